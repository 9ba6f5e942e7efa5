"""Gradient descent, with and without momentum."""

from collections.abc import Callable, Mapping
from typing import Any

from optimisers.errors import HyperparameterError
from optimisers.rules.base import LIKE, Hyper, Rule, Slot
from optimisers.rules.decorator import rule

__all__ = ["SGD", "Descent", "Momentum", "Nesterov"]


@rule
class Descent(Rule):
    r"""Gradient descent: $p \leftarrow p - \mathrm{lr}\, g$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = np.array([1.0, 2.0])
        >>> op.update(op.setup(op.Descent(0.1), model), model, np.array([3.0, 3.0]))[1]
        array([0.7, 1.7])

    Source: Cauchy (1847).
    """

    lr: Hyper = 1e-1

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return h.lr * g


def _momentum(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
    velocity = h.momentum * velocity + g
    return h.lr * velocity, velocity


@rule
class Momentum(Rule):
    r"""Gradient descent with heavy-ball momentum: $v \leftarrow \rho v + g$, $p \leftarrow p - \mathrm{lr}\, v$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `momentum`: ρ, the share of the velocity that is kept, ≥ 0.

    Example:
        >>> import optimisers as op
        >>> op.Momentum(0.1)
        Momentum(lr=0.1, momentum=0.9)

    Source: Polyak (1964); the numbers are those of `torch.optim.SGD(momentum=…)`.
    """

    lr: Hyper = 1e-2
    momentum: Hyper = 0.9

    slots = {"velocity": LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum}

    kernel = _momentum


@rule
class Nesterov(Rule):
    r"""Gradient descent with Nesterov's momentum: $v \leftarrow \rho v + g$, $p \leftarrow p - \mathrm{lr}\,(g + \rho v)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `momentum`: ρ, the share of the velocity that is kept, ≥ 0.

    Example:
        >>> import optimisers as op
        >>> op.Nesterov(0.1)
        Nesterov(lr=0.1, momentum=0.9)

    Source: Nesterov (1983), in the form of Sutskever et al. (2013); the numbers are those of `torch.optim.SGD(nesterov=True)`.
    """

    lr: Hyper = 1e-2
    momentum: Hyper = 0.9

    slots = {"velocity": LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum}

    def kernel(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
        velocity = h.momentum * velocity + g
        return h.lr * (g + h.momentum * velocity), velocity


def _sgd(xp: Any, g: Any, p: Any, h: Any) -> Any:
    return h.lr * (g + h.weight_decay * p)


def _sgd_momentum(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
    velocity = h.momentum * velocity + h.fresh * (g + h.weight_decay * p)
    return h.lr * velocity, velocity


def _sgd_nesterov(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
    g = g + h.weight_decay * p
    velocity = h.momentum * velocity + h.fresh * g
    return h.lr * (g + h.momentum * velocity), velocity


@rule
class SGD(Rule):
    r"""Stochastic gradient descent with PyTorch's signature.

    $g \leftarrow g + \lambda p$; $v \leftarrow \rho v + (1-\tau) g$ (at the first step $v \leftarrow g$);
    $p \leftarrow p - \mathrm{lr}\, v$, or $p - \mathrm{lr}\,(g + \rho v)$ with `nesterov`. Without momentum there is no velocity,
    and no slot for it.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `momentum`: ρ ≥ 0. Whether it is zero is static.
    - `dampening`: τ.
    - `weight_decay`: λ ≥ 0, coupled: it is added to the gradient.
    - `nesterov`: Nesterov's momentum.

    **Raises** `HyperparameterError` for `nesterov` without momentum or with dampening.

    Example:
        >>> import optimisers as op
        >>> op.SGD(0.1, momentum=0.9, nesterov=True)
        SGD(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True)

    Source: `torch.optim.SGD`; Sutskever et al. (2013).
    """

    lr: Hyper = 1e-3
    momentum: Hyper = 0.0
    dampening: Hyper = 0.0
    weight_decay: Hyper = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self._still or self.dampening != 0):
            raise HyperparameterError(f"{self!r}: nesterov needs a momentum above 0 and a dampening of 0")

    switches = ("momentum",)

    @property
    def _still(self) -> bool:
        return isinstance(self.momentum, (int, float)) and self.momentum == 0

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {} if self._still else {"velocity": LIKE}

    @property
    def kernel(self) -> Callable[..., Any]:
        if self._still:
            return _sgd
        return _sgd_nesterov if self.nesterov else _sgd_momentum

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "fresh": 1 - self.dampening * (step > 1),
            "weight_decay": self.weight_decay,
        }
