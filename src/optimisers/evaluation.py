"""Models to evaluate with: the averages that rules keep, and the weights of schedule-free training."""

from collections.abc import Callable
from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, library_of
from optimisers.backends.conversion import copied_as
from optimisers.errors import StateError
from optimisers.leaf import Leaf
from optimisers.model.reading import open_with
from optimisers.rules.averages import Average
from optimisers.rules.base import Rule, member_names
from optimisers.rules.parameter_free import ScheduleFree
from optimisers.rules.precision import MixedPrecision
from optimisers.rules.values import is_traced
from optimisers.state import State, check_single, check_state, check_unspent

__all__ = ["averaged", "evaluation", "training"]


def averaged(state: State, model: Any) -> Any:
    """A copy of the model whose parameters are the running averages that `Average` keeps, ties and dtypes kept.

    Parameters without an average, or that have not trained yet, are copied as they are, and so are the buffers of modules: what
    trains on afterwards, in place or not, leaves the copy alone. Of several averages in a chain the last counts.

    **Arguments:** `state`: with a rule that holds `Average`; `model`: as it trains, which stays as it is.

    **Raises** `StateError` when no rule keeps an average; `ModelError` for a model that is not the state's.

    Example: see `Average`.
    """
    check_state(state, "averaged")
    check_unspent(state)
    check_single(state)
    view = open_with(state.layout, model)
    changed = {}
    for at, array in enumerate(view.arrays):
        leaf = state.leaf(at)
        average = _kept(leaf, Average, "average")
        if average is not None and _has_trained(leaf):
            changed[at] = _as(array, average)
    if not any(isinstance(member, Average) for rule in state.rules for member in rule.members):
        raise StateError("no rule keeps an average; put Average() at the end of the chain")
    return view.copy(changed)


def evaluation(state: State, model: Any) -> tuple[State, Any]:
    r"""The model of schedule-free training as it is to be evaluated, $x = y + (1 - 1/\beta_1)(z - y)$, and a state that knows so.

    β₁ is the one of the last step. The state refuses updates until `training` is called. A model that is evaluated already is
    returned as it is. What does not train and the buffers of modules are shared with the model that is given.

    **Arguments:** `state`: with a rule that holds `ScheduleFree`; `model`: as it trains.

    **Returns** the state and the model.

    **Raises** `StateError` when no rule is `ScheduleFree`; `ModelError` for a model that is not the state's.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.array([1.0])}
        >>> state = op.setup(op.ScheduleFree(0.1), model)
        >>> state, model = op.update(state, model, {"w": np.array([1.0])})
        >>> state, best = op.evaluation(state, model)
        >>> state, again = op.training(state, best)
        >>> bool(np.allclose(again["w"], model["w"]))
        True
    """
    check_state(state, "evaluation")
    return _moved(state, model, True, lambda beta, y, z: y + (1 - 1 / beta) * (z - y))


def training(state: State, model: Any) -> tuple[State, Any]:
    r"""The model of schedule-free training as it trains, $y = x + (1 - \beta_1)(z - x)$: the way back from `evaluation`.

    In half precision it comes back within rounding, unless the rule holds `MixedPrecision`, which keeps it exactly.

    **Raises** as `evaluation` does.

    Example: see `evaluation`.
    """
    check_state(state, "training")
    return _moved(state, model, False, lambda beta, x, z: x + (1 - beta) * (z - x))


def _moved(state: State, model: Any, mode: bool, move: Callable[[float, Any, Any], Any]) -> tuple[State, Any]:
    check_unspent(state)
    check_single(state)
    if "schedulefree" not in state.memory:
        raise StateError("no rule of this state is ScheduleFree, so the model is trained and evaluated with the same weights")
    if state.memory["schedulefree"]["evaluating"] == mode:
        return state, model
    view = open_with(state.layout, model)
    beta = state.memory["schedulefree"]["beta"]
    changed = {}
    for at, array in enumerate(view.arrays):
        leaf = state.leaf(at)
        z, master = _kept(leaf, ScheduleFree, "z"), _kept(leaf, MixedPrecision, "master")
        if z is None or not _has_trained(leaf):
            continue
        if master is not None:
            # The master goes on training; the model shows what is to be evaluated, or the master.
            changed[at] = _as(array, move(beta, master, z) if mode else master)
        else:
            changed[at] = _as(array, move(beta, _as(z, array), z))
    memory = {**state.memory, "schedulefree": {**state.memory["schedulefree"], "evaluating": mode}}
    return state.evolved(memory=memory), view.put(changed)


def _kept(leaf: Leaf, kind: type[Rule], slot: str) -> Any:
    """A slot of the last member of a kind in the rule of a leaf; `None` where there is none."""
    members = leaf.rule.members
    for name, member in reversed(list(zip(member_names(members), members, strict=True))):
        if isinstance(member, kind):
            return leaf.slots.get(f"{name}.{slot}", leaf.slots.get(slot))
    return None


def _has_trained(leaf: Leaf) -> bool:
    """Whether a parameter may differ from what its slots started as; inside a traced program, nothing tells."""
    return is_traced(leaf.step) or bool(np.any(leaf.step > 0))


def _as(other: Any, array: Any) -> Any:
    """A copy of an array in the dtype of another."""
    return copied_as(array, dtype_name(other), library_of(other) or "")
