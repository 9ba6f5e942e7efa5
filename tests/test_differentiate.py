"""Gradients with respect to the live parameters, by JAX and PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimisers as op
from optimisers.errors import GradientError
from tests.conftest import BACKENDS, Backend, assert_close

ENGINES = {each.name: each for each in BACKENDS if each.name in ("jax", "torch")}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Backend:
    """JAX and PyTorch in turn."""
    return ENGINES[request.param]


def _model(engine: Backend) -> dict[str, Any]:
    w = engine.array([1.0, 2.0])
    return {"embed": w, "head": w, "trunk": [engine.array([3.0, 4.0])]}


def _loss(model: Any, x: float = 1.0) -> Any:
    return (model["embed"] * model["head"] * model["trunk"][0] * x).sum()


def test_live_parameters_get_gradients_and_tied_ones_their_sum(engine: Backend) -> None:
    model = _model(engine)
    state = op.setup(op.Descent(0.1), model)
    value, grads = op.value_and_grad(_loss, state)(model, x=2.0)
    assert float(value) == 2 * (3 + 16)
    assert {name: engine.read(array).tolist() for name, array in grads.items()} == {"embed": [12.0, 32.0], "trunk.0": [2.0, 8.0]}
    _, after = op.update(state, model, grads)
    assert_close(engine.read(after["head"]), [-0.2, -1.2], 1e-12)


def test_frozen_parameters_get_none(engine: Backend) -> None:
    model = _model(engine)
    state = op.setup(op.Descent(0.1), model)
    assert list(op.grad(_loss, state.freeze("trunk"))(model)) == ["embed"]
    assert list(op.grad(_loss, state.freeze("head"))(model)) == ["trunk.0"]


def test_a_masked_occurrence_gives_none(engine: Backend) -> None:
    model = _model(engine)
    state = op.setup(op.Descent(0.1), model).mask("head")
    assert engine.read(op.grad(_loss, state)(model)["embed"]).tolist() == [3.0, 8.0]


def test_what_the_loss_returns_beside_its_value_comes_back(engine: Backend) -> None:
    model = _model(engine)
    state = op.setup(op.Descent(0.1), model)
    (value, rest), grads = op.value_and_grad(lambda model: (_loss(model), "rest"), state, has_aux=True)(model)
    assert (float(value), rest, sorted(grads)) == (19.0, "rest", ["embed", "trunk.0"])
    grads, rest = op.grad(lambda model: (_loss(model), "rest"), state, has_aux=True)(model)
    assert (rest, sorted(grads)) == ("rest", ["embed", "trunk.0"])


def test_a_complex_gradient_points_uphill(engine: Backend) -> None:
    model = {"z": engine.array([1.0 + 2.0j, -3.0 + 0.5j], "complex128")}
    state = op.setup(op.Descent(0.25), model)
    for _ in range(3):
        grads = op.grad(lambda model: (abs(model["z"]) ** 2).sum(), state)(model)
        state, model = op.update(state, model, grads)
    assert_close(engine.read(model["z"]), np.array([1.0 + 2.0j, -3.0 + 0.5j]) / 8, 1e-12)


def test_a_model_that_nothing_can_differentiate_is_an_error() -> None:
    model = {"w": np.ones(2)}
    with pytest.raises(GradientError, match="numpy parameters that are live; take partition"):
        op.value_and_grad(_loss, op.setup(op.Adam(), model))
    jax_model = _model(ENGINES["jax"])
    with pytest.raises(GradientError, match="no parameters that are live"):
        op.grad(_loss, op.setup(op.Adam(), jax_model).freeze("**"))


def test_a_loss_that_depends_on_nothing_is_an_error_in_torch() -> None:
    model = _model(ENGINES["torch"])
    with pytest.raises(GradientError, match="does not depend on any live parameter"):
        op.grad(lambda other: _loss(model), op.setup(op.Adam(), model))(model)


def test_it_composes_with_transformations_of_jax() -> None:
    model = _model(ENGINES["jax"])
    state = op.setup(op.Adam(0.1), model)
    plain = op.grad(_loss, state)(model)
    for made in (
        jax.jit(lambda state, model: op.grad(_loss, state)(model))(state, model),
        jax.jit(lambda state, model: op.grad(jax.checkpoint(_loss), state)(model))(state, model),
        jax.tree.map(lambda leaf: leaf[1], jax.vmap(op.grad(_loss, state), in_axes=(None, 0))(model, jnp.ones(3))),
    ):
        assert {name: array.tolist() for name, array in made.items()} == {name: array.tolist() for name, array in plain.items()}


def test_frozen_parameters_cost_no_flops() -> None:
    layers = [jnp.full((64, 64), 0.1) for _ in range(8)]

    def loss(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return x.sum()

    state = op.setup(op.Descent(0.1), layers)

    def flops(state: op.State) -> float:
        step = jax.jit(lambda state, layers, x: op.update(state, layers, op.grad(loss, state)(layers, x)))
        cost = step.lower(state, layers, jnp.ones((64, 64))).compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    everything, last = flops(state), flops(state.freeze("**").thaw("7"))
    forward, product = 8, 3 * 8 - 1
    assert last < everything * (forward + 2) / product


def test_a_loss_of_torch_is_one_number_and_outside_of_inference_mode() -> None:
    import torch

    model = {"w": torch.ones(3)}
    state = op.setup(op.Adam(), model)
    with pytest.raises(GradientError, match=r"the loss is of shape \[3\], not one number; return its mean or its sum"):
        op.value_and_grad(lambda model: model["w"] ** 2, state)(model)
    with torch.inference_mode(), pytest.raises(GradientError, match="inference_mode keeps no gradients"):
        op.value_and_grad(lambda model: (model["w"] ** 2).sum(), state)(model)


def test_where_all_is_frozen_some_has_to_thaw() -> None:
    state = op.setup(op.Adam(), {"w": jnp.ones(3)}).freeze("w")
    with pytest.raises(GradientError, match=r"no parameters that are live; thaw some first: state\.thaw"):
        op.value_and_grad(lambda model: model["w"].sum(), state)
