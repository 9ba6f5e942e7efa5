"""Hyperparameters as functions of the step."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers import schedules
from optimisers.errors import HyperparameterError
from optimisers.schedules import Constant, Cosine, Joined, Linear, Schedule, warmup
from tests.conftest import Backend, assert_close, leaf, train

SCHEDULES: dict[str, tuple[Any, dict[int, float]]] = {
    "constant": (Constant(0.3), {0: 0.3, 1000: 0.3}),
    "linear": (Linear(1.0, 0.0, 4), {0: 1.0, 1: 0.75, 4: 0.0, 5: 0.0, 1000: 0.0}),
    "rising": (Linear(0.0, 2.0, 4), {0: 0.0, 3: 1.5, 4: 2.0, 9: 2.0}),
    "cosine": (Cosine(2.0, 4), {0: 2.0, 1: 1 + math.cos(math.pi / 4), 2: 1.0, 4: 0.0, 5: 0.0}),
    "cosine to a floor": (Cosine(2.0, 4, stop=1.0), {0: 2.0, 2: 1.5, 4: 1.0, 100: 1.0}),
    "warm-up": (warmup(Cosine(1.0, 4), 2), {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.5, 6: 0.0, 7: 0.0}),
    "warm-up to a number": (warmup(0.5, 5, start=0.25), {0: 0.25, 1: 0.3, 5: 0.5, 50: 0.5}),
    "joined": (Joined((Constant(1.0), Linear(1.0, 0.0, 2), Constant(9.0)), (2, 5)), {0: 1, 1: 1, 2: 1, 3: 0.5, 4: 0, 5: 9, 99: 9}),
    "then": (Constant(1.0).then(Linear(4.0, 0.0, 4), 3).then(7.0, after=5), {2: 1.0, 3: 4.0, 4: 3.0, 5: 7.0}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_of_a_schedule(name: str) -> None:
    schedule, values = SCHEDULES[name]
    for step, value in values.items():
        assert schedule(step) == pytest.approx(value, abs=1e-15)
        assert isinstance(schedule(step), (int, float))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_arrays_of_steps(backend: Backend, name: str) -> None:
    schedule, values = SCHEDULES[name]
    steps = backend.array(list(values))
    found = schedule(steps)
    if not isinstance(found, float):
        found = backend.read(found)
    assert_close(np.broadcast_to(found, (len(values),)), list(values.values()), 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_value(name: str) -> None:
    schedule = SCHEDULES[name][0]
    for made in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule)), eval(repr(schedule), vars(schedules).copy())):
        assert made == schedule
        assert hash(made) == hash(schedule)
    rule = op.Adam(schedule)
    assert eval(repr(rule), vars(schedules) | vars(op)) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_the_first_update_sees_step_zero(backend: Backend) -> None:
    seen: list[Any] = []

    def rate(step: Any) -> float:
        seen.append(step)
        return 1.0 / (1 + step)

    model = {"w": backend.array([0.0])}
    one = {"w": backend.array([1.0])}
    _, model = train(op.Descent(rate), model, one, one, one)
    assert set(seen) == {0, 1, 2}
    assert_close(backend.read(model["w"]), [-(1 + 1 / 2 + 1 / 3)], 1e-15)


def test_schedules_read_the_step_of_the_state_and_bias_correction_the_parameters_own(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.setup(op.Adam(Linear(1.0, 0.0, 10)), model, frozen="b"), model, one, one, one, one)
    state, model = op.update(state.thaw(), model, one)
    assert_close(backend.read(model["b"]), [-0.6], 1e-7)


def test_any_hyperparameter_may_be_a_schedule(backend: Backend) -> None:
    model = {"w": backend.array([1.0])}
    one = {"w": backend.array([1.0])}
    rule = op.Chain(
        op.ClipGrad(lambda step: 0.5 + step),
        op.AdamW(lambda step: 0.1, (lambda step: 0.5 if step == 0 else 0.0, 0.9), weight_decay=lambda step: 0.0),
    )
    state, model = train(rule, model, one)
    assert_close(backend.read(leaf(state, "w").slots["mu"]), [0.25], 1e-15)
    state, model = train(state, model, one)
    assert_close(backend.read(leaf(state, "w").slots["mu"]), [1.0], 1e-15)


def test_schedules_in_some_groups_and_numbers_in_others(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    _, model = train({"a": op.Descent(Linear(1.0, 0.0, 2)), "b": op.Descent(0.25)}, model, one, one, one)
    assert_close(backend.read(model["a"]), [-1.5], 1e-15)
    assert_close(backend.read(model["b"]), [-0.75], 1e-15)


def test_adjust_sets_a_schedule_and_takes_it_away(backend: Backend) -> None:
    model = {"w": backend.array([0.0])}
    one = {"w": backend.array([1.0])}
    state, model = train(op.Momentum(1.0, 0.0), model, one)
    state = state.adjust(lr=lambda step: 10.0 * step)
    state, model = op.update(state, model, one)
    state, model = op.update(state.adjust(lr=0.5), model, one)
    assert_close(backend.read(model["w"]), [-11.5], 1e-15)


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_schedule_that_leaves_the_range_is_an_error_before_anything_changed(backend: Backend, value: float) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([1.0], "float32")}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0], "float32")}
    state, model = train({"a": op.Adam(), "b": op.Adam(lambda step: 0.1 if step == 0 else value)}, model, one)
    before = backend.read(model["a"]).copy()
    with pytest.raises(HyperparameterError, match="lr"):
        op.update_(state, model, one)
    assert backend.read(model["a"]).tolist() == before.tolist()


def test_a_schedule_of_a_users_own_is_a_class_with_a_call() -> None:
    class Halves(Schedule):
        def __call__(self, step: Any) -> Any:
            return 0.5**step

    _, model = train(op.Descent(Halves().then(0.0, after=2)), {"w": np.zeros(1)}, *[{"w": np.ones(1)}] * 5)
    assert model["w"].tolist() == [-1.5]
    with pytest.raises(NotImplementedError):
        Schedule()(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(0.0, 1.0, 0),
        lambda: Cosine(1.0, -1),
        lambda: Cosine(1.0, 2.5),  # type: ignore[arg-type]
        lambda: Linear(0.0, 1.0, True),
        lambda: warmup(1.0, 0),
        lambda: Joined((Constant(1.0),), (1,)),
        lambda: Joined((Constant(1.0), Constant(2.0)), ()),
        lambda: Joined((Constant(1.0), Constant(2.0), Constant(3.0)), (5, 5)),
        lambda: Joined((Constant(1.0), Constant(2.0), Constant(3.0)), (5, 2)),
    ],
)
def test_a_schedule_that_cannot_be_is_an_error(make: Any) -> None:
    with pytest.raises(HyperparameterError):
        make()
