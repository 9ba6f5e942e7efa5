"""The functions that a kernel may call, compiled, on one element. As a module, this is the `xp` of the Numba backend.

`np.where` and its like are slow on scalars under Numba, and literals promote float32 to float64: hence functions of our own.
"""

import cmath
import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload, register_jitable

__all__ = [
    "abs",
    "abs2",
    "clip",
    "conj",
    "exp",
    "imag",
    "isfinite",
    "log",
    "maximum",
    "minimum",
    "real",
    "sign",
    "sqrt",
    "tanh",
    "where",
]

# NaN and infinity keep their meaning: `nnan` and `ninf` are left out.
OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc", "arcp", "nsz"}, "error_model": "numpy"}


def _by_type(real: Any, complex_: Any) -> Any:
    """A compiled function with one body for real numbers and one for complex ones."""
    return _typed(lambda zero, one: real, complex_)


def _typed(real: Any, complex_: Any) -> Any:
    """The same, where the body for real numbers is made for the constants 0 and 1 of their type."""
    bodies = {types.float32: real(np.float32(0), np.float32(1)), types.float64: real(np.float64(0), np.float64(1))}

    def dispatch(x):  # no annotations: Numba compares them too
        return bodies[types.float64](x)

    @overload(dispatch, jit_options=OPTIONS)  # type: ignore[arg-type]
    def choose(x):
        return complex_ if isinstance(x, types.Complex) else bodies.get(x, bodies[types.float64])

    @numba.njit(**OPTIONS)
    def function(x: Any) -> Any:
        return dispatch(x)

    return function


@register_jitable
def _complex_sign(x):
    size = abs_(x)
    return x / size if size != 0 else x


@numba.njit(**OPTIONS)
def abs_(x: Any) -> Any:
    return math.sqrt(x.real * x.real + x.imag * x.imag)


sqrt = _by_type(lambda x: math.sqrt(x), lambda x: cmath.sqrt(x))
exp = _by_type(lambda x: math.exp(x), lambda x: cmath.exp(x))
log = _by_type(lambda x: math.log(x), lambda x: cmath.log(x))
tanh = _by_type(lambda x: math.tanh(x), lambda x: cmath.tanh(x))
abs = _by_type(lambda x: math.fabs(x), lambda x: abs_(x))  # noqa: A001  # named after NumPy's function
abs2 = _by_type(lambda x: x * x, lambda x: x.real * x.real + x.imag * x.imag)
isfinite = _by_type(lambda x: math.isfinite(x), lambda x: math.isfinite(x.real) and math.isfinite(x.imag))
real = _by_type(lambda x: x, lambda x: x.real)
imag = _typed(lambda zero, one: lambda x: zero, lambda x: x.imag)
conj = _by_type(lambda x: x, lambda x: x.conjugate())
# NaN has no sign, and stays what it is.
sign = _typed(lambda zero, one: lambda x: x if x == zero or x != x else math.copysign(one, x), _complex_sign)


@numba.njit(**OPTIONS)
def where(condition: Any, x: Any, y: Any) -> Any:
    """One of two numbers."""
    return x if condition else y


@numba.njit(**OPTIONS)
def minimum(x: Any, y: Any) -> Any:
    """The lesser of two numbers, or NaN."""
    return x if x < y or x != x else y


@numba.njit(**OPTIONS)
def maximum(x: Any, y: Any) -> Any:
    """The greater of two numbers, or NaN."""
    return x if x > y or x != x else y


@register_jitable
def _clip(x: Any, low: Any, high: Any) -> Any:
    return minimum(maximum(x, low), high)


def _clip_any(x, low, high):
    return _clip(x, low, high)


@overload(_clip_any, jit_options=OPTIONS)  # type: ignore[arg-type]
def _choose_clip(x, low, high):
    if isinstance(x, types.Complex):
        return lambda x, low, high: complex(_clip(x.real, low, high), _clip(x.imag, low, high))
    return lambda x, low, high: _clip(x, low, high)


@numba.njit(**OPTIONS)
def clip(x: Any, low: Any, high: Any) -> Any:
    """A number within bounds; of a complex one, each part."""
    return _clip_any(x, low, high)
