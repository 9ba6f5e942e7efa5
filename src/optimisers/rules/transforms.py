"""Parts for a chain that reshape a gradient as a whole: centralisation, adaptive clipping, noise."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from optimisers.rules.base import ABOVE_ZERO, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["AddNoise", "CentraliseGrad", "ClipAdaptive"]


def _other_axes(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(ndim) if each != axis % ndim)


def _no_axis(shape: tuple[int, ...], axis: int) -> str | None:
    if len(shape) > 1 and not -len(shape) <= axis < len(shape):
        return f"it has {len(shape)} axes, and unit_axis={axis} is none of them"
    return None


@cache
def _centralise(axis: int) -> Callable[..., Any]:
    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        if g.ndim < 2 or 0 in g.shape:
            return g, ()
        return g - xp.mean(g, axis=_other_axes(g.ndim, axis), keepdims=True), ()

    return apply


@rule
class CentraliseGrad(Rule):
    r"""Takes from the gradient of a matrix (or a larger array) its mean over all axes but that of the output units.

    **Arguments:**

    - `unit_axis`: the axis of the output units: 0 as in PyTorch, -1 for layers that multiply from the right.

    Example:
        >>> from optimisers import Adam, CentraliseGrad, Chain
        >>> rule = Chain(CentraliseGrad(), Adam(1e-3))

    Source: Yong et al. (2020), gradient centralisation; the numbers are those of `optax.centralize`.
    """

    unit_axis: int = 0

    options = ("unit_axis",)

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        return _no_axis(shape, self.unit_axis)

    @property
    def apply(self) -> Callable[..., Any]:
        return _centralise(self.unit_axis)


@cache
def _clip_adaptive(axis: int) -> Callable[..., Any]:
    def norms(xp: Any, x: Any) -> Any:
        if x.ndim < 2:
            return xp.sqrt(xp.sum(xp.abs2(x)))
        return xp.sqrt(xp.sum(xp.abs2(x), axis=_other_axes(x.ndim, axis), keepdims=True))

    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        most = h.clipping * xp.maximum(norms(xp, p), h.eps)
        return g * (most / xp.maximum(norms(xp, g), most)), ()

    return apply


@rule
class ClipAdaptive(Rule):
    r"""Scales the gradient of each output unit down to a share of the norm of the unit's own weights.

    $g_i \leftarrow g_i \min(1, \lambda \max(\|p_i\|, \epsilon)/\|g_i\|)$; a vector is one unit.

    **Arguments:**

    - `clipping`: λ > 0.
    - `eps`: ε > 0, the least norm of weights, so that zeros can move.
    - `unit_axis`: the axis of the output units: 0 as in PyTorch, -1 for layers that multiply from the right.

    Example:
        >>> from optimisers import SGD, Chain, ClipAdaptive
        >>> rule = Chain(ClipAdaptive(0.01), SGD(0.1))

    Source: Brock et al. (2021), adaptive gradient clipping; `optax.adaptive_grad_clip`.
    """

    clipping: Hyper = 1e-2
    eps: Hyper = 1e-3
    unit_axis: int = 0

    options = ("unit_axis",)
    ranges = {"clipping": ABOVE_ZERO, "eps": ABOVE_ZERO}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"clipping": self.clipping, "eps": self.eps}

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        return _no_axis(shape, self.unit_axis)

    @property
    def apply(self) -> Callable[..., Any]:
        return _clip_adaptive(self.unit_axis)


@rule
class AddNoise(Rule):
    r"""Adds Gaussian noise to the gradient, of a variance that falls: $g + \mathcal N(0, \eta/t^\gamma)$.

    The noise depends on the seed, the path, the step and the place alone, so a run can be repeated, and resumed. JAX draws
    numbers of its own.

    **Arguments:**

    - `eta`: η ≥ 0. `gamma`: γ ≥ 0.
    - `seed`: a whole number in [0, 2³¹).

    Example:
        >>> from optimisers import SGD, AddNoise, Chain
        >>> rule = Chain(AddNoise(0.01, seed=1), SGD(0.1))

    Source: Neelakantan et al. (2015); `optax.add_noise`.
    """

    eta: Hyper = 1e-2
    gamma: Hyper = 0.55
    seed: int = 0

    ranges = {"eta": (0.0, math.inf, False), "gamma": (0.0, math.inf, False), "seed": (0, 2.0**31, False)}
    keyed = True

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"scale": (self.eta / step**self.gamma) ** 0.5, "seed": self.seed, "step": step}

    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        return g + h.scale * xp.normal(g, (h.seed, h.key, h.step)), ()
