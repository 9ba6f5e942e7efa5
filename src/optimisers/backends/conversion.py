"""Arrays of any library copied, in another dtype, on another device, as arrays of another library."""

from importlib import import_module
from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, library_of, namespace_of, numpy_dtype
from optimisers.rules.values import is_traced

__all__ = ["converted", "copied", "copied_as", "from_numpy", "to_numpy"]


def copied(array: Any) -> Any:
    """A contiguous copy."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")
    return namespace_of(array).asarray(array.detach() if hasattr(array, "detach") else array, copy=True)


def copied_as(array: Any, dtype: str, library: str) -> Any:
    """A contiguous copy in another dtype."""
    if library == "numpy":
        return np.array(array, numpy_dtype(dtype), order="C", subok=False)
    array = array.detach() if library == "torch" else array
    made = namespace_of(array)
    return made.asarray(array, copy=True) if dtype_name(array) == dtype else made.astype(array, getattr(made, dtype), copy=True)


def converted(array: Any, dtype: str, library: str, device: Any) -> Any:
    """A copy as an array of another library, in another dtype, on a device."""
    if library_of(array) != library:
        array = from_numpy(to_numpy(array), library)
    array = copied_as(array, dtype, library)
    if library == "torch" and device is not None:
        from optimisers.backends import spread

        return spread.moved(array, device)
    if library == "jax" and device is not None and not is_traced(array):
        import jax

        return jax.device_put(array, device)
    return array


def to_numpy(array: Any) -> np.ndarray:
    """An array of any library as one of NumPy's, which may share its memory. Of a distributed one, the whole."""
    if library_of(array) != "torch":
        return np.asarray(array)
    array = array.detach()
    array = (array.full_tensor() if hasattr(array, "full_tensor") else array).cpu().resolve_conj().resolve_neg()
    name = dtype_name(array)
    if name == "bfloat16":  # which PyTorch does not hand to NumPy
        return array.view(namespace_of(array).int16).numpy().view(numpy_dtype(name))
    return array.numpy()


def from_numpy(array: np.ndarray, library: str) -> Any:
    """An array of NumPy's as one of another library, which may share its memory."""
    if library == "torch":
        import torch

        array = np.require(array, requirements=["C", "W"])
        # PyTorch takes complex128 to lie at multiples of 16 bytes, NumPy at those of 8; a file may have it at either.
        if array.dtype == np.complex128 and array.__array_interface__["data"][0] % 16:
            array = array.copy()
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    return array if library == "numpy" else import_module({"jax": "jax.numpy"}.get(library, library)).asarray(array)
