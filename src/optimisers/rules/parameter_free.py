"""Rules that need no learning rate schedule, or no learning rate: ScheduleFree, Prodigy."""

import math
from typing import Any

from optimisers.errors import HyperparameterError, StateError
from optimisers.rules.base import ABOVE_ZERO, COPY, LIKE, REAL, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["Prodigy", "ScheduleFree"]


@rule
class Prodigy(Rule):
    r"""Prodigy: AdamW that estimates its own step size d from the distance it has come.

    With $\mathrm{dlr} = d\,\mathrm{lr}\,\sqrt{1-\beta_2^t}/(1-\beta_1^t)$ and sums over all parameters:
    $r \leftarrow \beta_3 r + \frac{d}{d_0}\mathrm{dlr}\,\langle g, p_0 - p\rangle$;
    $s \leftarrow \beta_3 s + \frac{\mathrm{dlr}}{d_0} d\, g$;
    $\mu \leftarrow \beta_1\mu + (1-\beta_1) d g$; $\nu \leftarrow \beta_2\nu + (1-\beta_2) d^2 |g|^2$;
    $p \leftarrow p - \mathrm{dlr}\,(\mu/(\sqrt\nu + d'\epsilon) + \lambda p)$, where $d' = \max(d, c\,r/\|s\|_1)$ is the d
    of the next step.

    **Arguments:**

    - `lr`: a factor on the estimated rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1). `beta3`: that of the estimate; `None` for $\sqrt{\beta_2}$.
    - `eps`: ε ≥ 0. `weight_decay`: λ ≥ 0, decoupled.
    - `d0`: the first estimate, > 0. `d_coef`: c > 0.
    - `safeguard_warmup`: leave `lr` and the bias correction out of s.

    Slots: `scaled_mu`, `gradients` (s) and `start` (p₀) like the parameter; `scaled_nu` real. Memory: `d`, `r`. The estimate is one
    for all parameters.

    Example:
        >>> import optimisers as op
        >>> op.Prodigy().lr
        1.0

    Source: Mishchenko and Defazio (2024); the numbers are those of `optax.contrib.prodigy`.
    """

    lr: Hyper = 1.0
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    beta3: Hyper | None = None
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    d0: Hyper = 1e-6
    d_coef: Hyper = 1.0
    safeguard_warmup: bool = False

    ranges = {"beta3": (0.0, 1.0, False), "d0": ABOVE_ZERO, "d_coef": ABOVE_ZERO}
    slots = {"scaled_mu": LIKE, "scaled_nu": REAL, "gradients": LIKE, "start": COPY}
    memory = {"d": 0.0, "r": 0.0}
    individual = ("weight_decay",)
    scope = "tree"
    sums = 2

    def scalars(self, step: Any, d: Any, r: Any) -> dict[str, Any]:
        first, second = self.betas
        third = second**0.5 if self.beta3 is None else self.beta3
        d = d + self.d0 * (d == 0)
        rate = d * self.lr * (1 - second**step) ** 0.5 / (1 - first**step)
        return {
            "d": d,
            "d0": self.d0,
            "coef": self.d_coef,
            "rate": rate,
            "keep1": first,
            "keep2": second,
            "keep3": third,
            "gain1": (1 - first) * d,
            "gain2": (1 - second) * d * d,
            "gain3": d * (d if self.safeguard_warmup else rate) / self.d0,
            "eps": self.eps,
            "decay": rate * self.weight_decay,
            "r": third * r,
        }

    def measure(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, total: Any, start: Any) -> Any:
        return xp.real(xp.conj(g) * (start - p)), xp.abs(h.keep3 * total + h.gain3 * g)

    def measured(xp: Any, h: Any, along: Any, size: Any) -> dict[str, Any]:
        r = h.r + h.d / h.d0 * h.rate * along
        return {"next": xp.maximum(h.d, h.coef * r / (size + (size == 0))), "r": r}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, total: Any, start: Any) -> Any:
        mu = h.keep1 * mu + h.gain1 * g
        nu = h.keep2 * nu + h.gain2 * xp.abs2(g)
        step = h.rate * mu / (xp.sqrt(nu) + h.next * h.eps) + h.decay * p
        return step, mu, nu, h.keep3 * total + h.gain3 * g, start

    def remember(h: Any, d: Any, r: Any) -> dict[str, Any]:
        return {"d": h.next, "r": h.r}


@rule
class ScheduleFree(Rule):
    r"""Schedule-free AdamW: gradients are taken between a fast iterate z and its running average x, and no schedule is needed.

    The model holds $y = (1-\beta_1) z + \beta_1 x$ while it trains. With $d = g/(\sqrt{\hat\nu}+\epsilon) + \lambda y$ and
    $c = \mathrm{lr}_{\max}^{\,k}/\sum \mathrm{lr}_{\max}^{\,k}$: $z \leftarrow z - \mathrm{lr}\, d$,
    $x \leftarrow (1-c) x + c z$. `evaluation` gives the model at x, where
    it is to be evaluated, and `training` the one at y again.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0. For a warm-up, a schedule that rises and stays.
    - `betas`: $\beta_1$, in (0, 1), and the decay of the mean square.
    - `eps`: ε ≥ 0. `weight_decay`: λ ≥ 0, at y.
    - `weight_lr_power`: k ≥ 0.

    Slots: `z` like the parameter; `nu` real. Memory: `largest` rate; `weights`, their sum; `beta`, the last β₁;
    `evaluating`.

    Example:
        >>> import optimisers as op
        >>> op.ScheduleFree().lr
        0.0025

    Source: Defazio et al. (2024); the numbers are those of `optax.contrib.schedule_free_adamw`.
    """

    lr: Hyper = 2.5e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    weight_lr_power: Hyper = 2.0

    ranges = {"weight_lr_power": (0.0, math.inf, False)}
    slots = {"z": COPY, "nu": REAL}
    memory = {"largest": 0.0, "weights": 0.0, "beta": 1.0, "evaluating": False}
    individual = ("weight_decay",)

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "betas" and isinstance(value[0], (int, float)) and value[0] == 0:
            raise HyperparameterError(
                f"ScheduleFree(betas={value!r}): the first of betas must lie in (0, 1); at 0 the model holds nothing of the average"
            )

    def scalars(self, step: Any, largest: Any, weights: Any, beta: Any, evaluating: Any) -> dict[str, Any]:
        if evaluating:
            raise StateError(
                "the model holds its evaluation weights; call optimisers.training(state, model) before the next update"
            )
        first, second = self.betas
        largest = largest + (self.lr > largest) * (self.lr - largest)
        weight = largest**self.weight_lr_power
        weights = weights + weight
        share = weight / (weights + (weights == 0))
        return {
            "lr": self.lr,
            "share": share,
            "rate": self.lr * (1 - first * (1 - share)),
            "w2": 1 - second,
            "c2": 1 / (1 - second**step),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "largest": largest,
            "weights": weights,
            "beta": first,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, z: Any, nu: Any) -> Any:
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        d = g / (xp.sqrt(nu * h.c2) + h.eps) + h.weight_decay * p
        return h.share * (p - z) + h.rate * d, z - h.lr * d, nu

    def remember(h: Any, largest: Any, weights: Any, beta: Any, evaluating: Any) -> dict[str, Any]:
        return {"largest": h.largest, "weights": h.weights, "beta": h.beta, "evaluating": evaluating}
