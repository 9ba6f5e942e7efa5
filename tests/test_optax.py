"""Optax's transformations as rules, and rules as Optax's transformations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optimisers as op
from optimisers import errors
from optimisers.interop.optax import as_optax, from_optax
from tests.conftest import RULES, branch, leaf

ALONE: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(0.01),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01, momentum=0.9, centered=True),
    "adagrad, which does not start at zero": lambda: optax.adagrad(0.1),
    "a schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(0.1), 3),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "factored moments": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "another rule for matrices": lambda: optax.contrib.muon(0.1),
}
TOGETHER: dict[str, Callable[[], Any]] = {
    "the norm of all": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "noise from one key": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1)),
    "skipped steps": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "a distance": lambda: optax.contrib.prodigy(1.0),
}


def _model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(4, 5)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=3), jnp.float32),
        "z": {"q": jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)},
    }


def _grads(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), _model())


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_a_transformation_takes_the_same_steps_as_a_rule(name: str) -> None:
    transformation = {**ALONE, **TOGETHER}[name]()
    params, model = _model(), _model()
    state, theirs = op.setup(from_optax(transformation), model), transformation.init(params)
    for step in range(7):
        state, model = op.update(state, model, _grads(step))
        updates, theirs = transformation.update(_grads(step), theirs, params)
        params = optax.apply_updates(params, updates)
    for mine, its in zip(jax.tree.leaves(model), jax.tree.leaves(params), strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_allclose(mine, its, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_what_speaks_of_one_parameter_is_told_from_what_speaks_of_all(name: str) -> None:
    assert from_optax({**ALONE, **TOGETHER}[name]()).over_tree == (name in TOGETHER)


def test_a_parameter_that_thaws_late_has_a_count_of_its_own() -> None:
    model = _model()
    state = op.setup(from_optax(optax.adam(0.1)), model).freeze("y")
    for step in range(3):
        state, model = op.update(state, model, _grads(step))
    assert (model["y"] == _model()["y"]).all()
    ones = jax.tree.map(jnp.ones_like, model)
    state, after = op.update(state.thaw(), model, ones)
    assert {str(path): int(leaf(state, path).slots["count"]) for path in state} == {"x": 4, "y": 1, "z.q": 4}
    np.testing.assert_allclose(after["y"], model["y"] - 0.1, rtol=1e-5)


def test_frozen_parameters_are_no_part_of_the_tree() -> None:
    model = {"a": jnp.asarray([3.0, 4.0]), "b": jnp.asarray([0.0, 12.0])}
    state = op.setup(from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))), model).freeze("b")
    _, after = op.update(state, model, model)
    np.testing.assert_allclose(after["a"], [2.4, 3.2], rtol=1e-6)
    assert after["b"] is model["b"]


def test_the_state_of_a_tree_goes_on_when_a_parameter_freezes() -> None:
    model = _model()
    state = op.setup(from_optax(optax.apply_if_finite(optax.adam(0.1), 3)), model)
    state, model = op.update(state, model, _grads(0))
    state, model = op.update(state.freeze("x"), model, _grads(1))
    before = model
    state, model = op.update(state.thaw(), model, {**_grads(2), "y": jnp.full(3, jnp.nan)})
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(before), strict=True))
    assert set(leaf(state, "x").slots) == {"mu", "nu"}


def test_a_tied_parameter_is_one() -> None:
    w = jnp.ones(2)
    state, model = op.update(op.setup(from_optax(optax.sgd(0.1)), [w, w]), [w, w], [w, w * 2])
    np.testing.assert_allclose(model[0], 0.7, rtol=1e-6)
    assert model[0] is model[1]
    assert len(state) == 1


def test_it_stands_in_a_chain_and_beside_other_rules() -> None:
    model = _model()
    rules = {"x": op.Chain(op.ClipNorm(0.1), from_optax(optax.adam(0.1))), "**": op.Descent(0.1)}
    state, after = op.update(op.setup(rules, model), model, _grads(0))
    np.testing.assert_allclose(after["y"], model["y"] - 0.1 * _grads(0)["y"], rtol=1e-6)
    assert leaf(state, "x").slots.keys() == {"count", "mu", "nu"}
    assert repr(leaf(state, "x").rule).endswith("from_optax(chain))")


def test_numpy_models_and_half_precision() -> None:
    model = {"w": np.ones(3, np.float32)}
    state, after = op.update(op.setup(from_optax(optax.adam(0.1)), model), model, model)
    assert isinstance(after["w"], np.ndarray)
    np.testing.assert_allclose(after["w"], 0.9, rtol=1e-6)
    half = {"w": jnp.ones(3, jnp.bfloat16)}
    state, after = op.update(op.setup(from_optax(optax.adam(0.1)), half), half, half)
    assert (after["w"].dtype, leaf(state, "w").slots["mu"].dtype) == (jnp.bfloat16, jnp.float32)


def test_a_branch_and_surgery_keep_the_slots() -> None:
    model = _model()
    state, model = op.update(op.setup(from_optax(optax.adam(0.1)), model), model, _grads(0))
    part = branch(state, "z")
    assert part["q"].slots["mu"] is leaf(state, "z.q").slots["mu"]  # type: ignore[union-attr]
    assert int(leaf(state.reset("y"), "x").slots["count"]) == 1
    state, _ = op.update(state.reset("y"), model, _grads(1))
    assert [int(leaf(state, name).slots["count"]) for name in ("x", "y")] == [2, 1]


def test_what_cannot_be_a_rule_is_refused() -> None:
    with pytest.raises(errors.HyperparameterError, match="takes an optax.GradientTransformation, not float".replace(".", r"\.")):
        from_optax(0.1)
    with pytest.raises(errors.HyperparameterError, match="cannot be called with gradients, state and parameters alone"):
        from_optax(optax.contrib.reduce_on_plateau())
    by_name = optax.partition(
        {"one": optax.adam(0.1), "two": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))},
        lambda params: {name: "one" if name == "x" else "two" for name in params},
    )
    with pytest.raises(errors.StateError, match="give setup a mapping"):
        op.update(op.setup(from_optax(by_name), _model()), _model(), _grads(0))


# The other way round --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "Chain-norm", "LAMB", "Prodigy", "AccumGrad"])
def test_a_rule_takes_the_same_steps_as_a_transformation(name: str) -> None:
    transformation = as_optax(RULES[name])
    params, model = _model(), _model()
    state, theirs = op.setup(RULES[name], model), transformation.init(params)
    for step in range(3):
        state, model = op.update(state, model, _grads(step))
        updates, theirs = transformation.update(_grads(step), theirs, params)
        params = optax.apply_updates(params, updates)
    for mine, its in zip(jax.tree.leaves(model), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6)
    assert isinstance(theirs, op.State)
    assert [leaf(theirs, path).step for path in theirs] == [leaf(state, path).step for path in state]


def test_a_transformation_takes_what_setup_takes() -> None:
    transformation = as_optax({"x": op.Descent(1.0), "**": op.Descent(0.0)})
    updates, _ = transformation.update(_grads(0), transformation.init(_model()), _model())
    np.testing.assert_allclose(updates["x"], -_grads(0)["x"], rtol=1e-5)  # type: ignore[index]
    assert not np.any(updates["y"])  # type: ignore[index]


def test_a_transformation_without_its_parameters_is_an_error() -> None:
    transformation = as_optax(op.Adam())
    with pytest.raises(errors.ModelError, match="update"):
        transformation.update(_grads(0), transformation.init(_model()))


def test_a_state_that_optax_keeps_is_not_written_to_a_file(tmp_path: Path) -> None:
    params = {"w": jnp.ones(3)}
    state, _ = op.update(op.setup(from_optax(optax.adam(0.1)), params), params, params)
    with pytest.raises(errors.StateError, match=r"keeps a state of Optax, which a file of this library cannot hold; .* with Orbax"):
        op.save(tmp_path / "run", state)
    assert not list(tmp_path.iterdir())
