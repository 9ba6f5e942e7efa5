"""Parts that stand at the end of a chain and average the parameters themselves: Lookahead, Average."""

from typing import Any

from optimisers.rules.base import COPY, Hyper, Rule
from optimisers.rules.decorator import rule

__all__ = ["Average", "Lookahead"]


@rule
class Lookahead(Rule):
    r"""Lookahead: every `k` steps, go back from the fast weights to a point on the way from the slow ones.

    At each k-th step of the parameter: $s \leftarrow s + \alpha(p - s)$, $p \leftarrow s$. It stands at the end of a chain.

    **Arguments:**

    - `k`: how many fast steps make one slow one, ≥ 1.
    - `alpha`: how far the slow weights move, in [0, 1].

    Slots: `slow` like the parameter.

    Example:
        >>> from optimisers import Adam, Chain, Lookahead
        >>> rule = Chain(Adam(1e-3), Lookahead(k=5))

    Source: Zhang et al. (2019); the numbers are those of `optax.lookahead`.
    """

    k: Hyper = 5
    alpha: Hyper = 0.5

    ranges = {"k": (1, float("inf"), False), "alpha": (0.0, 1.0, True)}
    slots = {"slow": COPY}
    rank = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("k")

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"alpha": self.alpha, "meets": (step % self.k == 0) * 1.0, "zero": 0.0}

    def kernel(xp: Any, g: Any, p: Any, h: Any, slow: Any) -> Any:
        met = slow + h.alpha * (p - g - slow)
        return xp.where(h.meets > h.zero, p - met, g), xp.where(h.meets > h.zero, met, slow)


@rule
class Average(Rule):
    r"""Keeps an exponential moving average of the parameter beside it: $a \leftarrow \beta a + (1-\beta) p$, from the first
    step's p on.

    The parameter itself trains on unchanged; `averaged` gives the model of the averages. It is the last of its chain.

    **Arguments:**

    - `decay`: β, in [0, 1].

    Slots: `average` like the parameter.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.array([1.0])}
        >>> state = op.setup(op.Chain(op.Descent(1.0), op.Average(0.5)), model)
        >>> for _ in range(2):
        ...     state, model = op.update(state, model, {"w": np.array([1.0])})
        >>> model["w"], op.averaged(state, model)["w"]
        (array([-1.]), array([-0.5]))

    Source: Polyak and Juditsky (1992); `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """

    decay: Hyper = 0.999

    ranges = {"decay": (0.0, 1.0, True)}
    slots = {"average": COPY}
    rank = 2

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"w": 1 - self.decay * (step > 1)}

    def kernel(xp: Any, g: Any, p: Any, h: Any, average: Any) -> Any:
        return g, average + h.w * (p - g - average)
