"""Models spread over eight devices: replicated, and sharded along their rows."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optimisers as op
from tests.conftest import RULES, leaf, trains

P = PartitionSpec
ROWS = P("data")
SHAPES = {"embed": (16, 4), "block": (8, 8), "bias": (8,)}
RULE = op.Chain(op.ClipGlobalNorm(0.5), op.AdamW(0.1))
WHOLE = [name for name, rule in RULES.items() if any(m.measure or m.apply or m.memory for m in rule.members)]


def _mesh(kind: AxisType = AxisType.Auto, devices: int = 8) -> Any:
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Any:
    """Eight devices in a row; whether the compiler or the types of arrays say how they are spread."""
    return _mesh(request.param)


def _arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}


def _spread(tree: Any, mesh: Any, spec: PartitionSpec = ROWS) -> Any:
    def lying(leaf: Any) -> Any:
        # As JAX itself writes what comes out of a program: with all axes where the types tell, else without.
        rest = [None] * (leaf.ndim - len(spec)) if mesh.axis_types[0] is AxisType.Explicit else []
        return jax.device_put(leaf, NamedSharding(mesh, P(*spec, *rest)))

    return jax.tree.map(lying, tree)


def _slots_lie(state: op.State, mesh: Any, spec: PartitionSpec = ROWS) -> bool:
    slots = [slot for each in state.leaves() for slot in each.slots.values()]
    return bool(slots) and all(slot.sharding.is_equivalent_to(NamedSharding(mesh, spec), slot.ndim) for slot in slots)


def _trained(rule: op.Rule, spread: Any, *, steps: int = 3, compiled: bool = True) -> tuple[op.State, Any]:
    model = spread(_arrays(0))
    state = op.setup(rule, model)
    step = jax.jit(op.update) if compiled else op.update
    for k in range(steps):
        state, model = step(state, model, spread(_arrays(k + 1)))
    return state, model


def _assert_close(model: Any, other: Any) -> None:
    for name, array in other.items():
        np.testing.assert_allclose(model[name], array, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("spec", [P("data"), P()], ids=["sharded", "replicated"])
def test_slots_lie_as_their_parameters_and_the_numbers_are_those_of_one_device(mesh: Any, spec: Any, compiled: bool) -> None:
    started = op.setup(RULE, _spread(_arrays(0), mesh, spec))
    state, model = _trained(RULE, partial(_spread, mesh=mesh, spec=spec), compiled=compiled)
    assert _slots_lie(started, mesh, spec)
    assert _slots_lie(state, mesh, spec)
    assert all(array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim) for array in model.values())
    _assert_close(model, _trained(RULE, lambda tree: tree)[1])


def test_a_loop_compiles_once(mesh: Any) -> None:
    model = _spread(_arrays(0), mesh)
    state = op.setup(op.Chain(op.SkipNonFinite(), RULE), model)
    step: Any = jax.jit(lambda *args: op.update(*args), donate_argnums=(0, 1))
    for k in range(3):
        state, model = step(state, model, _spread(_arrays(k + 1), mesh))
        state = state.adjust(lr=0.1 / (k + 1))
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", [name for name in WHOLE if trains(RULES[name], (8,), "float32")])
def test_rules_that_see_whole_arrays_see_all_of_their_shards(name: str) -> None:
    # Types that say how arrays are spread refuse what is not settled, so they are the harder case.
    mesh = _mesh(AxisType.Explicit)
    _, model = _trained(RULES[name], partial(_spread, mesh=mesh))
    _, other = _trained(RULES[name], lambda tree: tree)
    _assert_close(model, other)


def test_a_thawed_parameter_gets_slots_that_lie_as_it_does(mesh: Any) -> None:
    model = _spread(_arrays(0), mesh)
    state = op.setup(RULE, model, frozen="embed")
    assert not leaf(state, "embed").slots
    state, model = jax.jit(op.update)(state, model, _spread(_arrays(1), mesh))
    thawed = state.thaw()
    assert len(leaf(thawed, "embed").slots) == 2
    assert _slots_lie(thawed, mesh)
    thawed, model = jax.jit(op.update)(thawed, model, _spread(_arrays(2), mesh))
    assert (int(leaf(thawed, "embed").step), int(leaf(thawed, "block").step)) == (1, 2)


def test_a_state_moves_to_another_mesh(mesh: Any) -> None:
    state, model = op.setup(RULE, _spread(_arrays(0), mesh), frozen="embed"), _spread(_arrays(0), mesh)
    state, model = jax.jit(op.update)(state, model, _spread(_arrays(1), mesh))
    other = _mesh(mesh.axis_types[0], 4)

    def moved(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(other, leaf.sharding.spec)), tree)

    state, model = moved(state).adjust(lr=0.05).thaw(), moved(model)
    assert _slots_lie(state, other)
    state, model = jax.jit(op.update)(state, model, _spread(_arrays(2), other))
    assert _slots_lie(state.reset("block"), other)
    assert int(leaf(state, "block").step) == 2


def test_a_state_is_made_inside_a_program_where_it_is_to_lie(mesh: Any) -> None:
    model = _spread(_arrays(0), mesh)

    def where(shape: Any) -> NamedSharding:
        return NamedSharding(mesh, P("data") if shape.ndim else P())

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(partial(op.setup, RULE), model)
        state = jax.jit(partial(op.setup, RULE), out_shardings=jax.tree.map(where, shapes))(model)
        assert _slots_lie(state, mesh)
        _, after = jax.jit(op.update)(state, model, _spread(_arrays(1), mesh))
    assert _slots_lie(state.reset("block"), mesh)
    _assert_close(after, _trained(RULE, lambda tree: tree, steps=1)[1])


def test_gradients_are_averaged_over_devices_that_hold_a_part_of_the_batch(mesh: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), "float32")
    model = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2)}
    state = op.setup(RULE, model)

    def loss(model: Any, x: Any) -> Any:
        return ((x @ model["w"] + model["b"]) ** 2).mean()

    def step(state: Any, model: Any, x: Any) -> Any:
        grads = jax.lax.pmean(jax.grad(loss)(jax.lax.pcast(model, "data", to="varying"), x), "data")
        return op.update(state, model, grads)

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    other, alone = state, model
    for _ in range(3):
        state, model = mapped(_spread(state, mesh, P()), _spread(model, mesh, P()), _spread(x, mesh))
        other, alone = op.update(other, alone, jax.grad(loss)(alone, x))
    _assert_close(model, alone)
    assert int(state.step) == 3


def test_a_state_is_made_and_scanned_inside_shard_map(mesh: Any) -> None:
    rule = op.Chain(op.SkipNonFinite(), op.Adam(0.1))

    def train(model: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return op.update(carry[0], carry[1], carry[1]), None

        return jax.lax.scan(body, (op.setup(rule, model), model), length=3)[0][1]

    model = {"w": jnp.ones((8, 3)), "b": jnp.ones(8)}
    parts: Any = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    trained = jax.jit(jax.shard_map(train, **parts, check_vma=False))(_spread(model, mesh))
    varying = jax.jit(jax.shard_map(lambda m: op.update(op.setup(op.Adam(0.1), m), m, m)[1], **parts))
    once = varying(_spread(model, mesh))
    _assert_close(trained, train(model))
    _assert_close(once, op.update(op.setup(op.Adam(0.1), model), model, model)[1])


def test_a_sharded_model_gets_sharded_gradients(mesh: Any) -> None:
    def loss(model: Any) -> Any:
        return (jnp.sum(model["block"] ** 2) + jnp.sum(model["bias"] ** 2)) * 0.5

    model = _spread(_arrays(0), mesh)
    state = op.setup(RULE, model).freeze("bias")
    _, grads = jax.jit(lambda state, model: op.value_and_grad(loss, state)(model))(state, model)
    assert sorted(grads) == ["block", "embed"]
    assert grads["block"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    np.testing.assert_allclose(grads["block"], model["block"], rtol=1e-6)


@pytest.mark.parametrize("devices", [8, 2], ids=["onto as many devices", "onto fewer"])
def test_a_state_goes_through_orbax(mesh: Any, devices: int, tmp_path: Path) -> None:
    def start(mesh: Any) -> tuple[op.State, Any]:
        model = _spread(_arrays(0), mesh)
        return op.setup(op.Chain(op.SkipNonFinite(), RULE), model), model

    state, model = start(mesh)
    for k in range(2):
        state, model = op.update(state, model, _spread(_arrays(k + 1), mesh))
    state = state.freeze("embed").adjust(lr=0.05)
    state, model = op.update(state, model, _spread(_arrays(3), mesh))
    target = _mesh(mesh.axis_types[0], devices)
    fresh, like = start(target)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", (state, model))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, (fresh.freeze("embed"), like))
        back, restored = checkpointer.restore(tmp_path / "step", shapes)
    assert back == state
    assert (int(leaf(back, "embed").step), int(leaf(back, "block").step)) == (2, 3)
    assert _slots_lie(back, target)
    ours, theirs = back.thaw(), state.thaw()
    _, after = jax.jit(op.update)(ours, restored, _spread(_arrays(4), target))
    _, other = jax.jit(op.update)(theirs, model, _spread(_arrays(4), mesh))
    _assert_close(after, other)
