"""Parts for a chain that pull parameters towards zero."""

from typing import Any

from optimisers.rules.base import Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["SignDecay", "WeightDecay"]


@rule
class WeightDecay(Rule):
    r"""Adds $\lambda p$ to the gradient: L2 regularisation when it stands first in a chain, decoupled decay when last.

    Decoupled, it is not multiplied by the learning rate, unlike the `weight_decay` of `AdamW`: give `lr * weight_decay`.

    **Arguments:**

    - `weight_decay`: λ ≥ 0.

    Example:
        >>> from optimisers import Chain, Descent, WeightDecay
        >>> Chain(WeightDecay(0.1), Descent(0.01))
        Chain(WeightDecay(weight_decay=0.1), Descent(lr=0.01))

    Source: Krogh and Hertz (1991).
    """

    weight_decay: Hyper = 5e-4

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g + h.weight_decay * p


@rule
class SignDecay(Rule):
    r"""Adds $\lambda\, \mathrm{sign}(p)$ to the gradient: L1 regularisation. For a complex parameter the sign is $p/|p|$.

    **Arguments:**

    - `weight_decay`: λ ≥ 0.

    Example:
        >>> from optimisers import SignDecay
        >>> SignDecay(0.1)
        SignDecay(weight_decay=0.1)

    Source: Tibshirani (1996).
    """

    weight_decay: Hyper = 1e-3

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g + h.weight_decay * xp.sign(p)
