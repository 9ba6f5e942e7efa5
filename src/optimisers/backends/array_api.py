"""The reference backend: any array library, and NumPy in blocks that stay in cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from optimisers.backends.arrays import (
    array_beside,
    compute_dtype,
    dtype_name,
    namespace_of,
    numpy_dtype,
    real_dtype,
    trainable_dtype,
)
from optimisers.backends.base import Batch, Scalars, check, columns_of
from optimisers.backends.namespace import Namespace, namespace
from optimisers.backends.rows import element_ranges, row_mask
from optimisers.errors import HyperparameterError
from optimisers.rules.program import Member, Program

__all__ = [
    "check_shapes",
    "derive",
    "moved",
    "prepare",
    "reached",
    "row_by_row",
    "run",
    "sums",
    "sums_of",
    "through",
    "watch",
    "wide",
    "zeros",
]

row_by_row = False

_BLOCK = 16_384


def zeros(shape: tuple[int, ...], dtype: str, library: str, device: Any) -> Any:
    """A fresh slot."""
    if library == "numpy":
        return np.zeros(shape, numpy_dtype(dtype))
    made = _import(library)
    return made.zeros(shape, dtype=getattr(made, dtype), device=device)


def prepare(batch: Batch) -> None:
    """Check the arrays; for NumPy, find or make contiguous ones to work on."""
    check(batch)
    if batch.library == "numpy":
        batch.prepared = prepare_numpy(batch)


class Prepared(NamedTuple):
    """Contiguous NumPy arrays to work on: parameters and slots to write into, and gradients."""

    params: list[np.ndarray]
    grads: list[np.ndarray]
    slots: list[tuple[np.ndarray, ...]]
    addresses: np.ndarray | None = None
    """Of all of them: a row of parameters, a row of gradients, a row for each slot."""


def prepare_numpy(batch: Batch) -> Prepared:
    """Contiguous parameters and slots to write into, and gradients in the dtype of the arithmetic."""
    dtype, compute = numpy_dtype(batch.dtype), numpy_dtype(compute_dtype(batch.dtype))
    params = [p if batch.in_place and ready(p, dtype) else np.array(p, dtype, order="C", subok=False) for p in batch.params]
    grads = [np.ascontiguousarray(g, compute).reshape(shape) for g, shape in zip(batch.grads, batch.shapes, strict=True)]
    slots = [tuple(s if batch.in_place and ready(s, s.dtype) else np.array(s, order="C") for s in slots) for slots in batch.slots]
    return Prepared(params, grads, slots)


def ready(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether an array can be written through a flat view."""
    flags = array.flags
    return type(array) is np.ndarray and array.dtype == dtype and bool(flags.c_contiguous and flags.writeable and flags.aligned)


def finish_numpy(batch: Batch, step: bool) -> list[np.ndarray]:
    """The parameters to put into the model: the old arrays where nothing moved or they could be written, else the new."""
    params = batch.prepared.params
    if not step or params is batch.params:
        return batch.params
    if not batch.in_place:
        return params
    return [_written(old, new) for old, new in zip(batch.params, params, strict=True)]


def _written(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if old is not new and old.flags.writeable:
        old[...] = new
        return old
    return new


@contextmanager
def _plainly(library: str) -> Iterator[None]:
    """Inside, arithmetic neither warns of NaN and infinity nor is recorded for differentiation."""
    with np.errstate(all="ignore"), _import("torch").no_grad() if library == "torch" else nullcontext():
        yield


def derive(batch: Batch, member: int, totals: Sequence[Any]) -> None:
    """Add the scalars that a member derives from sums: numbers for all rows of the table alike, or one for each."""
    form, columns = batch.program.members[member], batch.scalars[member]
    assert form.measured is not None
    h = Scalars(**{name: np.array(values) for name, values in columns.items()})
    with np.errstate(all="ignore"):
        values = form.measured(namespace(np), h, *(np.asarray(total) for total in totals))
    columns |= columns_of(values, batch.rows)


def sums(batch: Batch, member: int) -> Sequence[Any]:
    """The sums of one member's measure, in float64."""
    totals = [[float(total) for total in sums_of(batch, member, at)] for at in range(len(batch.params))]
    return list(np.array(totals, np.float64).T)


def sums_of(batch: Batch, member: int, at: int) -> list[Any]:
    """The sums of one member's measure over one parameter."""
    program = batch.program
    measure = program.members[member].measure
    assert measure is not None
    h = [batch.h(k, at) for k in range(member + 1)]
    whole = batch.prepared is None or not program.head(member).elementwise
    rows = row_mask(batch.live_rows[at], batch.shapes[at]) if whole else None
    total: list[Any] = [0.0] * program.members[member].sums
    with _plainly(batch.library):
        for xp, g, p, slots in _pieces(batch, at, whole):
            g, p, _ = through(batch, at, xp, g, p, h[:member], slots)
            inputs = [wide(array) for array in (g, p, *slots[program.spans[member]])]
            parts = measure(xp, inputs[0], inputs[1], h[member], *inputs[2:])
            values = [_sum(part, inputs[0], rows) for part in (parts if isinstance(parts, tuple) else (parts,))]
            total = [a + b for a, b in zip(total, values, strict=True)]
    return total


def reached(batch: Batch, member: int) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """For each parameter what reaches one member, on whole arrays."""
    found = []
    with _plainly(batch.library):
        for at in range(len(batch.params)):
            h = [batch.h(k, at) for k in range(member)]
            for xp, g, p, slots in _pieces(batch, at, whole=True):
                g, p, _ = through(batch, at, xp, g, p, h, slots)
                found.append((g, p, tuple(slots[batch.program.spans[member]])))
    return found


def watch(batch: Batch, length: int) -> bool:
    """Nothing is added up on the way where whole arrays are worked on."""
    return False


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members on each parameter in turn."""
    program = batch.program.head(length)
    new: list[Any] = list(batch.prepared.params) if batch.prepared else list(batch.params)
    new_slots: list[tuple[Any, ...]] = list(batch.prepared.slots) if batch.prepared else list(batch.slots)
    with _plainly(batch.library):
        for at in range(len(new)):
            h = [batch.h(k, at) for k in range(length)]
            if batch.prepared:
                _run_numpy(batch, at, program, h, step)
            else:
                new[at], new_slots[at] = _run_array(batch, at, h, step)
    return (finish_numpy(batch, step) if batch.prepared else new), new_slots


def _run_numpy(batch: Batch, at: int, program: Program, h: list[Any], step: bool) -> None:
    params, slots = batch.prepared.params, batch.prepared.slots
    whole = not program.elementwise
    for xp, g, p, old, part in _numpy_pieces(batch, at, whole):
        p, new = moved(batch, at, xp, g, p, h, old, step)
        rows = row_mask(batch.live_rows[at], batch.shapes[at]) if whole else None
        # A rule may keep an old slot in a new one: what is about to be written is copied first.
        new = [
            value.copy() if any(k != other and np.may_share_memory(value, slot) for other, slot in enumerate(old)) else value
            for k, value in enumerate(new)
        ]
        for target, value in zip(slots[at], new, strict=True):
            if value is not None:
                _store(target if whole else target.reshape(-1)[part], value, rows)
        if step:
            _store(params[at] if whole else params[at].reshape(-1)[part], p, rows)


def _store(target: np.ndarray, value: Any, rows: np.ndarray | None) -> None:
    if rows is None or target.shape[:1] != rows.shape:
        target[...] = value
    else:
        target[rows] = np.broadcast_to(value, target.shape)[rows]


def _run_array(batch: Batch, at: int, h: list[Any], step: bool) -> tuple[Any, tuple[Any, ...]]:
    ((xp, g, p, old),) = _pieces(batch, at, whole=True)
    given: list[Any] = [batch.params[at], batch.grads[at], p, g, *old]
    p, new = moved(batch, at, xp, g, p, h, old, step)
    rows = row_mask(batch.live_rows[at], batch.shapes[at])
    slots: list[Any] = []
    for before, value in zip(batch.slots[at], new, strict=True):
        # A kernel may return an array that it was given, or one array twice; each slot has memory of its own.
        shared = any(value is each for each in given)
        given.append(value)
        slots.append(_kept(xp._library, before, value, rows, copy=shared))
    before = batch.params[at]
    if not step:
        return before, tuple(slots)
    after = _kept(xp._library, before, p, rows, copy=any(p is each for each in given))
    return after, tuple(slots)


def _kept(library: Any, before: Any, value: Any, rows: np.ndarray | None, *, copy: bool) -> Any:
    """A new array of the old dtype, the frozen rows taken from the old one."""
    if value is None:
        return before
    value = library.asarray(value)
    if dtype_name(value) == dtype_name(before) and not copy and rows is None and value.shape == before.shape:
        return value
    value = library.astype(library.broadcast_to(value, before.shape), before.dtype, copy=copy)
    if rows is None or tuple(before.shape[:1]) != rows.shape:
        return value
    return library.where(_beside(rows, before), value, before)


def moved(
    batch: Any, at: int, xp: Namespace, g: Any, p: Any, h: list[Any], slots: Sequence[Any], step: bool
) -> tuple[Any, list[Any]]:
    """A parameter after its step, and all slots, `None` for those not reached."""
    program = batch.program
    g, p, new = through(batch, at, xp, g, p, h, slots)
    if step:
        p = p - g
        for member, span in zip(program.members[: len(h)], program.spans, strict=False):
            if member.load is not None:
                new[span] = [p]
        for member, scalars in zip(program.members, h, strict=False):
            if member.store is not None:
                p = member.store(xp, p, scalars)
    return p, new


def through(batch: Any, at: int, xp: Namespace, g: Any, p: Any, h: list[Any], slots: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Pass a gradient through as many members as there are scalars for.

    Returns what comes out, the parameter that they acted on, and all slots, `None` for those not reached.
    """
    program = batch.program
    new: list[Any] = [None] * len(slots)
    for k, (member, span) in enumerate(zip(program.members, program.spans, strict=True)):
        if member.load is not None:
            p = member.load(xp, p, batch.h(k, at), *slots[span])
    for k, (member, span, scalars) in enumerate(zip(program.members, program.spans, h, strict=False)):
        if member.apply_tree is not None:
            g, new[span] = batch.outcomes[k][at]
        elif member.apply is not None or member.kernel is not None:
            g, new[span] = stepped(member, xp, g, p, scalars, slots[span])
    return g, p, new


def stepped(member: Member, xp: Namespace, g: Any, p: Any, h: Any, slots: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What one member makes of a gradient, and its new slots.

    **Raises** `HyperparameterError` for something else than a step and as many slots as there are.
    """
    names = [name for name, _ in member.slots]
    if member.apply is not None:
        returned = member.apply(xp, g, p, h, tuple(slots))
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], (tuple, list))):
            raise HyperparameterError(f"apply of {member.name} returns the step, and a tuple of its slots {names}")
        who, parts = f"apply of {member.name}", (returned[0], *returned[1])
    else:
        assert member.kernel is not None
        returned = member.kernel(xp, g, p, h, *slots)
        who, parts = f"the kernel of {member.name}", returned if isinstance(returned, tuple) else (returned,)
    if len(parts) != 1 + len(names):
        raise HyperparameterError(f"{who} returned {len(parts)} values; it returns the step and its slots {names}")
    if member.apply is not None:
        check_shapes(who, dict(zip(["the step", *names], parts, strict=True)), [g, *slots])
    return parts[0], list(parts[1:])


def check_shapes(who: str, parts: Mapping[str, Any], like: Sequence[Any]) -> None:
    """Check that what was returned are numbers, or arrays of the shapes of what was given.

    **Raises** `HyperparameterError`.
    """
    for (name, part), given in zip(parts.items(), like, strict=True):
        shape = () if isinstance(part, (int, float, complex)) else getattr(part, "shape", None)
        if shape is None:
            raise HyperparameterError(f"{who} returned {part!r} for {name}")
        if shape not in ((), given.shape):
            raise HyperparameterError(f"{who} returned shape {list(shape)} for {name}, which is of shape {list(given.shape)}")


def _pieces(batch: Batch, at: int, whole: bool) -> Iterator[tuple[Namespace, Any, Any, list[Any]]]:
    """The parameter with its gradient and slots, in the dtype of the arithmetic, frozen rows left out."""
    if batch.prepared:
        for xp, g, p, slots, _ in _numpy_pieces(batch, at, whole):
            yield xp, g, p, slots
        return
    library = namespace_of(batch.params[at])
    rows = row_mask(batch.live_rows[at], batch.shapes[at])
    g, p = batch.grads[at], batch.params[at]
    if rows is not None:
        g = library.where(_beside(rows, p), g, library.zeros_like(g))
    compute = compute_dtype(batch.dtype)
    dtype = getattr(library, compute)
    slots = [_cast(library, slot, dtype) for slot in batch.slots[at]]
    yield namespace(library, real_dtype(compute)), library.astype(g, dtype, copy=False), library.astype(p, dtype, copy=False), slots


def _cast(library: Any, slot: Any, dtype: Any) -> Any:
    name, wanted = dtype_name(slot), str(dtype).rpartition(".")[2]
    as_it_is = not trainable_dtype(name) or (not name.startswith("complex") and wanted.startswith("complex"))
    return slot if as_it_is else library.astype(slot, dtype, copy=False)


def _numpy_pieces(
    batch: Batch, at: int, whole: bool
) -> Iterator[tuple[Namespace, np.ndarray, np.ndarray, list[np.ndarray], slice]]:
    p, g, s = batch.prepared.params[at], batch.prepared.grads[at], batch.prepared.slots[at]
    xp = namespace(np, real_dtype(compute_dtype(batch.dtype)))
    compute = numpy_dtype(compute_dtype(batch.dtype))
    if whole:
        rows = row_mask(batch.live_rows[at], p.shape)
        if rows is not None:
            g = g.copy()
            g[~rows] = 0
        yield xp, g.astype(compute, copy=False), p.astype(compute, copy=False), [_widened(x, compute) for x in s], slice(None)
        return
    p, g, s = p.reshape(-1), g.reshape(-1), [x.reshape(-1) for x in s]
    for start, stop in element_ranges(batch.live_rows[at], batch.shapes[at]):
        for low in range(start, stop, _BLOCK):
            part = slice(low, min(low + _BLOCK, stop))
            gradient, block = g[part].astype(compute, copy=False), p[part].astype(compute, copy=False)
            yield xp, gradient, block, [_widened(x[part], compute) for x in s], part


def _widened(slot: np.ndarray, compute: np.dtype) -> np.ndarray:
    if not trainable_dtype(slot.dtype.name):
        return slot
    if compute.kind == "c" and slot.dtype.kind != "c":
        compute = compute.type(0).real.dtype
    return slot.astype(compute, copy=False)


def wide(array: Any) -> Any:
    """In double precision, where a sum of squares neither overflows nor loses small terms."""
    library = np if isinstance(array, np.ndarray) else namespace_of(array)
    name = "complex128" if dtype_name(array).startswith("complex") else "float64"
    if library is np:
        return array.astype(name)
    # JAX may be told to do without double precision.
    return library.astype(array, library.result_type(getattr(library, name)), copy=False)


def _beside(rows: np.ndarray, array: Any) -> Any:
    """A mask of rows that broadcasts against an array."""
    return array_beside(rows.reshape(-1, *(1,) * (len(array.shape) - 1)), array)


def _sum(part: Any, gradient: Any, rows: np.ndarray | None) -> Any:
    """The sum of what `measure` returned for each element; or the same number for all of them."""
    library = np if isinstance(gradient, (np.ndarray, np.generic)) else namespace_of(gradient)
    live: Any = library.broadcast_to(library.asarray(part), gradient.shape)
    if rows is not None:
        live = library.where(_beside(rows, gradient), live, library.zeros_like(live))
    return library.sum(live)


def _import(library: str) -> Any:
    return import_module({"torch": "array_api_compat.torch", "jax": "jax.numpy"}.get(library, library))
