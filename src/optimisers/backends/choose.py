"""Which backend runs a batch. A backend is imported when an array of its library is first met."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from optimisers.backends import array_api
from optimisers.backends.base import Backend
from optimisers.rules.program import Program

__all__ = ["backend_for", "reference_only", "reference_only_is_set"]

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def reference_only() -> Iterator[None]:
    """Run every step inside as if Numba were not installed.

    NumPy then runs in the reference backend, PyTorch by its own fused kernels or on lists.

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


def backend_for(library: str, program: Program, dtypes: tuple[str, ...], device: Any) -> Backend:
    """The module that runs such a batch. It is imported when first needed."""
    on_cpu = library == "numpy" or (library == "torch" and getattr(device, "type", None) == "cpu")
    if on_cpu and program.elementwise and not _reference_only.get() and _has_numba():
        from optimisers.backends import numba

        if numba.fuses(program, dtypes):
            if library == "numpy":
                return numba
            from optimisers.backends import torch_numba

            return torch_numba
    if library == "jax":
        from optimisers.backends import jax

        return jax
    if library == "torch":
        from optimisers.backends import torch

        return torch
    return array_api


def reference_only_is_set() -> bool:
    """Whether the reference backend is asked for."""
    return _reference_only.get()


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None
