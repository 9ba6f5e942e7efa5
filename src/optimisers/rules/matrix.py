"""Rules that see a parameter as a matrix: Muon, Adafactor."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from optimisers.errors import HyperparameterError
from optimisers.rules.base import ABOVE_ZERO, LIKE, REAL, Hyper, Rule, Slot
from optimisers.rules.decorator import rule

__all__ = ["Adafactor", "Muon"]


def _orthogonal(xp: Any, g: Any, coefficients: Any, eps: Any, steps: int) -> Any:
    """Newton-Schulz iteration towards the nearest orthogonal matrix."""
    a, b, c = coefficients
    tall = g.shape[-2] > g.shape[-1]
    x = xp.matrix_transpose(g) if tall else g
    x = x / xp.maximum(xp.sqrt(xp.sum(xp.abs2(x))), eps)
    for _ in range(steps):
        gram = xp.matmul(x, xp.matrix_transpose(x))
        x = a * x + xp.matmul(b * gram + c * xp.matmul(gram, gram), x)
    return xp.matrix_transpose(x) if tall else x


def _size_factor(name: str, shape: tuple[int, ...]) -> float:
    rows, columns = shape[-2:]
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if name == "original" else 1.0


@cache
def _muon(nesterov: bool, steps: int, adjust: str) -> Callable[..., Any]:
    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        if 0 in g.shape:
            return g, slots
        velocity = slots[0] + h.w * (g - slots[0])
        direction = g + h.momentum * (velocity - g) if nesterov else velocity
        direction = _orthogonal(xp, direction, (h.a, h.b, h.c), h.eps, steps)
        return h.lr * _size_factor(adjust, p.shape) * direction + h.decay * p, (velocity,)

    return apply


@rule
class Muon(Rule):
    r"""Muon: momentum whose matrix is made orthogonal, so that all directions move alike. For the matrices of hidden layers.

    $v \leftarrow v + (1-\rho)(g - v)$; $O = \mathrm{NS}(g + \rho(v - g))$, a few Newton-Schulz steps
    $X \leftarrow aX + (bXX^\top + c(XX^\top)^2)X$ from
    $X = V/\|V\|$; $p \leftarrow p - \mathrm{lr}\, s\, O - \mathrm{lr}\,\lambda p$, where s depends on the shape.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0.
    - `weight_decay`: λ ≥ 0, decoupled.
    - `momentum`: ρ, in [0, 1).
    - `nesterov`: orthogonalise $g + \rho(v - g)$, not v.
    - `ns_coefficients`: (a, b, c). `eps`: the least norm to divide by. `ns_steps`: how many steps, 1 to 99.
    - `adjust_lr_fn`: `"original"` (s = √max(1, rows/columns)), `"match_rms_adamw"` (s = 0.2 √max(rows, columns)) or `"none"`.
    - `fallback`: the rule for parameters that are no matrices. Without one they are an error at `setup`. Embeddings and heads are
      matrices, too; give them another rule with a mapping: `{"embed": AdamW(3e-4), "**": Muon(0.02, fallback=AdamW(3e-4))}`.

    Slots: `mu` (v) like the parameter. Real parameters with two axes only.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"weight": np.eye(3), "bias": np.zeros(3)}
        >>> state = op.setup(op.Muon(0.02, fallback=op.AdamW(3e-4)), model)
        >>> type(state["weight"].rule).__name__, type(state["bias"].rule).__name__
        ('Muon', 'AdamW')

    Source: Jordan et al. (2024); the numbers are those of `torch.optim.Muon`, but PyTorch iterates in bfloat16.
    """

    lr: Hyper = 1e-3
    weight_decay: Hyper = 0.1
    momentum: Hyper = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[Hyper, Hyper, Hyper] = (3.4445, -4.775, 2.0315)
    eps: Hyper = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = "original"
    fallback: Rule | None = None

    slots = {"mu": LIKE}
    options = ("ns_steps",)
    ranges = {"ns_coefficients": (-math.inf, math.inf, False), "ns_steps": (1, 100, False)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjust_lr_fn is None:
            object.__setattr__(self, "adjust_lr_fn", "original")  # as PyTorch takes it
        if self.adjust_lr_fn not in ("original", "match_rms_adamw", "none"):
            raise HyperparameterError(
                f'Muon(adjust_lr_fn={self.adjust_lr_fn!r}): adjust_lr_fn is "original", "match_rms_adamw" or "none"'
            )

    @property
    def apply(self) -> Callable[..., Any]:
        return _muon(self.nesterov, self.ns_steps, self.adjust_lr_fn)

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        if len(shape) != 2:
            return f"it has {len(shape)} axes, and Muon is for matrices; give Muon(fallback=…) a rule for it"
        return "it is complex" if dtype.startswith("complex") else None

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        return self if self.fallback is None or self.refuses(shape, dtype) is None else self.fallback.rule_for(shape, dtype)

    def scalars(self, step: Any) -> dict[str, Any]:
        a, b, c = self.ns_coefficients
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "w": 1 - self.momentum,
            "decay": self.lr * self.weight_decay,
            "a": a,
            "b": b,
            "c": c,
            "eps": self.eps,
        }


def _row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 1)


def _column(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], 1, shape[-1])


def _rms(xp: Any, x: Any) -> Any:
    """The root of the mean square, without an array of all squares."""
    return xp.sqrt(xp.mean(xp.real(xp.vecdot(x, x))) / x.shape[-1]) if x.ndim else xp.sqrt(xp.abs2(x))


@cache
def _adafactor(factored: bool, relative_step: bool, scale_parameter: bool, own_eps: bool) -> Callable[..., Any]:
    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        if 0 in g.shape:
            return g, slots
        # A new large array costs more than all arithmetic: roots are taken of rows and columns, and the step is scaled where it is.
        tiny = h.tiny if own_eps else xp.epsilon(p)
        square = xp.abs2(g)
        if factored:
            row = slots[0] + h.w * (xp.mean(square, axis=-1, keepdims=True) - slots[0])
            column = slots[1] + h.w * (xp.mean(square, axis=-2, keepdims=True) - slots[1])
            inverse = 1 / xp.sqrt(row / xp.maximum(xp.mean(row, axis=-2, keepdims=True), tiny)) * (1 / xp.sqrt(column))
            new: tuple[Any, ...] = (row, column)
        else:
            nu = slots[0] + h.w * (square - slots[0])
            inverse = 1 / xp.sqrt(nu)
            new = (nu,)
        # Bounded in float32, or the step of a gradient of 0 would be infinity times 0.
        step = xp.minimum(inverse, 1 / xp.maximum(tiny, 2e-38)) * g
        rate = xp.minimum(h.lr, h.relative) if relative_step else h.lr
        rate = rate * xp.maximum(_rms(xp, p), h.least) if scale_parameter else rate
        step *= rate / xp.maximum(_rms(xp, step) / h.d, h.one)
        return (step if isinstance(h.decay, float) and h.decay == 0 else step + h.decay * p), new

    return apply


@rule
class Adafactor(Rule):
    r"""Adafactor: the mean square of a matrix kept as the means of its rows and columns, which takes next to no memory.

    With $w = t^{\text{beta2\_decay}}$: $R \leftarrow R + w(\mathrm{mean}_{col}|g|^2 - R)$,
    $C \leftarrow C + w(\mathrm{mean}_{row}|g|^2 - C)$,
    $\hat V = RC/\mathrm{mean}(R)$ (a vector keeps $\hat V$ itself); $U = g/\sqrt{\hat V}$;
    $p \leftarrow p - \alpha\, U/\max(1, \mathrm{RMS}(U)/d) - \mathrm{lr}\,\lambda p$ with
    $\alpha = \max(\epsilon_2, \mathrm{RMS}(p))\min(\mathrm{lr}, 1/\sqrt t)$.

    **Arguments:**

    - `lr`: the learning rate, ≥ 0; with `relative_step` its upper bound.
    - `beta2_decay`: how the weight of a new square falls with the step, ≤ 0.
    - `eps`: (ε₁, ε₂): the least root of a mean square (`None`: the machine epsilon of the dtype), and the least RMS of a parameter.
    - `d`: the largest RMS of a step, > 0.
    - `weight_decay`: λ ≥ 0, decoupled.
    - `factored`: `None` for parameters with two axes or more. `True` refuses others, `False` keeps all mean squares whole.
    - `relative_step`: bound the rate by 1/√t. `scale_parameter`: multiply it by the RMS of the parameter.

    Slots: `row` and `column`, or `nu`; real.

    Example:
        >>> import numpy as np, optimisers as op
        >>> {name: slot.shape for name, slot in op.setup(op.Adafactor(), np.ones((3, 5)))[""].slots.items()}
        {'row': (3, 1), 'column': (1, 5)}

    Source: Shazeer and Stern (2018); the numbers are those of `torch.optim.Adafactor`.
    """

    lr: Hyper = 1e-2
    beta2_decay: Hyper = -0.8
    eps: tuple[Hyper | None, Hyper] = (None, 1e-3)
    d: Hyper = 1.0
    weight_decay: Hyper = 0.0
    factored: bool | None = None
    relative_step: bool = True
    scale_parameter: bool = True

    ranges = {"beta2_decay": (-math.inf, 0.0, True), "d": ABOVE_ZERO}

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {"row": Slot(real=True, shape=_row), "column": Slot(real=True, shape=_column)} if self.factored else {"nu": REAL}

    @property
    def apply(self) -> Callable[..., Any]:
        return _adafactor(bool(self.factored), self.relative_step, self.scale_parameter, self.eps[0] is not None)

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        if self.factored and len(shape) < 2:
            remedy = "use Adafactor(factored=None), in adapt or load as rule=…"
            return f"it has {len(shape)} axes, and a factored moment needs two; {remedy}"
        return None

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        return self if self.factored is not None else self.with_values({**self.hyperparameters, "factored": len(shape) > 1})

    def scalars(self, step: Any) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "w": step**self.beta2_decay,
            "relative": step**-0.5,
            "tiny": 0.0 if self.eps[0] is None else self.eps[0],
            "least": self.eps[1],
            "d": self.d,
            "one": 1.0,
            "decay": self.lr * self.weight_decay,
        }
