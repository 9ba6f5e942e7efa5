"""Parts for a chain that bound the gradient: by value, by the norm of a parameter, by the norm of all."""

from typing import Any

from optimisers.rules.base import ABOVE_ZERO, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["ClipGlobalNorm", "ClipGrad", "ClipNorm"]

_ABOVE_ZERO = (*ABOVE_ZERO[:2], True)  # an infinite bound clips nothing


@rule
class ClipGrad(Rule):
    r"""Clamps each element of the gradient to $[-c, c]$; of a complex one, both its parts.

    **Arguments:**

    - `clip_value`: c > 0.

    Example:
        >>> from optimisers import ClipGrad
        >>> ClipGrad(10.0)
        ClipGrad(clip_value=10.0)

    Source: `torch.nn.utils.clip_grad_value_`.
    """

    clip_value: Hyper = 10.0

    ranges = {"clip_value": _ABOVE_ZERO}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"low": -self.clip_value, "high": self.clip_value}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return xp.clip(g, h.low, h.high)


def _square(xp: Any, g: Any, p: Any, h: Any) -> Any:
    return xp.abs2(g)


def _factor(xp: Any, h: Any, total: Any) -> dict[str, Any]:
    # Of a norm of zero, infinity is the ratio, and one the factor.
    return {"factor": xp.minimum(h.max_norm / xp.sqrt(total), 1.0)}


def _scaled(xp: Any, g: Any, p: Any, h: Any) -> Any:
    return h.factor * g


@rule
class ClipNorm(Rule):
    r"""Scales a parameter's gradient down to an L2 norm of at most $c$: $g \cdot \min(1, c/\|g\|)$.

    **Arguments:**

    - `max_norm`: c > 0, for each parameter on its own.

    A gradient that holds NaN or infinity stays so: put `SkipNonFinite` before it.

    Example:
        >>> from optimisers import ClipNorm
        >>> ClipNorm(1.0)
        ClipNorm(max_norm=1.0)

    Source: Pascanu, Mikolov and Bengio (2013).
    """

    max_norm: Hyper = 1.0

    ranges = {"max_norm": _ABOVE_ZERO}
    scope = "leaf"
    measure = _square
    measured = _factor
    kernel = _scaled

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"max_norm": self.max_norm}


@rule
class ClipGlobalNorm(Rule):
    r"""Scales all gradients by one factor, so that their common L2 norm is at most $c$: $g \cdot \min(1, c/\|g\|)$.

    The norm goes over all live parameters whose rule holds this part, each once: a tied parameter counts with its
    summed gradient, a frozen one not at all.

    **Arguments:**

    - `max_norm`: c > 0.

    Example:
        >>> from optimisers import AdamW, Chain, ClipGlobalNorm
        >>> rule = Chain(ClipGlobalNorm(1.0), AdamW(3e-4))

    Source: Pascanu, Mikolov and Bengio (2013); `torch.nn.utils.clip_grad_norm_`, without its 1e-6.
    """

    max_norm: Hyper = 1.0

    ranges = {"max_norm": _ABOVE_ZERO}
    scope = "tree"
    measure = _square
    measured = _factor
    kernel = _scaled

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"max_norm": self.max_norm}
