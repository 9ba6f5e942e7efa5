"""Plans by which a model thaws part by part."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimisers as op
from optimisers.errors import PathError, StateError
from tests.conftest import leaf, steps_of


def test_a_plan_thaws_by_the_step_and_goes_on_when_resumed() -> None:
    model = {"embed": np.ones(2), "layers": [np.ones(2), np.ones(2)], "head": np.ones(2)}
    plan = op.Unfreezing.by_depth(model, at=2)
    state = op.setup(op.layerwise(op.Adam(), model, decay=0.5), model)
    for at in range(7):
        state = plan(state)
        if at == 3:
            state, _ = op.adapt(state, model)  # a layout that no cache knows
        state, model = op.update(state, model, model)
    assert steps_of(state) == {"head": 7, "layers.1": 5, "layers.0": 3, "embed": 1}
    assert plan(state) is state


def test_a_plan_keeps_frozen_rows_and_leaves_others_alone() -> None:
    model = {"a": np.ones((2, 2)), "b": np.ones(2), "c": np.ones(2), "d": np.ones(2)}
    plan = op.Unfreezing(["b", ["a", "b"]], at=[1, 3])
    state = plan(op.setup(op.Adam(), model).freeze("a", rows=[0]).freeze("c"))
    assert {str(each.path): each.frozen for each in state.leaves()} == {"a": True, "b": True, "c": True, "d": False}
    thawed = plan(state.evolved(step=3))
    assert {str(each.path): each.frozen for each in thawed.leaves()} == {"a": False, "b": False, "c": True, "d": False}
    assert leaf(thawed, "a").frozen_rows == ((0, 1),)


@pytest.mark.parametrize("at", [0, -1, True, [1], [3, 1], "1", 1.5, ["x", "y"], [None, 1], [-3, 1], [0.5, 1]])
def test_a_plan_that_makes_no_sense_is_an_error(at: Any) -> None:
    with pytest.raises(StateError, match="Unfreezing takes groups, and a number of steps or for each group its step, ascending"):
        op.Unfreezing(["a", "b"], at)


def test_a_plan_is_for_the_outside_of_jit() -> None:
    model = {"a": jnp.ones(2)}
    plan: Callable[[op.State], op.State] = op.Unfreezing(["a"], 1)
    with pytest.raises(StateError, match="call it outside of jit"):
        jax.jit(plan)(op.setup(op.Adam(), model))
    with pytest.raises(PathError, match='no parameter matches "b"'):
        op.Unfreezing(["b"], 1)(op.setup(op.Adam(), model))
    with pytest.raises(StateError, match="no path of the model has the number of a layer"):
        op.Unfreezing.by_depth(model, 1)
    with pytest.raises(StateError, match="a depth is a whole number or None, not 'top'"):
        op.Unfreezing.by_depth(model, 1, depth=lambda record: "top")  # type: ignore[arg-type,return-value]


def test_plans_whose_functions_look_alike_freeze_what_each_selects() -> None:
    state = op.setup(op.Adam(), {"enc": {"w": np.ones(2)}, "dec": {"w": np.ones(2)}})
    for name in ("enc", "dec", "enc"):
        plan = op.Unfreezing([op.select.where(lambda record, name=name: record.path[0] == name)], [100])
        assert {str(leaf.path) for leaf in plan(state).leaves() if leaf.frozen} == {f"{name}.w"}


def test_a_plan_that_would_never_begin_is_an_error() -> None:
    state = op.setup(op.Adam(), {"a": np.ones(2), "b": np.ones(2)})
    with pytest.raises(StateError, match="at step 0 this plan leaves nothing live, so no step would be counted"):
        op.Unfreezing(["a", "b"], at=[2, 4])(state)
    with pytest.raises(StateError, match="takes a list of groups, not 'a'"):
        op.Unfreezing("a", at=3)
