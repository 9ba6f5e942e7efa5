"""Steps inside JAX's transformations."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optimisers as op
from optimisers.interop.optax import as_optax, from_optax
from optimisers.schedules import Cosine, warmup
from tests.conftest import RULES, leaf, trains

SHAPES = {"w": (3, 4), "b": (4,), "s": ()}


def _model(dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def _grads(step: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(step + 1)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


class Counted:
    """`update` under `jit`, and how often it was traced."""

    def __init__(self) -> None:
        self.traces = 0
        self.step = jax.jit(self._step)

    def _step(self, state: Any, model: Any, grads: Any) -> Any:
        self.traces += 1
        return op.update(state, model, grads)


def _types(tree: Any) -> list[Any]:
    return [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_compiled_step_is_the_step(rule: op.Rule) -> None:
    counted = Counted()
    model = eager = _model()
    state, other = op.setup(rule, model), op.setup(rule, eager)
    before = _types((state, model)), jax.tree.structure((state, model))
    for step in range(5):
        state, model = counted.step(state, model, _grads(step))
        other, eager = op.update(other, eager, _grads(step))
        # The counts of a model that steps as a whole are one, so nothing changes but numbers.
        assert (_types((state, model)), jax.tree.structure((state, model))) == before
    assert counted.traces == 1
    assert int(state.step) == int(other.step)
    for name, array in eager.items():
        np.testing.assert_allclose(model[name], array, rtol=3e-5, atol=3e-6)


def test_half_precision_keeps_its_dtypes_in_a_compiled_step() -> None:
    rule = op.Chain(op.MixedPrecision(), op.StochasticRounding(), op.Adam(0.1))
    model = _model("bfloat16")
    state = op.setup(rule, model)
    before = _types((state, model))
    state, model = jax.jit(op.update)(state, model, _grads(0, "bfloat16"))
    assert _types((state, model)) == before


def test_hyperparameters_and_schedules_do_not_compile_anew() -> None:
    counted = Counted()
    model = _model()
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(warmup(Cosine(0.1, 10), 2))), model)
    for step in range(4):
        state, model = counted.step(state, model, _grads(step))
    assert counted.traces == 1
    state = op.setup(op.AdamW(0.1), _model())
    for step in range(6):
        state, model = counted.step(state, model, _grads(step))
        state = state.adjust(lr=0.1 / (step + 1), betas=(0.5, 0.6))
    assert counted.traces == 2


def test_freezing_and_thawing_compile_once_each() -> None:
    counted = Counted()
    model = _model()
    state = op.setup(op.Adam(0.1), model)
    for _ in range(2):
        for step in range(2):
            state, model = counted.step(state, model, _grads(step))
        before = np.asarray(model["w"])
        state = state.freeze("w")
        for step in range(2):
            state, model = counted.step(state, model, _grads(step))
        assert (np.asarray(model["w"]) == before).all()
        state = state.thaw()
    state, model = counted.step(state, model, _grads(0))
    # With all, without w, and with all again, where w has a count of its own.
    assert counted.traces == 3
    assert {str(path): int(leaf(state, path).step) for path in state} == {"w": 5, "b": 9, "s": 9}


def test_untying_compiles_once() -> None:
    w = jnp.ones(3)
    model, counted = {"embed": w, "head": w}, Counted()
    state = op.setup(op.Adam(0.1), model)
    grads = {"embed": jnp.ones(3), "head": 2 * jnp.ones(3)}
    state, model = counted.step(state, model, grads)
    state = state.untie("head")
    assert len(state.rules) == 1
    for _ in range(3):
        state, model = counted.step(state, model, grads)
    assert counted.traces == 2
    assert (model["embed"] != model["head"]).all()
    state, _ = op.update(state, model, grads)
    assert int(leaf(state, "head").step) == 5
    assert not state.detached


def test_the_frozen_part_is_gone_from_the_program() -> None:
    model = {"small": jnp.ones((10, 10)), "large": jnp.ones((100, 100))}
    state = op.setup(op.Adam(0.1), model)

    def flops(state: Any) -> float:
        cost = jax.jit(op.update).lower(state, model, model).compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    assert flops(state.freeze("large")) < 0.02 * flops(state)


def test_one_array_at_two_places_stays_one() -> None:
    w = jnp.ones((2, 3))
    model = {"embed": w, "head": w}
    state = op.setup(op.Adam(0.1), model)
    step = jax.jit(op.update, donate_argnums=(0, 1))
    state, model = jax.jit(op.update)(state, model, {"embed": w, "head": None})
    for _ in range(100):
        state, model = step(state, model, {"embed": w * 0.5, "head": w * 0.25})
        assert (model["embed"] == model["head"]).all()
    assert len(state) == 1
    assert int(leaf(state, "head").step) == 101


def test_a_frozen_parameter_moves_no_bytes_when_it_is_donated() -> None:
    def moved(state: op.State, model: Any) -> float:
        step = jax.jit(lambda *args: op.update(*args), donate_argnums=(0, 1))
        cost = step.lower(state, model, model).compile().cost_analysis()
        assert cost is not None
        return cost["bytes accessed"]

    small, both = {"small": jnp.ones(100)}, {"small": jnp.ones(100), "large": jnp.ones(9900)}
    alone = moved(op.setup(op.Adam(0.1), small), small)
    # Beside the other one's own count.
    assert moved(op.setup(op.Adam(0.1), both).freeze("large"), both) < alone + 100


def test_model_and_state_can_be_donated() -> None:
    model = _model()
    state = op.setup(op.Chain(op.Adam(0.1), op.Average()), model)
    step = jax.jit(op.update, donate_argnums=(0, 1))
    for k in range(3):
        state, model = step(state, model, _grads(k))
    assert int(state.step) == 3


def test_scan_takes_steps() -> None:
    model = _model()
    state = op.setup(op.AdamW(0.1), model)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(_grads(k) for k in range(4)))

    def body(carry: Any, grads: Any) -> Any:
        return op.update(carry[0], carry[1], grads), None

    # Counts that begin as numbers of Python are of the weak type that a step returns.
    (state, model), _ = jax.lax.scan(body, (state, model), stacked)
    other, eager = op.setup(op.AdamW(0.1), _model()), _model()
    for k in range(4):
        other, eager = op.update(other, eager, _grads(k))
    np.testing.assert_allclose(model["w"], eager["w"], rtol=1e-5)


def test_an_ensemble_is_trained_with_trees_of_axes_and_by_equinox() -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), _model())
    make = lambda model: op.setup(op.AdamW(0.1), model)  # noqa: E731
    axes = jax.tree.map(lambda _: 0, make(_model()))
    state = jax.vmap(make, out_axes=axes)(many)
    _, new = jax.vmap(op.update, in_axes=(axes, 0, 0))(state, many, many)
    _, other = eqx.filter_vmap(op.update)(eqx.filter_vmap(make)(many), many, many)
    for name, array in new.items():
        np.testing.assert_allclose(other[name], array, rtol=1e-6)
    with pytest.raises(op.errors.HyperparameterError, match="the numbers of an ensemble; adjust them where they are numbers"):
        state.adjust(lr=0.1)
    swept = jax.vmap(lambda state, lr: state.adjust(lr=lr))(state, jnp.asarray([0.0, 0.1]))
    _, new = jax.vmap(op.update)(swept, many, many)
    assert [bool((new["w"][at] == many["w"][at]).all()) for at in (0, 1)] == [True, False]


@pytest.mark.parametrize("first", [op.AccumGrad(1), op.ClipGlobalNorm(100.0)], ids=repr)
def test_noise_and_arithmetic_are_the_same_whatever_came_before(first: op.Rule) -> None:
    model = _model()
    state = op.setup(op.Chain(first, op.AddNoise(0.1), op.Descent(0.1)), model)
    with jax.enable_x64(False):
        _, narrow = op.update(state, model, _grads(0))
    for step in (op.update, jax.jit(op.update)):
        _, new = step(state, model, _grads(0))
        for name, array in narrow.items():
            np.testing.assert_allclose(new[name], array, rtol=1e-5, atol=1e-6)


def test_numpy_arrays_that_jit_has_converted_are_an_error_that_says_so() -> None:
    model = {"w": np.ones(3, np.float32)}
    with pytest.raises(op.errors.ModelError, match=r"w: the state was made for a NumPy array, and jax\.jit makes one of JAX of it"):
        jax.jit(lambda model: op.update(op.setup(op.Adam(), {"w": np.ones(3, np.float32)}), model, model))(model)
    mixed = {"n": np.ones(3), "j": jnp.ones(3)}
    with pytest.raises(op.errors.GradientError, match='"j" is an array of jax, "n" one of numpy'):
        op.value_and_grad(sum, op.setup(op.Adam(), mixed))


def test_steps_can_be_checkpointed_and_differentiated_through() -> None:
    model = _model()

    def after(lr: Any, *, remat: bool) -> Any:
        state = op.setup(op.AdamW(0.1), model).adjust(lr=lr)
        new = model
        for k in range(2):
            state, new = (jax.checkpoint(op.update) if remat else op.update)(state, new, _grads(k))
        return sum((leaf**2).sum() for leaf in new.values())

    plain, saved = (float(jax.grad(lambda lr, remat=remat: after(lr, remat=remat))(0.1)) for remat in (False, True))
    assert plain == pytest.approx(saved, rel=1e-6)
    slope = (after(0.1 + 1e-3, remat=False) - after(0.1 - 1e-3, remat=False)) / 2e-3
    assert plain == pytest.approx(float(slope), rel=1e-2)


def test_an_ensemble_is_trained_under_vmap() -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), _model())
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1))
    state = jax.vmap(lambda model: op.setup(rule, model))(many)
    for k in range(2):
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), _grads(k))
        state, many = jax.vmap(op.update)(state, many, both)
    for at, factor in enumerate((1.0, 2.0)):
        model = jax.tree.map(lambda leaf, factor=factor: leaf * factor, _model())
        alone = op.setup(rule, model)
        for k in range(2):
            alone, model = op.update(alone, model, jax.tree.map(lambda leaf, factor=factor: leaf * factor, _grads(k)))
        for name, array in model.items():
            np.testing.assert_allclose(many[name][at], array, rtol=2e-5, atol=1e-6)


def test_setup_is_traced_and_evaluated_without_arrays() -> None:
    model = _model()
    shapes = jax.eval_shape(lambda model: op.setup(op.Adam(0.1), model), model)
    assert isinstance(shapes, op.State)
    made = jax.jit(lambda model: op.setup(op.Adam(0.1), model))(model)
    assert jax.tree.structure(made) == jax.tree.structure(op.setup(op.Adam(0.1), model))
    assert repr(made) == "State(step=0, 3 parameters, Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08))"
    assert jax.tree.map(lambda leaf: leaf.shape, shapes.slots) == jax.tree.map(lambda leaf: leaf.shape, made.slots)


def test_the_leaves_of_a_state_have_names() -> None:
    model = {"layers": [{"weight": jnp.ones(2)}]}
    state = op.setup(op.Chain(op.SkipNonFinite(), op.AdamW()), model)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert names == [
        ".layers.0.weight.mu",
        ".layers.0.weight.nu",
        ".counters[0]",
        ".step",
        ".rules[0].members[1].lr",
        ".rules[0].members[1].betas[0]",
        ".rules[0].members[1].betas[1]",
        ".rules[0].members[1].eps",
        ".rules[0].members[1].weight_decay",
        ".memory.skipnonfinite.skipped",
    ]


@pytest.mark.parametrize("mark", [True, 0, 1.5, "a word", jax.sharding.PartitionSpec("data")], ids=repr)
def test_anything_may_stand_for_the_leaves_of_a_state(mark: Any) -> None:
    rules = {"w": op.Chain(op.SkipNonFinite(), op.SGD(0.1, momentum=0.9)), "**": op.Chain(op.SkipNonFinite(), op.AdamW())}
    state = op.setup(rules, _model())
    marks = jax.tree.map(lambda leaf: mark, state)
    assert jax.tree.structure(marks) == jax.tree.structure(state)
    assert jax.tree.leaves(marks) == [mark] * len(jax.tree.leaves(state))
    none = jax.tree.map(lambda leaf: None, state)
    back = jax.tree.map(lambda _, leaf: leaf, none, state, is_leaf=lambda leaf: leaf is None)
    assert back == state
    assert "…" not in repr(marks)


def test_a_gate_closes_inside_a_program() -> None:
    counted = Counted()
    model = _model()
    state = op.setup(op.Chain(op.SkipNonFinite(), op.AccumGrad(2), op.Adam(0.1)), model)
    broken = {**_grads(0), "b": jnp.full(4, jnp.nan, "float32")}
    for k, grads in enumerate((_grads(0), broken, _grads(1), _grads(2))):
        state, model = counted.step(state, model, grads)
        moved = any((model[name] != _model()[name]).any() for name in model)
        assert moved == (k >= 2)
    assert counted.traces == 1
    assert (int(state.step), int(leaf(state, "w").step)) == (1, 1)
    assert {name: {each: int(value) for each, value in own.items()} for name, own in state.memory.items()} == {
        "skipnonfinite": {"skipped": 1},
        "accumgrad": {"filled": 1},
    }


def test_parameters_behind_a_gate_and_others_have_counts_of_their_own() -> None:
    model = _model()
    rules = {"w": op.Chain(op.AccumGrad(2), op.Adam(0.1)), "**": op.Adam(0.1)}
    state = op.setup(rules, model)
    for k in range(4):
        state, model = jax.jit(op.update)(state, model, _grads(k))
    assert {str(path): int(leaf(state, path).step) for path in state} == {"w": 2, "b": 4, "s": 4}
    assert int(state.step) == 4


def test_frozen_rows_stay_in_a_compiled_step() -> None:
    model = _model()
    state = op.setup(op.AdamW(0.1), model).freeze("w", rows=[1])
    _, after = jax.jit(op.update)(state, model, _grads(0))
    assert (after["w"][1] == model["w"][1]).all()
    assert (after["w"][0] != model["w"][0]).all()


def test_a_state_from_a_program_is_a_state() -> None:
    model = _model()
    state, model = jax.jit(op.update)(op.setup(op.AdamW(0.1), model), model, _grads(0))
    assert repr(state) == "State(step=1, 3 parameters, AdamW(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01))"
    assert "w" in str(op.summary(state))
    for same in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert same == state
    after = state.freeze("w").adjust("b", lr=0.2).thaw().reset("s")
    assert {str(path): int(leaf(after, path).step) for path in after} == {"w": 1, "b": 1, "s": 0}
    assert after.replace(op.Adam(0.1))["w"].slots["mu"] is state["w"].slots["mu"]


def test_every_state_from_a_program_can_be_changed_and_kept(rule: op.Rule) -> None:
    model = _model()
    state, model = jax.jit(op.update)(op.setup(rule, model), model, _grads(0))
    for other in (state.freeze("w").thaw(), state.reset("w"), pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        op.update(other, model, _grads(1))
        jax.jit(op.update)(other, model, _grads(1))


def test_gates_that_differ_between_groups_close_as_they_do_outside() -> None:
    counted = Counted()
    rules = {
        "w": op.Chain(op.SkipNonFinite(), op.AccumGrad(2), op.Descent()),
        "**": op.Chain(op.AccumGrad(2), op.Descent()),
    }
    model = eager = _model()
    state, other = op.setup(rules, model), op.setup(rules, eager)
    for k in range(5):
        grads = {**_grads(k), "w": jnp.full((3, 4), jnp.nan, "float32")} if k == 1 else _grads(k)
        state, model = counted.step(state, model, grads)
        other, eager = op.update(other, eager, grads)
        assert int(state.memory["accumgrad"]["filled"]) == int(other.memory["accumgrad"]["filled"])
        assert [int(leaf(state, path).step) for path in state] == [int(leaf(other, path).step) for path in other]
    for name, array in eager.items():
        np.testing.assert_allclose(model[name], array, rtol=1e-5)


def test_the_models_to_evaluate_with_come_out_of_programs() -> None:
    model = _model()
    state, model = op.update(op.setup(op.Chain(op.Adam(0.1), op.Average(0.5)), model), model, _grads(0))
    for name, array in op.averaged(state, model).items():
        np.testing.assert_allclose(jax.jit(op.averaged)(state, model)[name], array, rtol=1e-6)
    model = _model()
    state = op.setup(op.ScheduleFree(0.1), model)
    for k in range(3):
        state, model = jax.jit(op.update)(state, model, _grads(k))
    evaluated, best = jax.jit(op.evaluation)(state, model)
    with pytest.raises(op.errors.StateError, match="holds its evaluation weights"):
        jax.jit(op.update)(evaluated, best, _grads(3))
    again, back = jax.jit(op.training)(evaluated, best)
    for name, array in model.items():
        np.testing.assert_allclose(back[name], array, rtol=1e-5, atol=1e-6)
    jax.jit(op.update)(again, back, _grads(3))


def test_the_state_of_an_ensemble_prints() -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 2]), _model())
    state = jax.vmap(lambda model: op.setup(op.Adam(0.1), model))(many)
    assert "Adam" in str(state)
    assert "w" in str(op.summary(state))
    assert state == copy.deepcopy(state)


def test_errors_come_while_tracing() -> None:
    model = _model()
    state = op.setup(op.Adam(0.1), model)
    with pytest.raises(op.errors.ShapeError, match="w: the gradient has shape"):
        jax.jit(op.update)(state, model, {**_grads(0), "w": jnp.ones((3, 1))})
    with pytest.raises(op.errors.ModelError, match="w: the state was made for shape"):
        jax.jit(op.update)(state, {**model, "w": jnp.ones((3, 1))}, _grads(0))
    with pytest.raises(op.errors.DtypeError, match="b: the gradient has dtype int"):
        jax.jit(op.update)(state, model, {**_grads(0), "b": jnp.ones(4, int)})
    with pytest.raises(op.errors.ModelError, match="b: the state has a parameter here, but the model holds None"):
        jax.jit(op.update)(state, {**model, "b": None}, _grads(0))


def test_float0_gradients_are_errors() -> None:
    model = _model()
    state = op.setup(op.Adam(), model)
    none = np.zeros((3, 4), jax.dtypes.float0)
    with pytest.raises(op.errors.DtypeError, match="w: the gradient is float0"):
        jax.jit(lambda state, model: op.update(state, model, {"w": none}))(state, model)
    # For whole numbers in the model they are what JAX gives.
    model = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jax.grad(lambda model: model["w"].sum(), allow_int=True)(model)
    _, after = op.update(op.setup(op.Descent(1.0), model), model, grads)
    assert after["w"].tolist() == [0, 0]


def test_none_in_the_place_of_a_parameter_is_an_error_without_gradient_too() -> None:
    model = _model()
    state = op.setup(op.Adam(), model)
    with pytest.raises(op.errors.ModelError, match="w: the state has a parameter here, but the model holds None"):
        jax.jit(op.update)(state, {**model, "w": None}, {"b": model["b"]})


def test_arrays_of_a_trace_that_is_over_are_an_error() -> None:
    kept: list[Any] = []
    jax.jit(lambda model: kept.append(model))(_model())
    with pytest.raises(op.errors.ModelError, match='"b" is a traced array that was kept'):
        op.setup(op.Adam(), kept[0])


def test_the_global_norm_is_taken_inside_a_program() -> None:
    model = _model()
    state = op.setup(op.Adam(), model).freeze("w")
    for norm in (op.global_norm, lambda grads: op.global_norm(grads, state)):
        assert float(jax.jit(norm)(_grads(0))) == pytest.approx(norm(_grads(0)), rel=1e-6)


# Optax ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RULES if trains(RULES[name], (3,), "float32")])
def test_a_rule_is_a_transformation_in_a_compiled_step(name: str) -> None:
    transformation = as_optax(RULES[name])
    params = _model()

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = transformation.init(params)
    other, eager = op.setup(RULES[name], _model()), _model()
    for k in range(3):
        params, state = step(params, state, _grads(k))
        other, eager = op.update(other, eager, _grads(k))
    for name, array in eager.items():
        np.testing.assert_allclose(params[name], array, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    "transformation",
    [optax.adamw(0.1), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), optax.apply_if_finite(optax.adam(0.1), 3)],
    ids=["adamw", "the norm of all", "skipped steps"],
)
def test_a_transformation_is_a_rule_in_a_compiled_step(transformation: Any) -> None:
    counted = Counted()
    model = eager = _model()
    state, other = op.setup(from_optax(transformation), model), op.setup(from_optax(transformation), eager)
    for k in range(3):
        state, model = counted.step(state, model, _grads(k))
        other, eager = op.update(other, eager, _grads(k))
    for name, array in eager.items():
        np.testing.assert_allclose(model[name], array, rtol=3e-5, atol=3e-6)
    # What belongs to the tree is made at the first step.
    assert counted.traces <= 2
