"""Hyperparameters as functions of the step."""

import copy
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

import optimisers as op
from optimisers import schedules
from optimisers.errors import HyperparameterError
from optimisers.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Joined,
    Linear,
    Polynomial,
    Scaled,
    Schedule,
    Shifted,
    one_cycle,
    piecewise,
    warmup,
    warmup_stable_decay,
)
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
    "exponential": (Exponential(1.0, 0.25, 4), {0: 1.0, 1: 0.25**0.25, 2: 0.5, 4: 0.25, 40: 0.25**10}),
    "stairs to a floor": (Exponential(1.0, 0.5, 4, stairs=True, least=0.2), {0: 1.0, 3: 1.0, 4: 0.5, 8: 0.25, 12: 0.2, 99: 0.2}),
    "polynomial": (Polynomial(1.0, 0.5, 4, 2.0), {0: 1.0, 2: 0.625, 4: 0.5, 50: 0.5}),
    "restarts": (CosineRestarts(1.0, 4, 0.5), {0: 1.0, 2: 0.75, 4: 1.0, 6: 0.75, 400: 1.0}),
    "longer restarts": (CosineRestarts(1.0, 2, 0.0, 3), {0: 1.0, 1: 0.5, 2: 1.0, 5: 0.5, 8: 1.0, 17: 0.5, 26: 1.0}),
    "inverse root": (InverseSqrt(1.0, 4), {0: 0.0, 2: 0.5, 4: 1.0, 16: 0.5, 64: 0.25}),
    "one cycle": (one_cycle(1.0, 10, 0.4, 0.1, 0.01), {0: 0.1, 2: 0.55, 4: 1.0, 7: 0.505, 10: 0.01, 99: 0.01}),
    "plateau": (warmup_stable_decay(1.0, 2, 3, 4, 0.2), {0: 0.0, 1: 0.5, 2: 1.0, 5: 1.0, 7: 0.6, 9: 0.2, 99: 0.2}),
    "piecewise": (piecewise([1.0, 0.5, 0.1], [2, 4]), {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5, 4: 0.1, 99: 0.1}),
    "scaled": (Scaled(Linear(0.0, 1.0, 4), 0.5), {0: 0.0, 2: 0.25, 9: 0.5}),
    "later": (Linear(0.0, 1.0, 4).starting_at(10), {0: 0.0, 10: 0.0, 11: 0.25, 99: 1.0}),
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
        lambda: warmup(1.0, -1),
        lambda: Joined((Constant(1.0),), (1,)),
        lambda: Joined((Constant(1.0), Constant(2.0)), ()),
        lambda: Joined((Constant(1.0), Constant(2.0), Constant(3.0)), (5, 5)),
        lambda: Joined((Constant(1.0), Constant(2.0), Constant(3.0)), (5, 2)),
        lambda: Constant(1.0).then(2.0, after=-1),
        lambda: Constant(1.0).then(2.0, after=1.5),  # type: ignore[arg-type]
        lambda: Constant(1.0).then("fast", after=1),
        lambda: Constant(1.0).then(None, after=1),
        lambda: Constant(1.0).then(Linear, after=1),
        lambda: Constant(math.nan),
        lambda: Constant("0.1"),  # type: ignore[arg-type]
        lambda: Linear(0.0, None, 4),  # type: ignore[arg-type]
        lambda: Cosine(True, 4),
        lambda: Exponential(1.0, 0.0),
        lambda: Exponential(1.0, -0.5),
        lambda: Exponential(1.0, math.nan),
        lambda: Exponential(1.0, "0.5"),  # type: ignore[arg-type]
        lambda: Exponential(1.0, 0.5, 0),
        lambda: Polynomial(1.0, 0.0, 4, power=-1.0),
        lambda: Polynomial(1.0, 0.0, 0),
        lambda: CosineRestarts(1.0, 4, factor=0),
        lambda: CosineRestarts(1.0, 4, factor=1.5),  # type: ignore[arg-type]
        lambda: InverseSqrt(1.0, 0),
        lambda: Scaled("fast", 1.0),
        lambda: Scaled(Constant(1.0), None),  # type: ignore[arg-type]
        lambda: Shifted(Constant(1.0), "late"),  # type: ignore[arg-type]
        lambda: one_cycle(1.0, 0),
        lambda: one_cycle(1.0, 10, warmup=1.5),
        lambda: one_cycle(1.0, 10, warmup=-0.5),
        lambda: warmup_stable_decay(1.0, -1, 2, 3),
        lambda: warmup_stable_decay(1.0, 1, 2.5, 3),  # type: ignore[arg-type]
        lambda: piecewise([1.0], [3]),
        lambda: piecewise([], []),
        lambda: piecewise(["1", 2.0], [3]),  # type: ignore[list-item]
    ],
)
def test_a_schedule_that_cannot_be_is_an_error(make: Any) -> None:
    with pytest.raises(HyperparameterError):
        make()


# Against others --------------------------------------------------------------------------------------------------------


def _torch_rates(make: Any, steps: int) -> list[float]:
    optimiser = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = make(optimiser)
    rates = []
    for _ in range(steps):
        rates.append(float(optimiser.param_groups[0]["lr"]))
        optimiser.step()
        scheduler.step()
    return rates


TORCH: dict[str, tuple[Any, Any]] = {
    "ExponentialLR": (Exponential(0.5, 0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "StepLR": (Exponential(0.5, 0.1, 7, stairs=True), lambda o: lr_scheduler.StepLR(o, 7, 0.1)),
    "PolynomialLR": (Polynomial(0.5, 0.0, 30, 2.5), lambda o: lr_scheduler.PolynomialLR(o, 30, 2.5)),
    "CosineAnnealingLR": (Cosine(0.5, 40, 0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 40, 0.1)),
    "CosineAnnealingWarmRestarts": (
        CosineRestarts(0.5, 7, 0.1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, eta_min=0.1),
    ),
    "CosineAnnealingWarmRestarts-longer": (
        CosineRestarts(0.5, 3, 0.1, 2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2, 0.1),
    ),
    "MultiStepLR": (piecewise([0.5, 0.05, 0.005], [5, 20]), lambda o: lr_scheduler.MultiStepLR(o, [5, 20])),
    # 30 steps of rise and 70 of fall are a cycle of 101 rates, whose peak is the 31st.
    "OneCycleLR": (
        one_cycle(0.5, 100),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, 101, pct_start=31 / 101, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_rates_are_those_of_torch(name: str) -> None:
    schedule, make = TORCH[name]
    assert_close([schedule(step) for step in range(40)], _torch_rates(make, 40), 1e-12)


OPTAX: dict[str, tuple[Any, Any]] = {
    "linear": (Linear(1.0, 0.1, 20), optax.linear_schedule(1.0, 0.1, 20)),
    "cosine": (Cosine(1.0, 20, 0.1), optax.cosine_decay_schedule(1.0, 20, 0.1)),
    "exponential": (Exponential(1.0, 0.5, 10, least=0.05), optax.exponential_decay(1.0, 10, 0.5, end_value=0.05)),
    "stairs": (Exponential(1.0, 0.5, 10, stairs=True), optax.exponential_decay(1.0, 10, 0.5, staircase=True)),
    "polynomial": (Polynomial(1.0, 0.1, 20, 3.0), optax.polynomial_schedule(1.0, 0.1, 3.0, 20)),
    "one cycle": (one_cycle(1.0, 50), optax.cosine_onecycle_schedule(50, 1.0)),
    "one cycle, late": (
        one_cycle(1.0, 40, 0.5, 0.1, 0.001),
        optax.cosine_onecycle_schedule(40, 1.0, pct_start=0.5, div_factor=10, final_div_factor=100),
    ),
    "warm-up": (warmup(Cosine(1.0, 30), 10), optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 40)),
    "plateau": (
        warmup_stable_decay(1.0, 5, 10, 20),
        optax.join_schedules(
            [optax.linear_schedule(0, 1, 5), optax.constant_schedule(1.0), optax.linear_schedule(1, 0, 20)], [5, 15]
        ),
    ),
    "steps": (piecewise([1.0, 0.5, 0.1], [10, 20]), optax.piecewise_constant_schedule(1.0, {10: 0.5, 20: 0.2})),
    "restarts": (
        CosineRestarts(1.0, 10),
        optax.sgdr_schedule([{"init_value": 1.0, "peak_value": 1.0, "decay_steps": 10, "warmup_steps": 0}] * 7),
    ),
}


@pytest.mark.parametrize("name", OPTAX)
def test_rates_are_those_of_optax(name: str) -> None:
    schedule, its = OPTAX[name]
    assert_close([schedule(step) for step in range(60)], [float(its(step)) for step in range(60)], 2e-6)


def test_the_inverse_root_is_that_of_the_paper() -> None:
    rate = InverseSqrt(512**-0.5 * 4000**-0.5, 4000)
    for step in (1, 100, 4000, 4001, 100_000):
        assert rate(step) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-14)


# Steps of all kinds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_traced_by_jax(name: str) -> None:
    schedule, values = SCHEDULES[name]
    # Scalar steps of int32, as a scan would give.
    found = jax.jit(jax.vmap(schedule))(jnp.array(list(values)))
    assert_close(np.broadcast_to(found, len(values)), list(values.values()), 1e-6)


def test_the_numbers_of_a_schedule_may_be_traced() -> None:
    value = jax.jit(lambda start, stop, power: Polynomial(start, stop, 4, power)(jnp.array(2)))(1.0, 0.5, 2.0)
    assert float(value) == pytest.approx(0.625)
    value = jax.jit(lambda begin: Linear(0.0, 1.0, 4).starting_at(begin)(12))(10)
    assert float(value) == pytest.approx(0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_before_the_first_count_as_the_first_and_huge_ones_are_finite(name: str) -> None:
    schedule, _ = SCHEDULES[name]
    for step in (-1, -1000, np.array([-1, -1000])):
        assert_close(np.broadcast_to(schedule(step), 2), [schedule(0)] * 2, 1e-15)
    huge = [10**6, 10**12, 2**60]
    assert all(math.isfinite(schedule(step)) for step in huge)
    assert np.isfinite(schedule(np.array(huge))).all()


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_restarts_fall_on_the_step_however_late_and_however_the_step_is_given(factor: int) -> None:
    rate = CosineRestarts(1.0, 4, 0.0, factor)
    begins = [4 * (factor**n - 1) // (factor - 1) for n in range(1, 9)]
    for step in begins:
        for made in (step, np.array(step), np.float32(step), torch.tensor(step)):
            assert float(rate(made)) == 1.0
        assert rate(step - 1) < 0.15
    # In single precision, as JAX counts.
    traced = jax.jit(rate)
    assert [float(traced(step)) for step in begins] == [1.0] * 8
    assert all(float(traced(step - 1)) < 0.15 for step in begins)
    assert float(jax.jit(CosineRestarts(1.0, 4, 0.0, 2))(4 * (2**15 - 1))) == 1.0


def test_growth_without_end_is_an_error_of_the_rule_and_not_of_the_schedule() -> None:
    rate = Exponential(1.0, 2.0)
    assert rate(10**6) == math.inf
    with pytest.raises(HyperparameterError, match="lr must lie in"):
        op.Adam(rate).at(10**6)


# Other callables -------------------------------------------------------------------------------------------------------


def test_any_function_may_stand_before_or_after_a_schedule() -> None:
    def falling(step: Any) -> Any:
        # Not defined before step 0.
        return 1 / (step + 1)

    rate = warmup(falling, 2)
    assert [rate(step) for step in range(5)] == [0.0, 0.5, 1.0, 0.5, 1 / 3]
    assert_close(rate(np.arange(5)), [0.0, 0.5, 1.0, 0.5, 1 / 3], 1e-15)
    rate = Constant(1.0).then(math.sqrt, after=3)
    assert [rate(step) for step in (0, 2, 3, 7)] == [1.0, 1.0, 0.0, 2.0]
    table = [0.5, 0.25]
    assert [Joined((table.__getitem__, 0.125), (2,))(step) for step in range(4)] == [0.5, 0.25, 0.125, 0.125]
    assert Scaled(falling, 0.5)(1) == 0.25


def test_a_schedule_of_optax_is_a_learning_rate_and_a_part_of_others() -> None:
    model = {"w": np.zeros(1)}
    one = {"w": np.ones(1)}
    _, new = train(op.Descent(optax.linear_schedule(1.0, 0.0, 4)), model, one, one, one)
    assert_close(new["w"], [-(1 + 0.75 + 0.5)], 1e-6)
    rate = warmup(optax.linear_schedule(1.0, 0.0, 4), 2)
    assert hash(rate) == hash(warmup(rate.schedules[1], 2))
    _, new = train(op.Descent(rate), model, one, one, one, one)
    assert_close(new["w"], [-(0 + 0.5 + 1 + 0.75)], 1e-6)


@pytest.mark.parametrize("phases", [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 3), (2, 0, 0), (0, 0, 0)])
def test_any_phase_of_a_plateau_may_be_missing(phases: tuple[int, int, int]) -> None:
    rise, plateau, fall = phases
    rate = warmup_stable_decay(1.0, *phases, stop=0.25)
    expected = [step / rise for step in range(rise)] + [1.0] * plateau + [1 - 0.75 * step / fall for step in range(fall)] + [0.25]
    assert_close([rate(step) for step in range(len(expected))], expected, 1e-15)


def test_numbers_of_numpy_make_a_schedule_that_equals_that_of_python() -> None:
    assert Linear(np.float64(0.5), np.float32(1.0), np.int64(4)) == Linear(0.5, 1.0, 4)  # type: ignore[arg-type]
    assert repr(Cosine(np.float64(0.5), np.int32(4))) == "Cosine(start=0.5, steps=4, stop=0.0)"  # type: ignore[arg-type]
    assert Constant(1.0).then(np.float32(0.5), after=np.int64(3)) == Constant(1.0).then(0.5, after=3)  # type: ignore[arg-type]


def test_a_plot_draws_every_step_and_can_be_saved(tmp_path: Path) -> None:
    rate = warmup(Cosine(1.0, 6), 4)
    axes = rate.plot(10)
    xs, ys = axes.lines[0].get_data()
    assert list(xs) == list(range(11))
    assert list(ys) == [rate(step) for step in range(11)]
    assert Linear(0.0, 1.0, 4).plot(4, axes=axes) is axes
    assert len(axes.lines) == 2
    axes.figure.savefig(tmp_path / "rate.png")
    assert (tmp_path / "rate.png").stat().st_size > 1000


def test_any_function_can_be_shifted() -> None:
    assert Shifted(0.1, 5)(7) == 0.1
    shifted = Shifted(lambda step: step * 2.0, 10)
    assert shifted(13) == 6.0
    assert shifted(0) == 0.0
    assert shifted.length == 110


@pytest.mark.parametrize("steps", [3, 7, 10, 99, 1000])
@pytest.mark.parametrize("power", [0.5, 1.5])
def test_a_power_of_what_is_left_is_a_number_in_a_compiled_program_too(steps: int, power: float) -> None:
    rate = jax.jit(Polynomial(1e-2, 0.0, steps, power=power))
    for dtype in ("int32", "float32"):
        assert [float(rate(jnp.asarray(step, dtype))) for step in (steps, steps + 1, 2 * steps)] == [0.0, 0.0, 0.0]


def test_a_schedule_of_a_users_own_may_have_any_fields() -> None:
    @dataclass(frozen=True)
    class Own(schedules.Schedule):
        steps: tuple[int, ...] = (1, 2)
        offset: int = 0

        def __call__(self, step: Any) -> Any:
            return step * 0.0 + self.offset

    assert Own()(3) == 0
    assert Own().length == 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cosine(1.0, 10).plot("rate.png"), "plot takes a number of steps"),  # type: ignore[arg-type]
        (lambda: Cosine(1.0, 10).plot(0), "plot takes a number of steps"),
        (lambda: schedules.Joined(None, 3), "Joined takes a tuple of schedules"),  # type: ignore[arg-type]
        (lambda: schedules.Joined((1.0, 2.0), 3), "Joined takes a tuple of schedules"),  # type: ignore[arg-type]
        (lambda: schedules.one_cycle("1", 10), r"one_cycle\(peak='1'\): peak is a number"),  # type: ignore[arg-type]
        (lambda: schedules.one_cycle(1.0, 10, stop_factor=None), "stop_factor is a number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_a_schedule_is_told_so(call: Any, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        call()
