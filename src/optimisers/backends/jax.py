"""JAX arrays: the step of each parameter as one compiled function, inside a trace or outside of one.

The function is the reference backend's, on a batch of one, under `jax.jit`: parameters of one shape share it, and the trace of a
whole model holds a call for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optimisers.backends import array_api
from optimisers.backends.array_api import watch
from optimisers.backends.arrays import compute_dtype, real_dtype
from optimisers.backends.base import Batch, check
from optimisers.backends.namespace import NAMESPACES, Namespace, namespace

__all__ = ["derive", "prepare", "reached", "row_by_row", "run", "sums", "sums_together", "watch", "zeros"]

row_by_row = True
_TOGETHER = (64, 8, 1)
"""How many parameters are summed at a time."""


class _Namespace(Namespace):
    """The functions for kernels, with JAX's own random numbers, and products of arrays whose types say how they are spread."""

    def __init__(self, library: Any, dtype: str) -> None:
        super().__init__(library, dtype)
        self.matmul = _product
        self.vecdot = lambda x, y: jnp.sum(jnp.conj(x) * y, axis=-1)

    def normal(self, like: Any, key: tuple[Any, ...]) -> Any:
        """Gaussian numbers in the shape and dtype of an array, told by the key alone."""
        return jax.random.normal(_folded(key), like.shape, like.dtype)

    def _uniform(self, like: Any, key: tuple[Any, ...]) -> Any:
        return jax.random.uniform(_folded(key), like.shape, like.dtype)


def _product(x: Any, y: Any) -> Any:
    """The product of two matrices, spread as the rows of the first and the columns of the second are."""
    first, second = (jax.typeof(each).sharding for each in (x, y))
    (*rows, inner), (*_, columns) = first.spec, second.spec
    if columns is None and inner is None and not any(rows):
        return jnp.matmul(x, y)
    spec = PartitionSpec(*rows, None if columns in rows else columns)
    return jnp.matmul(x, y, out_sharding=NamedSharding(first.mesh, spec))


def _folded(key: tuple[Any, ...]) -> Any:
    folded = jax.random.key(0)
    for part in key:
        folded = jax.random.fold_in(folded, part)
    return folded


NAMESPACES["jax.numpy"] = _Namespace


def zeros(shape: tuple[int, ...], dtype: str, library: str, device: Any) -> Any:
    """A fresh slot, spread over devices as its parameter is; one of a shape that cannot be is on all of them."""
    if isinstance(device, frozenset):
        return jax.lax.pcast(jnp.zeros(shape, dtype), tuple(device), to="varying")
    return jnp.zeros(shape, dtype, device=device if device is None else _fitting(device, shape))


def _fitting(sharding: Sharding, shape: tuple[int, ...]) -> Sharding | None:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return sharding


def prepare(batch: Batch) -> None:
    """Check the arrays."""
    check(batch)


def sums(batch: Batch, member: int) -> Sequence[Any]:
    """The sums of one member's measure, for each of them a list over the parameters."""
    found = [_measured(batch, at, member) for at in range(len(batch.params))]
    return [list(parts) for parts in zip(*found, strict=True)]


def sums_together(batch: Batch, member: int) -> Sequence[np.ndarray]:
    """The sums as numbers, read now, for each of them a vector over the parameters; outside of traces, and for members whose sums
    hang on no scalar, since those of the first call are compiled in.

    Parameters of one shape go many at a time, since calls take longer than small arrays do.
    """
    alike: dict[Any, list[int]] = {}
    for at, (shape, rows) in enumerate(zip(batch.shapes, batch.live_rows, strict=True)):
        alike.setdefault((shape, rows), []).append(at)
    called = []
    for key, places in alike.items():
        while places:
            # Few sizes, so that little is compiled.
            count = next(size for size in _TOGETHER if size <= len(places))
            chosen, places = places[:count], places[count:]
            if (member, key, count) not in batch.kept:
                batch.kept[member, key, count] = _sums_of(batch, member, chosen)
            arrays = [[column[at] for at in chosen] for column in (batch.params, batch.grads, batch.slots)]
            called.append((chosen, batch.kept[member, key, count](*arrays)))
    found = np.empty((batch.program.members[member].sums, len(batch.shapes)))
    for chosen, totals in called:
        found[:, chosen] = np.asarray(totals)
    return list(found)


def _sums_of(batch: Batch, member: int, chosen: Sequence[int]) -> Any:
    """The sums of so many parameters of one shape as a compiled function of their arrays."""
    lists = {name: [getattr(batch, name)[at] for at in chosen] for name in ("paths", "shapes", "live_rows")}
    form = replace(batch, params=[], grads=[], slots=[], row=[0] * len(chosen), **lists)

    def totals(params: Any, grads: Any, slots: Any) -> Any:
        found = sums(replace(form, params=params, grads=grads, slots=slots), member)
        return jnp.stack([jnp.stack(column) for column in found])

    return jax.jit(totals)


def derive(batch: Batch, member: int, totals: Sequence[Any]) -> None:
    """Add the scalars that a member derives from sums, for each row of the table on its own: they may be traced."""
    form, columns, xp = batch.program.members[member], batch.scalars[member], namespace(jnp)
    assert form.measured is not None
    rows = [SimpleNamespace(**{name: values[row] for name, values in columns.items()}) for row in range(batch.rows)]
    derived = [form.measured(xp, h, *totals) for h in rows]
    columns |= {name: [each[name] for each in derived] for name in derived[0]}


def reached(batch: Batch, member: int) -> Sequence[tuple[Any, Any, tuple[Any, ...]]]:
    """For each parameter what reaches one member."""
    return [_reached(batch, at, member) for at in range(len(batch.params))]


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members on each parameter; behind a gate that is not known yet, in a branch."""
    moved = _branch(batch, length, step, batch.gates)
    return [param for param, _ in moved], [slots for _, slots in moved]


def _head(batch: Batch, length: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """What a closed gate leaves: the parameters as they were, and the slots of the members up to it."""
    if not any(member.slots for member in batch.program.members[:length]):
        return list(zip(batch.params, batch.slots, strict=True))
    return [(param, _stepped(batch, at, length, False)[1]) for at, param in enumerate(batch.params)]


def _branch(batch: Batch, length: int, step: bool, gates: Sequence[tuple[int, Any]]) -> list[tuple[Any, tuple[Any, ...]]]:
    if not step:
        return _head(batch, length)
    if not gates:
        return [_stepped(batch, at, length, step) for at in range(len(batch.params))]
    (member, is_open), *rest = gates
    return jax.lax.cond(is_open, lambda: _branch(batch, length, step, rest), lambda: _head(batch, member + 1))


# One parameter --------------------------------------------------------------------------------------------------------


def _of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a batch of one parameter."""

    @partial(jax.jit, static_argnums=(0, 1, 2))
    def compiled(form: Any, member: int, options: Any, param: Any, grad: Any, slots: Any, scalars: Any, outcomes: Any) -> Any:
        program, dtype, slot_dtypes, rows = form
        real = real_dtype(compute_dtype(dtype))
        batch = Batch(
            program=program,
            paths=("",),
            shapes=(param.shape,),
            dtype=dtype,
            slot_dtypes=slot_dtypes,
            library="jax",
            device=None,
            params=[param],
            grads=[grad],
            slots=[slots],
            live_rows=[rows],
            in_place=False,
            kept={},
            addresses={},
            scalars=[{name: [_in_dtype(value, real)] for name, value in each.items()} for each in scalars],
            row=(0,),
            outcomes={at: [outcome] for at, outcome in outcomes.items()},
        )
        for at, each in enumerate(program.members[:member]):
            if each.measure is not None and each.scope == "leaf":
                derive(batch, at, array_api.sums_of(batch, at, 0))
        return function(batch, member, *options)

    def call(batch: Batch, at: int, member: int, *options: Any) -> Any:
        form = (batch.program, batch.dtype, batch.slot_dtypes, batch.live_rows[at])
        row = batch.row[at]
        scalars = [{name: values[row] for name, values in each.items()} for each in batch.scalars]
        outcomes = {k: each[at] for k, each in batch.outcomes.items()}
        return compiled(form, member, options, batch.params[at], batch.grads[at], batch.slots[at], scalars, outcomes)

    return call


def _in_dtype(value: Any, dtype: str) -> Any:
    """A scalar in the dtype of the arithmetic: a wider one would widen the arrays that it meets."""
    wide = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != dtype
    return value.astype(dtype) if wide else value


@_of_one
def _measured(batch: Batch, member: int) -> list[Any]:
    return array_api.sums_of(batch, member, 0)


@_of_one
def _reached(batch: Batch, member: int) -> tuple[Any, Any, tuple[Any, ...]]:
    return array_api.reached(batch, member)[0]


@_of_one
def _stepped(batch: Batch, length: int, step: bool) -> tuple[Any, tuple[Any, ...]]:
    params, slots = array_api.run(batch, length, step=step)
    return params[0], slots[0]
