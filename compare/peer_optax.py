"""Optax alone: a tree of parameters, gradients by `jax.grad`; what is frozen is behind `stop_gradient`."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.lax import stop_gradient
from jax.sharding import NamedSharding, PartitionSpec

from compare.cases import by_hand
from compare.jax_kinds import same_kinds


def _steps(tx: Any, state: Any, params: Any, *grads: Any) -> Any:
    for each in grads:
        updates, state = tx.update(each, state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def _all(tree: Any) -> Any:
    return {name: each.tolist() for name, each in tree.items()}


def _fresh(tx: Any, params: Any, *grads: Any) -> Any:
    return _steps(tx, tx.init(params), params, *grads)


def _a(values: Any, dtype: Any = jnp.float32) -> Any:
    return jnp.array(values, dtype)


def _tied() -> Any:
    w = _a([1.0, 2.0])
    return {"w": w, "again": w, "c": _a([1.0, 2.0])}


def _tied_loss(params: Any) -> Any:
    return (3 * params["w"]).sum() + (7 * params["again"]).sum() + (10 * params["c"]).sum()


# Ties


def t1() -> Any:
    """The tree has two leaves, whatever arrays stand there."""
    params = _tied()
    return _all(_fresh(optax.sgd(0.1), params, jax.grad(_tied_loss)(params))[1])


def t1b() -> Any:
    params = _tied()
    grads = jax.grad(lambda params: (7 * params["again"]).sum())(params)
    params = _fresh(optax.sgd(0.1), params, grads)[1]
    return {name: params[name].tolist() for name in ("w", "again")}


def t2() -> Any:
    w = _a([[1.0, 2, 3], [4, 5, 6]])
    params = {"w": w, "transpose": w.T}
    grads = {"w": _a([[1.0, 1, 1], [1, 1, 1]]), "transpose": _a([[1.0, 2], [3, 4], [5, 6]])}
    return _all(_fresh(optax.sgd(0.1), params, grads)[1])


def t3() -> Any:
    """`optax.clip`."""
    w = _a([0.0])
    return _all(
        _fresh(optax.chain(optax.clip(10.0), optax.sgd(1.0)), {"w": w, "again": w}, {"w": _a([8.0]), "again": _a([8.0])})[1]
    )


def t4() -> Any:
    return _all(_fresh(optax.sgd(0.1), {"a": _a([1.0]), "b": _a([1.0])}, {"a": _a([1.0]), "b": _a([10.0])})[1])


def t6() -> Any:
    x, g = _a([0.0]), _a([1.0])
    state, params = _fresh(optax.adam(0.1), [x, x], [g, g])
    return {"x": params[0].tolist(), "count": int(state[0].count)}


def t7() -> Any:
    """The table is in the tree once, and the model uses it twice."""
    params = {"table": jnp.zeros((4, 3))}
    grads = jax.grad(lambda params: 1.5 * params["table"][0, 0] + 1.5 * params["table"].T[0, 0])(params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    return {"norm": float(optax.global_norm(grads)), "table": _fresh(tx, params, grads)[1]["table"][0, 0].item()}


def t8() -> Any:
    params, tx = _tied(), optax.sgd(0.1)
    state, params = pickle.loads(pickle.dumps((tx.init(params), params)))
    return _all(_steps(tx, state, params, jax.grad(_tied_loss)(params))[1])


def t9() -> Any:
    """`ravel_pytree`."""
    w = _a([1.0, 2.0])
    flat, rebuild = ravel_pytree({"again": w, "w": w, "z": _a([3.0])})

    def loss(flat: Any) -> Any:
        model = rebuild(flat)
        return (3 * model["w"]).sum() + (7 * model["again"]).sum() + model["z"].sum()

    return {"length": len(flat), "gradient": jax.grad(loss)(flat).tolist()}


# Freezing


def f1() -> Any:
    """`stop_gradient`; `inject_hyperparams` for the learning rate."""
    params = {"x": _a([1.0, 2.0]), "y": _a([3.0, 4.0])}
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)

    def loss(params: Any, frozen: bool) -> Any:
        y = stop_gradient(params["y"]) if frozen else params["y"]
        return (_a([1.0, 10.0]) * params["x"]).sum() + (_a([100.0, 1000.0]) * y).sum()

    state, params = _fresh(tx, params, jax.grad(loss)(params, True))
    first = _all(params)
    state.hyperparams["learning_rate"] = 0.2
    _, params = _steps(tx, state, params, jax.grad(loss)(params, False))
    return first | {f"then {name}": value for name, value in _all(params).items()}


RULES = {
    "SGD with momentum": optax.sgd(0.1, momentum=0.9),
    "Adam": optax.adam(0.1),
    "AdamW": optax.adamw(0.1, weight_decay=0.1),
}


def f2a() -> Any:
    """Behind `stop_gradient` a gradient is zero, and zero is a gradient."""
    found = {}
    for name, tx in RULES.items():
        params = {"p": _a(1.0), "other": _a(1.0)}
        state, params = _fresh(tx, params, {"p": _a(1.0), "other": _a(1.0)})
        for _ in range(3):
            grads = jax.grad(lambda params: stop_gradient(params["p"]) + params["other"])(params)
            state, params = _steps(tx, state, params, grads)
        found[name] = params["p"].item()
    return found


def f2() -> Any:
    """As F2a."""
    return f2a()


def _clipped(y: Any, given: Any) -> Any:
    params = {"x": _a([0.0, 0.0]), "y": _a(y)}
    grads = jax.grad(lambda params: (_a([3.0, 4.0]) * params["x"]).sum() + stop_gradient(params["y"]).sum())(params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    return _all(_fresh(tx, params, grads if given is None else grads | {"y": _a(given)})[1])


def f3() -> Any:
    """The gradient is given; `optax.clip_by_global_norm`."""
    return _clipped([1.0], [float("nan")])


def f4a() -> Any:
    """`stop_gradient`."""
    return _clipped([0.0, 0.0], None)


def f4() -> Any:
    """As F3."""
    return _clipped([0.0, 0.0], [0.0, 12.0])


def _late_loss(params: Any, frozen: bool) -> Any:
    return params["a"] + (stop_gradient(params["b"]) if frozen else params["b"])


def f5() -> Any:
    """There is one count for all parameters."""
    params, tx = {"a": _a(0.0), "b": _a(0.0)}, optax.adam(0.1)
    state = tx.init(params)
    for at in range(11):
        state, params = _steps(tx, state, params, jax.grad(_late_loss)(params, at < 10))
    return _all(params) | {"mu of a": state[0].mu["a"].item()}


def f6() -> Any:
    params, tx = {"a": _a(0.0), "b": _a(0.0)}, optax.adam(0.1)
    state, params = _fresh(tx, params, jax.grad(_late_loss)(params, True))
    nbytes = state[0].mu["b"].nbytes + state[0].nu["b"].nbytes
    return {"bytes": nbytes, "first step": _steps(tx, state, params, jax.grad(_late_loss)(params, False))[1]["b"].item()}


def f7() -> Any:
    """Optax has no files of its own: `pickle`."""
    params, tx = {"a": _a(0.0), "b": _a(0.0)}, optax.adam(0.1)
    state = tx.init(params)
    for at in range(3):
        state, params = _steps(tx, state, params, jax.grad(_late_loss)(params, at == 2))
    state, params = pickle.loads(pickle.dumps((state, params)))
    _, new = _steps(tx, state, params, jax.grad(_late_loss)(params, False))
    return {"mu": state[0].mu["b"].item(), "next step": new["b"].item() - params["b"].item()}


def f8() -> Any:
    """`stop_gradient` on these rows."""
    params = {"e": _a([[1.0], [1.0], [1.0]])}
    tx = optax.adamw(0.1, weight_decay=0.1)
    _, params = _fresh(tx, params, *[{"e": jnp.zeros((3, 1))}] * 3)
    return {"rows": params["e"][:, 0].tolist()}


def f9() -> Any:
    """`stop_gradient` on one of the two leaves."""
    w = _a([1.0, 2.0])
    params = {"a": w, "b": w}
    grads = jax.grad(lambda params: stop_gradient(params["a"]).sum() + params["b"].sum())(params)
    return _all(_fresh(optax.sgd(0.1), params, grads)[1])


def f10() -> Any:
    """Freezing changes nothing in the state."""
    state, params = _fresh(optax.adam(0.1), {"p": _a(0.0)}, {"p": _a(1.0)}, {"p": _a(1.0)})
    return {"p": params["p"].item(), "mu": state[0].mu["p"].item()}


# Missing gradients


def m1a() -> Any:
    state, _ = _fresh(optax.adam(0.1), {"p": _a(0.0)}, {"p": _a(1.0)}, {"p": _a(0.0)})
    return {"mu": state[0].mu["p"].item(), "nu": state[0].nu["p"].item()}


def m1b() -> Any:
    """`None` in the tree of gradients."""
    tx, one = optax.adam(0.1), _a(1.0)
    state, params = _fresh(tx, {"p": _a(0.0), "q": _a(0.0)}, {"p": one, "q": one}, {"p": None, "q": one})
    found = {"mu": state[0].mu["p"].item(), "nu": state[0].nu["p"].item()}
    _, new = _steps(tx, state, params, {"p": one, "q": one})
    return found | {"next step": new["p"].item() - params["p"].item()}


def m2a() -> Any:
    """`None` in the tree of gradients."""
    params = {"encoder": {"deep": _a(1.0)}, "head": _a(1.0)}
    _, params = _fresh(optax.sgd(0.1), params, {"encoder": None, "head": _a(1.0)})
    return {"branch": params["encoder"]["deep"].item(), "head": params["head"].item()}


def m2b() -> Any:
    params = {"encoder": _a(1.0), "head": _a(1.0)}
    return _all(_fresh(optax.sgd(0.1), params, {"encoder": _a(1.0), "heda": _a(1.0)})[1])


# Rules

X, G = {"x": _a([1.0, 10.0, 100.0])}, {"x": _a([1.0, 2.0, 3.0])}


def r1() -> Any:
    """`add_decayed_weights`."""
    return _all(_fresh(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0)), X, G)[1])


def r1b() -> Any:
    """`clip`, `add_decayed_weights`."""
    return _all(_fresh(optax.chain(optax.clip(2.0), optax.add_decayed_weights(0.1), optax.sgd(1.0)), X, G)[1])


def r2() -> Any:
    return _all(_fresh(optax.adam(0.1), {"p": _a([1.0, 2.0])}, *[{"p": _a([0.5, -0.25])}] * 3)[1])


def r3() -> Any:
    """`optax.MultiSteps`."""
    tx = optax.MultiSteps(optax.sgd(0.1), 3)
    state, before = _fresh(tx, {"x": _a(1.0)}, {"x": _a(3.0)}, {"x": _a(6.0)})
    return {"before": before["x"].item(), "after": _steps(tx, state, before, {"x": _a(0.0)})[1]["x"].item()}


def r3b() -> Any:
    """`optax.MultiSteps`."""
    tx = optax.MultiSteps(optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)), 2)
    grads = {"x": _a(33.0), "y": _a(0.0)}, {"x": _a(0.0), "y": _a(444.0)}
    return _all(_fresh(tx, {"x": _a(1.0), "y": _a(2.0)}, *grads)[1])


def r3c() -> Any:
    """`optax.MultiSteps(…, 2)` goes on with the state of `optax.MultiSteps(…, 4)`."""
    state, params = _fresh(optax.MultiSteps(optax.sgd(0.1), 4), {"x": _a(1.0)}, *[{"x": _a(g)} for g in (3.0, 6.0, 0.0)])
    return _all(_steps(optax.MultiSteps(optax.sgd(0.1), 2), state, params, {"x": _a(3.0)})[1])


def r4() -> Any:
    """The parameter is float32, and is cast in the loss, as JAX's users do it."""
    params, tx = {"p": _a(1.0)}, optax.sgd(1e-3)
    state = tx.init(params)
    for _ in range(100):
        grads = jax.grad(lambda params: optax.tree.cast(params, jnp.bfloat16)["p"].astype(jnp.float32))(params)
        state, params = _steps(tx, state, params, grads)
    return _all(params)


def r5() -> Any:
    params = {"p": _a([1.0, 1.0], jnp.float16)}
    return _all(_fresh(optax.adam(0.1), params, {"p": _a([0.0, 1e-8], jnp.float16)})[1])


def r6() -> Any:
    """`optax.tree_utils.tree_set` on the state of `inject_hyperparams`."""
    tx, params = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), {"x": _a(1.0)}
    state = optax.tree_utils.tree_set(tx.init(params), learning_rat=0.2)
    return _all(_steps(tx, state, params, {"x": _a(1.0)})[1])


def r6b() -> Any:
    return _all(_fresh(optax.sgd(-0.1), {"x": _a(1.0)}, {"x": _a(1.0)})[1])


def r7() -> Any:
    """The gradient is conjugated, as JAX's documentation says."""
    params, tx = {"p": _a(0j, jnp.complex64)}, optax.adam(0.1)
    state = tx.init(params)
    for _ in range(500):
        grads = jax.grad(lambda params: jnp.abs(params["p"] - (1 + 1j)) ** 2 / 2)(params)
        state, params = _steps(tx, state, params, jax.tree.map(jnp.conj, grads))
    return {"real": params["p"].real.item(), "imaginary": params["p"].imag.item()}


def r9() -> Any:
    return _all(_fresh(optax.sgd(0.1), {"bias": _a([1.0])}, {"bias": _a([1.0, 2.0, 3.0])})[1])


# State


def s1() -> Any:
    """`pickle`; trees are by name."""
    ones, tx = jnp.ones((2, 2)), optax.adam(0.1)
    state, _ = _fresh(tx, {"p1": ones, "p2": ones}, {"p1": ones, "p2": 5 * ones})
    state = pickle.loads(pickle.dumps(state))
    state, _ = _steps(optax.adam(0.0), state, {"p2": ones, "p1": ones})
    return {f"mu of {name}": state[0].mu[name][0, 0].item() for name in ("p1", "p2")}


def s2() -> Any:
    """`pickle`."""
    old, tx = {"trunk": jnp.ones(1), "head": jnp.ones((10, 2))}, optax.adam(0.1)
    state = pickle.loads(pickle.dumps(_fresh(tx, old, old)[0]))
    new = {"trunk": jnp.ones(1), "head": jnp.ones((3, 2))}
    return _all(_steps(tx, state, new, new)[1])


def s4() -> Any:
    """`pickle`."""
    params = {"step": _a(0.0), "mu": _a(0.0), "a.b": _a(0.0), "a": {"b": _a(0.0)}}
    grads = {"step": _a(1.0), "mu": _a(2.0), "a.b": _a(3.0), "a": {"b": _a(4.0)}}
    mu = pickle.loads(pickle.dumps(_fresh(optax.adam(0.1), params, grads)[0]))[0].mu
    return {name: mu[name].item() for name in ("step", "mu", "a.b")} | {"b in a": mu["a"]["b"].item()}


def s5() -> Any:
    """`pickle`."""
    params = {"p": jnp.arange(8.0).reshape(2, 4).T}
    state, params = pickle.loads(pickle.dumps(_fresh(optax.adam(0.0), params, params)))
    return {"p": params["p"].tolist(), "mu": state[0].mu["p"].tolist()}


@by_hand
def s10() -> Any:
    """`init` is given a float32 copy of the parameter; `pickle`."""
    params, tx = {"p": _a([1.0], jnp.bfloat16)}, optax.adam(0.1)
    state = tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    state, _ = pickle.loads(pickle.dumps(_steps(tx, state, params, params)))
    return {"dtype": state[0].mu["p"].dtype.name}


# JAX


def _compiled(tx: Any, **options: Any) -> Any:
    def step(state: Any, params: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    return jax.jit(step, **options)


def j1() -> Any:
    """The first step donates nothing, since one buffer cannot be given twice."""
    w = _a(0.0)
    params, grads, tx = {"w": w, "again": w}, {"w": _a(3.0), "again": _a(7.0)}, optax.sgd(0.01)
    state, params = _compiled(tx)(tx.init(params), params, grads)
    step = _compiled(tx, donate_argnums=(0, 1))
    for _ in range(99):
        state, params = step(state, params, grads)
    return _all(params)


def j2() -> Any:
    """`inject_hyperparams`; `cosine_decay_schedule`."""
    found = {}
    for name, lr in {"adjusted": 0.1, "schedule": optax.cosine_decay_schedule(0.1, 10)}.items():
        traced: list[int] = []
        params, grads = {"p": _a(0.0)}, {"p": _a(1.0)}
        tx = optax.inject_hyperparams(optax.adam)(learning_rate=lr)

        def step(state: Any, params: Any, grads: Any, tx: Any = tx, traced: Any = traced) -> Any:
            traced.append(1)
            return _steps(tx, state, params, grads)

        step, state = jax.jit(step, static_argnums=()), tx.init(params)
        for at in range(6):
            if name == "adjusted" and at == 3:
                state.hyperparams["learning_rate"] = _a(0.2)
            state, params = step(state, params, grads)
        found[name] = len(traced)
    return found


def j3() -> Any:
    tx, params, grads = optax.adam(0.1), {"p": _a([0.0, 1.0])}, {"p": _a([1.0, 1.0])}

    def three(params: Any) -> Any:
        start = tx.init(params), params
        return jax.lax.scan(lambda carry, _: (_steps(tx, *carry, grads), None), start, length=3)[0][0]

    return {"same": int(same_kinds(tx.init(params), three, params))}


def j4() -> Any:
    where = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    params, tx = {"p": jax.device_put(jnp.zeros((8, 2)), where)}, optax.adam(0.1)
    state = tx.init(params)
    found = {"before": int(state[0].mu["p"].sharding.is_equivalent_to(where, 2))}
    state, _ = _compiled(tx)(state, params, params)
    return found | {"after": int(state[0].mu["p"].sharding.is_equivalent_to(where, 2))}


def operations(tx: Any, frozen: bool) -> float:
    """Of a compiled step with 99 % of a model behind `stop_gradient`, or not."""
    params = {"large": jnp.ones(99_000), "small": jnp.ones(1000)}

    def loss(params: Any) -> Any:
        large = stop_gradient(params["large"]) if frozen else params["large"]
        return jnp.sin(large).sum() + jnp.sin(params["small"]).sum()

    def step(state: Any, params: Any) -> Any:
        return _steps(tx, state, params, jax.grad(loss)(params))

    return jax.jit(step).lower(tx.init(params), params).compile().cost_analysis()["flops"]


def j5() -> Any:
    """`stop_gradient`."""
    tx = optax.adam(0.1)
    return {"fewer": int(operations(tx, True) < 0.1 * operations(tx, False))}
