"""The functions that a kernel may call, on whole arrays of one library."""

from functools import cache
from typing import Any

import numpy as np

from optimisers.backends.arrays import array_beside, dtype_name, numpy_dtype
from optimisers.errors import UnknownNameError, suggest

__all__ = ["NAMESPACES", "Namespace", "namespace"]


class Namespace:
    """The functions that a kernel may call, on whole arrays of one library. Scalars stand for arrays anywhere.

    `dtype` is the one of numbers that meet no array.
    """

    def __init__(self, library: Any, dtype: str) -> None:
        self._library = library
        self._dtype = getattr(library, dtype)
        self.sqrt = library.sqrt
        self.exp = library.exp
        self.log = library.log
        self.tanh = library.tanh
        self.isfinite = library.isfinite
        self.abs = library.abs
        self.conj = library.conj
        # For rules on whole arrays.
        self.matmul = library.matmul
        self.vecdot = library.vecdot
        self.sum = library.sum
        self.mean = library.mean

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = [each for each in dir(self) if not each.startswith("_")]
        raise UnknownNameError(f"a kernel asks for xp.{name}, which xp lacks{suggest(name, known)}")

    def _complex(self, x: Any) -> bool:
        return dtype_name(x).startswith("complex") if hasattr(x, "dtype") else isinstance(x, complex)

    def _arrays(self, *values: Any) -> list[Any]:
        like = next((value for value in values if hasattr(value, "dtype")), None)
        if like is None:
            return [self._library.asarray(value, dtype=self._dtype) for value in values]
        return [value if hasattr(value, "dtype") else self._library.asarray(value, dtype=like.dtype) for value in values]

    def real(self, x: Any) -> Any:
        """The real part."""
        return self._library.real(x) if self._complex(x) else x

    def imag(self, x: Any) -> Any:
        """The imaginary part; zeros for a real array."""
        return self._library.imag(x) if self._complex(x) else self._library.zeros_like(x)

    def abs2(self, x: Any) -> Any:
        """|x|², real."""
        if not self._complex(x):
            return x * x
        real, imag = self._library.real(x), self._library.imag(x)
        return real * real + imag * imag

    def sign(self, x: Any) -> Any:
        """The sign; x/|x| of a complex number; 0 at 0."""
        return self._library.sign(x)

    def matrix_transpose(self, x: Any) -> Any:
        """The last two axes exchanged."""
        return self._library.matrix_transpose(x)

    def epsilon(self, x: Any) -> float:
        """The machine epsilon of an array's dtype."""
        return float(self._library.finfo(x.dtype).eps)

    def normal(self, like: Any, key: tuple[Any, ...]) -> Any:
        """Gaussian numbers in the shape and dtype of an array, told by the key alone."""
        random = np.random.default_rng([int(part) for part in key])
        drawn = random.standard_normal(tuple(like.shape))
        if self._complex(like):
            drawn = (drawn + 1j * random.standard_normal(tuple(like.shape))) / np.sqrt(2)
        return array_beside(drawn.astype(numpy_dtype(dtype_name(like))), like)

    def round_at_random(self, x: Any, bits: int, key: tuple[Any, ...]) -> Any:
        """Real numbers rounded at random to a neighbour with so many bits of precision, told by the key alone."""
        size = self.abs(x)
        usual = self.isfinite(x) & (size > 0)
        # The distance between neighbours is a power of two.
        exponent = self._library.floor(self._library.log2(self.where(usual, size, 1.0))) - (bits - 1)
        # Below the normal numbers of bfloat16 the distance stays; where it is flushed to zero, nothing is rounded.
        unit = 2.0 ** self.maximum(exponent, -133.0)
        usual = usual & (unit > 0)
        unit = self.where(usual, unit, 1.0)
        down = self._library.floor(x / unit)
        up = x / unit - down > self._uniform(x, key)
        return self.where(usual, self.where(up, down + 1, down) * unit, x)

    def _uniform(self, like: Any, key: tuple[Any, ...]) -> Any:
        drawn = np.random.default_rng([int(part) for part in key]).random(tuple(like.shape))
        return array_beside(drawn.astype(numpy_dtype(dtype_name(like))), like)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y."""
        x, y = self._arrays(x, y)
        if not hasattr(condition, "dtype"):
            condition = array_beside(np.asarray(bool(condition)), x)
        return self._library.where(condition, x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two."""
        return self._library.minimum(*self._arrays(x, y))

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two."""
        return self._library.maximum(*self._arrays(x, y))

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        """x within [low, high]; both parts of a complex x."""
        if self._complex(x):
            real, imag = self._library.real(x), self._library.imag(x)
            return self.clip(real, low, high) + 1j * self.clip(imag, low, high)
        return self.minimum(self.maximum(x, low), high)


NAMESPACES: dict[str, type[Namespace]] = {}
"""For libraries that need more than the array API: the class of their functions for kernels."""


@cache
def _namespace(library: Any, dtype: str) -> Namespace:
    return NAMESPACES.get(library.__name__, Namespace)(library, dtype)


def namespace(library: Any, dtype: str = "float64") -> Namespace:
    """The functions for kernels, from an array-API namespace and the real dtype of the arithmetic."""
    return _namespace(library, dtype)
