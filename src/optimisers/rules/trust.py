"""Rules whose step is measured against the parameter it moves: LAMB, LARS."""

from collections.abc import Callable
from typing import Any

from optimisers.rules.adam import moments
from optimisers.rules.base import ABOVE_ZERO, LIKE, REAL, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["LAMB", "LARS"]


def _ratio(xp: Any, p2: Any, d2: Any, coefficient: Any, eps: Any) -> Any:
    """The ratio of two norms from their squares; 1 where either is zero."""
    idle = (p2 == 0) | (d2 == 0)
    return xp.where(idle, 1.0, coefficient * xp.sqrt(p2) / (xp.sqrt(d2) + eps + idle))


@rule
class LAMB(Rule):
    r"""LAMB: AdamW's direction, scaled for each parameter to the parameter's own norm. For large batches.

    $d = \hat\mu/(\sqrt{\hat\nu}+\epsilon) + \lambda p$ with the moments of `Adam`;
    $p \leftarrow p - \mathrm{lr}\,\frac{\|p\|}{\|d\|}\,d$ (the ratio is 1 where a
    norm is zero).

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.LAMB().eps
        1e-06

    Source: You et al. (2020); the numbers are those of `optax.lamb`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-6
    weight_decay: Hyper = 0.0

    slots = {"mu": LIKE, "nu": REAL}
    scope = "leaf"
    sums = 2

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **moments(step, self.betas), "eps": self.eps, "weight_decay": self.weight_decay}

    def measure(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return xp.abs2(p), xp.abs2(mu * h.c1 / (xp.sqrt(nu * h.c2) + h.eps) + h.weight_decay * p)

    def measured(xp: Any, h: Any, p2: Any, d2: Any) -> dict[str, Any]:
        return {"rate": h.lr * _ratio(xp, p2, d2, 1.0, 0.0)}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return h.rate * (mu * h.c1 / (xp.sqrt(nu * h.c2) + h.eps) + h.weight_decay * p), mu, nu


def _lars(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
    velocity = h.momentum * velocity + h.rate * (g + h.weight_decay * p)
    return velocity, velocity


def _lars_nesterov(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
    step = h.rate * (g + h.weight_decay * p)
    velocity = h.momentum * velocity + step
    return step + h.momentum * velocity, velocity


@rule
class LARS(Rule):
    r"""LARS: momentum whose step is scaled for each parameter to the parameter's own norm. For large batches.

    $d = g + \lambda p$; $v \leftarrow \rho v + \mathrm{lr}\,\frac{\eta\|p\|}{\|d\|+\epsilon}\,d$ (the ratio is 1 where a
    norm is zero); $p \leftarrow p - v$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `momentum`: ρ ≥ 0.
    - `weight_decay`: λ ≥ 0.
    - `trust_coefficient`: η > 0.
    - `eps`: ε ≥ 0.
    - `nesterov`: Nesterov's momentum.

    Slots: `scaled_velocity` like the parameter: the learning rate is in it.

    Example:
        >>> import optimisers as op
        >>> op.LARS(1.0).trust_coefficient
        0.001

    Source: You, Gitman and Ginsburg (2017); the numbers are those of `optax.lars`.
    """

    lr: Hyper = 1.0
    momentum: Hyper = 0.9
    weight_decay: Hyper = 0.0
    trust_coefficient: Hyper = 1e-3
    eps: Hyper = 0.0
    nesterov: bool = False

    ranges = {"trust_coefficient": ABOVE_ZERO}
    slots = {"scaled_velocity": LIKE}
    scope = "leaf"
    sums = 2

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "trust": self.trust_coefficient,
            "eps": self.eps,
        }

    def measure(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
        return xp.abs2(p), xp.abs2(g + h.weight_decay * p)

    def measured(xp: Any, h: Any, p2: Any, d2: Any) -> dict[str, Any]:
        return {"rate": h.lr * _ratio(xp, p2, d2, h.trust, h.eps)}

    @property
    def kernel(self) -> Callable[..., Any]:
        return _lars_nesterov if self.nesterov else _lars
