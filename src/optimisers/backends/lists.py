"""Lists of PyTorch tensors that kernels take for arrays: every function runs over the whole list at once (`torch._foreach_*`)."""

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import torch

from optimisers.backends.namespace import Namespace

__all__ = ["Lists", "Many"]

_torch: Any = torch  # whose stubs do not tell of functions on lists


class Many:
    """Tensors that are computed with as one. The other operand is another such list, a number, or a vector with one for each."""

    __slots__ = ("tensors",)
    __array_ufunc__ = None  # a vector of numbers on the left leaves it to the methods here

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors

    @property
    def dtype(self) -> Any:
        """The dtype of all of them."""
        return self.tensors[0].dtype

    def each(self, function: Callable[..., Any], *others: Any) -> "Many":
        """Call a function for each tensor, with what the others have for it."""
        return Many([function(*parts) for parts in zip(self.tensors, *(_parts(other, self) for other in others), strict=True)])

    def _both(self, other: Any, function: Callable[..., Any]) -> "Many":
        return Many(function(self.tensors, _operand(other)))

    def _swapped(self, other: Any, function: Callable[..., Any]) -> "Many":
        return self.each(lambda x, y: function(y, x), other)

    def _alone(self, other: Any, function: Callable[..., Any]) -> "Many":
        return self.each(function, other)

    __add__ = __radd__ = partialmethod(_both, function=_torch._foreach_add)
    __sub__ = partialmethod(_both, function=_torch._foreach_sub)
    __mul__ = __rmul__ = partialmethod(_both, function=_torch._foreach_mul)
    __truediv__ = partialmethod(_both, function=_torch._foreach_div)
    __pow__ = partialmethod(_both, function=_torch._foreach_pow)
    __rsub__ = partialmethod(_swapped, function=torch.sub)
    __rtruediv__ = partialmethod(_swapped, function=torch.div)
    __rpow__ = partialmethod(_swapped, function=torch.pow)
    __gt__ = partialmethod(_alone, function=torch.gt)
    __ge__ = partialmethod(_alone, function=torch.ge)
    __lt__ = partialmethod(_alone, function=torch.lt)
    __le__ = partialmethod(_alone, function=torch.le)
    __eq__ = partialmethod(_alone, function=torch.eq)  # type: ignore[assignment]
    __ne__ = partialmethod(_alone, function=torch.ne)  # type: ignore[assignment]
    __and__ = __rand__ = partialmethod(_alone, function=torch.logical_and)
    __or__ = __ror__ = partialmethod(_alone, function=torch.logical_or)
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> "Many":
        return Many(_torch._foreach_neg(self.tensors))

    def __invert__(self) -> "Many":
        return self.each(torch.logical_not)


def _operand(value: Any) -> Any:
    return value.tensors if isinstance(value, Many) else value.tolist() if isinstance(value, np.ndarray) else value


def _parts(value: Any, like: Many, dtype: torch.dtype | None = None) -> Sequence[Any]:
    """What each tensor meets of an operand, as a tensor."""
    if isinstance(value, Many):
        return value.tensors
    parts = value.tolist() if isinstance(value, np.ndarray) else [value] * len(like.tensors)
    return [torch.tensor(part, dtype=dtype or x.dtype, device=x.device) for part, x in zip(parts, like.tensors, strict=True)]


class Lists(Namespace):
    """The functions for kernels, on lists; numbers that meet no list are NumPy's business."""

    def __init__(self, single: Namespace) -> None:
        self._single = single
        for name, function in {
            "sqrt": _torch._foreach_sqrt,
            "exp": _torch._foreach_exp,
            "log": _torch._foreach_log,
            "tanh": _torch._foreach_tanh,
            "abs": _torch._foreach_abs,
        }.items():
            setattr(self, name, self._over(function, getattr(np, name)))
        for name in ("isfinite", "conj", "real", "imag", "sign", "abs2"):
            setattr(self, name, self._one_by_one(name))

    def _over(self, function: Callable[..., Any], number: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: Many(function(x.tensors)) if isinstance(x, Many) else number(x)

    def _one_by_one(self, name: str) -> Callable[..., Any]:
        function, number = getattr(self._single, name), {"abs2": lambda x: x * x}.get(name) or getattr(np, name)
        return lambda x: x.each(function) if isinstance(x, Many) else number(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y."""
        like = next((each for each in (condition, x, y) if isinstance(each, Many)), None)
        if like is None:
            return np.where(condition, x, y)
        if not isinstance(condition, (Many, np.ndarray)):
            return x if condition else y
        typed = next((each.dtype for each in (x, y) if isinstance(each, Many)), self._single._dtype)
        parts = [_parts(condition, like, torch.bool), _parts(x, like, typed), _parts(y, like, typed)]
        return Many([torch.where(*each) for each in zip(*parts, strict=True)])

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two."""
        return self._extreme(x, y, _torch._foreach_minimum, np.minimum)

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two."""
        return self._extreme(x, y, _torch._foreach_maximum, np.maximum)

    def _extreme(self, x: Any, y: Any, function: Callable[..., Any], number: Callable[..., Any]) -> Any:
        if not isinstance(x, Many):
            x, y = y, x
        return Many(function(x.tensors, _operand(y))) if isinstance(x, Many) else number(x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        """x within [low, high]; both parts of a complex x."""
        if not isinstance(x, Many):
            return np.clip(x, low, high)
        if x.dtype.is_complex:
            return x.each(self._single.clip, low, high)
        return self.minimum(self.maximum(x, low), high)

    def normal(self, like: Any, key: tuple[Any, ...]) -> Any:
        """Gaussian numbers in the shape and dtype of each tensor, told by its key alone."""
        return Many([self._single.normal(x, own) for x, own in zip(like.tensors, _keys(key, like), strict=True)])

    def round_at_random(self, x: Any, bits: int, key: tuple[Any, ...]) -> Any:
        """Real numbers rounded at random to a neighbour with so many bits of precision, told by the key alone."""
        return Many([self._single.round_at_random(each, bits, own) for each, own in zip(x.tensors, _keys(key, x), strict=True)])


def _keys(key: tuple[Any, ...], like: Many) -> list[tuple[Any, ...]]:
    columns = [part.tolist() if isinstance(part, np.ndarray) else [part] * len(like.tensors) for part in key]
    return list(zip(*columns, strict=True))
