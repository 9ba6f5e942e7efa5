"""A missing gradient means no step; zero is a gradient like any other."""

from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import GradientError
from tests.conftest import Backend, assert_close, bits, leaf, train


def test_zero_is_a_gradient_and_none_is_none(backend: Backend) -> None:
    one = {"w": backend.array([1.0])}
    for second, mu, nu, count in (({"w": backend.array([0.0])}, 0.09, 0.000999, 2), ({"w": None}, 0.1, 0.001, 1)):
        state, _ = train(op.Adam(), {"w": backend.array([1.0])}, one, second)
        found = leaf(state, "w")
        assert_close(backend.read(found.slots["mu"]), [mu], 1e-15)
        assert_close(backend.read(found.slots["nu"]), [nu], 1e-15)
        assert found.step == count


def test_a_parameter_without_gradient_does_not_decay(backend: Backend) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    for rule in (op.AdamW(0.1, weight_decay=0.5), op.SGD(0.1, momentum=0.9, weight_decay=0.5)):
        state, new = train(rule, model, {"a": backend.array([1.0])}, {"a": backend.array([1.0]), "b": None})
        assert new["b"] is model["b"]
        assert (leaf(state, "a").step, leaf(state, "b").step, state.step) == (2, 0, 2)


@pytest.mark.parametrize(
    "grads",
    [
        lambda g: {"encoder": {"layers": [{"w": g}, None]}, "head": None},
        lambda g: {"encoder": {"layers": [{"w": g}, {"w": None}]}, "head": None},
        lambda g: {"encoder": {"layers": [{"w": g}, None]}},
        lambda g: {"encoder": {"layers": {0: {"w": g}}}},
        lambda g: {"encoder.layers.0.w": g},
        lambda g: {op.Path("encoder.layers.0.w"): g},
        lambda g: {("encoder", "layers", 0, "w"): g},
        lambda g: {"encoder.layers.0.w": g, "head": None, "encoder.layers.1": None},
    ],
    ids=["none-branches", "none-leaves", "left-out", "by-number", "spelled", "path", "keys", "spelled-none"],
)
def test_none_may_stand_for_any_branch_and_a_mapping_may_name_some_paths(backend: Backend, grads: Any) -> None:
    model = {"encoder": {"layers": [{"w": backend.array([1.0])}, {"w": backend.array([1.0])}]}, "head": backend.array([1.0])}
    state = op.setup(op.Adam(0.1), model)
    for step in (op.update, op.update_):
        state, model = step(state, model, grads(backend.array([1.0])))
    assert [each.step for each in state.leaves()] == [2, 0, 0]
    assert_close(backend.read(model["encoder"]["layers"][0]["w"]), [0.8], 1e-8)
    assert backend.read(model["head"]).tolist() == [1.0]


def test_none_at_the_root_of_a_branch_that_is_the_whole_model_steps_nothing(backend: Backend) -> None:
    model = {"a": {"b": backend.array([1.0])}}
    state = op.setup(op.Adam(), model)
    for grads in ({}, {"a": None}, {"a": {}}, {"a": {"b": None}}):
        after, new = op.update(state, model, grads)
        assert after == state
        assert bits(backend, new["a"]["b"]) == bits(backend, model["a"]["b"])


def test_none_for_a_branch_without_parameters_is_fine() -> None:
    model = {"w": np.ones(1), "empty": {}, "config": {"name": "x", "size": 3}}
    state = op.setup(op.Descent(0.5), model)
    for rest in (
        {"empty": None, "config": None},
        {"empty": {}, "config": {"name": None, "size": None}},
        {"config": model["config"]},
    ):
        _, new = op.update(state, model, {"w": np.ones(1), **rest})
        assert new["w"].tolist() == [0.5]
        assert new["config"] == model["config"]


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"encoder.wieght": 1}, r'"encoder\.wieght".*did you mean "encoder\.weight"'),
        ({"encoder": {"weight": 1, "bias": 1}}, r'"encoder\.bias", the model has nothing there'),
        ({"encoder": 1}, '"encoder", where the model has a branch'),
        ({"encoder": [1]}, r'"encoder\.0", the model has nothing there'),
        ([1, 1], '"0", the model has nothing there'),
        ({"head": [1]}, "head"),
        ({"head": 1, "other": 1}, '"other", the model has nothing there'),
    ],
    ids=repr,
)
def test_a_gradient_for_an_unknown_place_is_an_error(backend: Backend, grads: Any, message: str) -> None:
    def filled(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: filled(value) for key, value in tree.items()}
        return [filled(value) for value in tree] if isinstance(tree, list) else backend.array([1.0])

    model = {"encoder": {"weight": backend.array([1.0])}, "head": backend.array([1.0])}
    state = op.setup(op.Adam(), model)
    for step in (op.update, op.update_):
        with pytest.raises(GradientError, match=message):
            step(state, model, filled(grads))
    assert backend.read(model["head"]).tolist() == [1.0]


def test_no_gradients_at_all_are_an_error(backend: Backend) -> None:
    model = {"w": backend.array([1.0])}
    state = op.setup(op.Adam(), model)
    for step in (op.update, op.update_):
        with pytest.raises(GradientError, match="update needs gradients"):
            step(state, model)
        with pytest.raises(GradientError, match="update needs gradients"):
            step(state, model, None)


def test_counts_of_parameters_stay_their_own(backend: Backend) -> None:
    model = {name: backend.array([0.0]) for name in "abc"}
    one = backend.array([1.0])
    state, model = train(op.Adam(0.1), model, {"a": one}, {"a": one, "b": one}, {"b": one}, {"c": one})
    assert [each.step for each in state.leaves()] == [2, 2, 1]
    # With a gradient that is always 1, each step of Adam is 0.1 when the count is its own.
    for name, steps in zip("abc", (2, 2, 1), strict=True):
        assert_close(backend.read(model[name]), [-0.1 * steps], 1e-7)
    assert state.step == 4
