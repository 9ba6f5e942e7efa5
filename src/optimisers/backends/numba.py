"""NumPy arrays in one fused pass: a compiled loop over a table of addresses, on all cores.

A program becomes one compiled function, which walks a table of chunks (parameter, start, length). What is frozen is not in it.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba exports it without saying so

from optimisers.backends import array_api
from optimisers.backends.array_api import Prepared, derive, finish_numpy, prepare_numpy, reached, zeros
from optimisers.backends.arrays import real_dtype
from optimisers.backends.base import Batch, check
from optimisers.backends.loops import DTYPES, compile_at_once, loop, pointer
from optimisers.backends.rows import element_ranges
from optimisers.backends.watching import watched
from optimisers.rules.program import Program

__all__ = [
    "derive",
    "fuses",
    "prepare",
    "reached",
    "row_by_row",
    "run",
    "run_in_one_pass",
    "sums",
    "sums_in_one_pass",
    "watch",
    "zeros",
]

row_by_row = False

_CHUNK = 16_384
# Handing work to another thread takes about a tenth of a millisecond: as long as this many elements take.
_PARALLEL_FROM = 400_000
_PARALLEL_SHARE = 1_000_000


# Addresses ------------------------------------------------------------------------------------------------------------
# Asking 2,000 arrays for their addresses through Python takes longer than the whole compiled step. So compiled code reads
# them, and what has to be checked, from the array objects themselves, whose layout (PyArrayObject) is part of NumPy's ABI.

_OBJECT_FIELDS = 9
_NUMPY_READY = 0x1 | 0x100  # C-contiguous, aligned
_WRITEABLE = 0x400


def _read_addresses(
    objects: Any, kind: int, dtype: int, dims: Any, shapes: Any, flags: int, addresses: Any
) -> int:  # pragma: no cover
    """Read the data addresses of arrays; returns how many could be read before one was not as expected."""
    at = 0
    for i in range(objects.shape[0]):
        fields = carray(pointer(objects[i]), _OBJECT_FIELDS, np.int64)
        if fields[1] != kind or fields[7] != dtype:
            return i
        if fields[3] & 0xFFFFFFFF != dims[i] or fields[8] & flags != flags:
            return i
        shape = carray(pointer(fields[4]), dims[i], np.int64)
        for axis in range(dims[i]):
            if shape[axis] != shapes[at]:
                return i
            at += 1
        addresses[i] = fields[2]
    return objects.shape[0]


@cache
def _reader() -> Callable[..., int]:
    return compile_at_once(_read_addresses, "int64(int64[::1], int64, int64, int64[::1], int64[::1], int64, int64[::1])")


@cache
def _can_read() -> bool:
    """Whether array objects on this interpreter lie as expected; tried on arrays of several kinds."""
    base = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    samples = [base, base[1], np.zeros((), np.float64), base[0].copy(), np.zeros((0, 3))]
    if object.__basicsize__ != 16:  # a free-threaded or a debugging interpreter
        return False
    for each in samples:
        fields = (ctypes.c_int64 * _OBJECT_FIELDS).from_address(id(each))
        expected = (id(np.ndarray), each.__array_interface__["data"][0], each.ndim, id(each.dtype))
        if (fields[1], fields[2], fields[3] & 0xFFFFFFFF, fields[7]) != expected:
            return False
        if bool(fields[8] & 0x1) != each.flags.c_contiguous or bool(fields[8] & _WRITEABLE) != each.flags.writeable:
            return False
    return True


class _Expected:
    """What the arrays of a batch have to be, in the form that `_read_addresses` takes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.dims = np.array([len(shape) for shape in shapes], np.int64)
        self.shapes = np.array([size for shape in shapes for size in shape], np.int64)

    def read(self, arrays: Sequence[Any], dtype: str, out: np.ndarray, *, writeable: bool) -> bool:
        """Fill in the addresses, if every array is as it has to be."""
        if not _can_read():
            return False
        objects = np.fromiter(map(id, arrays), np.int64, len(arrays))
        flags = _NUMPY_READY | (_WRITEABLE if writeable else 0)
        kind, native = id(np.ndarray), id(np.dtype(dtype))
        return _reader()(objects, kind, native, self.dims, self.shapes, flags, out) == len(arrays)


class _Work(NamedTuple):
    """What a batch is, whatever its arrays. As an object it stands for the batch among the addresses that a state keeps."""

    expected: _Expected
    chunks: np.ndarray

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


# The batch ------------------------------------------------------------------------------------------------------------


def fuses(program: Program, dtypes: tuple[str, ...]) -> bool:
    """Whether the program speaks of single elements, of dtypes that compiled code knows."""
    plain = program.elementwise and all(slot.shape is None for _, slot in program.slots)
    return plain and DTYPES.issuperset(dtypes)


def prepare(batch: Batch) -> None:
    """Read the addresses of all arrays; arrays that cannot be used as they are (strided, read-only, cast) are copied."""
    expected = _work_of(batch).expected
    addresses = np.empty((2 + len(batch.slot_dtypes), len(batch.params)), np.int64)
    fine = expected.read(batch.grads, batch.dtype, addresses[1], writeable=False)
    fine = expected.read(batch.params, batch.dtype, addresses[0], writeable=batch.in_place) and fine
    if fine and batch.in_place and _read_slots(batch, expected, addresses):
        batch.prepared = Prepared(batch.params, batch.grads, batch.slots, addresses)
        return
    if not fine:
        check(batch)
    prepared = prepare_numpy(batch)
    for at, arrays in enumerate((prepared.params, prepared.grads, *zip(*prepared.slots, strict=True))):
        addresses[at] = [array.__array_interface__["data"][0] for array in arrays]
    batch.prepared = prepared._replace(addresses=addresses)


def _read_slots(batch: Batch, expected: _Expected, addresses: np.ndarray) -> bool:
    """The addresses of the slots: kept as long as the slots are the same objects."""
    key = _work_of(batch)
    if key in batch.addresses:
        addresses[2:] = batch.addresses[key]
        return True
    columns = zip(*batch.slots, strict=True)
    for at, (column, dtype) in enumerate(zip(columns, batch.slot_dtypes, strict=True)):
        if not expected.read(column, dtype, addresses[2 + at], writeable=True):
            return False
    batch.know(key, addresses[2:].copy())
    return True


def sums(batch: Batch, member: int) -> Sequence[np.ndarray]:
    """The sums of one member's measure, in float64, added up in a fixed order whatever the threads do."""
    found = sums_in_one_pass(batch, member)
    return array_api.sums(batch, member) if found is None else found


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members in one pass."""
    if not step and not any(member.slots for member in batch.program.members[:length]):
        return batch.params, batch.slots
    if not run_in_one_pass(batch, length, step=step):
        return array_api.run(batch, length, step=step)
    return finish_numpy(batch, step), batch.prepared.slots


# One pass over addresses ----------------------------------------------------------------------------------------------


def sums_in_one_pass(batch: Batch, member: int) -> Sequence[np.ndarray] | None:
    """The sums of one member's measure over what lies at the prepared addresses; `None` when Numba cannot compile it."""
    function = _function(batch, member + 1, "measure")
    if function is None:
        return None
    addresses, chunks, table = batch.prepared.addresses, _work_of(batch).chunks, _table(batch, member + 1)
    parts = np.zeros((batch.program.members[member].sums, len(chunks)))
    _share(chunks, lambda first, last: function(addresses, table, chunks, first, last, parts))
    return [np.bincount(chunks[:, 0], part, minlength=len(batch.params)) for part in parts]


def run_in_one_pass(batch: Batch, length: int, *, step: bool) -> bool:
    """Run the first members on what lies at the prepared addresses; `False` when Numba cannot compile them."""
    function = _function(batch, length, "step" if step else "hold")
    if function is None:
        return False
    addresses, chunks, table = batch.prepared.addresses, _work_of(batch).chunks, _table(batch, length)
    if not step or batch.watched is None:
        _share(chunks, lambda first, last: function(addresses, table, chunks, first, last))
        return True
    parts = np.zeros((3, len(chunks)))
    _share(chunks, watched(batch.dtype, function, addresses, table, chunks, parts))
    batch.watched = np.array([np.bincount(chunks[:, 0], part, minlength=len(batch.params)) for part in parts])
    return True


def watch(batch: Batch, length: int) -> bool:
    """Make the coming `run` of so many members add up `watched`; `False` when it cannot."""
    if batch.prepared.addresses is None or _function(batch, length, "step") is None:
        return False
    batch.watched = np.zeros((3, len(batch.params)))
    return True


def _work_of(batch: Batch) -> "_Work":
    """What a batch is, whatever its arrays."""
    if "work" not in batch.kept:
        batch.kept["work"] = _Work(_Expected(batch.shapes), _chunks(batch))
    return batch.kept["work"]


def _function(batch: Batch, length: int, purpose: str) -> Callable[..., None] | None:
    """The compiled function for the first members of the program, or `None` when Numba cannot compile it."""
    columns = tuple(tuple(scalars) for scalars in batch.scalars[:length])
    key = (length, purpose, columns)
    if key not in batch.kept:
        program = batch.program.head(length)
        dtypes = (batch.dtype, *batch.slot_dtypes[: len(program.slots)])
        batch.kept[key] = loop(program, dtypes, columns, purpose)
    return batch.kept[key]


def _chunks(batch: Batch) -> np.ndarray:
    """The table of work: parameter, first element, number of elements."""
    chunks = [
        (at, low, min(_CHUNK, stop - low))
        for at, (rows, shape) in enumerate(zip(batch.live_rows, batch.shapes, strict=True))
        for start, stop in element_ranges(rows, shape)
        for low in range(start, stop, _CHUNK)
    ]
    return np.array(chunks, np.int64).reshape(-1, 3)


def _table(batch: Batch, length: int) -> np.ndarray:
    """The scalars of the first members: one column a parameter."""
    rows = [values for scalars in batch.scalars[:length] for values in scalars.values()]
    if not rows:
        return np.zeros((0, len(batch.params)), real_dtype(batch.dtype))
    table = np.array(rows, real_dtype(batch.dtype))
    return table if isinstance(batch.row, range) else np.ascontiguousarray(table[:, batch.row])


# Threads --------------------------------------------------------------------------------------------------------------
# Compiled loops release the GIL, so plain Python threads share the chunks. Numba's own parallel layers either cannot be called
# from two threads at once or do not survive a fork.

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def _share(chunks: np.ndarray, work: Callable[[int, int], None]) -> None:
    """Call `work(first, last)` over all chunks, on all cores when there is enough of it."""
    global _pool
    threads = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    total = int(chunks[:, 2].sum())
    if threads == 1 or total < _PARALLEL_FROM:
        work(0, len(chunks))
        return
    shares = max(threads, min(threads * 32, total // _PARALLEL_SHARE))
    ends = np.searchsorted(np.cumsum(chunks[:, 2]), np.linspace(0, total, shares + 1)[1:-1])
    bounds = [0, *(int(end) for end in ends), len(chunks)]
    ranges = iter(list(pairwise(bounds)))

    def drain() -> None:
        for first, last in ranges:
            work(first, last)

    if _pool is None:
        _pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="optimisers")
    helpers = [_pool.submit(drain) for _ in range(threads - 1)]
    try:
        drain()
    finally:
        # Even when interrupted, leave no thread behind that still writes.
        for helper in helpers:
            helper.result()
