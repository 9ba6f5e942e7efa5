"""Parts for parameters in half precision: float32 masters, stochastic rounding."""

from typing import Any

from optimisers.rules.base import COPY, Rule, Slot
from optimisers.rules.chain import Chain
from optimisers.rules.decorator import rule

__all__ = ["MixedPrecision", "StochasticRounding"]


@rule
class MixedPrecision(Rule):
    r"""Keeps a float32 master of a half-precision parameter; the chain acts on the master, and the parameter is its rounded copy.

    Without it, steps smaller than half a unit in the last place of the parameter are lost. In parameters of float32 and more
    it does nothing, and takes nothing. Moments are float32 with or without it. `state.replace` adds it to a state that has
    trained, and takes it away; moments and counts stay. The master is what trains: what is written into the model from outside
    between steps is lost with the next step, unless the rule is taken away and added again. A float32 model that is cast to half
    precision later needs it once more, `adapt(state, model, rule=…)` or `state.replace(…)`: what does nothing is not kept.

    Slots: `master`, float32.

    Example:
        >>> from optimisers import Adam, Chain, MixedPrecision
        >>> rule = Chain(MixedPrecision(), Adam(1e-3))

    Source: Micikevicius et al. (2018).
    """

    slots = {"master": Slot(start=COPY.start, wide=True)}

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        return self if dtype in ("float16", "bfloat16") else Chain()

    def load(xp: Any, p: Any, h: Any, master: Any) -> Any:
        return master

    def kernel(xp: Any, g: Any, p: Any, h: Any, master: Any) -> Any:
        return g, p


@rule
class StochasticRounding(Rule):
    r"""Rounds a bfloat16 parameter up or down at random after its step, so that small steps count on average.

    A value between two neighbours becomes the upper one with a probability equal to its distance from the lower one, in units of
    theirs. The choice depends on the seed, the path, the step and the place alone (JAX draws numbers of its own). Parameters of
    other dtypes are left alone. It acts after the whole chain, wherever it stands in it (before `Lookahead` and `Average`).

    **Arguments:**

    - `seed`: a whole number in [0, 2³¹).

    Example:
        >>> from optimisers import Adam, Chain, StochasticRounding
        >>> rule = Chain(StochasticRounding(), Adam(1e-3))

    Source: Gupta et al. (2015).
    """

    seed: int = 0

    ranges = {"seed": (0, 2.0**31, False)}
    keyed = True

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        return self if dtype == "bfloat16" else Chain()

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"seed": self.seed, "step": step}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g

    def store(xp: Any, p: Any, h: Any) -> Any:
        return xp.round_at_random(p, 8, (h.seed, h.key, h.step))
