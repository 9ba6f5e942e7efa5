"""What became of Adam: AdaMax, NAdam, RAdam, OAdam, AdaBelief, Adan."""

import math
from typing import Any

from optimisers.rules.adam import moments
from optimisers.rules.base import LIKE, REAL, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["AdaBelief", "AdaMax", "Adan", "NAdam", "OAdam", "RAdam"]

_SERIES = 60


@rule
class AdaMax(Rule):
    r"""AdaMax: Adam with the largest gradient, decayed, in place of the mean square.

    $g \leftarrow g + \lambda p$; $\mu \leftarrow \mu + (1-\beta_1)(g-\mu)$; $u \leftarrow \max(\beta_2 u, |g| + \epsilon)$;
    $p \leftarrow p - \frac{\mathrm{lr}}{1-\beta_1^t}\,\mu/u$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the mean and of the maximum, each in [0, 1).
    - `eps`: ε ≥ 0.
    - `weight_decay`: λ ≥ 0, coupled.

    Slots: `mu` like the parameter; `largest` (u) real.

    Example:
        >>> import optimisers as op
        >>> op.AdaMax().lr
        0.002

    Source: Kingma and Ba (2015), section 7; the numbers are those of `torch.optim.Adamax`.
    """

    lr: Hyper = 2e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0

    slots = {"mu": LIKE, "largest": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        first, second = self.betas
        return {
            "lr": self.lr / (1 - first**step),
            "w1": 1 - first,
            "keep": second,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, peak: Any) -> Any:
        g = g + h.weight_decay * p
        mu = mu + h.w1 * (g - mu)
        peak = xp.maximum(h.keep * peak, xp.sqrt(xp.abs2(g)) + h.eps)
        return h.lr * mu / peak, mu, peak


def _warm_product(first: Any, decay: Any, step: Any) -> Any:
    r"""$\prod_{i \le t} \beta_1 (1 - \frac12 0.96^{i\psi})$ without a loop over steps.

    $\log(1-x) = -\sum_k x^k/k$, and the sum over i of $0.96^{ik\psi}$ is geometric. The terms fall faster than $2^{-k}$.
    """
    ratio = 0.96**decay
    total = 0.0
    for k in range(1, _SERIES):
        power = ratio**k
        # With ψ = 0 every factor is one half, and the geometric sum is t.
        still = power == 1
        total = total + 0.5**k / k * ((1 - still) * power * (1 - power**step) / (1 - power + still) + still * step)
    return first**step * math.e**-total


@rule
class NAdam(Rule):
    r"""NAdam: Adam with Nesterov's momentum.

    With $\mu_t = \beta_1 (1 - \frac12 0.96^{t\psi})$, $m$ and $\nu$ as in `Adam`, $d = \sqrt{\nu/(1-\beta_2^t)} + \epsilon$:
    $p \leftarrow p - \mathrm{lr}\,\frac{1-\mu_t}{1-\prod_{i\le t}\mu_i}\, g/d - \mathrm{lr}\,\frac{\mu_{t+1}}{1-\prod_{i\le
    t+1}\mu_i}\, m/d$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0: coupled, or with `decoupled_weight_decay` as in `AdamW`.
    - `momentum_decay`: ψ ≥ 0.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.NAdam().momentum_decay
        0.004

    Source: Dozat (2016); the numbers are those of `torch.optim.NAdam`.
    """

    lr: Hyper = 2e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    momentum_decay: Hyper = 4e-3
    decoupled_weight_decay: bool = False

    ranges = {"momentum_decay": (0.0, float("inf"), False)}
    slots = {"mu": LIKE, "nu": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        first, second = self.betas
        now = first * (1 - 0.5 * 0.96 ** (step * self.momentum_decay))
        following = first * (1 - 0.5 * 0.96 ** ((step + 1) * self.momentum_decay))
        product = _warm_product(first, self.momentum_decay, step)
        return {
            "w1": 1 - first,
            "w2": 1 - second,
            "c2": 1 / (1 - second**step),
            "eps": self.eps,
            "of_g": self.lr * (1 - now) / (1 - product),
            "of_mu": self.lr * following / (1 - product * following),
            "coupled": self.weight_decay * (not self.decoupled_weight_decay),
            "decay": self.lr * self.weight_decay * self.decoupled_weight_decay,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        g = g + h.coupled * p
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return (h.of_g * g + h.of_mu * mu) / (xp.sqrt(nu * h.c2) + h.eps) + h.decay * p, mu, nu


@rule
class RAdam(Rule):
    r"""RAdam: Adam that waits with its denominator until the variance of it can be trusted.

    With $\rho_\infty = 2/(1-\beta_2) - 1$ and $\rho_t = \rho_\infty - 2t\beta_2^t/(1-\beta_2^t)$: while $\rho_t \le 5$,
    $p \leftarrow p - \mathrm{lr}\,\hat\mu$; afterwards
    $p \leftarrow p - \mathrm{lr}\; r_t\, \hat\mu\,\sqrt{1-\beta_2^t}/(\sqrt{\nu}+\epsilon)$ with
    $r_t = \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0: coupled, or with `decoupled_weight_decay` as in `AdamW`.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.RAdam().lr
        0.001

    Source: Liu et al. (2020); the numbers are those of `torch.optim.RAdam`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    decoupled_weight_decay: bool = False

    slots = {"mu": LIKE, "nu": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        first, second = self.betas
        limit = 2 / (1 - second) - 1
        length = limit - 2 * step * second**step / (1 - second**step)
        trusted = (length > 5) * 1.0
        # Where the root is not used, abs keeps it real, and the divisor may be zero: a limit of 4 is that of β₂ = 0.6.
        below = (limit - 4) * (limit - 2) * length
        square = abs((length - 4) * (length - 2) * limit / (below + (below == 0)))
        return {
            "w1": 1 - first,
            "w2": 1 - second,
            "eps": self.eps,
            "plain": self.lr / (1 - first**step) * (1 - trusted),
            "scaled": self.lr / (1 - first**step) * trusted * (square * (1 - second**step)) ** 0.5,
            "coupled": self.weight_decay * (not self.decoupled_weight_decay),
            "decay": self.lr * self.weight_decay * self.decoupled_weight_decay,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        g = g + h.coupled * p
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return mu * (h.plain + h.scaled / (xp.sqrt(nu) + h.eps)) + h.decay * p, mu, nu


@rule
class OAdam(Rule):
    r"""Optimistic Adam: twice the step of Adam, less the step before. For games, such as GANs.

    $d_t = \mathrm{lr}\,\hat\mu/(\sqrt{\hat\nu}+\epsilon)$ as in `Adam`; $p \leftarrow p - 2 d_t + d_{t-1}$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.

    Slots: `mu` and `before` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.OAdam().betas
        (0.5, 0.9)

    Source: Daskalakis et al. (2018); Optimisers.jl, `OAdam`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.5, 0.9)
    eps: Hyper = 1e-8

    slots = {"mu": LIKE, "nu": REAL, "before": LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **moments(step, self.betas), "eps": self.eps}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, before: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        now = h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps)
        return now + now - before, mu, nu, now


@rule
class AdaBelief(Rule):
    r"""AdaBelief: Adam whose denominator is the distance of the gradient from its mean.

    $\mu \leftarrow \mu + (1-\beta_1)(g-\mu)$; $s \leftarrow s + (1-\beta_2)(|g-\mu|^2 - s) + \epsilon_r$;
    $p \leftarrow p - \mathrm{lr}\;\hat\mu/(\sqrt{\hat s} + \epsilon)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, outside the root. `eps_root`: $\epsilon_r$ ≥ 0, added to s at each step.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.AdaBelief().eps
        1e-16

    Source: Zhuang et al. (2020); the numbers are those of `optax.adabelief`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-16
    eps_root: Hyper = 1e-16

    ranges = {"eps_root": (0.0, float("inf"), False)}
    slots = {"mu": LIKE, "nu": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **moments(step, self.betas), "eps": self.eps, "eps_root": self.eps_root}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g - mu) - nu) + h.eps_root
        return h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps), mu, nu


@rule
class Adan(Rule):
    r"""Adan: Nesterov momentum in all moments, from the differences of gradients.

    With $\delta = g_t - g_{t-1}$ (0 at the first step): $m \leftarrow m + (1-\beta_1)(g-m)$;
    $v \leftarrow v + (1-\beta_2)(\delta-v)$;
    $n \leftarrow n + (1-\beta_3)(|g+(1-\beta_2)\delta|^2-n)$;
    $d = (\hat m + (1-\beta_2)\hat v)/(\sqrt{\hat n + \epsilon_r}+\epsilon)$;
    $p \leftarrow p - \mathrm{lr}\,(d + \lambda p)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the three means, each in [0, 1).
    - `eps`: ε ≥ 0, outside the root. `eps_root`: $\epsilon_r$ ≥ 0, inside.
    - `weight_decay`: λ ≥ 0, decoupled.

    Slots: `mu`, `difference` and `previous` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.Adan().betas
        (0.98, 0.92, 0.99)

    Source: Xie et al. (2024); the numbers are those of `optax.adan`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper, Hyper] = (0.98, 0.92, 0.99)
    eps: Hyper = 1e-8
    eps_root: Hyper = 1e-8
    weight_decay: Hyper = 0.0

    ranges = {"eps_root": (0.0, float("inf"), False)}
    slots = {"mu": LIKE, "difference": LIKE, "nu": REAL, "previous": LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        first, second, third = self.betas
        return {
            "lr": self.lr,
            "w1": 1 - first,
            "w2": 1 - second,
            "w3": 1 - third,
            "c1": 1 / (1 - first**step),
            "c2": (1 - second) / (1 - second**step),
            "c3": 1 / (1 - third**step),
            "eps": self.eps,
            "eps_root": self.eps_root,
            "decay": self.lr * self.weight_decay,
            "later": (step > 1) * 1.0,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, difference: Any, nu: Any, previous: Any) -> Any:
        delta = h.later * (g - previous)
        mu = mu + h.w1 * (g - mu)
        difference = difference + h.w2 * (delta - difference)
        nu = nu + h.w3 * (xp.abs2(g + h.w2 * delta) - nu)
        step = (mu * h.c1 + difference * h.c2) / (xp.sqrt(nu * h.c3 + h.eps_root) + h.eps)
        return h.lr * step + h.decay * p, mu, difference, nu, g
