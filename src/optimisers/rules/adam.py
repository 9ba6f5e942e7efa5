"""Adam and its kin: steps from running means of the gradient and of its square."""

from typing import Any

from optimisers.rules.base import LIKE, REAL, Hyper, Rule, rule

__all__ = ["Adam", "AdamW"]


def _moments(step: Any, betas: Any) -> dict[str, Any]:
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
        return {"lr": self.lr, **_moments(step, self.betas), "eps": self.eps}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps), mu, nu


@rule
class AdamW(Rule):
    r"""Adam with decoupled weight decay: $p \leftarrow p - \mathrm{lr}\,\lambda\, p - {}$ the step of `Adam`.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `betas`: the decay of the two means, each in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0, multiplied by `lr` as in PyTorch.

    Slots: `mu` like the parameter; `nu` real.

    Example:
        >>> import optimisers as op
        >>> op.AdamW(1e-3)
        AdamW(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)

    Source: Loshchilov and Hutter (2019); the numbers are those of `torch.optim.AdamW`.
    """

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 1e-2

    slots = {"mu": LIKE, "nu": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, **_moments(step, self.betas), "eps": self.eps, "decay": self.lr * self.weight_decay}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
        mu = mu + h.w1 * (g - mu)
        nu = nu + h.w2 * (xp.abs2(g) - nu)
        return h.lr * (mu * h.c1) / (xp.sqrt(nu * h.c2) + h.eps) + h.decay * p, mu, nu
