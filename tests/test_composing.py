"""States of models that are made of others."""

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import PathError, StateError
from tests.conftest import Backend, leaf, steps_of, trained_on


def test_composed_states_are_those_of_their_branches(backend: Backend) -> None:
    first, a = trained_on(backend, op.Chain(op.ClipGlobalNorm(1.0), op.Adam(0.1)), {"w": (2,), "v": (3,)})
    second, b = trained_on(backend, op.SGD(0.1, momentum=0.9), {"w": (2,)}, steps=1)
    second = second.freeze("w")
    state = op.compose({"backbone.one": first, "head": second})
    assert (state.step, steps_of(state)) == (3, {"backbone.one.v": 3, "backbone.one.w": 3, "head.w": 1})
    assert state["backbone.one"] == first
    model = {"backbone": {"one": a}, "head": b}
    state, model = op.update(state, model, model)
    alone, _ = op.update(first, a, a)
    assert leaf(state, "backbone.one.v").step == leaf(alone, "v").step == 4
    mine, theirs = (backend.read(leaf(each, path).slots["mu"]) for each, path in ((state, "backbone.one.w"), (alone, "w")))
    np.testing.assert_array_equal(mine, theirs)


def test_a_state_under_two_names_has_slots_of_its_own_under_each() -> None:
    model = {"w": np.ones(2)}
    state, model = op.update(op.setup(op.Momentum(0.1), model), model, model)
    both = op.compose({"a": state, "b": state}, step=7)
    pair = {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}}
    new, _ = op.update_(both, pair, {"a": {"w": np.ones(2)}})
    assert new.step == 8
    assert not np.shares_memory(leaf(new, "a.w").slots["velocity"], leaf(new, "b.w").slots["velocity"])
    assert leaf(new, "b.w").slots["velocity"].tolist() == [1.0, 1.0]


def test_what_cannot_be_composed_is_an_error() -> None:
    state = op.setup(op.Chain(op.AccumGrad(2), op.Adam()), {"w": np.ones(2)})
    with pytest.raises(PathError, match=r'"a\.b" lies inside "a"'):
        op.compose({"a": state, "a.b": state})
    other = op.setup(op.Chain(op.AccumGrad(3), op.Adam()), {"w": np.ones(2)})
    with pytest.raises(StateError, match="decide for the whole tree"):
        op.compose({"a": state, "b": other})
    begun, _ = op.update(state, {"w": np.ones(2)}, {"w": np.ones(2)})
    with pytest.raises(StateError, match="b: accumgrad decides for the whole tree, and stands otherwise than in the others"):
        op.compose({"a": state, "b": begun})
    for wrong in ({}, [state]):
        with pytest.raises(StateError, match="compose takes a mapping from names to states"):
            op.compose(wrong)  # type: ignore[arg-type]
