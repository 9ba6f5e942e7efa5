"""PyTorch tensors of any device and dtype: kernels run over lists of tensors, on the CPU in waves that stay in cache."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from optimisers.backends import array_api, shards, spread
from optimisers.backends.array_api import derive, moved, reached, through, watch
from optimisers.backends.arrays import compute_dtype, namespace_of, real_dtype
from optimisers.backends.base import Batch, Scalars, check
from optimisers.backends.lists import Recorder, Tape, Value
from optimisers.backends.namespace import namespace
from optimisers.backends.rows import element_ranges
from optimisers.backends.spread import Spread, spread_of
from optimisers.backends.torch_fused import Fused, fused_kernel
from optimisers.rules.program import Member, Program

__all__ = ["Prepared", "derive", "finish", "like", "prepare", "reached", "row_by_row", "run", "sums", "watch", "zeros"]

row_by_row = False

_torch: Any = torch  # whose stubs do not tell of functions on lists

_WAVE = 131_072
"""How many elements a wave has on the CPU."""


def zeros(shape: tuple[int, ...], dtype: str, library: str, device: Any) -> torch.Tensor:
    """A fresh slot."""
    if isinstance(device, Spread):
        return spread.zeros(shape, getattr(torch, dtype), device)
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


_DTYPE, _LAYOUT, _DEVICE = map(attrgetter, ("dtype", "layout", "device"))
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _as_expected(batch: Batch) -> bool:
    """Whether nothing speaks against the tensors of a batch. Much faster than `check`, which says what does."""
    if "expected" not in batch.kept:
        batch.kept["expected"] = [torch.Size(shape) for shape in batch.shapes], getattr(torch, batch.dtype)
    sizes, dtype = batch.kept["expected"]
    for tensors in (batch.params, batch.grads):
        kinds = set(map(type, tensors))
        if not all(issubclass(kind, torch.Tensor) for kind in kinds) or [each.shape for each in tensors] != sizes:
            return False
        if set(map(_DTYPE, tensors)) != {dtype} or set(map(_LAYOUT, tensors)) != {torch.strided}:
            return False
        places = map(_DEVICE, tensors) if kinds <= _PLAIN else (spread_of(each) or each.device for each in tensors)
        if set(places) != {batch.device}:
            return False
    return True


def prepared(batch: Batch) -> Prepared:
    """The tensors of a batch as they are worked on."""
    if batch.in_place and all(map(_as_they_lie, (batch.params, batch.grads, *zip(*batch.slots, strict=True)))):
        return Prepared(batch.params, batch.params, batch.grads, batch.slots, [None] * len(batch.params))
    dtype = getattr(torch, batch.dtype)
    columns: list[list[Any]] = [[] for _ in range(5)]
    with torch.no_grad():
        for param, grad, slots, rows in zip(batch.params, batch.grads, batch.slots, batch.live_rows, strict=True):
            target = param if batch.in_place else param.detach().clone()
            order = _order(target, rows is not None)
            own = [slot if batch.in_place else slot.clone() for slot in slots]
            grad = grad if grad.dtype.is_complex == dtype.is_complex else grad.to(dtype)
            grad = grad.resolve_conj().resolve_neg() if grad.data_ptr() else grad.clone()
            work = [each if order is None else each.permute(order) for each in (target, grad, *own)]
            new = [each.contiguous() for each in work]
            for column, value in zip(columns, (target, new[0], new[1], tuple(new[2:]), order), strict=True):
                column.append(value)
    targets, params, grads, slots, orders = columns
    return Prepared(targets, params, grads, slots, orders)


def _as_they_lie(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors hold their values, one after another. Gradients may be others' conjugated, or zeros without memory."""
    if not all(map(torch.Tensor.is_contiguous, tensors)) or not all(map(torch.Tensor.data_ptr, tensors)):
        return False
    return not any(map(torch.Tensor.is_neg, tensors)) and not (tensors[0].is_complex() and any(map(torch.Tensor.is_conj, tensors)))


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
    return [like(old, _spread(new, old)) for old, new in zip(params, batch.prepared.targets, strict=True)], slots


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
    return tensor if spread_of(like) is None else spread.whole(tensor, like)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.data_ptr() == b.data_ptr()


def _back(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return tensor if order is None else tensor.permute(tuple(np.argsort(order).tolist()))


def like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A tensor as the kind of parameter that it replaces."""
    if torch.nn.Parameter in type(old).__mro__:
        made = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
        vars(made).update(vars(old))
        return made
    if isinstance(old, torch.nn.Parameter):  # a distributed one
        return torch.nn.Parameter(new, requires_grad=old.requires_grad)
    return new.requires_grad_(old.requires_grad)


# Waves ----------------------------------------------------------------------------------------------------------------


def _on_lists(program: Program) -> bool:
    """Whether a program runs on lists: it speaks of elements, and has one of each slot."""
    alone = all(slot.shape is None for _, slot in program.slots)
    return alone and not any(member.apply or member.apply_tree for member in program.members)


class _Wave(NamedTuple):
    """Parts of parameters that go through a program together."""

    numbers: np.ndarray
    """The number of the parameter of each part."""
    parts: list[slice | None]

    def pick(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of some tensors."""
        return [
            tensors[at] if part is None else tensors[at].view(-1)[part] for at, part in zip(self.numbers, self.parts, strict=True)
        ]


def _waves(batch: Batch, *, whole: bool) -> list[_Wave]:
    """The live elements of a batch, wave by wave."""
    key = ("waves", whole)
    if key not in batch.kept:
        batch.kept[key] = list(_made_waves(batch, whole))
    return batch.kept[key]


def _made_waves(batch: Batch, whole: bool) -> Iterator[_Wave]:
    limit = _WAVE if not whole and batch.prepared.params[0].device.type == "cpu" else None
    numbers: list[int] = []
    parts: list[slice | None] = []
    size = 0
    for at, (rows, shape) in enumerate(zip(batch.live_rows, batch.shapes, strict=True)):
        for start, stop in element_ranges(rows, shape):
            for low in range(start, stop, limit or stop - start):
                high = min(low + limit, stop) if limit else stop
                numbers.append(at)
                parts.append(None if high - low == batch.prepared.params[at].numel() else slice(low, high))
                size += high - low
                if limit and size >= limit:
                    yield _Wave(np.array(numbers), parts)
                    numbers, parts, size = [], [], 0
    if parts:
        yield _Wave(np.array(numbers), parts)


class _Recording:
    """A program written down for lists: its inputs are the gradient, the parameter and the slots."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.program, self.outcomes = batch.program, batch.outcomes
        compute = compute_dtype(batch.dtype)
        self.dtype, self.real = getattr(torch, compute), getattr(torch, real_dtype(compute))
        self.tape = Tape(self.real)
        self.xp = Recorder(self.tape, namespace(namespace_of(batch.prepared.params[0]), real_dtype(compute)))
        self.columns = [list(column) for column in zip(*batch.prepared.slots, strict=True)] if batch.slot_dtypes else []
        self.g, self.p = (self.tape.input(self.dtype.is_complex) for _ in range(2))
        self.slots = [self.tape.input(column[0].is_complex()) for column in self.columns]

    def h(self, member: int, at: int = 0) -> Scalars:
        """The scalars of a member: numbers, or where parameters differ vectors with one for each."""
        columns = self.batch.scalars[member].items()
        if self.batch.rows == 1:
            return Scalars(**{name: _number(values[0]) for name, values in columns})
        return Scalars(**{name: np.asarray(values)[np.asarray(self.batch.row)] for name, values in columns})

    def inputs(self, wave: _Wave) -> dict[int, list[torch.Tensor]]:
        """What goes in, in the dtype of the arithmetic."""
        wide = [(self.g, self.batch.prepared.grads, self.dtype), (self.p, self.batch.prepared.params, self.dtype)]
        for value, column in zip(self.slots, self.columns, strict=True):
            wide.append((value, column, self.dtype if value.complex else self.real))
        return {
            value.at: [each if each.dtype == dtype else each.to(dtype) for each in wave.pick(tensors)]
            for value, tensors, dtype in wide
        }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def sums(batch: Batch, member: int) -> Sequence[np.ndarray]:
    """The sums of one member's measure over each parameter, added up in double precision."""
    if batch.prepared is None:
        return array_api.sums(batch, member)
    measure = batch.program.members[member].measure
    assert measure is not None
    to = _Recording(batch)
    g, p, _ = through(to, 0, to.xp, to.g, to.p, [to.h(k) for k in range(member)], to.slots)
    inputs = [to.tape.emit(array_api.wide, each) for each in (g, p, *to.slots[batch.program.spans[member]])]
    out = measure(to.xp, inputs[0], inputs[1], to.h(member), *inputs[2:])
    found = out if isinstance(out, tuple) else (out,)
    program = to.tape.program([each for each in found if isinstance(each, Value)], [])
    totals = np.zeros((len(found), len(batch.params)))
    with torch.no_grad():
        for wave in _waves(batch, whole=False):
            values = program.run(to.inputs(wave), wave.numbers)
            for row, part in enumerate(found):
                np.add.at(totals[row], wave.numbers, _added(part, values, wave, to))
    return shards.reduced(list(totals), batch)


def _added(part: Any, values: dict[int, list[torch.Tensor]], wave: _Wave, to: _Recording) -> np.ndarray:
    """The sum over each tensor of a list; of a number, as if it stood for each element."""
    if isinstance(part, Value):
        return torch.stack([torch.sum(tensor) for tensor in values[part.at]]).cpu().numpy()
    sizes = np.array([tensor.numel() for tensor in wave.pick(to.batch.prepared.params)])
    return sizes * (part[wave.numbers] if isinstance(part, np.ndarray) else part)


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members on lists; programs that speak of whole arrays, on each parameter in turn."""
    if batch.prepared is None:
        return _run_whole(batch, length, step)
    if step or any(member.slots for member in batch.program.members[:length]):
        _run_lists(batch, length, step)
    return finish(batch, step=step)


def _run_lists(batch: Batch, length: int, step: bool) -> None:
    members = batch.program.members[:length]
    to = _Recording(batch)
    h = [to.h(k) for k in range(length)]
    fused = _fused_last(to, members) if step else None
    grad: Any = None
    written: list[Value] = []
    if fused is None:
        p, new = moved(to, 0, to.xp, to.g, to.p, h, to.slots, step)
    else:
        grad, p, new = through(to, 0, to.xp, to.g, to.p, h[:-1], to.slots)
        grad = grad if isinstance(grad, Value) else to.tape.emit(torch.full_like, to.g, grad)
        last = batch.program.spans[length - 1]
        written = [to.p, *to.slots[last]]
        new[last] = written[1:]
    pairs = [*zip(to.slots, to.columns, new, strict=True), *([(to.p, batch.prepared.params, p)] if step else [])]
    changed = [each for each in pairs if each[2] is not None and (each[2] is not each[0] or any(each[0] is own for own in written))]
    needed = [value for value in (grad, *(value for *_, value in changed)) if isinstance(value, Value)]
    program = to.tape.program(needed, [old for old, *_ in changed])
    with torch.no_grad():
        # A kernel of PyTorch that gets everything as it is goes through it once, on all cores.
        straight = grad is to.g and to.dtype == to.real == to.batch.prepared.params[0].dtype
        for wave in _waves(batch, whole=straight or any(member.store or member.keyed for member in members)):
            found = program.run(to.inputs(wave), wave.numbers)
            if fused is not None:
                _run_fused(fused, batch, length - 1, wave, found[grad.at], [found[each.at] for each in written])
            targets = [wave.pick(tensors) for _, tensors, _ in changed]
            new = [found[value.at] if isinstance(value, Value) else value for *_, value in changed]
            _write(targets, _apart(targets, new), wave)


def _fused_last(to: _Recording, members: Sequence[Member]) -> Fused | None:
    """PyTorch's own kernel for the last member, where it can take the place of ours."""
    if not members or any(member.load or member.store for member in members):
        return None
    return fused_kernel(members[-1], to.dtype, to.batch.prepared.params[0].device)


def _run_fused(
    fused: Fused, batch: Batch, member: int, wave: _Wave, grads: list[torch.Tensor], written: list[list[torch.Tensor]]
) -> None:
    """Call a kernel of PyTorch once for each row of scalars."""
    rows = np.asarray(batch.row)[wave.numbers]
    for row in np.unique(rows):
        chosen = np.flatnonzero(rows == row)
        params, own, *slots = [[each[at] for at in chosen] for each in (written[0], grads, *written[1:])]
        fused(params, own, slots, batch.h(member, int(wave.numbers[chosen[0]])))


def _apart(targets: list[list[torch.Tensor]], new: list[Any]) -> list[Any]:
    """New values; those that lie in the target of another one are copied before that is written."""
    owner = {tensor.data_ptr(): k for k, own in enumerate(targets) for tensor in own}
    return [
        [each.clone() if owner.get(each.data_ptr(), k) != k else each for each in value] if isinstance(value, list) else value
        for k, value in enumerate(new)
    ]


def _write(targets: list[list[torch.Tensor]], new: list[Any], wave: _Wave) -> None:
    for own, value in zip(targets, new, strict=True):
        if isinstance(value, list):
            pairs = [(target, each) for target, each in zip(own, value, strict=True) if not _same(target, each)]
            if pairs:
                _torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
            continue
        numbers = value[wave.numbers].tolist() if isinstance(value, np.ndarray) else [value] * len(own)
        for target, number in zip(own, numbers, strict=True):
            target.fill_(number)


def _run_whole(batch: Batch, length: int, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    new, slots = array_api.run(batch, length, step=step)
    new = [spread.placed(each, old) for each, old in zip(new, batch.params, strict=True)]
    slots = [
        tuple([spread.placed(each, old) for each, old in zip(some, before, strict=True)])
        for some, before in zip(slots, batch.slots, strict=True)
    ]
    if not step:
        return new, slots
    if not batch.in_place:
        return [like(old, each.detach()) for old, each in zip(batch.params, new, strict=True)], slots
    with torch.no_grad():
        for old, each in zip(batch.params, new, strict=True):
            old.copy_(each)
    return batch.params, slots
