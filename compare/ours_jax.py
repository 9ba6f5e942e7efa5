"""This library under JAX: compiled, scanned, sharded."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import optimisers as op
from compare.jax_kinds import same_kinds
from compare.ours import *  # noqa: F403
from compare.ours import Arrays


def j1(array: Arrays) -> Any:
    w = array(0.0)
    model = {"w": w, "again": w}
    state = op.setup(op.Descent(0.01), model)
    grads = {"w": array(3.0), "again": array(7.0)}
    # One buffer may not be donated twice; from the first step on each place has its own, and the state knows the tie.
    state, model = jax.jit(op.update)(state, model, grads)
    step = jax.jit(op.update, donate_argnums=(0, 1))
    for _ in range(99):
        state, model = step(state, model, grads)
    return {name: array.read(value) for name, value in model.items()}


def j2(array: Arrays) -> Any:
    found = {}
    for name, lr in {"adjusted": 0.1, "schedule": op.schedules.Cosine(0.1, 10)}.items():
        traced: list[int] = []
        model, grads = {"p": array(0.0)}, {"p": array(1.0)}
        step = jax.jit(lambda *args, traced=traced: traced.append(1) or op.update(*args))
        state = op.setup(op.Adam(lr), model)
        for at in range(6):
            state, model = step(state.adjust(lr=0.2) if name == "adjusted" and at == 3 else state, model, grads)
        found[name] = len(traced)
    return found


def j3(array: Arrays) -> Any:
    grads = {"p": array([1.0, 1.0])}

    def three(model: Any) -> Any:
        state = op.setup(op.Adam(0.1), model)
        return jax.lax.scan(lambda carry, _: (op.update(*carry, grads), None), (state, model), length=3)[0][0]

    model = {"p": array([0.0, 1.0])}
    return {"same": int(same_kinds(op.setup(op.Adam(0.1), model), three, model))}


def j4(array: Arrays) -> Any:
    mesh = jax.make_mesh((8,), ("data",))
    where = NamedSharding(mesh, PartitionSpec("data"))
    model = {"p": jax.device_put(jnp.zeros((8, 2)), where)}
    state = op.setup(op.Adam(0.1), model)
    found = {"before": int(state["p"].slots["mu"].sharding.is_equivalent_to(where, 2))}
    state, _ = jax.jit(op.update)(state, model, model)
    return found | {"after": int(state["p"].slots["mu"].sharding.is_equivalent_to(where, 2))}


def j5(array: Arrays) -> Any:
    model = {"large": jnp.ones(99_000), "small": jnp.ones(1000)}

    def step(state: Any, model: Any) -> Any:
        _, grads = op.value_and_grad(lambda model: sum(jnp.sum(jnp.sin(each)) for each in model.values()), state)(model)
        return op.update(state, model, grads)

    def operations(state: Any) -> float:
        cost = jax.jit(step).lower(state, model).compile().cost_analysis()
        return cost["flops"]

    state = op.setup(op.Adam(0.1), model)
    return {"fewer": int(operations(state.freeze("large")) < 0.1 * operations(state))}
