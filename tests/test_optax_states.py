"""States of Optax taken over and given back: training goes on with the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optimisers as op
from optimisers.errors import ShapeError, StateError
from optimisers.interop.optax_states import state_from_optax, state_to_optax
from optimisers.schedules import Linear
from tests.conftest import leaf

SHAPES = {"w": (3, 2), "b": (2,)}


def _grads(at: int) -> dict[str, Any]:
    rng = np.random.default_rng(at)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def _params() -> dict[str, Any]:
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def _in_optax(theirs: Any, opt_state: Any, params: Any, steps: range) -> tuple[Any, Any]:
    for at in steps:
        updates, opt_state = theirs.update(_grads(at), opt_state, params)
        params = optax.apply_updates(params, updates)
    return opt_state, params


def _here(state: op.State, model: Any, place: Any, steps: range) -> tuple[op.State, Any]:
    for at in steps:
        state, model = op.update(state, model, jax.tree.map(place, _grads(at)))
    return state, model


def _assert_same(model: Any, params: Any) -> None:
    for key, array in params.items():
        np.testing.assert_allclose(model[key], array, rtol=1e-6, atol=1e-7)


CASES: dict[str, tuple[optax.GradientTransformation, Any]] = {
    "adam": (optax.adam(0.1, b1=0.8), op.Adam(0.1, betas=(0.8, 0.999))),
    "adamw": (optax.adamw(0.1, weight_decay=0.02), op.AdamW(0.1, weight_decay=0.02)),
    "momentum": (optax.sgd(0.1, momentum=0.9), op.Momentum(0.1, momentum=0.9)),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), op.Nesterov(0.1, momentum=0.9)),
    "sgd": (optax.sgd(0.1), op.Descent(0.1)),
    "lion": (optax.lion(0.1, weight_decay=0.0), op.Lion(0.1, weight_decay=0.0)),
    "a chain with a schedule": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.0)),
        op.Chain(op.ClipGlobalNorm(0.5), op.AdamW(Linear(0.1, 0.0, 10), weight_decay=0.0)),
    ),
    "momentum with a schedule": (
        optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9),
        op.SGD(Linear(0.1, 0.0, 10), momentum=0.9),
    ),
    "hyperparameters in the state": (optax.inject_hyperparams(optax.adam)(0.1), op.Adam(0.1)),
    "partition": (
        optax.partition({"a": optax.adam(0.1), "m": optax.sgd(0.2, momentum=0.5)}, {"w": "a", "b": "m"}),
        {"w": op.Adam(0.1), "b": op.SGD(0.2, momentum=0.5)},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("library", ["jax", "numpy"])
def test_training_goes_on_with_the_same_numbers(name: str, library: str) -> None:
    theirs, rule = CASES[name]
    opt_state, params = _in_optax(theirs, theirs.init(_params()), _params(), range(3))
    place = np.asarray if library == "numpy" else jnp.asarray
    model: Any = jax.tree.map(place, params)
    state = state_from_optax(opt_state, model, rule, step=3 if name in ("momentum", "nesterov", "sgd", "partition") else None)
    assert state.step == 3
    assert {each.step for each in state.leaves()} == {3}
    _, params = _in_optax(theirs, opt_state, params, range(3, 6))
    _assert_same(_here(state, model, place, range(3, 6))[1], params)


def test_what_was_masked_starts_afresh_with_a_count_of_its_own() -> None:
    theirs = optax.masked(optax.adam(0.1), {"w": True, "b": False})
    params = _params()
    _, opt_state = theirs.update(_grads(0), theirs.init(params), params)
    state = state_from_optax(opt_state, params, op.Adam(0.1))
    assert {str(each.path): each.step for each in state.leaves()} == {"b": 0, "w": 1}
    assert not leaf(state, "b").slots["mu"].any()


def test_what_cannot_be_taken_over_is_named() -> None:
    params = _params()
    opt_state = optax.adam(0.1).init(params)
    with pytest.raises(StateError, match=r"b: RMSProp keeps nu, which no state of Optax has .* there are Adam, AdamW, Lion, SGD"):
        state_from_optax(opt_state, params, op.RMSProp(0.1))
    with pytest.raises(ShapeError, match=r"w: mu has shape \(3, 2\) in the state, the parameter \(4, 2\)"):
        state_from_optax(opt_state, {**params, "w": jnp.ones((4, 2))}, op.Adam(0.1))
    with pytest.raises(StateError, match="b: the state of Optax has mu for it 2 times"):
        state_from_optax(optax.chain(optax.adam(0.1), optax.adam(0.1)).init(params), params, op.Adam(0.1))
    with pytest.raises(StateError, match=r"b: the state of Optax has mu for it \(ScaleByLionState\), which no parameter takes"):
        state_from_optax(optax.lion(0.1).init(params), params, op.Adam(0.1))
    with pytest.raises(StateError, match=r"state_from_optax\(step=-1\): a count of steps is a whole number"):
        state_from_optax(opt_state, params, op.Adam(0.1), step=-1)


@pytest.mark.parametrize(
    "theirs",
    [
        optax.amsgrad(0.1),
        optax.adabelief(0.1),
        optax.rmsprop(0.1, momentum=0.9),
        optax.lion(0.1),
        optax.chain(optax.trace(0.9), optax.adam(0.1)),
        optax.chain(optax.adam(0.1), optax.ema(0.9)),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    ],
    ids=["amsgrad", "adabelief", "rmsprop", "lion", "trace", "ema", "accumulating"],
)
def test_moments_that_would_be_lost_are_an_error(theirs: optax.GradientTransformation) -> None:
    params = _params()
    _, opt_state = theirs.update(_grads(0), theirs.init(params), params)
    with pytest.raises(StateError, match="the state of Optax"):
        state_from_optax(opt_state, params, op.Adam(0.1))


@pytest.mark.parametrize("given", [None, 3, (), _params(), {"count": 1, "mu": _params(), "nu": _params()}])
def test_what_holds_no_moments_is_an_error(given: Any) -> None:
    with pytest.raises(StateError, match="no moments were found in what is to be a state of Optax"):
        state_from_optax(given, _params(), op.Adam(0.1))


def test_a_state_of_another_model_is_an_error() -> None:
    opt_state = optax.adam(0.1).init(_params())
    with pytest.raises(StateError, match=r"b: the state of Optax has mu for it .* which no parameter takes; the model"):
        state_from_optax(opt_state, {"params": _params()}, op.Adam(0.1))


def test_the_state_inside_an_optimizer_of_nnx_goes_on() -> None:
    from flax import nnx

    theirs, mine = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = nnx.Optimizer(theirs, optax.adam(0.1), wrt=nnx.Param)

    def grads(module: Any, at: int) -> Any:
        return nnx.grad(lambda module: (module(jnp.ones((1, 3)) * at) ** 3).sum())(module)

    for at in range(1, 4):
        optimizer.update(theirs, grads(theirs, at))
    nnx.update(mine, nnx.state(theirs))
    state = state_from_optax(optimizer.opt_state, mine, op.Adam(0.1))
    assert (state.step, {each.step for each in state.leaves()}) == (3, {3})
    back = state_to_optax(state, nnx.Optimizer(mine, optax.adam(0.1), wrt=nnx.Param).opt_state)
    assert jax.tree.structure(back) == jax.tree.structure(optimizer.opt_state)
    assert [a.tolist() for a in jax.tree.leaves(back)] == [b.tolist() for b in jax.tree.leaves(optimizer.opt_state)]
    state, new = op.update(state, mine, grads(mine, 4))
    optimizer.update(theirs, grads(theirs, 4))
    np.testing.assert_allclose(new.kernel[...], theirs.kernel[...], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("library", ["jax", "numpy"])
def test_a_state_given_back_goes_on_with_the_same_numbers(name: str, library: str) -> None:
    theirs, rule = CASES[name]
    place = np.asarray if library == "numpy" else jnp.asarray
    start = jax.tree.map(place, _params())
    state, model = _here(op.setup(rule, start), start, place, range(3))
    params: Any = jax.tree.map(jnp.asarray, model)
    fresh = theirs.init(params)
    opt_state = state_to_optax(state, fresh)
    assert jax.tree.structure(opt_state) == jax.tree.structure(fresh)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), opt_state) == jax.tree.map(lambda a: (a.shape, a.dtype), fresh)
    _, params = _in_optax(theirs, opt_state, params, range(3, 6))
    _assert_same(_here(state, model, place, range(3, 6))[1], params)


def test_what_optax_cannot_hold_is_named() -> None:
    params = _params()
    state, params = op.update(op.setup(op.Adam(0.1), params), params, {"b": jnp.ones(2)})
    with pytest.raises(StateError, match="b is at step 1 and w at step 0, and Optax keeps one count for both"):
        state_to_optax(state, optax.adam(0.1).init(params))
    parts = optax.partition({"a": optax.adam(0.1), "m": optax.adam(0.1)}, {"w": "a", "b": "m"})
    assert [int(part.inner_state[0].count) for part in state_to_optax(state, parts.init(params)).inner_states.values()] == [0, 1]
    with pytest.raises(StateError, match=r"b: the state of Optax keeps trace for it \(TraceState\), and the state here does not"):
        state_to_optax(state, optax.sgd(0.1, momentum=0.9).init(params))
    with pytest.raises(StateError, match="b: the state has mu for it, and that of Optax does not"):
        state_to_optax(state, optax.sgd(0.1).init(params))
    with pytest.raises(StateError, match="c: the state of Optax keeps mu for it"):
        state_to_optax(state, optax.adam(0.1).init({**params, "c": jnp.ones(2)}))
    with pytest.raises(StateError, match=r"the state of Optax keeps ema \(EmaState\), which no rule here does"):
        state_to_optax(state.reset(), optax.chain(optax.adam(0.1), optax.ema(0.9)).init(params))
    with pytest.raises(ShapeError, match=r"w: mu has shape \(3, 2\), and in the state of Optax \(4, 2\)"):
        state_to_optax(state.reset(), optax.adam(0.1).init({**params, "w": jnp.ones((4, 2))}))
    with pytest.raises(StateError, match="b: RMSProp keeps nu"):
        state_to_optax(op.setup(op.RMSProp(), params), optax.adam(0.1).init(params))


def test_what_is_tied_and_what_is_frozen_goes_to_optax() -> None:
    w = jnp.ones((3, 2))
    model: Any = {"embed": w, "head": w, "b": jnp.ones(2)}
    state = op.setup(op.Adam(0.1), model).freeze("b")
    state, model = op.update(state, model, {"embed": jnp.ones((3, 2))})
    masked = optax.masked(optax.adam(0.1), {"embed": True, "head": True, "b": False})
    adam = state_to_optax(state, masked.init(model)).inner_state[0]
    assert int(adam.count) == 1
    assert (adam.mu["head"] == adam.mu["embed"]).all()
    assert float(adam.mu["embed"][0, 0]) == pytest.approx(0.1)
