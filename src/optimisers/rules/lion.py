"""Lion: steps of one size, in the direction of the sign."""

from typing import Any

from optimisers.rules.base import LIKE, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["Lion"]


@rule
class Lion(Rule):
    r"""Lion: the sign of a momentum that looks further ahead than the one it keeps.

    $c = \beta_1 m + (1-\beta_1) g$; $p \leftarrow p - \mathrm{lr}\,(\mathrm{sign}(c) + \lambda p)$;
    $m \leftarrow \beta_2 m + (1-\beta_2) g$. For a
    complex parameter the sign is $c/|c|$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0. A third to a tenth of AdamW's.
    - `betas`: the weights of the momentum in the step and in what is kept, each in [0, 1).
    - `weight_decay`: λ ≥ 0, decoupled.

    Slots: `mu` like the parameter.

    Example:
        >>> import optimisers as op
        >>> op.Lion(1e-4)
        Lion(lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0)

    Source: Chen et al. (2023); the numbers are those of `optax.lion`.
    """

    lr: Hyper = 1e-4
    betas: tuple[Hyper, Hyper] = (0.9, 0.99)
    weight_decay: Hyper = 0.0

    slots = {"mu": LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        first, second = self.betas
        return {"lr": self.lr, "w1": 1 - first, "w2": 1 - second, "decay": self.lr * self.weight_decay}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any) -> Any:
        return h.lr * xp.sign(mu + h.w1 * (g - mu)) + h.decay * p, mu + h.w2 * (g - mu)
