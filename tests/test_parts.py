"""Parts of chains and rules on whole arrays: precision, averages, noise, matrices, and members addressed by name."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import optimisers as op
from optimisers.errors import HyperparameterError, StateError
from tests.conftest import RULES, SETTINGS, Backend, assert_close, bits, branch, dtype_of, leaf, numpy_dtype, train, trains, wide

HALVES = ("float16", "bfloat16")


def _read(backend: Backend, array: Any) -> list[Any]:
    return wide(backend.read(array)).tolist()


# A master in single precision ------------------------------------------------------------------------------------------


def test_a_master_gathers_steps_below_the_rounding_of_the_parameter(half_backend: Backend) -> None:
    one = {"w": half_backend.array([1.0], "bfloat16")}
    for in_place in (False, True):
        fresh = {"w": half_backend.array([1.0], "bfloat16")}
        state, model = train(op.Chain(op.MixedPrecision(), op.Descent(1e-3)), fresh, *[one] * 100, in_place=in_place)
        assert dtype_of(model["w"]) == "bfloat16"
        assert dtype_of(leaf(state, "w").slots["master"]) == "float32"
        assert_close(half_backend.read(leaf(state, "w").slots["master"]), [0.9], 1e-5)
        assert_close(half_backend.read(model["w"]), [0.9], 2**-8)


def test_a_master_of_a_long_parameter_is_nothing(backend: Backend) -> None:
    for dtype in ("float32", "float64"):
        model = {"w": backend.array([1.0, 2.0], dtype)}
        state, new = train(op.Chain(op.MixedPrecision(), op.Adam(0.1)), model, model, model)
        assert set(leaf(state, "w").slots) == {"mu", "nu"}
        _, plain = train(op.Adam(0.1), model, model, model)
        assert bits(backend, new["w"]) == bits(backend, plain["w"])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_master_can_be_added_and_taken_away_amid_training(half_backend: Backend, dtype: str) -> None:
    one = {"w": half_backend.array([1.0, -2.0], dtype)}
    state, model = train(op.Adam(1e-3), one, one, one, one)
    mu = leaf(state, "w").slots["mu"]
    state = state.replace(op.Chain(op.MixedPrecision(), op.Adam(1e-3)))
    assert leaf(state, "w").slots["mu"] is mu
    assert leaf(state, "w").step == 3
    assert "master" not in leaf(state, "w").slots
    before = wide(half_backend.read(model["w"]))
    state, model = op.update(state, model, one)
    assert_close(half_backend.read(leaf(state, "w").slots["master"]), before - [1e-3, -1e-3], 1e-6)
    mu = leaf(state, "w").slots["mu"]
    state = state.replace(op.Adam(1e-3))
    assert set(leaf(state, "w").slots) == {"mu", "nu"}
    assert leaf(state, "w").slots["mu"] is mu
    assert leaf(state, "w").step == 4
    op.update(state, model, one)


def test_masters_only_where_they_are_needed_and_ties_and_frozen_rows_hold(half_backend: Backend) -> None:
    table = half_backend.array(np.ones((3, 2)), "bfloat16")
    model = {"embed": table, "head": table, "norm": half_backend.array([1.0], "float32")}
    grads = {"embed": table, "norm": half_backend.array([1.0], "float32")}
    state = op.setup(op.Chain(op.MixedPrecision(), op.Descent(1e-3)), model).freeze("embed", rows=[1])
    state, model = train(state, model, *[grads] * 100)
    assert model["embed"] is model["head"]
    assert_close(half_backend.read(model["embed"]), [[0.9, 0.9], [1.0, 1.0], [0.9, 0.9]], 2**-8)
    assert_close(half_backend.read(leaf(state, "embed").slots["master"])[1], [1.0, 1.0], 0.0)
    assert not leaf(state, "norm").slots


def test_what_follows_a_master_acts_on_it(half_backend: Backend) -> None:
    one = {"w": half_backend.array([1.0], "bfloat16")}
    rule = op.Chain(op.MixedPrecision(), op.AccumGrad(2), op.Descent(1e-3), op.Average(0.5))
    state, _ = train(rule, one, *[one] * 20)
    assert leaf(state, "w").step == 10
    assert_close(half_backend.read(leaf(state, "w").slots["master"]), [0.99], 1e-5)
    assert_close(half_backend.read(leaf(state, "w").slots["average"]), [0.991], 1e-5)


# Rounding at random ----------------------------------------------------------------------------------------------------


def test_rounding_at_random_is_unbiased_and_goes_to_neighbours(half_backend: Backend) -> None:
    # Between 1 and the number below it, a quarter of the way: 0.25 · 2⁻⁸.
    start, g = np.ones(4000), np.ones(4000)
    rule = op.Chain(op.StochasticRounding(seed=5), op.Descent(2.0**-10))
    _, model = train(rule, {"w": half_backend.array(start, "bfloat16")}, {"w": half_backend.array(g, "bfloat16")})
    found = wide(half_backend.read(model["w"]))
    assert set(found.tolist()) == {1.0, 1 - 2.0**-8}
    # Four standard deviations of the mean of so many draws.
    assert abs(found.mean() - (1 - 2.0**-10)) < 4 * 2.0**-8 * (0.25 * 0.75 / 4000) ** 0.5


def test_rounding_at_random_is_unbiased_over_seeds_paths_and_steps() -> None:
    model = {name: np.ones(1, numpy_dtype("bfloat16")) for name in "abcdefgh"}
    ends = []
    for seed in range(8):
        _, new = train(op.Chain(op.StochasticRounding(seed), op.Descent(1e-3)), model, *[model] * 50)
        ends += [float(array[0]) for array in new.values()]
    assert len(set(ends)) > 5
    assert np.mean(ends) == pytest.approx(0.95, abs=0.004)


def test_rounding_at_random_can_be_repeated_and_resumed(sharing_backend: Backend) -> None:
    half_backend = sharing_backend
    rule = op.Chain(op.StochasticRounding(seed=1), op.Adam(1e-3))
    one = {"w": half_backend.array(np.ones(50), "bfloat16"), "v": half_backend.array(np.ones(50), "bfloat16")}
    state, model = train(rule, one, one, one)
    _, whole = train(state, model, one, one)
    _, again = train(rule, one, one, one, one, one)
    _, resumed = train(pickle.loads(pickle.dumps(state)), model, one, one)
    assert bits(half_backend, whole["w"]) == bits(half_backend, again["w"]) == bits(half_backend, resumed["w"])
    assert bits(half_backend, whole["w"]) != bits(half_backend, whole["v"])
    _, other = train(rule.adjusted(seed=2), one, one, one, one, one)
    assert bits(half_backend, whole["w"]) != bits(half_backend, other["w"])


def test_rounding_at_random_leaves_numbers_of_bfloat16_zero_and_other_dtypes_alone(sharing_backend: Backend) -> None:
    backend = sharing_backend
    rule = op.Chain(op.StochasticRounding(), op.Descent(1.0))
    for dtype in backend.dtypes:
        values = [0.0, 1.0, -2.5, 2.0**-100 if dtype != "float16" else 2.0**-20]
        model = {"w": backend.array(values, dtype)}
        _, new = train(rule, model, {"w": backend.array(np.zeros(4), dtype)})
        assert _read(backend, new["w"]) == _read(backend, model["w"])
        assert leaf(op.setup(rule, model), "w").rule == (rule if dtype == "bfloat16" else op.Chain(op.Descent(1.0)))


def test_rounding_at_random_keeps_what_is_not_finite() -> None:
    model = {"w": np.array([1.0, 1.0, 1.0], numpy_dtype("bfloat16"))}
    _, new = train(op.Chain(op.StochasticRounding(), op.Descent(1.0)), model, {"w": np.array([np.nan, np.inf, -np.inf])})
    assert str(new["w"].astype(float).tolist()) == "[nan, -inf, inf]"


# Gates together with rules that remember -------------------------------------------------------------------------------

REMEMBERING = [
    op.Prodigy(d0=0.5),
    op.ScheduleFree(0.1),
    op.AdamW(0.1, cautious=True),
    op.Muon(0.1),
    op.Adafactor(0.1),
    op.LAMB(0.1),
    op.Chain(op.AddNoise(), op.Adam(0.1)),
    op.Chain(op.Adam(0.1), op.Average(0.5)),
    op.Chain(op.Adam(0.1), op.Lookahead(2)),
]


@pytest.mark.parametrize("rule", REMEMBERING, ids=lambda rule: type(rule.members[-1]).__name__)
def test_a_closed_gate_leaves_what_rules_remember(numpy_backend: Backend, rule: op.Rule) -> None:
    good, bad = {"w": np.full((2, 2), 0.5)}, {"w": np.array([[1.0, np.nan], [1.0, 1.0]])}
    model = {"w": np.array([[1.0, 2.0], [3.0, 5.0]])}
    gated = op.Chain(op.SkipNonFinite(), op.AccumGrad(2), rule)
    state, new = train(gated, model, bad, good, bad, good, good, bad, good)
    true, right = train(rule, model, good, good)
    assert_close(new["w"], right["w"], 1e-15)
    assert (state.step, leaf(state, "w").step) == (2, 2)
    assert state.memory["skipnonfinite"] == {"skipped": 3}
    for name, memory in true.memory.items():
        assert dict(state.memory[name]) == pytest.approx(dict(memory), rel=1e-14)
    for name, slot in leaf(true, "w").slots.items():
        found = leaf(state, "w").slots
        assert_close(found[name if name in found else f"{type(rule).__name__.lower()}.{name}"], slot, 1e-15)


@pytest.mark.parametrize("eps", [1e-39, 0.0, 1e-30])
def test_adafactor_leaves_a_row_without_a_gradient_alone(backend: Backend, eps: float) -> None:
    grads = {"w": backend.array([[0.0, 0.0], [1.0, 1.0]], "float32")}
    model = {"w": backend.array(np.ones((2, 2)), "float32")}
    _, model = op.update(op.setup(op.Adafactor(eps=(eps, 1e-3)), model), model, grads)
    found = backend.read(model["w"])
    assert found[0].tolist() == [1.0, 1.0]
    assert (found[1] < 1).all()


# Averages --------------------------------------------------------------------------------------------------------------


def test_an_average_follows_the_parameter_from_its_first_step(backend: Backend) -> None:
    one = {"w": backend.array([1.0])}
    state, model = train(op.Chain(op.Descent(1.0), op.Average(0.5)), {"w": backend.array([4.0])}, one, one, one)
    # 3; (3 + 2)/2; (2.5 + 1)/2
    assert _read(backend, op.averaged(state, model)["w"]) == [1.75]
    assert _read(backend, model["w"]) == [1.0]


def test_averages_keep_ties_and_dtypes_and_leave_the_others_be(sharing_backend: Backend) -> None:
    b = sharing_backend
    table = b.array(np.ones((2, 3)), "float32")
    model = {"a": table, "t": table.T, "frozen": b.array([1.0]), "late": b.array([1.0]), "half": b.array([1.0], "float16")}
    model |= {"plain": b.array([1.0])}
    rules = {"plain": op.Adam(0.1), "**": op.Chain(op.Adam(0.1), op.Average(0.5))}
    grads = {"a": b.array(np.ones((2, 3))), "half": b.array([1.0]), "plain": b.array([1.0])}
    state, model = train(op.setup(rules, model, frozen="frozen"), model, grads, grads)
    found = op.averaged(state, model)
    assert {name: dtype_of(array) for name, array in found.items()} == {name: dtype_of(array) for name, array in model.items()}
    assert_close(b.read(found["a"]), np.full((2, 3), 0.85), 1e-6)
    assert_close(b.read(found["half"]), [0.85], 1e-3)
    assert np.shares_memory(b.read(found["a"]), b.read(found["t"]))
    assert tuple(found["t"].shape) == (3, 2)
    assert all(b.read(found[name]).tolist() == b.read(model[name]).tolist() for name in ("frozen", "late", "plain"))
    # They are copies: neither the state nor the model is in them.
    assert not np.shares_memory(b.read(found["a"]), b.read(leaf(state, "a").slots["average"]))
    assert not any(np.shares_memory(b.read(found[name]), b.read(model[name])) for name in model)


def test_an_average_added_amid_training_keeps_moments_and_count(backend: Backend) -> None:
    one = {"w": backend.array([1.0])}
    state, model = train(op.Adam(0.1), one, one, one)
    mu = leaf(state, "w").slots["mu"]
    state = state.replace(op.Chain(op.Adam(0.1), op.Average(0.5)))
    assert (leaf(state, "w").slots["mu"] is mu, leaf(state, "w").step) == (True, 2)
    assert _read(backend, op.averaged(state, model)["w"]) == _read(backend, model["w"])
    before = _read(backend, model["w"])[0]
    state, model = op.update(state, model, one)
    assert_close(backend.read(op.averaged(state, model)["w"]), [(before + _read(backend, model["w"])[0]) / 2], 1e-12)
    assert leaf(state, "w").step == 3
    state = state.replace(op.Adam(0.1))
    assert (set(leaf(state, "w").slots), leaf(state, "w").step) == ({"mu", "nu"}, 3)


def test_of_two_averages_the_last_counts() -> None:
    one = {"w": np.ones(1)}
    state, model = train(op.Chain(op.Descent(1.0), op.Average(1.0), op.Average(0.5)), {"w": np.array([4.0])}, one, one)
    assert op.averaged(state, model)["w"].tolist() == [2.5]


def test_without_an_average_there_is_nothing_to_give() -> None:
    with pytest.raises(StateError, match=r"no rule keeps an average; put Average\(\) at the end"):
        op.averaged(op.setup(op.Adam(), np.ones(1)), np.ones(1))


def test_parts_that_see_the_whole_step_stand_last() -> None:
    with pytest.raises(HyperparameterError, match="Lookahead sees what the whole chain does, so Adam has to stand before it"):
        op.Chain(op.Lookahead(), op.Adam())
    with pytest.raises(HyperparameterError, match="so Lookahead has to stand before it"):
        op.Chain(op.Adam(), op.Average(), op.Lookahead())


def test_lookahead_meets_every_k_steps(backend: Backend) -> None:
    one = {"w": backend.array([1.0])}
    state, model = (
        op.setup(op.Chain(op.Descent(1.0), op.Lookahead(3, 0.5)), {"w": backend.array([0.0])}),
        {"w": backend.array([0.0])},
    )
    seen = []
    for _ in range(6):
        state, model = op.update(state, model, one)
        seen += _read(backend, model["w"])
    assert seen == [-1, -2, -1.5, -2.5, -3.5, -3.0]


# Schedule-free ---------------------------------------------------------------------------------------------------------


def _schedule_free(b: Backend, rule: op.Rule, dtype: str = "float64") -> tuple[op.State, dict[str, Any], dict[str, Any]]:
    table = b.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype)
    model = {"a": table, "same": table, "frozen": b.array([1.0], dtype), "late": b.array([1.0], dtype)}
    grads = {"a": b.array(np.full((2, 3), 0.5), dtype)}
    state, model = train(op.setup(rule, model, frozen="frozen"), model, grads, grads, grads)
    return state, model, grads


@pytest.mark.parametrize(
    "setting",
    [each for each in SETTINGS if not each[1].startswith("complex")],
    ids=lambda each: f"{each[0]}-{each[1]}",
    indirect=True,
)
def test_evaluation_is_the_average_and_training_goes_back(setting: tuple[Backend, str]) -> None:
    backend, dtype = setting
    state, model, grads = _schedule_free(backend, op.ScheduleFree(0.25), dtype)
    # z moves by 0.25 a step, and x is the mean of all z after a step.
    z0 = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
    evaluated, best = op.evaluation(state, model)
    assert_close(backend.read(best["a"]), z0 - 0.5, tolerance)
    assert best["a"] is best["same"]
    assert (best["frozen"] is model["frozen"], best["late"] is model["late"]) == (True, True)
    assert dtype_of(best["a"]) == dtype
    again, back = op.training(evaluated, best)
    assert_close(backend.read(back["a"]), backend.read(model["a"]), tolerance)
    assert again == state
    new = op.update(again, back, grads)[1]
    assert_close(backend.read(new["a"]), backend.read(op.update(state, model, grads)[1]["a"]), tolerance)


def test_asking_twice_changes_nothing(backend: Backend) -> None:
    state, model, _ = _schedule_free(backend, op.ScheduleFree(0.25))
    once = op.evaluation(state, model)
    twice = op.evaluation(*once)
    assert (twice[0] is once[0], twice[1] is once[1]) == (True, True)
    same = op.training(state, model)
    assert (same[0] is state, same[1] is model) == (True, True)


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_no_step_is_taken_from_the_evaluation_weights(backend: Backend, step: Any) -> None:
    state, model, grads = _schedule_free(backend, op.ScheduleFree(0.25))
    evaluated, best = op.evaluation(state, model)
    before = bits(backend, best["a"])
    for each in (evaluated, pickle.loads(pickle.dumps(evaluated)), evaluated.adjust(lr=0.5), evaluated.freeze("late")):
        with pytest.raises(StateError, match=r"call optimisers\.training\(state, model\) before the next update"):
            step(each, best, grads)
    assert bits(backend, best["a"]) == before
    step(*op.training(pickle.loads(pickle.dumps(evaluated)), best), grads)


def test_evaluation_in_a_chain_with_an_average_and_frozen_rows() -> None:
    rule = op.Chain(op.ClipNorm(10.0), op.ScheduleFree(0.25), op.Average(0.5))
    model = {"w": np.arange(6.0).reshape(3, 2)}
    state = op.setup(rule, model).freeze("w", rows=[1])
    state, new = train(state, model, *[{"w": np.ones((3, 2))}] * 3)
    evaluated, best = op.evaluation(state, new)
    assert best["w"][1].tolist() == [2.0, 3.0]
    assert_close(best["w"][[0, 2]], model["w"][[0, 2]] - 0.5, 1e-6)
    assert_close(op.training(evaluated, best)[1]["w"], new["w"], 1e-15)


@op.rule
class Zigzag(op.Rule):
    """A rule of a user's own whose slot has the name of one of ScheduleFree's."""

    slots = {"z": op.LIKE}

    def kernel(xp: Any, g: Any, p: Any, h: Any, z: Any) -> Any:
        return g, z + g


def test_slots_of_the_same_name_are_told_apart() -> None:
    model, grads = {"w": np.ones(2)}, {"w": np.ones(2)}
    both = train(op.Chain(Zigzag(), op.ScheduleFree(0.25)), model, grads, grads)
    alone = train(op.ScheduleFree(0.25), model, grads, grads)
    assert_close(op.evaluation(*both)[1]["w"], op.evaluation(*alone)[1]["w"], 1e-15)


def test_only_schedule_free_parameters_move_and_without_any_it_is_an_error() -> None:
    model = {"a": np.ones(1), "b": np.ones(1)}
    state, new = train({"a": op.ScheduleFree(0.25), "b": op.Adam(0.25)}, model, model, model)
    _, best = op.evaluation(state, new)
    assert (best["a"] is new["a"], best["b"] is new["b"]) == (False, True)
    for ask in (op.evaluation, op.training):
        with pytest.raises(StateError, match="no rule of this state is ScheduleFree"):
            ask(op.setup(op.Adam(), model), model)


def test_schedule_free_needs_a_first_beta_above_zero() -> None:
    with pytest.raises(HyperparameterError, match=r"the first of betas must lie in \(0, 1\)"):
        op.ScheduleFree(betas=(0.0, 0.9))
    with pytest.raises(HyperparameterError, match="betas"):
        op.setup(op.ScheduleFree(), np.ones(1)).adjust(betas=(0.0, 0.9))


# Prodigy ---------------------------------------------------------------------------------------------------------------


def test_prodigy_estimates_one_step_size_for_the_whole_tree(backend: Backend) -> None:
    def gradients(model: Any) -> Any:
        return {name: backend.array(2 * wide(backend.read(array))) for name, array in model.items()}

    model = {"a": backend.array([10.0, -8.0]), "b": backend.array([[6.0]])}
    state = op.setup(op.Prodigy(), model)
    for _ in range(200):
        state, model = op.update(state, model, gradients(model))
    assert 0.1 < state.memory["prodigy"]["d"] < 20
    assert max(abs(wide(backend.read(array))).max() for array in model.values()) < 1.0
    # Frozen parameters have no part in the estimate, not even broken gradients of theirs.
    frozen = state.freeze("b")
    broken = gradients(model) | {"b": backend.array([[np.nan]])}
    after, _ = op.update(frozen, model, broken)
    without, _ = op.update(frozen, model, {"a": broken["a"]})
    assert after.memory == without.memory
    with pytest.raises(StateError, match="decide for the whole tree"):
        state.adjust("a", lr=0.5)
    state.adjust("a", weight_decay=0.5)


# Gradients reshaped ----------------------------------------------------------------------------------------------------


def test_a_centralised_gradient_has_no_mean_over_the_inputs_of_a_unit(backend: Backend) -> None:
    g = np.arange(6.0).reshape(2, 3) ** 2
    zero, grads = (
        {"w": backend.array(np.zeros((2, 3))), "b": backend.array([0.0])},
        {"w": backend.array(g), "b": backend.array([3.0])},
    )
    for axis, mean in ((0, g.mean(1, keepdims=True)), (-1, g.mean(0)), (1, g.mean(0)), (-2, g.mean(1, keepdims=True))):
        _, new = train(op.CentraliseGrad(axis), zero, grads)
        assert_close(-backend.read(new["w"]), g - mean, 1e-14)
        assert _read(backend, new["b"]) == [-3.0]


def test_adaptive_clipping_goes_by_the_norm_of_each_unit(backend: Backend) -> None:
    p, g = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[0.0, 10.0], [0.3, 0.4]])
    _, new = train(op.ClipAdaptive(0.1, 0.01), {"w": backend.array(p)}, {"w": backend.array(g)})
    # Row 0: at most 0.1 · 5; row 1: at most 0.1 · 0.01.
    assert_close(p - backend.read(new["w"]), [[0.0, 0.5], [0.0006, 0.0008]], 1e-14)
    _, new = train(op.ClipAdaptive(10.0), {"w": backend.array(p[:1])}, {"w": backend.array(g[:1])})
    assert_close(p[:1] - backend.read(new["w"]), g[:1], 0.0)


@pytest.mark.parametrize("make", [op.CentraliseGrad, lambda axis: op.ClipAdaptive(unit_axis=axis)])
def test_an_axis_that_a_parameter_lacks_is_an_error_at_setup(make: Any) -> None:
    model = {"layer": {"w": np.ones((2, 2)), "b": np.ones(2)}}
    for axis in (2, -3):
        with pytest.raises(StateError, match=rf"layer\.w: \w+ cannot train it: it has 2 axes, and unit_axis={axis} is none"):
            op.setup(op.Chain(make(axis), op.Adam()), model)
    for wrong in (0.5, float("inf"), None, "0", lambda step: 0):
        with pytest.raises(HyperparameterError, match="unit_axis is a whole number"):
            make(wrong)
    with pytest.raises(HyperparameterError, match=r"unit_axis is 0, and 1 would change the computation.*use state\.replace"):
        op.setup(op.Chain(make(0), op.Adam()), model).adjust(unit_axis=1)


def test_noise_is_told_by_seed_path_step_and_place(backend: Backend) -> None:
    rule = op.Chain(op.AddNoise(1.0, 0.5, seed=7), op.Descent(1.0))
    zero = {"a": backend.array(np.zeros((40, 50))), "b": backend.array(np.zeros((40, 50)))}
    state, model = train(rule, zero, zero)
    first = -backend.read(model["a"])
    assert first.std() == pytest.approx(1.0, abs=0.07)
    assert first.mean() == pytest.approx(0.0, abs=0.1)
    assert len(np.unique(first)) == first.size
    assert not np.array_equal(first, -backend.read(model["b"]))
    # The same after the state went through a file, and alone as in company.
    _, new = train(state, model, zero)
    _, resumed = train(pickle.loads(pickle.dumps(state)), model, {"a": zero["a"]})
    assert bits(backend, new["a"]) == bits(backend, resumed["a"])
    second = -backend.read(new["a"]) - first
    # The variance falls with the root of the step.
    assert second.std() == pytest.approx(2**-0.25, abs=0.07)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    _, other = train(state.adjust(seed=8), model, zero)
    assert bits(backend, new["a"]) != bits(backend, other["a"])


@pytest.mark.parametrize("make", [op.StochasticRounding, lambda seed: op.AddNoise(seed=seed)])
def test_a_seed_is_a_whole_number(make: Any) -> None:
    for wrong in (-1, 1.5, None, "1", True, lambda step: step):
        with pytest.raises(HyperparameterError, match="seed"):
            make(wrong)
    assert make(np.int64(3)).seed == 3


# Matrices --------------------------------------------------------------------------------------------------------------


def _layer() -> dict[str, Any]:
    return {"embed": np.ones((3, 2)), "layer": {"w": np.eye(2), "b": np.ones(2), "s": np.array(1.0)}}


def test_muon_leaves_what_is_no_matrix_to_its_fallback() -> None:
    muon = op.Muon(fallback=op.AdamW(0.1))
    state = op.setup({"embed": op.Adam(), "**": op.Chain(op.ClipNorm(1.0), muon)}, _layer())
    kinds = {str(each.path): [type(member).__name__ for member in each.rule.members] for each in state.leaves()}
    assert kinds == {
        "embed": ["Adam"],
        "layer.b": ["ClipNorm", "AdamW"],
        "layer.s": ["ClipNorm", "AdamW"],
        "layer.w": ["ClipNorm", "Muon"],
    }
    state = state.adjust(adamw={"lr": 0.5})
    assert leaf(state, "layer.b").rule.members[1] == op.AdamW(0.5)
    assert leaf(state, "layer.w").rule.members[1] == muon
    # The fallback of a fallback; a complex matrix.
    deep = op.Muon(fallback=op.Muon(fallback=op.Descent()))
    assert leaf(op.setup(deep, np.ones(2)), "").rule == op.Descent()
    assert leaf(op.setup(deep, np.ones((2, 2), complex)), "").rule == op.Descent()


def test_muon_without_a_fallback_names_what_it_cannot_train() -> None:
    for rule in (op.Muon(), op.Chain(op.ClipNorm(), op.Muon()), op.Muon(fallback=op.Muon())):
        with pytest.raises(StateError, match=r"layer\.b: Muon cannot train it: it has 1 axes.*give Muon\(fallback=…\)"):
            op.setup(rule, {"layer": {"b": np.ones(2), "w": np.ones((2, 2))}})
    with pytest.raises(StateError, match="it has 3 axes"):
        op.setup(op.Muon(), np.ones((2, 2, 2)))
    with pytest.raises(StateError, match=r"b: Muon cannot train it"):
        op.setup(op.Adam(), {"b": np.ones(2)}).replace("b", op.Muon())


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 4)])
def test_muon_moves_in_all_directions_alike(backend: Backend, shape: tuple[int, int]) -> None:
    g = np.random.default_rng(0).normal(size=shape)
    rule = op.Muon(1.0, weight_decay=0.0, adjust_lr_fn="none", ns_steps=12, ns_coefficients=(1.5, -0.5, 0.0))
    _, new = train(rule, {"w": backend.array(np.zeros(shape))}, {"w": backend.array(g)})
    u, _, v = np.linalg.svd(g, full_matrices=False)
    assert_close(-backend.read(new["w"]), u @ v, 1e-2)


def test_adafactor_keeps_a_row_and_a_column(sharing_backend: Backend) -> None:
    backend = sharing_backend
    model = {name: backend.array(np.ones(shape)) for name, shape in (("m", (3, 5)), ("t", (4, 2, 3)), ("v", (5,)), ("s", ()))}
    state, new = train(op.Adafactor(0.1), model, model, model)
    shapes = {str(each.path): {name: tuple(slot.shape) for name, slot in each.slots.items()} for each in state.leaves()}
    assert shapes == {
        "m": {"row": (3, 1), "column": (1, 5)},
        "s": {"nu": ()},
        "t": {"row": (4, 2, 1), "column": (4, 1, 3)},
        "v": {"nu": (5,)},
    }
    assert all(tuple(new[name].shape) == tuple(model[name].shape) for name in model)
    with pytest.raises(StateError, match=r"l\.b: Adafactor cannot train it: it has 1 axes, and a factored moment needs two"):
        op.setup(op.Adafactor(factored=True), {"l": {"b": np.ones(2)}})


@pytest.mark.parametrize("rule", [op.Adafactor(), op.Muon(fallback=op.Adam()), op.CentraliseGrad(), op.ClipAdaptive()], ids=repr)
def test_an_array_without_elements_takes_its_steps(backend: Backend, rule: op.Rule) -> None:
    model = {"a": backend.array(np.ones((0, 3))), "b": backend.array(np.ones((3, 0))), "c": backend.array(np.ones(0))}
    state, new = train(op.Chain(rule, op.Descent(0.1)), model, model, model)
    assert {name: tuple(array.shape) for name, array in new.items()} == {"a": (0, 3), "b": (3, 0), "c": (0,)}
    assert state.step == 2


# Frozen rows -----------------------------------------------------------------------------------------------------------

WHOLE = {
    name: RULES[name]
    for name in ("Muon", "Adafactor", "CentraliseGrad", "ClipAdaptive", "AddNoise", "LAMB", "LARS", "Prodigy", "ClipNorm")
} | {"AdamW-cautious": RULES["AdamW-cautious"], "ClipGlobalNorm": RULES["ClipGlobalNorm"], "ScheduleFree": RULES["ScheduleFree"]}


@pytest.mark.parametrize("name", WHOLE)
def test_frozen_rows_stay_and_their_gradients_are_not_read(sharing_backend: Backend, name: str) -> None:
    backend = sharing_backend
    rng = np.random.default_rng(0)
    p, g = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    broken = g.copy()
    broken[[0, 3]] = [np.nan, np.inf, -np.inf]
    for in_place in (False, True):
        fresh = op.setup(WHOLE[name], {"w": backend.array(p)}).freeze("w", rows=[0, 3])
        state, new = train(fresh, {"w": backend.array(p)}, *[{"w": backend.array(broken)}] * 2, in_place=in_place)
        _, clean = train(fresh if not in_place else state.reset(), {"w": backend.array(p)}, *[{"w": backend.array(g)}] * 2)
        assert backend.read(new["w"])[[0, 3]].tolist() == p[[0, 3]].tolist()
        assert_close(backend.read(new["w"]), backend.read(clean["w"]), 1e-15)
        assert (backend.read(new["w"])[[1, 2, 4]] != p[[1, 2, 4]]).all()
        assert all(np.isfinite(backend.read(slot)).all() for slot in leaf(state, "w").slots.values())


# Half precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", RULES)
def test_tiny_gradients_of_half_precision_give_finite_steps(name: str, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    start = {"w": np.array([[1.0, -0.5]]), "z": np.zeros(2)}
    for g in (0.0, 1e-8, 1e-4):
        model = {key: each.astype(kind) for key, each in start.items() if trains(RULES[name], each.shape, dtype)}
        grads = {key: np.full(each.shape, g, kind) for key, each in model.items()}
        state, new = train(RULES[name], model, *[grads] * 3)
        assert all(np.isfinite(each.astype(float)).all() for each in new.values())
        assert all(np.isfinite(slot.astype(float)).all() for each in state.leaves() for slot in each.slots.values())


@pytest.mark.parametrize("name", RULES)
def test_tiny_gradients_of_half_precision_give_finite_steps_in_torch(name: str) -> None:
    model = {"w": torch.tensor([[1.0, -0.5]], dtype=torch.float16), "z": torch.zeros(2, dtype=torch.float16)}
    for g in (0.0, 1e-7):
        grads = {key: torch.full_like(each, g) for key, each in model.items()}
        _, new = train(RULES[name], model, grads, grads)
        assert all(bool(torch.isfinite(each).all()) for each in new.values())


# AdamW's options -------------------------------------------------------------------------------------------------------


def test_cautious_steps_go_only_where_mean_and_gradient_agree(backend: Backend) -> None:
    model = {"w": backend.array([0.0, 0.0, 0.0, 0.0])}
    grads = [{"w": backend.array([1.0, 1.0, 1.0, 1.0])}, {"w": backend.array([1.0, -0.5, 1.0, 1.0])}]
    rules = op.AdamW(0.1, weight_decay=0.0), op.AdamW(0.1, weight_decay=0.0, cautious=True)
    plain, cautious = (train(rule, model, *grads) for rule in rules)
    before = [train(rule, model, grads[0])[1] for rule in rules]
    steps = [backend.read(new["w"]) - backend.read(old["w"]) for (_, new), old in zip((plain, cautious), before, strict=True)]
    # The second element's mean still has the old sign; the others share its step.
    assert_close(steps[1], steps[0] * np.array([1, 0, 1, 1]) / 0.75, 1e-12)
    for name in ("mu", "nu"):
        assert bits(backend, leaf(plain[0], "w").slots[name]) == bits(backend, leaf(cautious[0], "w").slots[name])


def test_an_option_is_no_number_to_adjust_but_may_be_replaced() -> None:
    model = {"w": np.ones(2)}
    state, model = train(op.AdamW(0.1), model, model)
    with pytest.raises(HyperparameterError, match=r"AdamW\.cautious is False, and True would change .*use state\.replace"):
        state.adjust(cautious=True)
    with pytest.raises(HyperparameterError, match="cautious is True or False"):
        state.adjust(cautious=1)
    with pytest.raises(HyperparameterError, match=r"Muon\.ns_steps is 5, and 3 would change"):
        op.setup(op.Muon(), {"w": np.ones((2, 2))}).adjust(ns_steps=3)
    changed = state.replace(op.AdamW(0.1, cautious=True))
    assert leaf(changed, "w").slots["mu"] is leaf(state, "w").slots["mu"]
    assert leaf(changed, "w").step == 1


# Members by name -------------------------------------------------------------------------------------------------------


def _chain() -> op.Chain:
    return op.Chain(op.ClipNorm(1.0), op.Adam(0.1), op.WeightDecay(0.2), op.Adam(0.3))


def test_a_hyperparameter_is_changed_in_every_member_that_has_it_or_in_one_by_name() -> None:
    state = op.setup(_chain(), {"w": np.ones(1)})

    def members(**changes: Any) -> tuple[op.Rule, ...]:
        assert _chain().adjusted(**changes) == leaf(state.adjust(**changes), "w").rule
        return _chain().adjusted(**changes).members

    clip, first, decay, second = _chain().members
    assert members(lr=0.5) == (clip, op.Adam(0.5), decay, op.Adam(0.5))
    assert members(adam={"lr": 0.5}) == (clip, op.Adam(0.5), decay, second)
    assert members(adam_2={"lr": 0.5, "eps": 1e-3}) == (clip, first, decay, op.Adam(0.5, eps=1e-3))
    assert members(clipnorm={"max_norm": 5.0}) == (op.ClipNorm(5.0), first, decay, second)
    # What is said to one member goes before what is said to all.
    assert members(lr=0.5, adam_2={"lr": 0.7}) == (clip, op.Adam(0.5), decay, op.Adam(0.7))
    assert members(adam={}) == _chain().members


def test_a_single_rule_is_its_own_only_member() -> None:
    assert op.Adam().adjusted(adam={"lr": 0.5}, eps=1e-3) == op.Adam(0.5, eps=1e-3)
    state = op.setup({"a": op.Chain(op.ClipNorm(), op.Adam()), "b": op.AdamW(), "c": op.Adam()}, dict.fromkeys("abc", 0) | _abc())
    state = state.adjust(adam={"lr": 0.5}, adamw={"weight_decay": 0.0})
    assert [each.rule.members[-1] for each in state.leaves()] == [op.Adam(0.5), op.AdamW(weight_decay=0.0), op.Adam(0.5)]


def _abc() -> dict[str, Any]:
    return {name: np.ones(1) for name in "abc"}


def test_a_member_whose_name_is_a_hyperparameter_too() -> None:
    for rule in (op.Momentum(0.1), op.Chain(op.ClipNorm(), op.Momentum(0.1))):
        assert rule.adjusted(momentum=0.5).members[-1] == op.Momentum(0.1, 0.5)
        assert rule.adjusted(momentum={"lr": 0.5}).members[-1] == op.Momentum(0.5, 0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adamw": {"lr": 0.5}}, 'has(n| a| no|) .*hyperparameter "adamw"'),
        ({"adam_3": {"lr": 0.5}}, 'hyperparameter "adam_3"'),
        ({"adam": {"lrr": 0.5}}, 'Adam has no hyperparameter "lrr"; did you mean "lr"'),
        ({"adam": {"weight_decay": 0.5}}, 'Adam has no hyperparameter "weight_decay"'),
        ({"adam": 0.5}, r'"adam" is a rule; give its hyperparameters by name, adam=\{"…": …\}'),
        ({"adam": None}, '"adam" is a rule'),
        ({"adam": [0.5]}, '"adam" is a rule'),
        ({"adam": {3: 0.5}}, '"adam" is a rule'),
        ({"lr": {"adam": 0.5}}, "lr is a number or a schedule"),
        ({"adam": {"lr": -1.0}}, "lr must lie in"),
        ({"clipnorm": {"lr": 1.0}}, 'ClipNorm has no hyperparameter "lr"'),
    ],
    ids=str,
)
def test_what_cannot_be_said_to_a_member(changes: Any, message: str) -> None:
    state = op.setup(_chain(), {"w": np.ones(1)})
    for change in (_chain().adjusted, state.adjust):
        with pytest.raises(HyperparameterError, match=message):
            change(**changes)
    for wrong in ({"adam": 0.5}, {"lr": {"adam": 0.5}}, {"sgd": {"lr": 0.5}}):
        with pytest.raises(HyperparameterError):
            op.Adam().adjusted(**wrong)


# Parts together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [op.Prodigy(d0=0.5), op.LAMB(0.1), op.Descent(1e-3)], ids=lambda rule: type(rule).__name__)
def test_a_master_serves_wherever_it_stands(half_backend: Backend, rule: op.Rule) -> None:
    rounding = op.StochasticRounding()
    chains = (op.Chain(op.MixedPrecision(), rounding, rule), op.Chain(rounding, rule, op.MixedPrecision()))
    masters = []
    for chain in chains:
        model = {"w": half_backend.array([1.0, 1.5, -2.0], "bfloat16")}
        state = op.setup(chain, model)
        for _ in range(20):
            state, model = op.update(state, model, {"w": model["w"]})
        masters.append(half_backend.read(leaf(state, "w").slots["master"]))
    assert_close(masters[0], masters[1], 0.0)


def test_evaluation_looks_at_the_master() -> None:
    rng = np.random.default_rng(0)
    bfloat16 = numpy_dtype("bfloat16")
    model = {"w": rng.standard_normal(200).astype(bfloat16)}
    state = op.setup(op.Chain(op.MixedPrecision(), op.ScheduleFree(0.1, betas=(0.5, 0.999))), model)
    for _ in range(10):
        state, model = op.update(state, model, {"w": rng.standard_normal(200).astype(bfloat16)})
    y, z = (leaf(state, "w").slots[name] for name in ("master", "z"))
    evaluated, best = op.evaluation(state, model)
    assert (best["w"] == (y + (1 - 1 / 0.5) * (z - y)).astype(bfloat16)).all()
    again, back = op.training(evaluated, best)
    assert (back["w"] == model["w"]).all()
    assert again == state


def test_gates_in_two_orders_are_refused() -> None:
    model = {"a": np.ones(1), "b": np.ones(1)}
    rules = {
        "a": op.Chain(op.AccumGrad(4), op.SkipNonFinite(), op.Adam()),
        "b": op.Chain(op.SkipNonFinite(), op.AccumGrad(4), op.Adam()),
    }
    with pytest.raises(StateError, match="put them in the same order"):
        op.setup(rules, model)
    with pytest.raises(StateError, match="put them in the same order"):
        op.setup(rules["a"], model).replace("b", rules["b"])


@pytest.mark.parametrize(
    ("old", "new"),
    [(op.Adam(), op.Prodigy()), (op.AMSGrad(), op.AdaMax()), (op.Momentum(), op.LARS()), (op.Momentum(), op.Muon())],
    ids=lambda rule: type(rule).__name__,
)
def test_slots_that_mean_something_else_do_not_go_on(old: op.Rule, new: op.Rule) -> None:
    model = {"w": np.ones((2, 2))}
    state, _ = train(old, model, model)
    kept = {name for name, slot in leaf(state.replace(new), "w").slots.items() if slot is leaf(state, "w").slots.get(name)}
    assert kept <= {"mu"}
    assert leaf(state.replace(new), "w").step == (0 if type(new) is op.Prodigy else 1)


def test_tiny_numbers_are_rounded_to_numbers(half_backend: Backend) -> None:
    model = {"w": half_backend.array([0.0, 1e-37, 1e-39], "bfloat16")}
    grads = {"w": half_backend.array([1e-38, 1e-36, 1e-36], "bfloat16")}
    _, model = train(op.Chain(op.StochasticRounding(), op.Descent(1e-4)), model, grads)
    assert np.isfinite(wide(half_backend.read(model["w"]))).all()


def test_a_reshaped_place_on_its_own_gets_the_rule_for_its_shape() -> None:
    w = np.ones((3, 4))
    model = {"a": w, "b": {"x": w.reshape(12)}}
    grads = {"a": None, "b": {"x": np.ones(12)}}
    for rule, expected in ((op.Muon(fallback=op.Adam()), op.Adam()), (op.AdamW(), op.AdamW())):
        state = op.setup(rule, model)
        for alone, path in ((state.untie("b.x"), "b.x"), (branch(state, "b"), "x")):
            assert leaf(alone, path).rule == expected
        op.update(state.untie("b.x"), model, grads)
    for refused in (op.Muon(), op.Adafactor(factored=True)):
        with pytest.raises(StateError, match=r"b\.x: .* cannot train it"):
            op.setup(refused, model).untie("b.x")


# Modules of PyTorch -----------------------------------------------------------------------------------------------------


def _tied_module() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    return module


def _with_gradients(module: Any) -> Any:
    module.zero_grad()
    module(module[0].weight.detach().new_ones(2, 3)).square().sum().backward()
    return module


def test_the_average_of_a_module_is_a_module_with_its_parameters_and_ties() -> None:
    state = op.setup(op.Chain(op.Descent(0.1), op.Average(0.5)), module := _tied_module())
    state, module = op.update(state, _with_gradients(module))
    average = op.averaged(state, module)
    assert isinstance(average[0].weight, torch.nn.Parameter)
    assert average[1].weight is average[0].weight
    assert average[0].weight.is_leaf
    assert average[0].weight.requires_grad


def test_an_average_stays_what_it_was_while_the_model_trains_on() -> None:
    module: Any = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1)
    )
    module[3] = module[1]
    module[2] = torch.nn.Linear(3, 3)
    module[2].weight.requires_grad_(requires_grad=False)
    table = torch.nn.Parameter(torch.ones(2, 3))
    model = {"net": module, "left out": table, "tied": table, "ids": torch.arange(3)}
    state = op.setup(op.Chain(op.SGD(0.1), op.Average(0.5)), model, trainable="net", frozen="net.0")
    for _ in range(2):
        module(torch.randn(4, 3)).square().sum().backward()
        state, model = op.update_(state, model)
    best = op.averaged(state, model)
    before = copy.deepcopy(best)
    assert best["net"][3] is best["net"][1]
    assert best["tied"] is best["left out"]
    assert not best["net"][2].weight.requires_grad
    model["ids"] += 1
    state = state.thaw()
    with torch.no_grad():
        table += 1
    for _ in range(2):
        module(torch.randn(4, 3)).square().sum().backward()
        state, model = op.update_(state, model)
    assert not torch.equal(module[1].running_mean, best["net"][1].running_mean)
    for name, value in before["net"].state_dict().items():
        assert torch.equal(best["net"].state_dict()[name], value), name
    assert torch.equal(best["left out"], before["left out"])
    assert torch.equal(best["ids"], before["ids"])


def test_a_module_trains_on_after_it_was_evaluated() -> None:
    state = op.setup(op.ScheduleFree(0.1), module := _tied_module())
    other_state, other = op.setup(op.ScheduleFree(0.1), _tied_module()), _tied_module()
    for _ in range(3):
        state, module = op.update(state, _with_gradients(module))
        evaluated, best = op.evaluation(state, module)
        copy.deepcopy(best)
        state, module = op.training(evaluated, best)
        assert module[1].weight is module[0].weight
        assert isinstance(module[0].weight, torch.nn.Parameter)
        other_state, other = op.update(other_state, _with_gradients(other))
    assert state.step == state["0.weight"].step == 3
    torch.testing.assert_close(module[0].weight, other[0].weight, rtol=1e-4, atol=1e-6)
