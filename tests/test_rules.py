"""The numbers of every rule, chains, gates, and rules of a user's own."""

from typing import Any

import numpy as np
import pytest
import torch

import optimisers as op
from optimisers.errors import HyperparameterError, OptimiserWarning, ShapeError, StateError
from tests.conftest import EPS, Backend, Trust, assert_close, dtype_of, leaf, numpy_dtype, random_array, train, wide


def _step(backend: Backend, rule: op.Rule, values: Any, gradient: Any) -> np.ndarray:
    _, model = train(rule, {"x": backend.array(values)}, {"x": backend.array(gradient)})
    return backend.read(model["x"])


# Chains ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (op.WeightDecay(0.1), [-0.1, 7, 87]),
        (op.Chain(op.ClipGrad(2.0), op.WeightDecay(0.1)), [-0.1, 7, 88]),
        (op.Chain(), [0, 8, 97]),
        (op.Chain(op.Descent(0.1)), [0.9, 9.8, 99.7]),
        (op.Chain(op.Chain(), op.Chain(op.Descent(0.5), op.Chain(op.Descent(0.2)))), [0.9, 9.8, 99.7]),
    ],
    ids=repr,
)
def test_what_one_member_returns_is_the_gradient_of_the_next(backend: Backend, rule: op.Rule, expected: Any) -> None:
    assert_close(_step(backend, rule, [1, 10, 100], [1, 2, 3]), expected, 1e-15)


def test_sign_decay_pulls_by_the_sign(backend: Backend) -> None:
    assert_close(_step(backend, op.SignDecay(0.1), [1, -10, 100], [3, 2, -1]), [-2.1, -11.9, 100.9], 1e-15)
    assert_close(_step(backend, op.SignDecay(0.1), [0.0], [0.0]), [0.0], 0.0)


def test_sign_decay_of_a_complex_parameter_points_at_zero(backend: Backend) -> None:
    _, model = train(op.SignDecay(0.5), {"x": backend.array([3 + 4j, 0], "complex128")}, {"x": backend.array([0, 0], "complex128")})
    assert_close(backend.read(model["x"]), [2.7 + 3.6j, 0], 1e-15)


def test_a_chain_inside_a_chain_dissolves() -> None:
    flat = op.Chain(op.ClipGrad(1.0), op.Adam(), op.WeightDecay())
    assert op.Chain(op.Chain(op.ClipGrad(1.0)), op.Chain(op.Chain(op.Adam()), op.WeightDecay())) == flat
    assert flat.members == (op.ClipGrad(1.0), op.Adam(), op.WeightDecay())


def test_slots_that_two_members_share_by_name_carry_the_name_of_the_member(backend: Backend) -> None:
    rule = op.Chain(op.Adam(0.1), op.Momentum(1.0), op.Adam(0.1))
    state, _ = train(rule, {"x": backend.array([1.0])}, {"x": backend.array([1.0])})
    slots = leaf(state, "x").slots
    assert list(slots) == ["adam.mu", "adam.nu", "velocity", "adam_2.mu", "adam_2.nu"]
    assert_close(backend.read(slots["adam_2.mu"]), [0.01], 1e-8)


@pytest.mark.parametrize("wrong", [op.Adam, 3, None, "Adam"])
def test_a_chain_holds_rules_and_nothing_else(wrong: Any) -> None:
    with pytest.raises(HyperparameterError, match="a chain holds rules"):
        op.Chain(op.Descent(), wrong)


# Clipping -------------------------------------------------------------------------------------------------------------


def test_clipping_by_value_is_that_of_torch() -> None:
    g = random_array(np.random.default_rng(0), (5, 3), "float64") * 4
    tensor = torch.zeros(5, 3, dtype=torch.float64)
    tensor.grad = torch.from_numpy(g.copy())
    torch.nn.utils.clip_grad_value_([tensor], 1.5)
    _, model = train(op.ClipGrad(1.5), {"x": np.zeros((5, 3))}, {"x": g})
    assert_close(-model["x"], tensor.grad.numpy(), 0.0)


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_clipping_by_the_global_norm_is_that_of_torch(backend: Backend, size: float) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 3), "b": (4,), "c": ()}
    grads = {name: np.asarray(random_array(rng, shape, "float64") * size) for name, shape in shapes.items()}
    tensors = [torch.zeros(each.shape, dtype=torch.float64) for each in grads.values()]
    for tensor, g in zip(tensors, grads.values(), strict=True):
        tensor.grad = torch.from_numpy(g.copy())
    norm = torch.nn.utils.clip_grad_norm_(tensors, 1.0)
    model = {name: backend.make(np.zeros(each.shape)) for name, each in grads.items()}
    _, model = train(op.ClipGlobalNorm(1.0), model, {name: backend.make(each) for name, each in grads.items()})
    assert op.global_norm(grads) == pytest.approx(norm.item(), rel=1e-14)
    for name, tensor in zip(grads, tensors, strict=True):
        assert tensor.grad is not None
        # torch.nn.utils adds 1e-6 to the norm it divides by.
        assert_close(-backend.read(model[name]), tensor.grad.numpy(), 1e-5)


def test_clipping_by_norm_is_that_of_each_parameter(backend: Backend) -> None:
    grads = {"a": backend.array([3.0, 4.0]), "b": backend.array([0.3, 0.4]), "c": backend.array([0.0])}
    model = {"a": backend.array([0.0, 0.0]), "b": backend.array([0.0, 0.0]), "c": backend.array([0.0])}
    _, model = train(op.ClipNorm(1.0), model, grads)
    assert_close(backend.read(model["a"]), [-0.6, -0.8], 1e-15)
    assert_close(backend.read(model["b"]), [-0.3, -0.4], 0.0)
    assert backend.read(model["c"]).tolist() == [0.0]


def test_complex_gradients_clip_by_part_and_by_modulus(backend: Backend) -> None:
    zero, g = backend.array([0j, 0j], "complex128"), backend.array([3 + 0.5j, -4j], "complex128")
    _, model = train(op.ClipGrad(1.0), {"x": zero}, {"x": g})
    assert_close(-backend.read(model["x"]), [1 + 0.5j, -1j], 0.0)
    _, model = train(op.ClipNorm(1.0), {"x": zero}, {"x": g})
    assert_close(-backend.read(model["x"]), np.array([3 + 0.5j, -4j]) / np.sqrt(25.25), 1e-15)


def test_a_short_gradient_passes_a_norm_exactly_as_it_is(backend: Backend) -> None:
    g = random_array(np.random.default_rng(0), (7,), "float32") / 100
    _, model = train(op.ClipGlobalNorm(1.0), {"x": backend.array(np.zeros(7), "float32")}, {"x": backend.make(g)})
    assert (-backend.read(model["x"])).tolist() == g.tolist()


def test_a_norm_neither_overflows_nor_vanishes(backend: Backend) -> None:
    for size in (1e30, 1e-30):
        g = backend.array([3 * size, 4 * size], "float32")
        _, model = train(op.ClipNorm(size), {"x": backend.array([0.0, 0.0], "float32")}, {"x": g})
        assert_close(backend.read(model["x"]) / np.float32(size), [-0.6, -0.8], 4 * EPS["float32"])


def test_the_global_norm_goes_over_dtypes_and_groups(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0], "float32"), "c": backend.array([0j], "complex128")}
    grads = {"a": backend.array([2.0]), "b": backend.array([3.0], "float32"), "c": backend.array([6j], "complex128")}
    rules = {"a": op.Chain(op.ClipGlobalNorm(3.5)), "**": op.Chain(op.ClipGlobalNorm(7.0), op.Descent(1.0))}
    _, new = train(rules, model, grads)
    assert_close(backend.read(new["a"]), [-1.0], 1e-15)
    assert_close(backend.read(new["b"]), [-3.0], 1e-7)
    assert_close(backend.read(new["c"]), [-6j], 1e-15)


# Adam, by hand and against torch --------------------------------------------------------------------------------------


def test_three_steps_of_adam(backend: Backend) -> None:
    _, model = train(op.Adam(0.1), {"p": backend.array([1.0, 2.0])}, *[{"p": backend.array([0.5, -0.25])}] * 3)
    assert_close(backend.read(model["p"]), [0.7, 2.3], 1e-7)
    _, model = train(op.Adam(0.1), {"p": backend.array([1.0])}, *[{"p": backend.array([1.0])}] * 3)
    assert_close(backend.read(model["p"]), [0.7], 1e-7)


def test_sgd_has_no_velocity_without_momentum() -> None:
    model = {"x": np.ones(2)}
    assert not leaf(op.setup(op.SGD(0.1), model), "x").slots
    assert set(leaf(op.setup(op.SGD(0.1, momentum=0.1), model), "x").slots) == {"velocity"}


def test_momentum_cannot_be_switched_on_or_off_by_adjust() -> None:
    model = {"x": np.ones(2)}
    for start, changed in ((0.9, 0.0), (0.0, 0.9)):
        state = op.setup(op.Chain(op.ClipGrad(), op.SGD(0.1, momentum=start)), model)
        with pytest.raises(HyperparameterError, match=r"use state\.replace"):
            state.adjust(momentum=changed)
    state, _ = train(op.setup(op.SGD(0.1, momentum=0.9), model).adjust(momentum=0.5), model, model, model)
    assert leaf(state, "x").slots["velocity"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("options", [{"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}], ids=str)
def test_nesterov_needs_momentum_without_dampening(options: Any) -> None:
    with pytest.raises(HyperparameterError, match="nesterov needs"):
        op.SGD(0.1, **options)
    with pytest.raises(HyperparameterError):
        op.setup(op.SGD(momentum=0.9, nesterov=True), {"x": np.ones(1)}).adjust(dampening=0.1)


# Gates ----------------------------------------------------------------------------------------------------------------


def test_accumulation_lets_the_mean_through_once_in_n(backend: Backend) -> None:
    model = {"x": backend.array([0.0])}
    state = op.setup(op.Chain(op.AccumGrad(3), op.Adam(0.1)), model)
    for count, g in enumerate((1.0, 2.0, 6.0)):
        state, new = op.update(state, model, {"x": backend.array([g])})
        if count < 2:
            assert new["x"] is model["x"]
            assert (state.step, leaf(state, "x").step) == (0, 0)
            assert state.memory == {"accumgrad": {"filled": count + 1}}
            assert backend.read(leaf(state, "x").slots["mu"]).tolist() == [0.0]
        model = new
    assert (state.step, leaf(state, "x").step, state.memory) == (1, 1, {"accumgrad": {"filled": 0}})
    assert_close(backend.read(leaf(state, "x").slots["mu"]), [0.3], 1e-15)
    assert backend.read(leaf(state, "x").slots["total"]).tolist() == [0.0]
    assert_close(backend.read(model["x"]), [-0.1], 1e-8)


def test_accumulation_before_decay(backend: Backend) -> None:
    rule = op.Chain(op.AccumGrad(2), op.WeightDecay(0.01), op.Descent(0.1))
    model = {"x": backend.array([1.0]), "y": backend.array([2.0])}
    grads = [
        {"x": backend.array([33.0]), "y": backend.array([0.0])},
        {"x": backend.array([0.0]), "y": backend.array([444.0])},
    ]
    for in_place in (False, True):
        fresh = {name: backend.make(backend.read(array).copy()) for name, array in model.items()}
        _, new = train(rule, fresh, *grads, in_place=in_place)
        assert_close(backend.read(new["x"]), [-0.651], 1e-15)
        assert_close(backend.read(new["y"]), [-20.202], 1e-15)


def test_lowering_n_amid_a_window_still_fires(backend: Backend) -> None:
    model = {"x": backend.array([0.0])}
    g = {"x": backend.array([6.0])}
    state, model = train(op.Chain(op.AccumGrad(10), op.Descent(1.0)), model, g, g, g)
    state, model = op.update(state.adjust(n=2), model, g)
    assert_close(backend.read(model["x"]), [-6], 1e-15)
    assert (state.step, state.memory["accumgrad"]["filled"]) == (1, 0)


def test_accumulation_counts_calls_also_for_missing_gradients(backend: Backend) -> None:
    model = {"x": backend.array([0.0]), "y": backend.array([0.0])}
    both = {"x": backend.array([6.0]), "y": backend.array([6.0])}
    only = {"y": backend.array([6.0])}
    state, model = train(op.Chain(op.AccumGrad(3), op.Descent(1.0)), model, only, only, both)
    assert_close(backend.read(model["x"]), [-2], 1e-15)
    assert_close(backend.read(model["y"]), [-6], 1e-15)
    # Without a gradient in the call that fires there is no step, and what was gathered waits for the next window.
    state, model = train(state, model, both, both, only)
    assert_close(backend.read(model["x"]), [-2], 1e-15)
    assert (leaf(state, "x").step, leaf(state, "y").step, state.step) == (1, 2, 2)
    state, model = train(state, model, only, only, both)
    assert_close(backend.read(model["x"]), [-8], 1e-15)


def test_a_window_is_one_for_the_whole_tree() -> None:
    model = {"x": np.zeros(1), "y": np.zeros(1)}
    rules = {"x": op.Chain(op.AccumGrad(2), op.Adam()), "y": op.Chain(op.AccumGrad(3), op.Descent())}
    with pytest.raises(StateError, match="they have to be equal for all parameters"):
        op.setup(rules, model)
    state = op.setup({"x": op.Chain(op.AccumGrad(2), op.Adam()), "y": op.Chain(op.AccumGrad(2), op.Descent())}, model)
    state, _ = op.update(state, model, {"x": np.ones(1)})
    state, new = op.update(state, model, {"y": np.ones(1)})
    assert (new["x"] is model["x"], new["y"].tolist()) == (True, [-0.05])
    with pytest.raises(StateError, match="equal"):
        state.adjust("x", n=5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, complex(0, np.nan)])
def test_a_broken_gradient_skips_the_whole_step(backend: Backend, bad: Any) -> None:
    dtype = "complex128" if isinstance(bad, complex) else "float64"
    model = {"x": backend.array([1, 2], dtype), "y": backend.array([3.0], "float32")}
    state = op.setup(op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0), op.Adam(0.1)), model)
    good = {"x": backend.array([1, 1], dtype), "y": backend.array([1.0], "float32")}
    for step in (op.update, op.update_):
        skipped, new = step(state, model, good | {"x": backend.array([1, bad], dtype)})
        assert new["x"] is model["x"]
        assert new["y"] is model["y"]
        assert (skipped.step, leaf(skipped, "x").step) == (0, 0)
        assert skipped.memory == {"skipnonfinite": {"skipped": 1}}
        assert not backend.read(leaf(skipped, "x").slots["nu"]).any()
    skipped, new = op.update(skipped, model, good)
    assert (skipped.step, skipped.memory["skipnonfinite"]["skipped"]) == (1, 1)


def test_gates_before_and_after_each_other(backend: Backend) -> None:
    rule = op.Chain(op.SkipNonFinite(), op.AccumGrad(2), op.Descent(1.0))
    model = {"x": backend.array([0.0])}
    grads = [{"x": backend.array([g])} for g in (1.0, np.nan, 3.0, 5.0)]
    state, model = train(rule, model, *grads)
    assert_close(backend.read(model["x"]), [-2.0], 1e-15)
    assert state.memory == {"skipnonfinite": {"skipped": 1}, "accumgrad": {"filled": 1}}
    assert backend.read(leaf(state, "x").slots["total"]).tolist() == [5.0]


def test_chains_that_hold_tree_wide_members_in_another_order(backend: Backend) -> None:
    model = {"x": backend.array([0.0]), "y": backend.array([0.0])}
    rules = {
        "x": op.Chain(op.ClipGrad(100.0), op.ClipGlobalNorm(1.0), op.Descent(1.0)),
        "y": op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0)),
    }
    state, new = train(rules, model, {"x": backend.array([3.0]), "y": backend.array([4.0])})
    assert_close(backend.read(new["x"]), [-0.6], 1e-15)
    assert_close(backend.read(new["y"]), [-0.8], 1e-15)
    rules = {"x": op.Chain(op.ClipGlobalNorm(1.0), op.SkipNonFinite()), "y": op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0))}
    state, new = train(rules, model, {"x": backend.array([3.0]), "y": backend.array([4.0])})
    assert state.step == 1
    assert np.isfinite(backend.read(new["x"])).all()
    twice = op.Chain(op.ClipGlobalNorm(1.0), op.Descent(10.0), op.ClipGlobalNorm(2.0))
    _, new = train(twice, model, {"x": backend.array([3.0]), "y": backend.array([4.0])})
    assert_close(backend.read(new["x"]), [-1.2], 1e-15)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_plain_descent_in_half_precision_loses_steps_below_its_rounding(half_backend: Backend) -> None:
    backend = half_backend
    one = {"w": backend.array([1.0], "bfloat16")}
    _, model = train(op.Descent(1e-3), one, *[one] * 100)
    assert wide(backend.read(model["w"])).tolist() == [1.0]


@pytest.mark.parametrize("gradient", [0.0, 1e-8, 6e4])
def test_adam_stays_finite_in_half_precision(half_backend: Backend, gradient: float) -> None:
    backend = half_backend
    g = {"w": backend.array([gradient], "float16")}
    state, model = train(op.Adam(0.1), {"w": backend.array([1.0], "float16")}, *[g] * 5)
    assert np.isfinite(backend.read(model["w"])).all()
    # A beta of 0.999 rounded to 1 would leave no second moment.
    seen = float(backend.read(g["w"])[0])
    assert_close(backend.read(leaf(state, "w").slots["nu"]), [seen**2 * (1 - 0.999**5)], 1e-6)


def test_float32_parameters_stay_so_with_double_gradients_and_hyperparameters(numpy_backend: Backend) -> None:
    rule = op.AdamW(np.float64(0.1), (np.float64(0.9), np.float64(0.999)), np.float64(1e-8), np.float64(0.01))
    assert type(rule.lr) is float
    assert type(rule.betas[0]) is float
    model = {"w": np.ones(3, np.float32), "h": np.ones(3, np.float16)}
    state, new = train(rule, model, {"w": np.ones(3), "h": np.ones(3)}, {"w": np.ones(3), "h": np.ones(3)})
    assert {name: dtype_of(array) for name, array in new.items()} == {"w": "float32", "h": "float16"}
    assert {dtype_of(slot) for each in state.leaves() for slot in each.slots.values()} == {"float32"}
    _, narrow = train(rule, model, *[{"w": np.ones(3, np.float32), "h": np.ones(3, np.float32)}] * 2)
    assert_close(new["w"], narrow["w"], EPS["float32"])


def test_a_schedule_that_returns_numpy_scalars_promotes_nothing(numpy_backend: Backend) -> None:
    for schedule in (lambda step: np.float64(0.1), lambda step: np.float32(0.1), lambda step: np.array(0.1), lambda step: 1):
        state, model = train(op.Adam(schedule), {"w": np.ones(3, np.float32)}, {"w": np.ones(3)})
        assert dtype_of(model["w"]) == dtype_of(leaf(state, "w").slots["mu"]) == "float32"


def test_complex_parameters_converge_and_their_second_moment_is_real(backend: Backend) -> None:
    for dtype, real in (("complex64", "float32"), ("complex128", "float64")):
        model = {"z": backend.array([1 + 2j, -3j], dtype)}
        state = op.setup(op.Adam(0.1), model)
        for _ in range(150):
            state, model = op.update_(state, model, {"z": backend.array(wide(backend.read(model["z"])) - (1 - 1j), dtype)})
        assert_close(backend.read(model["z"]), [1 - 1j, 1 - 1j], 0.05)
        assert {name: dtype_of(slot) for name, slot in leaf(state, "z").slots.items()} == {"mu": dtype, "nu": real}


def test_a_complex_parameter_takes_a_real_gradient(backend: Backend) -> None:
    _, model = train(op.Descent(1.0), {"z": backend.array([1 + 2j], "complex128")}, {"z": backend.array([3.0])})
    assert_close(backend.read(model["z"]), [-2 + 2j], 0.0)


def test_scalars_of_arrays_are_parameters_and_numbers_are_not(backend: Backend) -> None:
    model = {
        "zero_d": backend.array(1.0),
        "count": backend.array([1, 2], "int32"),
        "flags": backend.array([True, False], "bool"),
        "float": 1.0,
        "scalar": np.float32(1),
        "text": "x",
        "none": None,
    }
    state = op.setup(op.Adam(0.1), model)
    assert [str(path) for path in state] == ["zero_d"]
    for step in (op.update, op.update_):
        _, new = step(state, model, {"zero_d": backend.array(2.0)})
        assert_close(backend.read(new["zero_d"]), 0.9, 1e-8)
        assert tuple(new["zero_d"].shape) == ()
        assert all(new[name] is model[name] for name in model if name != "zero_d")
        model = {**model, "zero_d": backend.array(1.0)}


def test_a_numpy_scalar_is_a_gradient_of_a_parameter_without_axes(numpy_backend: Backend) -> None:
    _, model = train(op.Descent(0.5), {"s": np.array(1.0)}, {"s": np.float64(2.0)}, in_place=True)
    assert model["s"] == 0.0


def test_extended_precision_stays_extended() -> None:
    dtype = np.dtype(np.longdouble)
    third = np.ones(2, dtype) / 3
    state, model = train(op.Chain(op.ClipGlobalNorm(10.0), op.Adam(0.1)), {"w": third}, {"w": third})
    assert model["w"].dtype == leaf(state, "w").slots["nu"].dtype == dtype
    assert abs(leaf(state, "w").slots["nu"][0] - third[0] ** 2 / 1000) < 1e-17


def test_a_gradient_of_another_shape_is_never_broadcast(backend: Backend) -> None:
    for shape, other in (((1,), (3,)), ((3,), (1,)), ((), (1,)), ((1,), ()), ((2, 3), (3, 2)), ((2, 3), (6,))):
        model = {"layer": {"w": backend.array(np.ones(shape))}}
        state = op.setup(op.Descent(0.1), model)
        for step in (op.update, op.update_):
            with pytest.raises(ShapeError, match=r"layer\.w: the gradient has shape"):
                step(state, model, {"layer": {"w": backend.array(np.ones(other))}})
        assert (backend.read(model["layer"]["w"]) == 1).all()


# Hyperparameters ------------------------------------------------------------------------------------------------------


def test_a_range_error_names_the_rule_the_value_and_the_range() -> None:
    with pytest.raises(HyperparameterError, match=r"Adam\(lr=-1\.0\): lr must lie in \[0, inf\)"):
        op.Adam(lr=-1.0)
    with pytest.raises(HyperparameterError, match=r"ClipGrad\(clip_value=0\.0\).*inf\]"):
        op.ClipGrad(0.0)
    assert op.ClipGrad(float("inf")).clip_value == float("inf")


def test_an_array_without_axes_may_be_a_hyperparameter(numpy_backend: Backend) -> None:
    rule = op.Descent(np.array(0.5))
    _, model = train({"**": rule}, {"w": np.ones(1, np.float32)}, {"w": np.ones(1)})
    assert model["w"].tolist() == [0.5]
    assert model["w"].dtype == np.float32


def test_a_rule_is_adjusted_by_the_names_it_has() -> None:
    assert op.Adam().adjusted(lr=0.5) == op.Adam(0.5)
    for rule in (op.Adam(), op.Chain(op.ClipGrad(), op.Adam())):
        with pytest.raises(HyperparameterError, match='has no hyperparameter "lrr"; did you mean "lr"'):
            rule.adjusted(lrr=0.5)
    with pytest.raises(HyperparameterError, match=r"use state\.replace"):
        op.SGD(momentum=0.9).adjusted(nesterov=True)


def test_betas_may_be_a_list() -> None:
    assert op.Adam(betas=[0.8, 0.9]) == op.Adam(betas=(0.8, 0.9))  # type: ignore[arg-type]


# Rules of a user's own ------------------------------------------------------------------------------------------------


def test_a_measuring_rule_amid_a_chain_takes_both_its_sums(setting: tuple[Backend, str]) -> None:
    backend, dtype = setting
    rng = np.random.default_rng(5)
    p, g = random_array(rng, (40, 30), dtype), random_array(rng, (40, 30), dtype)
    start = {"x": backend.make(p), "y": backend.array(np.zeros(2), dtype)}
    grads = {"x": backend.make(g), "y": backend.array(np.ones(2), dtype)}
    state, model = train(op.Chain(op.Momentum(0.5), Trust(0.1), op.Descent(2.0)), start, grads)
    ratio = np.linalg.norm(wide(p)) / np.linalg.norm(0.5 * wide(g))
    assert_close(backend.read(model["x"]), wide(p) - 2.0 * 0.1 * ratio * 0.5 * wide(g), 8 * EPS[dtype])
    # A parameter of length 0 takes no step by a ratio to its length.
    assert not wide(backend.read(model["y"])).any()
    assert list(leaf(state, "x").slots) == ["momentum.velocity", "trust.velocity"]


@op.rule
class Normalised(op.Rule):
    """On whole arrays: the gradient over its largest element."""

    tiny: op.Hyper = 1e-12

    slots = {"largest": op.Slot(real=True, shape=lambda shape: ())}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"tiny": self.tiny}

    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        (largest,) = slots
        largest = xp.maximum(largest, xp._library.max(xp.abs(g)))
        return g / (largest + h.tiny), (largest,)


def test_a_rule_on_whole_arrays_stands_among_others(backend: Backend) -> None:
    model = {"x": backend.array([[0.0, 0.0]]), "y": backend.array([0.0])}
    rule = op.Chain(op.ClipGlobalNorm(5.0), Normalised(), op.Momentum(0.5))
    grads = {"x": backend.array([[6.0, 8.0]]), "y": backend.array([0.0])}
    for in_place in (False, True):
        fresh = {name: backend.make(backend.read(array).copy()) for name, array in model.items()}
        state, new = train(rule, fresh, grads, in_place=in_place)
        assert_close(backend.read(new["x"]), [[-0.375, -0.5]], 1e-12)
        assert_close(backend.read(leaf(state, "x").slots["largest"]), 4.0, 1e-15)
        assert tuple(leaf(state, "x").slots["largest"].shape) == ()


@op.rule
class Counted(op.Rule):
    """Keeps one number for the whole tree: the sum of all gradients so far, which scales the step."""

    memory = {"seen": 0.0, "calls": 0}
    scope = "tree"

    def scalars(self, step: Any, seen: Any, calls: Any) -> dict[str, Any]:
        return {"factor": 1.0 / (1 + calls), "before": seen}

    def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return xp.real(g)

    def measured(xp: Any, h: Any, total: Any) -> dict[str, Any]:
        return {"total": total}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return h.factor * g

    def remember(h: Any, seen: Any, calls: Any) -> dict[str, Any]:
        return {"seen": seen + h.total, "calls": calls + 1}


def test_a_rule_may_remember_numbers_for_the_whole_tree(backend: Backend) -> None:
    model = {"x": backend.array([0.0]), "y": backend.array([0.0, 0.0])}
    grads = {"x": backend.array([1.0]), "y": backend.array([2.0, 4.0])}
    state, model = train(op.Chain(Counted(), op.Descent(1.0)), model, grads, grads, {"x": backend.array([3.0])})
    assert state.memory == {"counted": {"seen": 17.0, "calls": 3}}
    assert_close(backend.read(model["x"]), [-1 - 0.5 - 1], 1e-15)
    assert_close(backend.read(model["y"]), [-3, -6], 1e-15)


@op.rule
class Uncompilable(op.Rule):
    """A kernel that Numba does not know how to compile, for it calls a function of NumPy's that Numba lacks."""

    lr: op.Hyper = 0.5

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return h.lr * np.apply_along_axis(lambda each: each, 0, g)


def test_a_kernel_that_numba_cannot_compile_runs_in_numpy_with_a_warning() -> None:
    from optimisers.backends import loops

    loops.loop.cache_clear()
    model = {"x": np.array([1.0, 2.0])}
    state = op.setup(op.Chain(op.ClipGlobalNorm(5.0), Uncompilable(), op.ClipNorm(100.0)), model)
    with pytest.warns(OptimiserWarning, match="Numba cannot compile the kernels of clipglobalnorm, uncompilable"):
        state, model = op.update(state, model, {"x": np.array([6.0, 8.0])})
    assert_close(model["x"], [-0.5, 0.0], 1e-15)
    # Once a process is enough.
    for step in (op.update, op.update_):
        state, model = step(state, model, {"x": np.array([0.0, 2.0])})
    assert_close(model["x"], [-0.5, -2.0], 1e-15)


@op.rule
class Twins(op.Rule):
    """Returns one array for both its slots."""

    slots = {"one": op.LIKE, "two": op.LIKE}

    def kernel(xp: Any, g: Any, p: Any, h: Any, one: Any, two: Any) -> Any:
        both = one + g
        return g, both, both


def test_slots_stay_apart_even_where_a_kernel_returns_one_array_for_two(backend: Backend) -> None:
    model = {"x": backend.array([1.0, 2.0])}
    state, _ = train(Twins(), model, {"x": backend.array([1.0, 1.0])})
    slots = leaf(state, "x").slots
    assert not np.shares_memory(backend.read(slots["one"]), backend.read(slots["two"]))


@op.rule
class Refusing(op.Rule):
    """Trains matrices alone."""

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        return None if len(shape) == 2 else f"it has {len(shape)} axes, not 2"


def test_a_rule_may_refuse_a_parameter() -> None:
    model = {"layer": {"w": np.ones((2, 2)), "b": np.ones(2)}}
    with pytest.raises(StateError, match=r"layer\.b: Refusing cannot train it: it has 1 axes, not 2"):
        op.setup(op.Chain(op.ClipGrad(), Refusing()), model)
    state = op.setup({"**.w": Refusing(), "**": op.Descent()}, model)
    with pytest.raises(StateError, match=r"layer\.b: Refusing cannot train"):
        state.replace("layer", Refusing())


def test_a_rule_needs_arithmetic() -> None:
    with pytest.raises(HyperparameterError, match="neither a kernel nor an apply"):

        @op.rule
        class Empty(op.Rule):
            pass

    with pytest.raises(HyperparameterError, match="not a subclass"):
        op.rule(int)  # type: ignore[type-var]


def _with_default(factor: float) -> op.Rule:
    @op.rule
    class Scaled(op.Rule):
        def kernel(xp: Any, g: Any, p: Any, h: Any, factor: float = factor) -> Any:
            return factor * g

    return Scaled()


def _with_cell(factor: float) -> op.Rule:
    @op.rule
    class Scaled(op.Rule):
        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return factor * g

    return Scaled()


def _with_scalars(**scalars: float) -> op.Rule:
    @op.rule
    class Scaled(op.Rule):
        def scalars(self, step: Any) -> dict[str, Any]:
            return scalars

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return h.a * g + h.b

    return Scaled()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_with_default(2.0), _with_default(3.0)),
        (_with_cell(2.0), _with_cell(3.0)),
        (_with_scalars(a=2.0, b=0.0), _with_scalars(b=0.0, a=3.0)),
    ],
    ids=["defaults", "closures", "scalars"],
)
def test_rules_that_look_alike_do_not_share_compiled_code(first: op.Rule, second: op.Rule) -> None:
    for rule, expected in ((first, -2.0), (second, -3.0), (first, -2.0)):
        _, model = train(rule, {"x": np.zeros(1)}, {"x": np.ones(1)})
        assert model["x"].tolist() == [expected]


def test_a_kernel_may_use_every_function_of_the_namespace(backend: Backend) -> None:
    @op.rule
    class Everything(op.Rule):
        def scalars(self, step: Any) -> dict[str, Any]:
            return {"one": 1.0, "low": -0.5, "high": 0.5}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            a = xp.exp(xp.log(xp.sqrt(xp.abs2(g)))) + xp.tanh(p) * xp.sign(g)
            b = xp.where(xp.isfinite(a), xp.abs(a), h.one) + xp.maximum(xp.real(g), h.low) - xp.minimum(xp.imag(p), h.high)
            return xp.clip(b, h.low, h.high) + xp.conj(g)

    p, g = np.array([0.3, -1.2, 2.0]), np.array([0.5, -0.2, -3.0])
    a = np.abs(g) + np.tanh(p) * np.sign(g)
    b = np.abs(a) + np.maximum(g, -0.5)
    _, model = train(Everything(), {"x": backend.make(p)}, {"x": backend.make(g)})
    assert_close(backend.read(model["x"]), p - (np.clip(b, -0.5, 0.5) + g), 1e-14)


def test_slots_may_have_shapes_of_their_own(backend: Backend) -> None:
    model = {"x": backend.array(np.zeros((2, 3)), "float32")}
    state = op.setup(op.Chain(Normalised()), model, state_dtype="float64")
    assert dtype_of(leaf(state, "x").slots["largest"]) == "float64"
    state, model = op.update(state, model, {"x": backend.array(np.full((2, 3), 4.0), "float32")})
    assert dtype_of(leaf(state, "x").slots["largest"]) == "float64"
    assert_close(backend.read(model["x"]), np.full((2, 3), -1.0), 1e-6)
    assert leaf(state, "x").nbytes == 8


def test_numbers_of_a_rule_do_not_depend_on_numpy_dtype_names() -> None:
    # An array of the other byte order is of the same dtype as far as a rule can tell.
    swapped = np.array([1.0, 2.0], ">f4")
    _, model = train(op.Descent(0.5), {"x": swapped}, {"x": np.array([2.0, 2.0], ">f8")})
    assert model["x"].tolist() == [0.0, 1.0]
    assert numpy_dtype("float32").itemsize == model["x"].itemsize


def test_a_subclass_of_a_rule_may_have_another_kernel_with_the_same_slots() -> None:
    @op.rule
    class SignAdam(op.Adam):
        def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any, nu: Any) -> Any:
            mu = mu + h.w1 * (g - mu)
            return h.lr * xp.sign(mu), mu, nu

    model = np.ones(2)
    state, new = op.update(op.setup(SignAdam(0.5), model), model, np.array([3.0, -2.0]))
    assert new.tolist() == [0.5, 1.5]
    assert list(state[""].slots) == ["mu", "nu"]


def test_a_kernel_may_take_all_its_slots_together() -> None:
    @op.rule
    class Any1(op.Rule):
        lr: op.Hyper = 0.5
        slots = {"mu": op.LIKE}

        def scalars(self, step: Any) -> Any:
            return {"lr": self.lr}

        def kernel(*given: Any) -> Any:
            _, g, _, h, mu = given
            return h.lr * g, mu + g

    with op.reference_only():
        _, new = op.update(op.setup(Any1(), np.ones(1)), np.ones(1), np.ones(1))
    assert new.tolist() == [0.5]


def test_a_rule_that_measures_says_what_follows() -> None:
    message = r"Half measures, so it says what follows from the sums: measured\(xp, h, \*sums\)"
    with pytest.raises(HyperparameterError, match=message):

        @op.rule
        class Half(op.Rule):
            scope = "leaf"

            def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
                return g

            def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
                return g
