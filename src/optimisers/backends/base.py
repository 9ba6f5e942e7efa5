"""What a backend is, which one runs a batch, and what can be asked of any array."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import array_api_compat
import numpy as np

from optimisers.errors import DtypeError, GradientError, ModelError, ShapeError
from optimisers.rules.program import Program

__all__ = [
    "Backend",
    "Batch",
    "Memory",
    "backend_for",
    "check",
    "compute_dtype",
    "dtype_name",
    "library_of",
    "memory_of",
    "namespace_of",
    "real_dtype",
    "reference_only",
    "slot_dtype",
    "trainable_dtype",
]

Runs = tuple[tuple[int, int], ...]
"""Ranges of rows (start, stop), ascending and apart."""


@dataclass(slots=True)
class Batch:
    """Parameters that one program updates in one call: same backend, same dtypes, same device."""

    program: Program
    paths: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: str
    slot_dtypes: tuple[str, ...]
    library: str
    params: list[Any]
    grads: list[Any]
    slots: list[tuple[Any, ...]]
    live_rows: Sequence[Runs | None]
    """For each parameter the rows that train, or `None` for all of them."""
    in_place: bool
    plan: dict[Any, Any]
    """What the backend keeps between steps for this batch, whatever the arrays."""
    addresses: dict[Any, Any]
    """What the backend keeps between steps for these very slots."""
    scalars: list[dict[str, Sequence[Any]]] = field(default_factory=list)
    """For each member, its scalars by name, one value a row of the table."""
    row: Sequence[int] = ()
    """For each parameter, its row of the table."""
    prepared: Any = None

    def h(self, member: int, at: int) -> SimpleNamespace:
        """The scalars of one member for one parameter, as a kernel receives them."""
        row = self.row[at]
        return SimpleNamespace(**{name: values[row] for name, values in self.scalars[member].items()})


class Backend(Protocol):
    """The functions that a backend module has."""

    def fuses(self, program: Program, dtypes: tuple[str, ...]) -> bool:
        """Whether this backend runs such a program on a parameter and slots of these dtypes."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str, library: str, device: Any) -> Any:
        """A fresh slot."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Check the arrays of a batch, raising before anything changed, and bring them into the form that `run` needs."""
        ...

    def sums(self, batch: Batch, member: int) -> Sequence[Any]:
        """What `measure` of one member adds up to, for each of its sums an array over the parameters."""
        ...

    def run(self, batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Run the first members, and subtract the outcome where `step`; returns the new parameters and slots."""
        ...


_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def reference_only() -> Iterator[None]:
    """Run every step inside in the reference backend, as if Numba were not installed.

    Example:
        >>> import optimisers as op
        >>> with op.reference_only():
        ...     pass
    """
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def backend_for(library: str, program: Program, dtypes: tuple[str, ...]) -> Any:
    """The module that runs such a batch. It is imported when first needed."""
    if library == "numpy" and program.elementwise and not _reference_only.get() and _has_numba():
        from optimisers.backends import numba

        if numba.fuses(program, dtypes):
            return numba
    from optimisers.backends import array_api

    return array_api


def reference_only_is_set() -> bool:
    """Whether the reference backend is asked for."""
    return _reference_only.get()


@lru_cache(maxsize=1)
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


# What can be asked of any array ---------------------------------------------------------------------------------------


def library_of(value: Any) -> str | None:
    """The array library that a value belongs to, or `None` when it is no array.

    >>> import numpy as np
    >>> library_of(np.ones(2)), library_of(1.0), library_of(np.float32(1))
    ('numpy', None, None)
    """
    return _library(type(value))


@cache
def _library(kind: type) -> str | None:
    if issubclass(kind, np.ndarray):
        return "numpy"
    root = kind.__module__.partition(".")[0]
    for name, base in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(name)
        # JAX tracers pass for arrays of its abstract class only by instance; their type still descends from it in name.
        if module is not None and (issubclass(kind, getattr(module, base)) or (root == name and "Tracer" in kind.__name__)):
            return name
    return root if hasattr(kind, "__array_namespace__") and not issubclass(kind, np.generic) else None


def namespace_of(array: Any) -> Any:
    """The array-API namespace of an array."""
    return array_api_compat.array_namespace(array)


def dtype_name(array: Any) -> str:
    """The name of an array's dtype, alike for all libraries: `"float32"`."""
    return _dtype_name(array.dtype)


@cache
def _dtype_name(dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def trainable_dtype(name: str) -> bool:
    """Whether arrays of this dtype are parameters: floating or complex."""
    return name.startswith(("float", "bfloat", "complex", "longdouble", "clongdouble"))


def compute_dtype(name: str) -> str:
    """The dtype that the arithmetic of a parameter runs in: float32 for everything shorter."""
    short = name == "float16" or name.startswith(("bfloat", "float8_", "float6_", "float4_"))
    return "float32" if short else name


def real_dtype(name: str) -> str:
    """The dtype of the real part."""
    return {"complex64": "float32", "complex128": "float64", "complex256": "float128", "clongdouble": "longdouble"}.get(name, name)


def slot_dtype(parameter: str, real: bool, wish: str | None) -> str:
    """The dtype of a slot: the wish, made complex where the parameter is and the slot is not real."""
    base = compute_dtype(parameter)
    if wish is not None:
        base = {"float32": "complex64", "float64": "complex128"}.get(wish, wish) if base.startswith("complex") else wish
    return real_dtype(base) if real else base


@dataclass(frozen=True, slots=True)
class Memory:
    """Where an array lies: the address of its first element, shape, strides in bytes, and bytes of an element."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest address, and the one after the highest byte."""
        low = high = self.address
        for size, stride in zip(self.shape, self.strides, strict=True):
            low += min(0, (size - 1) * stride)
            high += max(0, (size - 1) * stride)
        return low, high + self.itemsize

    @property
    def dense(self) -> tuple[int, ...] | None:
        """The order of the axes under which the array is C-contiguous, or `None` when there is none."""
        order = tuple(sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis)))
        expected = self.itemsize
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != expected:
                return None
            expected *= self.shape[axis]
        return order


def memory_of(array: Any, library: str) -> Memory | None:
    """Where an array lies, for libraries whose arrays may share memory; `None` where identity alone counts."""
    if library == "numpy":
        return Memory(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
    if library == "torch":
        size = array.element_size()
        return Memory(array.data_ptr(), tuple(array.shape), tuple(stride * size for stride in array.stride()), size)
    return None


def check(batch: Batch) -> None:
    """Check every parameter and gradient of a batch against its record.

    **Raises** `ModelError`, `GradientError`, `ShapeError` or `DtypeError`, naming the path.
    """
    for path, shape, param, grad in zip(batch.paths, batch.shapes, batch.params, batch.grads, strict=True):
        check_parameter(path, shape, batch.dtype, batch.library, param)
        check_gradient(path, shape, batch.dtype, batch.library, grad)


def check_parameter(path: Any, shape: tuple[int, ...], dtype: str, library: str, param: Any) -> None:
    """Check that a model still holds the parameter that the state knows."""
    remedy = "make a state for the changed model"
    found = library_of(param)
    if found is None:
        raise ModelError(f"{_at(path)}: the state has a parameter here, but the model holds {_kind(param)}; {remedy}")
    if found != library:
        raise ModelError(f"{_at(path)}: the state was made for a {library} array, but the model holds a {found} array; {remedy}")
    if tuple(param.shape) != shape:
        raise ModelError(f"{_at(path)}: the state was made for shape {shape}, but the model holds {tuple(param.shape)}; {remedy}")
    if dtype_name(param) != dtype:
        raise ModelError(f"{_at(path)}: the state was made for {dtype}, but the model holds {dtype_name(param)}; {remedy}")


def check_gradient(path: Any, shape: tuple[int, ...], dtype: str, library: str, grad: Any) -> None:
    """Check that a gradient can serve a parameter."""
    found = "numpy" if isinstance(grad, np.generic) else library_of(grad)
    if found is None:
        raise GradientError(f"{_at(path)}: the gradient is {_kind(grad)}, not an array; pass an array or None")
    if found != library:
        raise GradientError(f"{_at(path)}: the gradient is a {found} array, the parameter a {library} array; convert it")
    if tuple(grad.shape) != shape:
        raise ShapeError(f"{_at(path)}: the gradient has shape {tuple(grad.shape)}, the parameter {shape}; they must be equal")
    name = dtype_name(grad)
    if not trainable_dtype(name):
        raise DtypeError(f"{_at(path)}: the gradient has dtype {name}; a gradient is floating or complex, convert it")
    if name.startswith("complex") and not dtype.startswith("complex"):
        raise DtypeError(f"{_at(path)}: the gradient is {name}, the parameter {dtype}; take the real part of the gradient")


def _at(path: Any) -> str:
    return str(path) or "the model"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
