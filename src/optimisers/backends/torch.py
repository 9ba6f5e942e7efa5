"""PyTorch tensors of any device and dtype: kernels run over lists of tensors, on the CPU in waves that stay in cache."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from optimisers.backends import array_api, shards
from optimisers.backends.array_api import derive, element_ranges, moved, through
from optimisers.backends.arrays import compute_dtype, namespace_of, real_dtype
from optimisers.backends.base import Batch, Scalars, check
from optimisers.backends.lists import Lists, Many
from optimisers.backends.namespace import namespace
from optimisers.backends.shards import Spread, spread_of
from optimisers.rules.program import Program

__all__ = ["Prepared", "decide", "derive", "finish", "prepare", "reached", "row_by_row", "run", "sums", "zeros"]

row_by_row = False

_torch: Any = torch  # whose stubs do not tell of functions on lists

_WAVE = 131_072
"""How many elements a wave has on the CPU."""


def zeros(shape: tuple[int, ...], dtype: str, library: str, device: Any) -> torch.Tensor:
    """A fresh slot."""
    if isinstance(device, Spread):
        return shards.zeros(shape, getattr(torch, dtype), device)
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


# The tensors of a batch -----------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """What is worked on: contiguous tensors, with their axes as they lie in memory."""

    targets: Sequence[torch.Tensor]
    """The parameters that come out: those of the batch where it may be written into, else copies."""
    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    slots: Sequence[tuple[torch.Tensor, ...]]
    orders: Sequence[tuple[int, ...] | None]
    """For each parameter how its axes were put in order, or `None`."""
    given: tuple[list[Any], list[tuple[Any, ...]]] = ([], [])
    """The parameters and slots of the batch, before this process's part was taken of them."""
    addresses: np.ndarray | None = None


def prepare(batch: Batch) -> None:
    """Check the tensors, and find or make contiguous ones to work on."""
    if not _as_expected(batch):
        check(batch)
    if not _on_lists(batch.program):
        return
    params, slots = batch.params, batch.slots
    if isinstance(batch.device, Spread):
        shards.local_batch(batch)
    batch.prepared = prepared(batch)._replace(given=(params, slots))


def _as_expected(batch: Batch) -> bool:
    """Whether nothing speaks against the tensors of a batch. Much faster than `check`, which says what does."""
    if "expected" not in batch.plan:
        batch.plan["expected"] = [torch.Size(shape) for shape in batch.shapes], getattr(torch, batch.dtype)
    sizes, dtype = batch.plan["expected"]
    for tensors in (batch.params, batch.grads):
        if not all(isinstance(each, torch.Tensor) for each in tensors) or [each.shape for each in tensors] != sizes:
            return False
        if {(each.dtype, each.layout) for each in tensors} != {(dtype, torch.strided)}:
            return False
        if {spread_of(each) or each.device for each in tensors} != {batch.device}:
            return False
    return True


def prepared(batch: Batch) -> Prepared:
    """The tensors of a batch as they are worked on."""
    if batch.in_place and _contiguous(batch.params) and _contiguous(batch.grads) and all(map(_contiguous, batch.slots)):
        return Prepared(batch.params, batch.params, batch.grads, batch.slots, [None] * len(batch.params))
    dtype = getattr(torch, batch.dtype)
    columns: list[list[Any]] = [[] for _ in range(5)]
    with torch.no_grad():
        for param, grad, slots, rows in zip(batch.params, batch.grads, batch.slots, batch.live_rows, strict=True):
            target = param if batch.in_place else param.detach().clone()
            order = _order(target, rows is not None)
            own = [slot if batch.in_place else slot.clone() for slot in slots]
            grad = grad if grad.dtype.is_complex == dtype.is_complex else grad.to(dtype)
            work = [each if order is None else each.permute(order) for each in (target, grad, *own)]
            new = [each.contiguous() for each in work]
            for column, value in zip(columns, (target, new[0], new[1], tuple(new[2:]), order), strict=True):
                column.append(value)
    targets, params, grads, slots, orders = columns
    return Prepared(targets, params, grads, slots, orders)


def _contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors))


def _order(tensor: torch.Tensor, rows: bool) -> tuple[int, ...] | None:
    """The axes of a tensor from the widest stride to the narrowest; `None` where they lie so already, or rows count."""
    if tensor.is_contiguous() or rows:
        return None
    return tuple(sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis)))


def finish(batch: Batch, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """The parameters and slots that come out of a batch."""
    params, slots = batch.prepared.given
    with torch.no_grad():
        if batch.prepared.slots is not batch.slots:
            slots = _slots_out(batch)
        if step and batch.prepared.params is not batch.prepared.targets:
            for target, param, order in zip(*batch.prepared[:2], batch.prepared.orders, strict=True):
                if not _same(target, param):
                    target.copy_(_back(param, order))
    if not step:
        return params, slots
    if batch.in_place:
        # Those who saved a tensor for a gradient learn that it has changed.
        torch.autograd.graph.increment_version(batch.prepared.targets)
        return params, slots
    return [_like(old, _spread(new, old)) for old, new in zip(params, batch.prepared.targets, strict=True)], slots


def _slots_out(batch: Batch) -> list[tuple[Any, ...]]:
    """The slots that were worked on, as those of the batch lie; itself where an old one was written."""
    found = []
    for given, old, new, order in zip(
        batch.prepared.given[1], batch.slots, batch.prepared.slots, batch.prepared.orders, strict=True
    ):
        if batch.in_place and all(map(_same, old, new)):
            found.append(given)
        else:
            found.append(tuple([_spread(_back(slot, order), like) for slot, like in zip(new, given, strict=True)]))
    return found


def _spread(tensor: torch.Tensor, like: Any) -> Any:
    """A tensor, distributed as another one is."""
    return tensor if spread_of(like) is None else shards.whole(tensor, like)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.data_ptr() == b.data_ptr()


def _back(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return tensor if order is None else tensor.permute(tuple(np.argsort(order).tolist()))


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A tensor as the kind of parameter that it replaces."""
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=old.requires_grad)
    return new.requires_grad_(old.requires_grad)


# Waves ----------------------------------------------------------------------------------------------------------------


def _on_lists(program: Program) -> bool:
    """Whether a program runs on lists: it speaks of elements, and has one of each slot."""
    alone = all(slot.shape is None for _, slot in program.slots)
    return alone and not any(member.apply or member.apply_tree for member in program.members)


class _Wave:
    """Parts of parameters that go through a program together."""

    def __init__(self, batch: Batch, parts: list[tuple[int, slice | None]]) -> None:
        self.batch = batch
        self.program = batch.program
        self.outcomes = batch.outcomes
        self.parts = parts
        self._rows = np.array([batch.row[at] for at, _ in parts])

    def h(self, member: int, at: int) -> Scalars:
        """The scalars of a member: numbers, or where parameters differ vectors with one for each part."""
        columns = self.batch.scalars[member].items()
        if self.batch.rows == 1:
            return Scalars(**{name: _number(values[0]) for name, values in columns})
        return Scalars(**{name: np.asarray(values)[self._rows] for name, values in columns})

    def pick(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of some tensors."""
        return [tensors[at] if part is None else tensors[at].view(-1)[part] for at, part in self.parts]

    def many(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Many:
        """The parts as one, in the dtype of the arithmetic."""
        return Many([each if each.dtype == dtype else each.to(dtype) for each in self.pick(tensors)])


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _waves(batch: Batch, *, whole: bool) -> Iterator[_Wave]:
    """The live elements of a batch, wave by wave."""
    limit = _WAVE if not whole and batch.prepared.params[0].device.type == "cpu" else None
    parts: list[tuple[int, slice | None]] = []
    size = 0
    for at, (rows, shape) in enumerate(zip(batch.live_rows, batch.shapes, strict=True)):
        for start, stop in element_ranges(rows, shape):
            for low in range(start, stop, limit or stop - start):
                high = min(low + limit, stop) if limit else stop
                parts.append((at, None if high - low == batch.prepared.params[at].numel() else slice(low, high)))
                size += high - low
                if limit and size >= limit:
                    yield _Wave(batch, parts)
                    parts, size = [], 0
    if parts:
        yield _Wave(batch, parts)


def _inputs(batch: Batch, *, whole: bool) -> Iterator[tuple[_Wave, Lists, Many, Many, list[Many]]]:
    """For each wave the functions, the gradients, the parameters and the slots, in the dtype of the arithmetic."""
    _, params, grads, slots, *_ = batch.prepared
    compute = compute_dtype(batch.dtype)
    dtype, real = getattr(torch, compute), getattr(torch, real_dtype(compute))
    xp = Lists(namespace(namespace_of(params[0]), real_dtype(compute)))
    columns = list(zip(*slots, strict=True)) if batch.slot_dtypes else []
    for wave in _waves(batch, whole=whole):
        own = [wave.many(column, dtype if column[0].is_complex() else real) for column in columns]
        yield wave, xp, wave.many(grads, dtype), wave.many(params, dtype), own


def sums(batch: Batch, member: int) -> Sequence[np.ndarray]:
    """The sums of one member's measure over each parameter, added up in double precision."""
    if batch.prepared is None:
        return array_api.sums(batch, member)
    measure = batch.program.members[member].measure
    assert measure is not None
    totals = np.zeros((batch.program.members[member].sums, len(batch.params)))
    with torch.no_grad():
        for wave, xp, g, p, slots in _inputs(batch, whole=False):
            g, p, _ = through(wave, 0, xp, g, p, [wave.h(k, 0) for k in range(member)], slots)
            g, p, *own = [each.each(array_api.wide) for each in (g, p, *slots[batch.program.spans[member]])]
            out = measure(xp, g, p, wave.h(member, 0), *own)
            for row, part in enumerate(out if isinstance(out, tuple) else (out,)):
                np.add.at(totals[row], [at for at, _ in wave.parts], _added(part, g))
    return shards.reduced(list(totals), batch)


def _added(part: Any, like: Many) -> np.ndarray:
    """The sum over each tensor of a list; of a number, as if it stood for each element."""
    if not isinstance(part, Many):
        return np.array([tensor.numel() for tensor in like.tensors]) * part
    return torch.stack([torch.sum(tensor) for tensor in part.tensors]).cpu().numpy()


def decide(batch: Batch, member: int) -> None:
    """Add the scalars that a member derives from the sums over each parameter."""
    derive(batch, member, sums(batch, member))


def reached(batch: Batch, member: int) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """For each parameter what reaches one member, on whole arrays."""
    return array_api.reached(batch, member)


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members on lists; programs that speak of whole arrays, on each parameter in turn."""
    if batch.prepared is None:
        return _run_whole(batch, length, step)
    members = batch.program.members[:length]
    if step or any(member.slots for member in members):
        whole = any(member.store or member.keyed for member in members)
        columns = list(zip(*batch.prepared.slots, strict=True)) if batch.slot_dtypes else []
        with torch.no_grad():
            for wave, xp, g, p, old in _inputs(batch, whole=whole):
                p, new = moved(wave, 0, xp, g, p, [wave.h(k, 0) for k in range(length)], old, step)
                for column, value, before in zip(columns, new, old, strict=True):
                    if value is not None and value is not before:
                        _write(wave.pick(column), value)
                if step:
                    _write(wave.pick(batch.prepared.params), p)
    return finish(batch, step=step)


def _write(targets: list[torch.Tensor], value: Any) -> None:
    if isinstance(value, Many):
        _torch._foreach_copy_(targets, value.tensors)
    else:
        for target, each in zip(targets, np.broadcast_to(value, len(targets)).tolist(), strict=True):
            target.fill_(each)


def _run_whole(batch: Batch, length: int, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    new, slots = array_api.run(batch, length, step=step)
    if not step:
        return new, slots
    if not batch.in_place:
        return [_like(old, each.detach()) for old, each in zip(batch.params, new, strict=True)], slots
    with torch.no_grad():
        for old, each in zip(batch.params, new, strict=True):
            old.copy_(each)
    return batch.params, slots
