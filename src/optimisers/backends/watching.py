"""Watching a compiled step: sums over each chunk just before and after it, while what it works on is in the cache.

The step itself is the same machine code as ever, called by its address, so that it rounds as it does when nobody is watching.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba exports it without saying so
from numba.core import types

from optimisers.backends import elementwise
from optimisers.backends.arrays import real_dtype
from optimisers.backends.loops import compile_at_once, pointer

__all__ = ["watched"]


def watched(
    dtype: str, step: Callable[..., None], addresses: np.ndarray, table: np.ndarray, chunks: np.ndarray, parts: np.ndarray
) -> Callable[[int, int], None]:
    """A step over a range of chunks that also adds up, for each of them, the squares of the gradient, of what the step does to the
    parameter, and of the parameter before it.

    **Arguments:** `step`: the compiled loop, and what it is called with; `parts`: where the sums go, a row for each.
    """
    longest = int(chunks[:, 2].max(initial=0))
    return lambda first, last: _compiled(dtype)(step, addresses, table, chunks, first, last, np.empty(longest, dtype), parts)


def _watch(
    step: Any, addresses: Any, table: Any, chunks: Any, first: int, last: int, old: Any, parts: Any
) -> None:  # pragma: no cover
    for c in range(first, last):
        i, start, n = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        p = carray(pointer(addresses[0, i] + start * old.itemsize), n, old.dtype)
        g = carray(pointer(addresses[1, i] + start * old.itemsize), n, old.dtype)
        gradient, moved, parameter = 0.0, 0.0, 0.0
        for j in range(n):
            old[j] = p[j]
            gradient += _square(g[j])
            parameter += _square(p[j])
        step(addresses, table, chunks, c, c + 1)
        for j in range(n):
            real = np.float64(p[j].real) - np.float64(old[j].real)
            imag = np.float64(p[j].imag) - np.float64(old[j].imag)
            moved += real * real + imag * imag
        parts[0, c], parts[1, c], parts[2, c] = gradient, moved, parameter


@numba.njit(**elementwise.OPTIONS)
def _square(x: Any) -> Any:  # pragma: no cover
    real, imag = np.float64(x.real), np.float64(x.imag)
    return real * real + imag * imag


@cache
def _compiled(dtype: str) -> Callable[..., None]:
    matrix, ranges = types.int64[:, ::1], (types.int64, types.int64)
    table = getattr(types, real_dtype(dtype))[:, ::1]
    step = types.FunctionType(types.void(matrix, table, matrix, *ranges))
    signature: Any = types.void(step, matrix, table, matrix, *ranges, getattr(types, dtype)[::1], types.float64[:, ::1])
    return compile_at_once(_watch, signature, nogil=True, **elementwise.OPTIONS)
