"""Parts for a chain that decide whether a step takes place: accumulation, and refusal of broken gradients."""

import math
from typing import Any

from optimisers.rules.base import LIKE, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["AccumGrad", "SkipNonFinite"]


@rule
class AccumGrad(Rule):
    r"""Lets a step through once in `n` calls, with the mean of the gradients of all `n`.

    Between firings, parameters, counters and the slots of what follows stay as they are. The window is one for all parameters
    whose rule holds this part. A call without a gradient for some parameter adds nothing to its sum, and the mean still divides
    by the number of calls. A parameter without a gradient in the very call that fires takes no step; its sum goes into the next
    window.

    **Arguments:**

    - `n`: how many calls make one step, ≥ 1. Lowering it in the middle of a window fires at the next call.

    Slots: `total`, what has been gathered. Memory: `filled`, the calls since the last firing.

    Example:
        >>> from optimisers import AccumGrad, Adam, Chain
        >>> rule = Chain(AccumGrad(4), Adam(1e-3))

    Source: Optimisers.jl, `AccumGrad`.
    """

    n: Hyper = 2

    ranges = {"n": (1, math.inf, False)}
    slots = {"total": LIKE}
    memory = {"filled": 0}
    gate = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("n")

    def scalars(self, step: Any, filled: Any) -> dict[str, Any]:
        return {"weight": 1 / (filled + 1), "open": filled + 1 >= self.n, "zero": 0.0}

    def kernel(xp: Any, g: Any, p: Any, h: Any, total: Any) -> Any:
        total = total + g
        return h.weight * total, xp.where(h.open > h.zero, h.zero, total)

    def remember(h: Any, filled: Any) -> dict[str, Any]:
        return {"filled": (filled + 1) * (1 - h.open)}


@rule
class SkipNonFinite(Rule):
    r"""Skips the step of all parameters whose rule holds this part when any of their live gradients holds NaN or infinity.

    Parameters, counters and the slots of what follows stay as they are. Put it first in a chain: what stands before it has
    already run.

    Memory: `skipped`, the number of steps that were skipped (`state.memory["skipnonfinite"]["skipped"]`).

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.ones(2)}
        >>> state = op.setup(op.Chain(op.SkipNonFinite(), op.Adam()), model)
        >>> state, model = op.update(state, model, {"w": np.array([1.0, np.nan])})
        >>> model["w"], state.step, state.memory["skipnonfinite"]["skipped"]
        (array([1., 1.]), 0, 1)

    Source: `optax.apply_if_finite`, and the skipped steps of PyTorch's `GradScaler`.
    """

    scope = "tree"
    memory = {"skipped": 0}
    gate = True

    def scalars(self, step: Any, skipped: Any) -> dict[str, Any]:
        return {"one": 1.0, "zero": 0.0}

    def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return xp.where(xp.isfinite(g), h.zero, h.one)

    def measured(xp: Any, h: Any, broken: Any) -> dict[str, Any]:
        return {"open": broken == 0}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g

    def remember(h: Any, skipped: Any) -> dict[str, Any]:
        return {"skipped": skipped + (1 - h.open)}
