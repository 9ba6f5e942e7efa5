"""Memory that a step is about to write while others still read it: gradients that lie in parameters (that of a·b is b) or slots."""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np

from optimisers.backends.arrays import WRITABLE, memory_of
from optimisers.backends.base import Batch
from optimisers.errors import TieError

__all__ = ["untangle"]

_BASE = attrgetter("base")


def untangle(batches: Sequence[Batch]) -> None:
    """Copy the gradients of prepared batches that lie in the memory of parameters, of any of them, or are slots.

    **Raises** `TieError` when two parameters lie in one place, or one where a slot does.
    """
    # Arrays of other libraries cannot be written.
    batches = [batch for batch in batches if batch.library in WRITABLE]
    if not batches or (all(batch.library == "numpy" for batch in batches) and _own_their_memory(batches)):
        return
    extents = [_written(batch) for batch in batches]
    written = _Ordered(*(np.concatenate(column) for column in zip(*extents, strict=True)))
    if (written.reach[1:-1] > written.starts[1:]).any():
        _check_apart(batches, written)
    held = [_held(batch)[1] for batch in batches]
    for batch, (lows, highs) in zip(batches, extents, strict=True):
        for at in np.flatnonzero(sum(slots.meet(lows, highs) for slots in held)):
            raise TieError(
                f"{batch.paths[int(at)]} lies in the memory of a slot, which the step writes; give the model a copy of it"
            )
    for batch in batches:
        lows, highs = _read(batch)
        for at in np.flatnonzero(sum(memory.meet(lows, highs) for memory in (written, *held))):
            _copy_gradient(batch, int(at))


class _Ordered:
    """Where arrays lie, in bytes, in the order of their starts; empty ones are left out."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray) -> None:
        filled = np.flatnonzero(starts < ends)
        self.order = filled[np.argsort(starts[filled])]
        self.starts = starts[self.order]
        self.reach = np.concatenate([[-1], np.maximum.accumulate(ends[self.order])])
        """How far the first none, one, two, … of them reach."""

    def meet(self, lows: np.ndarray, highs: np.ndarray) -> np.ndarray:
        """Which of some extents meet one of these."""
        return (self.reach[np.searchsorted(self.starts, highs)] > lows) & (lows < highs)


def _check_apart(batches: Sequence[Batch], written: _Ordered) -> None:
    """Check that no two parameters share an element. Their extents may overlap: so do those of columns of one array."""
    known = [
        (path, memory_of(param.to_local() if hasattr(param, "to_local") else param, batch.library))
        for batch in batches
        for path, param in zip(batch.paths, batch.params, strict=True)
    ]
    for first, at in enumerate(written.order):
        path, memory = known[at]
        last = np.searchsorted(written.starts, memory.bounds[1]) if memory else first
        for other, theirs in (known[each] for each in written.order[first + 1 : last]):
            if memory and theirs and memory.overlaps(theirs):
                raise TieError(
                    f"{path} and {other} lie in the same memory now, but were two parameters when the state was made; copy one"
                )


def _own_their_memory(batches: Sequence[Batch]) -> bool:
    """Whether no array is a view, nor two of parameters, gradients and slots one object. Quick to tell for NumPy."""
    written = {id(param) for batch in batches for param in batch.params}
    held = [_held(batch)[0] for batch in batches]
    for batch in batches:
        read = list(map(id, batch.grads))
        if not written.isdisjoint(read) or any(map(is_not, map(_BASE, batch.params + batch.grads), repeat(None))):
            return False
        for slots in held:
            if not (slots.isdisjoint(read) and slots.isdisjoint(written)):
                return False
    return True


def _held(batch: Batch) -> tuple[frozenset[int], _Ordered]:
    """The identities of the slots of a batch, and where they lie. They stay from one step to the next."""
    known = batch.addresses.get(id(batch.kept))
    if known is None or known[0] is not batch.kept:
        slots = [slot for own in batch.slots for slot in own]
        known = batch.kept, frozenset(map(id, slots)), _Ordered(*_extents(slots, batch, None, 0))
        batch.know(id(batch.kept), known)
    return known[1:]


def _written(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Where the parameters of a batch start and end, in bytes."""
    if batch.prepared is None or batch.prepared.params is not batch.params:
        return _extents(batch.params, batch, None, 0)
    return _extents(batch.params, batch, batch.prepared.addresses, 0)


def _read(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Where the gradients of a batch start and end."""
    if batch.prepared is None:
        return _extents(batch.grads, batch, None, 1)
    return _extents(batch.prepared.grads, batch, batch.prepared.addresses, 1)


def _extents(arrays: Sequence[Any], batch: Batch, addresses: np.ndarray | None, row: int) -> tuple[np.ndarray, np.ndarray]:
    if addresses is not None:
        if "bytes" not in batch.kept:
            batch.kept["bytes"] = np.array([array.nbytes for array in arrays], np.int64)
        return addresses[row], addresses[row] + batch.kept["bytes"]
    if batch.library == "torch":
        arrays = [array.to_local() if hasattr(array, "to_local") else array for array in arrays]
        if all(array.is_contiguous() for array in arrays):
            starts = np.array([array.data_ptr() for array in arrays], np.int64)
            return starts, starts + np.array([array.nbytes for array in arrays], np.int64) * (starts != 0)
    bounds = [_bounds(array, batch.library) for array in arrays]
    return np.array([low for low, _ in bounds], np.int64), np.array([high for _, high in bounds], np.int64)


def _bounds(array: Any, library: str) -> tuple[int, int]:
    memory = None if isinstance(array, np.generic) or 0 in array.shape else memory_of(array, library)
    return (0, 0) if memory is None else memory.bounds


def _copy_gradient(batch: Batch, at: int) -> None:
    if batch.prepared is None:
        batch.grads[at] = batch.grads[at].clone()
        return
    grads, addresses = batch.prepared.grads, batch.prepared.addresses
    grads[at] = grads[at].copy() if batch.library == "numpy" else grads[at].clone()
    if addresses is not None:
        addresses[1, at] = _bounds(grads[at], batch.library)[0]
