"""What can be asked of any array: its library, its dtype, where it lies."""

import sys
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import array_api_compat
import numpy as np

from optimisers.rules.values import is_traced

__all__ = [
    "WRITABLE",
    "Memory",
    "array_beside",
    "compute_dtype",
    "device_of",
    "dtype_name",
    "itemsize_of",
    "library_of",
    "memory_of",
    "namespace_of",
    "numpy_dtype",
    "real_dtype",
    "slot_dtype",
    "trainable_dtype",
]

WRITABLE = ("numpy", "torch")
"""The libraries into whose arrays a step may write."""


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


def device_of(array: Any, library: str) -> Any:
    """Where fresh arrays have to be made to lie beside this one; `None` where that is settled at their first use.

    For JAX, how an array is spread over several devices, or over the mesh of a trace that knows it; inside `shard_map`, the axes
    of the mesh that it varies over.
    """
    if library == "numpy":
        return None
    if library == "torch":
        from optimisers.backends.spread import spread_of

        return spread_of(array) or array.device
    if library != "jax":
        return getattr(array, "device", None)
    import jax

    if not is_traced(array):
        return array.sharding if len(array.sharding.device_set) > 1 else None
    kind = jax.typeof(array)
    varying = getattr(kind, "vma", None)
    if varying:
        return varying
    return kind.sharding if any(axes is not None for axes in kind.sharding.spec) else None


def dtype_name(array: Any) -> str:
    """The name of an array's dtype, alike for all libraries: `"float32"`."""
    # The type is part of the key, since dtypes of different libraries do not always bear to be compared.
    return _dtype_name(type(array.dtype), array.dtype)


@cache
def _dtype_name(kind: type, dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


@cache
def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of a name; that of `ml_dtypes` for those which NumPy lacks.

    **Raises** `TypeError` when there is none.
    """
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        found = getattr(ml_dtypes, name, None)
        if found is None:
            raise
        return np.dtype(found)


def itemsize_of(name: str) -> int | None:
    """The bytes of an element of a dtype, or `None` for a name that is no dtype."""
    try:
        return numpy_dtype(name).itemsize
    except (TypeError, ImportError):
        return {"bfloat16": 2}.get(name)


def trainable_dtype(name: str) -> bool:
    """Whether arrays of this dtype are parameters: floating or complex."""
    return name.startswith(("float", "bfloat", "complex", "longdouble", "clongdouble"))


def compute_dtype(name: str) -> str:
    """The dtype that the arithmetic of a parameter runs in: float32 for everything shorter."""
    short = name == "float16" or name.startswith(("bfloat", "float8_", "float6_", "float4_"))
    return "float32" if short else name


def array_beside(values: np.ndarray, like: Any) -> Any:
    """An array of NumPy's as one of the library of another array, where that lies; on all devices, where that is distributed."""
    if isinstance(like, (np.ndarray, np.generic)):
        return values
    if library_of(like) != "torch":
        return namespace_of(like).asarray(values)
    from optimisers.backends import spread

    return spread.beside(values, like)


def real_dtype(name: str) -> str:
    """The dtype of the real part."""
    return {"complex64": "float32", "complex128": "float64", "complex256": "float128", "clongdouble": "longdouble"}.get(name, name)


def slot_dtype(parameter: str, real: bool, wish: str | None) -> str:
    """The dtype of a slot: the wish, made complex where the parameter is and the slot is not real."""
    base = compute_dtype(parameter)
    if wish is None:
        return real_dtype(base) if real else base
    # There are no shorter complex numbers than complex64.
    return {"float64": "complex128"}.get(wish, "complex64") if base.startswith("complex") and not real else wish


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
    def order(self) -> tuple[int, ...]:
        """The axes from the widest stride to the narrowest."""
        return tuple(sorted(range(len(self.shape)), key=lambda axis: (-abs(self.strides[axis]), axis)))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Sizes and strides with the axes in order, those of size 1 left out, and neighbours merged where one stride goes on
        into the next. Two arrays at one address with equal runs are transposes and reshapes of each other."""
        merged: list[tuple[int, int]] = []
        for axis in self.order:
            size, stride = self.shape[axis], self.strides[axis]
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        return tuple(merged)

    @property
    def overlaps_itself(self) -> bool:
        """Whether some byte is in two elements. True, too, where it would take long to tell."""
        reach = self.itemsize - 1
        for stride, size in sorted((abs(stride), size) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1):
            if stride <= reach:
                break
            reach += (size - 1) * stride
        else:
            return False
        if 0 in self.strides or np.prod(self.shape, dtype=np.int64) > 1_000_000:
            return True
        places = reduce(np.add.outer, [np.arange(size) * stride for size, stride in zip(self.shape, self.strides, strict=True)])
        return bool((np.diff(np.sort(places, axis=None)) < self.itemsize).any())

    def overlaps(self, other: "Memory") -> bool:
        """Whether some byte is in both. True, too, where it would take long to tell."""
        a, b = (np.asarray(_Lying(each)) for each in (self, other))
        try:
            return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]  # NumPy's stubs know only -1 and 0
        except np.exceptions.TooHardError:
            return True


class _Lying:
    """An array that NumPy is told of and never reads."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, True),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{memory.itemsize}",
        }


def memory_of(array: Any, library: str) -> Memory | None:
    """Where an array lies, for libraries whose arrays may share memory; `None` where identity alone counts."""
    if library == "numpy":
        return Memory(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
    # A distributed tensor has an address on each process; identity alone is the same on all of them. Some tensors that are made of
    # others have none.
    if library == "torch" and not hasattr(array, "device_mesh") and (array.data_ptr() or not array.numel()):
        size = array.element_size()
        return Memory(array.data_ptr(), tuple(array.shape), tuple(stride * size for stride in array.stride()), size)
    return None
