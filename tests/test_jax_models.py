"""Models of the JAX world: Equinox, Flax NNX and Linen, Haiku, registered dataclasses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import optimisers as op
from optimisers.errors import ModelError, PathError, StateError
from optimisers.interop.flax import get_state, set_state
from optimisers.interop.optax import as_optax

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), "float32")
TOKENS = jnp.asarray([1, 4, 2])


def _net() -> tuple[Any, Callable[[Any], Any]]:
    model = eqx.nn.MLP(3, 2, 4, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    return model, lambda model: (jax.vmap(model)(X) ** 2).mean()


def _nnx() -> tuple[Any, Callable[[Any], Any]]:
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jax.nn.tanh, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    return model, lambda model: (model(X) ** 2).mean()


def _nnx_state() -> tuple[Any, Callable[[Any], Any]]:
    graph, state = nnx.split(_nnx()[0])
    return state, lambda state: (nnx.merge(graph, state)(X) ** 2).mean()


def _linen() -> tuple[Any, Callable[[Any], Any]]:
    module: Any = linen.Sequential([linen.Dense(4), jax.nn.tanh, linen.Dense(2)])
    return module.init(jax.random.key(0), X), lambda model: (module.apply(model, X) ** 2).mean()


def _haiku() -> tuple[Any, Callable[[Any], Any]]:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(jnp.tanh(hk.Linear(4)(x)))))
    return net.init(jax.random.key(0), X), lambda model: (net.apply(model, X) ** 2).mean()


@dataclass(frozen=True)
class Affine:
    """A type whose numbers JAX takes for static, the array among them."""

    weight: Any
    scale: Any = None


jax.tree_util.register_dataclass(Affine, data_fields=["weight"], meta_fields=["scale"])


def _registered() -> tuple[Any, Callable[[Any], Any]]:
    model = [Affine(jnp.ones((3, 4)), 2.0), Affine(jnp.ones((4, 2)), 0.5)]
    return model, lambda model: ((X @ model[0].weight * model[0].scale @ model[1].weight * model[1].scale) ** 2).mean()


MODELS = {
    "Equinox": (_net, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]),
    "NNX": (_nnx, ["layers.0.bias", "layers.0.kernel", "layers.2.bias", "layers.2.kernel"]),
    "state of NNX": (_nnx_state, ["layers.0.bias", "layers.0.kernel", "layers.2.bias", "layers.2.kernel"]),
    "Linen": (_linen, [f"params.layers_{at}.{name}" for at in (0, 2) for name in ("bias", "kernel")]),
    "Haiku": (_haiku, ["linear.b", "linear.w", "linear_1.b", "linear_1.w"]),
    "dataclass": (_registered, ["0.weight", "1.weight"]),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Any, Callable[[Any], Any], list[str]]:
    """A model, its loss, and the paths of its parameters."""
    make, paths = MODELS[request.param]
    return *make(), paths


def _arrays(model: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))]


def test_paths_read_as_those_of_the_model(case: Any) -> None:
    model, _, paths = case
    assert [str(path) for path in op.setup(op.Adam(), model)] == paths


def test_it_trains_as_with_optax(case: Any) -> None:
    model, loss, _ = case
    state = op.setup(op.AdamW(0.01), model)
    grad = eqx.filter_grad(loss)
    transformation = optax.adamw(0.01, weight_decay=0.01)
    other, memory = model, transformation.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(state: Any, model: Any) -> Any:
        return op.update(state, model, grad(model))

    for _ in range(4):
        state, model = step(state, model)
        updates, memory = transformation.update(grad(other), memory, eqx.filter(other, eqx.is_inexact_array))
        other = eqx.apply_updates(other, updates)
    assert type(model) is type(other)
    assert jax.tree.structure(model) == jax.tree.structure(other)
    for mine, theirs in zip(_arrays(model), _arrays(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_value_and_grad_gives_what_update_takes(case: Any) -> None:
    model, loss, paths = case
    state = op.setup(op.AdamW(0.01), model).freeze(paths[0])
    value, grads = eqx.filter_jit(op.value_and_grad(loss, state))(model)
    np.testing.assert_allclose(value, loss(model), rtol=1e-6)
    assert sorted(grads) == sorted(paths[1:])
    _, after = op.update(state, model, grads)
    _, whole = op.update(state, model, eqx.filter_grad(loss)(model))
    for one, other in zip(_arrays(after), _arrays(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (op.trainables(after)[paths[0]] == op.trainables(model)[paths[0]]).all()


def test_a_tie_of_equinox_is_one_parameter() -> None:
    class Language(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key: Any) -> None:
            embed, head = eqx.nn.Embedding(5, 4, key=key), eqx.nn.Linear(4, 5, use_bias=False, key=key)
            self.shared = eqx.nn.Shared((embed, head), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)

        def __call__(self, token: Any) -> Any:
            embed, head = self.shared()
            return head(embed(token))

    model = Language(jax.random.key(0))
    state = op.setup(op.Descent(0.1), model)
    assert [str(path) for path in state] == ["shared.pytree.0.weight"]
    grads = eqx.filter_grad(lambda model: jax.vmap(model)(TOKENS).sum())(model)
    _, after = eqx.filter_jit(op.update)(state, model, grads)
    embed, head = after.shared()
    assert (embed.weight == head.weight).all()
    np.testing.assert_allclose(embed.weight, model.shared()[0].weight - 0.1 * grads.shared.pytree[0].weight, rtol=1e-6)


def test_an_array_that_stands_twice_in_an_equinox_model_is_one_parameter() -> None:
    class Language(eqx.Module):
        embed: eqx.nn.Embedding
        head: eqx.nn.Linear

    embed, head = eqx.nn.Embedding(5, 4, key=jax.random.key(0)), eqx.nn.Linear(4, 5, use_bias=False, key=jax.random.key(1))
    model = Language(embed, eqx.tree_at(lambda head: head.weight, head, embed.weight))
    state = op.setup(op.Adam(0.1), model)

    def loss(model: Any) -> Any:
        return jax.vmap(lambda token: model.head(model.embed(token)))(TOKENS).sum()

    @eqx.filter_jit
    def step(state: Any, model: Any) -> Any:
        _, grads = op.value_and_grad(loss, state)(model)
        return op.update(state, model, grads)

    for _ in range(3):
        state, model = step(state, model)
    assert (model.embed.weight == model.head.weight).all()
    assert list(map(str, state)) == ["embed.weight"]


class Tied(nnx.Module):
    """Two variables that are one, a norm with running means, and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens: Any) -> Any:
        return self.head.attend(self.drop(self.norm(self.embed(tokens))))


def _tied_loss(model: Any) -> Any:
    return (model(TOKENS) ** 2).mean()


def test_a_graph_of_nnx_keeps_its_shared_variables() -> None:
    model = Tied(nnx.Rngs(0))
    state = op.setup(op.Adam(0.1), model)
    assert [str(path) for path in state] == ["embed.embedding", "norm.bias", "norm.scale"]
    assert [str(path) for path in state.parameters[0].paths] == ["embed.embedding", "head.embedding"]
    state, after = op.update(state, model, nnx.grad(_tied_loss)(model))
    assert after.head is after.embed
    assert after.head is not model.head
    assert int(state.step) == 1


def test_a_graph_of_nnx_is_trained_inside_its_own_jit() -> None:
    def trained(*, compiled: bool) -> tuple[Any, op.State]:
        model = Tied(nnx.Rngs(0))
        state = op.setup(op.Adam(0.1), model)

        def step(model: Any, state: Any) -> Any:
            state, new = op.update(state, model, nnx.grad(_tied_loss)(model))
            nnx.update(model, nnx.state(new))
            return state

        for _ in range(3):
            state = (nnx.jit(step) if compiled else step)(model, state)
        return model, state

    (model, state), (other, _) = trained(compiled=True), trained(compiled=False)
    assert model.head is model.embed
    assert int(state.step) == 3
    for one, two in zip(_arrays(model), _arrays(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    # What the norm and the dropout keep went on by itself, once a step.
    assert int(model.drop.rngs.count[...]) == 3
    assert not (np.asarray(model.norm.mean[...]) == 0).all()


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_what_a_loss_writes_into_variables_is_kept(compiled: bool) -> None:
    def trained(grad: Any) -> Any:
        model = Tied(nnx.Rngs(0))
        state = op.setup(op.Adam(0.1), model)

        def step(model: Any, state: Any) -> Any:
            state, new = op.update(state, model, grad(state)(model))
            nnx.update(model, nnx.state(new))
            return state

        for _ in range(3):
            state = (nnx.jit(step) if compiled else step)(model, state)
        return model

    model, other = trained(lambda state: op.grad(_tied_loss, state)), trained(lambda state: nnx.grad(_tied_loss))
    assert int(model.drop.rngs.count[...]) == 3
    for one, two in zip(_arrays(model), _arrays(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_variables_that_a_loss_makes_are_kept() -> None:
    class Noting(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
                setattr(layer, "seen", nnx.Intermediate(x))  # noqa: B010
            return x

    model: Any = Noting(nnx.Rngs(0))
    op.grad(lambda model: (model(X) ** 2).mean(), op.setup(op.Adam(), model))(model)
    seen = model.layers[1].seen[...]
    np.testing.assert_allclose(seen, model(X), rtol=1e-6)


def test_what_a_loss_writes_into_its_other_arguments_is_kept() -> None:
    model, drop, stream = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5), nnx.Rngs(1)
    grad = op.grad(lambda model, rngs: (drop(model(X), rngs=rngs) ** 2).mean(), op.setup(op.Adam(), model))
    first, second = grad(model, stream), grad(model, rngs=stream)
    assert int(stream.default.count[...]) == 2
    assert (first["kernel"] != second["kernel"]).any()


def test_of_a_module_of_nnx_only_its_params_train() -> None:
    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(3, 3, rngs=rngs)
            self.scale = jnp.full(3, 2.0)
            self.mean = nnx.BatchStat(jnp.ones(3))
            self.constant = nnx.data([np.ones(3, np.float32)])

        def __call__(self, x: Any) -> Any:
            return self.layer(x) * self.scale + self.constant[0]

    model = Scaled(nnx.Rngs(0))
    state = op.setup(op.AdamW(0.1), model)
    assert [str(path) for path in state] == ["layer.bias", "layer.kernel"]
    _, after = op.update(state, model, op.grad(lambda model: (model(X) ** 2).mean(), state)(model))
    assert (after.scale == 2).all()
    assert (after.mean[...] == 1).all()


def test_freezing_by_type_reaches_modules_of_jax() -> None:
    model = _net()[0]
    assert len([leaf for leaf in op.setup(op.Adam(), model).freeze(eqx.nn.Linear).leaves() if leaf.frozen]) == 4
    model = Tied(nnx.Rngs(0))
    frozen = op.setup(op.Adam(), model).freeze(nnx.BatchNorm)
    assert [str(leaf.path) for leaf in frozen.leaves() if leaf.frozen] == ["norm.bias", "norm.scale"]
    with pytest.raises(PathError):
        frozen.freeze(nnx.Conv)


def test_static_arrays_and_activations_pass_through() -> None:
    model, loss = _registered()
    _, after = op.update(op.setup(op.Descent(0.1), model), model, jax.grad(loss)(model))
    assert (after[0].scale, after[1].scale) == (2.0, 0.5)
    net, loss = _net()
    _, after = op.update(op.setup(op.Descent(0.1), net), net, eqx.filter_grad(loss)(net))
    assert after.activation is net.activation
    assert after.width_size == net.width_size


def test_a_model_that_changed_is_an_error_that_names_the_path() -> None:
    model, loss = _net()
    state, grads = op.setup(op.Adam(), model), eqx.filter_grad(loss)(model)
    with pytest.raises(ModelError, match=r"layers\.1\.bias: the state has a parameter here, but the model holds None"):
        op.update(state, eqx.tree_at(lambda model: model.layers[1].bias, model, None), grads)
    with pytest.raises(ModelError, match=r"layers\.0\.weight: the state was made for shape \(4, 3\)"):
        op.update(state, eqx.tree_at(lambda model: model.layers[0].weight, model, jnp.ones((4, 4))), grads)


def test_a_loop_of_equinox_compiles_once() -> None:
    traces = 0
    model, loss = _net()
    state = op.setup(op.Chain(op.SkipNonFinite(), op.AdamW(0.1)), model)

    @eqx.filter_jit
    def step(state: Any, model: Any) -> Any:
        nonlocal traces
        traces += 1
        return op.update(state, model, eqx.filter_grad(loss)(model))

    for at in range(4):
        state, model = step(state, model)
        state = state.adjust(lr=0.1 / (at + 1))
    assert traces == 1


# Optimisers of Flax ---------------------------------------------------------------------------------------------------


def _norms() -> Any:
    layers = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jax.nn.tanh, nnx.BatchNorm(4, rngs=nnx.Rngs(2)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    return nnx.Sequential(*layers)


def test_a_rule_works_inside_the_optimizer_of_nnx() -> None:
    def trained(transformation: Any) -> tuple[Any, Any, int]:
        model, traces = _norms(), 0
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> None:
            nonlocal traces
            traces += 1
            optimizer.update(model, nnx.grad(lambda model: (model(X) ** 2).mean())(model))

        for _ in range(4):
            step(model, optimizer)
        return model, optimizer, traces

    model, optimizer, traces = trained(as_optax(op.Chain(op.SkipNonFinite(), op.AdamW(0.1))))
    other, _, _ = trained(optax.adamw(0.1, weight_decay=0.01))
    assert traces == 1
    for one, two in zip(_arrays(model), _arrays(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    # Its state is a State, with variables in the places of arrays.
    assert int(optimizer.opt_state.step[...]) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.freeze("layers.0"),
        lambda state: state.adjust(lr=0.05).adjust("layers.0", weight_decay=1),
        lambda state: state.freeze("layers.0").drop("layers.0").thaw(),
        lambda state: state.replace(op.Lion(1e-3)),
        lambda state: state.reset("layers.3"),
    ],
    ids=["freeze", "adjust", "drop", "replace", "reset"],
)
def test_the_state_inside_an_optimizer_of_nnx_is_changed(change: Any) -> None:
    model = _norms()
    optimizer = nnx.Optimizer(model, as_optax(op.AdamW(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: (model(X) ** 2).mean())(model))

    step(model, optimizer)
    expected = change(get_state(optimizer))
    set_state(optimizer, expected)
    assert get_state(optimizer) == expected
    params, grads = nnx.state(model, nnx.Param), nnx.grad(lambda model: (model(X) ** 2).mean())(model)
    _, right = op.update(expected, params, grads)
    step(model, optimizer)
    for one, two in zip(_arrays(nnx.state(model, nnx.Param)), _arrays(right), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    with pytest.raises(StateError, match="as_optax"):
        get_state(nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))


def test_a_rule_works_inside_the_train_state_of_linen() -> None:
    model, loss = _linen()
    state: Any = TrainState.create(apply_fn=None, params=model, tx=as_optax(op.AdamW(0.1)))
    other: Any = TrainState.create(apply_fn=None, params=model, tx=optax.adamw(0.1, weight_decay=0.01))

    @jax.jit
    def step(state: Any) -> Any:
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(4):
        state, other = step(state), step(other)
    for one, two in zip(_arrays(state.params), _arrays(other.params), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    assert int(state.opt_state.step) == int(state.step) == 4
