"""Rules that scale each element by the history of its own gradients: RMSProp, AdaGrad, AdaDelta, Rprop."""

from collections.abc import Callable, Mapping
from typing import Any

from optimisers.errors import HyperparameterError
from optimisers.rules.base import LIKE, REAL, Hyper, Rule, Slot
from optimisers.rules.decorator import rule

__all__ = ["AdaDelta", "AdaGrad", "RMSProp", "Rprop"]


def _rmsprop(xp: Any, g: Any, p: Any, h: Any, nu: Any) -> Any:
    g = g + h.weight_decay * p
    nu = nu + h.w * (xp.abs2(g) - nu)
    return h.lr * g / (xp.sqrt(nu) + h.eps), nu


def _rmsprop_momentum(xp: Any, g: Any, p: Any, h: Any, nu: Any, velocity: Any) -> Any:
    g = g + h.weight_decay * p
    nu = nu + h.w * (xp.abs2(g) - nu)
    velocity = h.momentum * velocity + g / (xp.sqrt(nu) + h.eps)
    return h.lr * velocity, nu, velocity


def _rmsprop_centered(xp: Any, g: Any, p: Any, h: Any, nu: Any, mu: Any) -> Any:
    g = g + h.weight_decay * p
    nu = nu + h.w * (xp.abs2(g) - nu)
    mu = mu + h.w * (g - mu)
    # Rounding can make the variance negative where it is zero.
    return h.lr * g / (xp.sqrt(xp.maximum(nu - xp.abs2(mu), h.zero)) + h.eps), nu, mu


def _rmsprop_centered_momentum(xp: Any, g: Any, p: Any, h: Any, nu: Any, mu: Any, velocity: Any) -> Any:
    g = g + h.weight_decay * p
    nu = nu + h.w * (xp.abs2(g) - nu)
    mu = mu + h.w * (g - mu)
    velocity = h.momentum * velocity + g / (xp.sqrt(xp.maximum(nu - xp.abs2(mu), h.zero)) + h.eps)
    return h.lr * velocity, nu, mu, velocity


@rule
class RMSProp(Rule):
    r"""RMSProp: steps divided by a running root mean square of the gradient.

    $g \leftarrow g + \lambda p$; $\nu \leftarrow \alpha\nu + (1-\alpha)|g|^2$;
    $p \leftarrow p - \mathrm{lr}\; g/(\sqrt{\nu}+\epsilon)$.
    `centered`: with the variance $\nu - |\mu|^2$ in place of ν, $\mu \leftarrow \alpha\mu + (1-\alpha)g$. With momentum ρ:
    $v \leftarrow \rho v + g/(\sqrt{\nu}+\epsilon)$, $p \leftarrow p - \mathrm{lr}\, v$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `alpha`: the decay of the means, in [0, 1).
    - `eps`: ε ≥ 0, added outside the root.
    - `weight_decay`: λ ≥ 0, coupled.
    - `momentum`: ρ ≥ 0. Whether it is zero is static.
    - `centered`: subtract the squared mean.

    Slots: `nu` real; `mu` where centred; `scaled_velocity` where there is momentum.

    Example:
        >>> import optimisers as op
        >>> op.RMSProp(0.01, centered=True).slots.keys()
        dict_keys(['nu', 'mu'])

    Source: Tieleman and Hinton (2012), Graves (2013); the numbers are those of `torch.optim.RMSprop`.
    """

    lr: Hyper = 1e-2
    alpha: Hyper = 0.99
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    momentum: Hyper = 0.0
    centered: bool = False

    ranges = {"alpha": (0.0, 1.0, False)}

    switches = ("momentum",)

    @property
    def _still(self) -> bool:
        return isinstance(self.momentum, (int, float)) and self.momentum == 0

    @property
    def slots(self) -> Mapping[str, Slot]:
        slots: dict[str, Slot] = {"nu": REAL}
        slots |= {"mu": LIKE} if self.centered else {}
        return slots if self._still else {**slots, "scaled_velocity": LIKE}

    @property
    def kernel(self) -> Callable[..., Any]:
        if self.centered:
            return _rmsprop_centered if self._still else _rmsprop_centered_momentum
        return _rmsprop if self._still else _rmsprop_momentum

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "w": 1 - self.alpha,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "zero": 0.0,
        }


@rule
class AdaGrad(Rule):
    r"""AdaGrad: steps divided by the root of the sum of all squared gradients.

    $g \leftarrow g + \lambda p$; $s \leftarrow s + |g|^2$;
    $p \leftarrow p - \frac{\mathrm{lr}}{1+(t-1)\eta}\; g/(\sqrt{s}+\epsilon)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `lr_decay`: η ≥ 0.
    - `weight_decay`: λ ≥ 0, coupled.
    - `initial_accumulator_value`: where s starts, ≥ 0.
    - `eps`: ε ≥ 0, added outside the root.

    Slots: `total`, real.

    Example:
        >>> import optimisers as op
        >>> op.AdaGrad(0.1).lr
        0.1

    Source: Duchi, Hazan and Singer (2011); the numbers are those of `torch.optim.Adagrad`.
    """

    lr: Hyper = 1e-2
    lr_decay: Hyper = 0.0
    weight_decay: Hyper = 0.0
    initial_accumulator_value: Hyper = 0.0
    eps: Hyper = 1e-10

    ranges = {"lr_decay": (0.0, float("inf"), False), "initial_accumulator_value": (0.0, float("inf"), False)}
    slots = {"total": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "lr": self.lr / (1 + (step - 1) * self.lr_decay),
            "weight_decay": self.weight_decay,
            "start": self.initial_accumulator_value * (step == 1),
            "eps": self.eps,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, total: Any) -> Any:
        g = g + h.weight_decay * p
        total = total + h.start + xp.abs2(g)
        return h.lr * g / (xp.sqrt(total) + h.eps), total


@rule
class AdaDelta(Rule):
    r"""AdaDelta: steps in the units of the parameter, from running means of squared gradients and of squared steps.

    $g \leftarrow g + \lambda p$; $\nu \leftarrow \rho\nu + (1-\rho)|g|^2$; $d = \sqrt{\delta+\epsilon}/\sqrt{\nu+\epsilon}\; g$;
    $\delta \leftarrow \rho\delta + (1-\rho)|d|^2$; $p \leftarrow p - \mathrm{lr}\, d$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `rho`: ρ, the decay of the means, in [0, 1).
    - `eps`: ε ≥ 0, inside the roots.
    - `weight_decay`: λ ≥ 0, coupled.

    Slots: `nu` and `delta`, real.

    Example:
        >>> import optimisers as op
        >>> op.AdaDelta().rho
        0.9

    Source: Zeiler (2012); the numbers are those of `torch.optim.Adadelta`.
    """

    lr: Hyper = 1.0
    rho: Hyper = 0.9
    eps: Hyper = 1e-6
    weight_decay: Hyper = 0.0

    ranges = {"rho": (0.0, 1.0, False)}
    slots = {"nu": REAL, "delta": REAL}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, "w": 1 - self.rho, "eps": self.eps, "weight_decay": self.weight_decay}

    def kernel(xp: Any, g: Any, p: Any, h: Any, nu: Any, delta: Any) -> Any:
        g = g + h.weight_decay * p
        nu = nu + h.w * (xp.abs2(g) - nu)
        d = xp.sqrt(delta + h.eps) / xp.sqrt(nu + h.eps) * g
        delta = delta + h.w * (xp.abs2(d) - delta)
        return h.lr * d, nu, delta


@rule
class Rprop(Rule):
    r"""Rprop: a step size of its own for each element, grown while the gradient keeps its sign, shrunk when it turns.

    With $s = \mathrm{sign}(g\, g_{\text{before}})$: $\Delta \leftarrow \mathrm{clip}(\eta_\pm \Delta)$, where the factor is
    $\eta_+$ for $s > 0$,
    $\eta_-$ for $s < 0$ (and then $g \leftarrow 0$), 1 for $s = 0$; $p \leftarrow p - \mathrm{sign}(g)\,\Delta$. For full batches.

    **Arguments:**

    - `lr`: the first step size, ≥ 0.
    - `etas`: the factors $(\eta_-, \eta_+)$, $0 < \eta_- < 1 < \eta_+$.
    - `step_sizes`: the least and the greatest step size.

    Slots: `previous` like the parameter; `size` real. Real parameters only.

    Example:
        >>> import optimisers as op
        >>> op.Rprop().etas
        (0.5, 1.2)

    Source: Riedmiller and Braun (1993); the numbers are those of `torch.optim.Rprop`.
    """

    lr: Hyper = 1e-2
    etas: tuple[Hyper, Hyper] = (0.5, 1.2)
    step_sizes: tuple[Hyper, Hyper] = (1e-6, 50.0)

    ranges = {"etas": (0.0, float("inf"), False), "step_sizes": (0.0, float("inf"), False)}
    slots = {"previous": LIKE, "size": REAL}

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        numbers = name in ("etas", "step_sizes") and all(isinstance(part, (int, float)) for part in value)
        if name == "etas" and numbers and not 0 < value[0] < 1 < value[1]:
            raise HyperparameterError(f"Rprop(etas={value!r}): etas must be a number in (0, 1) and one above 1")
        if name == "step_sizes" and numbers and value[0] > value[1]:
            raise HyperparameterError(f"Rprop(step_sizes={value!r}): the first of step_sizes must not be above the second")

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        return "a complex number has no sign to keep" if dtype.startswith("complex") else None

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "start": self.lr * (step == 1),
            "shrink": self.etas[0],
            "grow": self.etas[1],
            "low": self.step_sizes[0],
            "high": self.step_sizes[1],
            "one": 1.0,
            "zero": 0.0,
        }

    def kernel(xp: Any, g: Any, p: Any, h: Any, previous: Any, size: Any) -> Any:
        turn = g * previous
        factor = xp.where(turn > h.zero, h.grow, xp.where(turn < h.zero, h.shrink, h.one))
        size = xp.clip((size + h.start) * factor, h.low, h.high)
        g = xp.where(turn < h.zero, h.zero, g)
        return xp.sign(g) * size, g, size
