"""Adam and its kin: steps from running means of the gradient and of its square."""

from collections.abc import Callable, Mapping
from typing import Any

from optimisers.rules.base import LIKE, REAL, Hyper, Rule, Slot
from optimisers.rules.decorator import rule

__all__ = ["AMSGrad", "Adam", "AdamW", "moments"]


def moments(step: Any, betas: Any) -> dict[str, Any]:
    """The weights of the two running means, and the factors that correct their bias."""
    first, second = betas
    return {
        "w1": 1 - first,
        "w2": 1 - second,
        "c1": 1 / (1 - first**step),
        "c2": 1 / (1 - second**step),
    }


@rule
class Adam(Rule):
    r"""Adam: adaptive moments.

    $\mu \leftarrow \mu + (1-\beta_1)(g - \mu)$, $\nu \leftarrow \nu + (1-\beta_2)(|g|^2 - \nu)$,
    $p \leftarrow p - \mathrm{lr}\; \hat\mu / (\sqrt{\hat\nu} + \epsilon)$ with $\hat\mu = \mu/(1-\beta_1^t)$,
    $\hat\nu = \nu/(1-\beta_2^t)$, where $t$ counts the parameter's own steps.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = np.array([1.0, 2.0])
        >>> state, model = op.update(op.setup(op.Adam(0.1), model), model, np.array([0.5, -0.25]))
        >>> model.round(6)
        array([0.9, 2.1])

    Source: Kingma and Ba (2015); the numbers are those of `torch.optim.Adam`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8

    slots = {"mu": LIKE, "nu": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **moments(step, self.betas), "eps": self.eps}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps), mu, nu


def _amsgrad(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, peak: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    nu = nu + h.w2 * (xp.abs2(g) - nu)
    peak = xp.maximum(peak, nu)
    return h.lr * (mu * h.c1) / (xp.sqrt(peak * h.c2) + h.eps), mu, nu, peak


@rule
class AMSGrad(Rule):
    r"""AMSGrad: Adam whose denominator never falls.

    $\mu$ and $\nu$ as in `Adam`; $\nu_{\max} \leftarrow \max(\nu_{\max}, \nu)$;
    $p \leftarrow p - \mathrm{lr}\; \hat\mu / (\sqrt{\hat\nu_{\max}} + \epsilon)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.

    Slots: `mu` like the parameter; `nu` and `peak` real.

    Example:
        >>> import optimisers as op
        >>> op.AMSGrad().lr
        0.001

    Source: Reddi, Kale and Kumar (2018); the numbers are those of `torch.optim.Adam(amsgrad=True)`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8

    slots = {"mu": LIKE, "nu": REAL, "peak": REAL}
    kernel = _amsgrad

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **moments(step, self.betas), "eps": self.eps}


def _adamw(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    nu = nu + h.w2 * (xp.abs2(g) - nu)
    return h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps) + h.decay * p, mu, nu


def _adamw_amsgrad(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, peak: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    nu = nu + h.w2 * (xp.abs2(g) - nu)
    peak = xp.maximum(peak, nu)
    return h.lr * (mu * h.c1) / (xp.sqrt(peak * h.c2) + h.eps) + h.decay * p, mu, nu, peak


def _cautious(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    nu = nu + h.w2 * (xp.abs2(g) - nu)
    step = xp.where(xp.real(mu * xp.conj(g)) > h.zero, h.boost * mu, h.zero * mu)
    return h.lr * (step * h.c1) / (xp.sqrt(nu * h.c2) + h.eps) + h.decay * p, mu, nu


def _cautious_amsgrad(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any, peak: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    nu = nu + h.w2 * (xp.abs2(g) - nu)
    peak = xp.maximum(peak, nu)
    step = xp.where(xp.real(mu * xp.conj(g)) > h.zero, h.boost * mu, h.zero * mu)
    return h.lr * (step * h.c1) / (xp.sqrt(peak * h.c2) + h.eps) + h.decay * p, mu, nu, peak


def _agreement(xp: Any, g: Any, p: Any, h: Any, mu: Any, *rest: Any) -> Any:
    mu = mu + h.w1 * (g - mu)
    return xp.where(xp.real(mu * xp.conj(g)) > h.zero, h.one, h.zero), h.one


@rule
class AdamW(Rule):
    r"""Adam with decoupled weight decay: $p \leftarrow p - \mathrm{lr}\,\lambda\, p - {}$ the step of `Adam`.

    With `cautious`, elements whose mean $\mu$ has not the sign of g do not move, and the step of the others is divided by
    their share
    (at least 0.001).

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0, multiplied by `lr` as in PyTorch.
    - `amsgrad`: a denominator that never falls, as in `AMSGrad`.
    - `cautious`: move only where mean and gradient agree.

    Slots: `mu` like the parameter; `nu` real, and `peak` with `amsgrad`.

    Example:
        >>> import optimisers as op
        >>> op.AdamW(1e-3)
        AdamW(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)

    Source: Loshchilov and Hutter (2019); the numbers are those of `torch.optim.AdamW`. Cautious: Liang et al. (2024).
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 1e-2
    amsgrad: bool = False
    cautious: bool = False

    sums = 2

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {"mu": LIKE, "nu": REAL, "peak": REAL} if self.amsgrad else {"mu": LIKE, "nu": REAL}

    @property
    def kernel(self) -> Callable[..., Any]:
        if self.cautious:
            return _cautious_amsgrad if self.amsgrad else _cautious
        return _adamw_amsgrad if self.amsgrad else _adamw

    @property
    def scope(self) -> str | None:
        return "leaf" if self.cautious else None

    @property
    def measure(self) -> Callable[..., Any] | None:
        return _agreement if self.cautious else None

    def measured(xp: Any, h: Any, agree: Any, size: Any) -> dict[str, Any]:
        return {"boost": 1.0 / xp.maximum(agree / size, 1e-3)}

    def scalars(self, step: Any) -> dict[str, Any]:
        scalars = {"lr": self.lr, **moments(step, self.betas), "eps": self.eps, "decay": self.lr * self.weight_decay}
        return {**scalars, "one": 1.0, "zero": 0.0} if self.cautious else scalars
