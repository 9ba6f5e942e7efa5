"""Optax with `selective_transform`, `partition` and `set_to_zero`, as its documentation freezes; ties by its users' recipe."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax

from compare import peer_optax as alone
from compare.cases import by_hand
from compare.peer_optax import RULES, _a, _all, _fresh, _steps, _tied, _tied_loss


def _owner_trains(inner: Any, params: Any, alias: str) -> Any:
    return optax.selective_transform(inner, freeze_mask={name: name == alias for name in params})


def _tied_step(tx: Any, state: Any, params: Any, grads: Any, owner: str = "w", alias: str = "again") -> Any:
    """The alias is frozen, its gradient added to the owner's, and its value copied after the step."""
    grads = grads | {owner: grads[owner] + grads[alias]}
    state, params = _steps(tx, state, params, grads)
    return state, params | {alias: params[owner]}


# Ties

_RECIPE = "One of the two is frozen; its gradient is added to the other's before, and its value copied after the step."


@by_hand
def t1() -> Any:
    params = _tied()
    tx = _owner_trains(optax.sgd(0.1), params, "again")
    return _all(_tied_step(tx, tx.init(params), params, jax.grad(_tied_loss)(params))[1])


@by_hand
def t1b() -> Any:
    params = _tied()
    tx = _owner_trains(optax.sgd(0.1), params, "again")
    grads = jax.grad(lambda params: (7 * params["again"]).sum())(params)
    params = _tied_step(tx, tx.init(params), params, grads)[1]
    return {name: params[name].tolist() for name in ("w", "again")}


@by_hand
def t2() -> Any:
    w = _a([[1.0, 2, 3], [4, 5, 6]])
    params = {"w": w, "transpose": w.T}
    tx = _owner_trains(optax.sgd(0.1), params, "transpose")
    grads = {"w": _a([[1.0, 1, 1], [1, 1, 1]]), "transpose": _a([[1.0, 2], [3, 4], [5, 6]])}
    grads = grads | {"w": grads["w"] + grads["transpose"].T}
    params = _fresh(tx, params, grads)[1]
    return _all(params | {"transpose": params["w"].T})


@by_hand
def t3() -> Any:
    w = _a([0.0])
    params = {"w": w, "again": w}
    tx = _owner_trains(optax.chain(optax.clip(10.0), optax.sgd(1.0)), params, "again")
    return _all(_tied_step(tx, tx.init(params), params, {"w": _a([8.0]), "again": _a([8.0])})[1])


t4 = alone.t4


@by_hand
def t5() -> Any:
    params = {"a": _a([1.0]), "b": _a([1.0])}
    tx = _owner_trains(optax.sgd(0.1), params, "b")
    return _all(_tied_step(tx, tx.init(params), params, {"a": _a([3.0]), "b": _a([7.0])}, "a", "b")[1])


t6, t7 = alone.t6, alone.t7


@by_hand
def t8() -> Any:
    params = _tied()
    tx = _owner_trains(optax.sgd(0.1), params, "again")
    state, params = pickle.loads(pickle.dumps((tx.init(params), params)))
    return _all(_tied_step(tx, state, params, jax.grad(_tied_loss)(params))[1])


t9 = alone.t9
for _function in (t1, t1b, t2, t3, t5, t8):
    _function.__doc__ = _RECIPE


# Freezing


def _selective(inner: Any, *frozen: str, names: tuple[str, ...] = ("a", "b")) -> Any:
    return optax.selective_transform(inner, freeze_mask={name: name in frozen for name in names})


def f1() -> Any:
    """`selective_transform`, made anew when what is frozen or the learning rate changes."""
    params = {"x": _a([1.0, 2.0]), "y": _a([3.0, 4.0])}
    grads = {"x": _a([1.0, 10.0]), "y": _a([100.0, 1000.0])}
    _, params = _fresh(_selective(optax.sgd(0.1), "y", names=("x", "y")), params, grads)
    first = _all(params)
    _, params = _fresh(_selective(optax.sgd(0.2), names=("x", "y")), params, grads)
    return first | {f"then {name}": value for name, value in _all(params).items()}


def _frozen_later(p: float) -> Any:
    found = {}
    for name, inner in RULES.items():
        params = {"p": _a(1.0), "other": _a(1.0)}
        _, params = _fresh(_selective(inner, names=("p", "other")), params, {"p": _a(1.0), "other": _a(1.0)})
        later = {"p": _a(p), "other": _a(1.0)}
        _, params = _fresh(_selective(inner, "p", names=("p", "other")), params, later, later, later)
        found[name] = params["p"].item()
    return found


def f2a() -> Any:
    """`selective_transform`."""
    return _frozen_later(1.0)


def f2() -> Any:
    """`selective_transform`."""
    return _frozen_later(0.0)


def _clipped(y: Any, given: Any) -> Any:
    params = {"x": _a([0.0, 0.0]), "y": _a(y)}
    tx = _selective(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "y", names=("x", "y"))
    return _all(_fresh(tx, params, {"x": _a([3.0, 4.0]), "y": _a(given)})[1])


def f3() -> Any:
    """`selective_transform` around the whole chain."""
    return _clipped([1.0], [float("nan")])


def f4a() -> Any:
    """`selective_transform` around the whole chain."""
    return _clipped([0.0, 0.0], [0.0, 0.0])


def f4() -> Any:
    """`selective_transform` around the whole chain."""
    return _clipped([0.0, 0.0], [0.0, 12.0])


def _apart(*frozen: str) -> Any:
    """A group for each parameter, so that each has a count."""
    rules = {name: optax.set_to_zero() if name in frozen else optax.adam(0.1) for name in ("a", "b")}
    return optax.partition(rules, {"a": "a", "b": "b"})


def _carried(state: Any, **inner: Any) -> Any:
    return state._replace(inner_states={**state.inner_states, **inner})


ONE = {"a": _a(1.0), "b": _a(1.0)}


@by_hand
def f5() -> Any:
    """`partition` with a group for each parameter; the state of a is taken over into the new one."""
    params = {"a": _a(0.0), "b": _a(0.0)}
    state, params = _fresh(_apart("b"), params, *[ONE] * 10)
    fresh = _carried(_apart().init(params), a=state.inner_states["a"])
    state, params = _steps(_apart(), fresh, params, ONE)
    return _all(params) | {"mu of a": state.inner_states["a"].inner_state[0].mu["a"].item()}


def f6() -> Any:
    """`selective_transform`, made anew for the thawed parameter."""
    params, tx = {"a": _a(0.0), "b": _a(0.0)}, _selective(optax.adam(0.1), "b")
    state, params = _fresh(tx, params, ONE)
    nbytes = sum(each.nbytes for each in jax.tree.leaves([state.inner_states["train"].inner_state[0].mu["b"]]))
    return {"bytes": nbytes, "first step": _fresh(_selective(optax.adam(0.1)), params, ONE)[1]["b"].item()}


@by_hand
def f7() -> Any:
    """The state of b is put aside and back; `pickle`."""
    state, params = _fresh(_apart(), {"a": _a(0.0), "b": _a(0.0)}, ONE, ONE)
    state, params = pickle.loads(pickle.dumps(_aside(state, params, ONE)))
    _, new = _steps(_apart(), state, params, ONE)
    mu = state.inner_states["b"].inner_state[0].mu["b"].item()
    return {"mu": mu, "next step": new["b"].item() - params["b"].item()}


@by_hand
def f8() -> Any:
    """Masks are for whole leaves; `optax.stateless` multiplies the update with a mask of rows, last in the chain."""
    rows = _a([[1.0], [0.0], [0.0]])
    tx = optax.chain(
        optax.adamw(0.1, weight_decay=0.1), optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * rows, updates))
    )
    params = _fresh(tx, {"e": jnp.ones((3, 1))}, *[{"e": jnp.zeros((3, 1))}] * 3)[1]
    return {"rows": params["e"][:, 0].tolist()}


def f9() -> Any:
    """`selective_transform`, with one of the two places frozen."""
    w = _a([1.0, 2.0])
    return _all(_fresh(_selective(optax.sgd(0.1), "a"), {"a": w, "b": w}, {"a": jnp.ones(2), "b": jnp.ones(2)})[1])


def _aside(state: Any, params: Any, grads: Any) -> Any:
    """A step with b frozen, its own state put aside and back."""
    frozen = _carried(_apart("b").init(params), a=state.inner_states["a"])
    frozen, params = _steps(_apart("b"), frozen, params, grads)
    return _carried(frozen, b=state.inner_states["b"]), params


@by_hand
def f10() -> Any:
    """The state of b is put aside and back."""
    state, params = _fresh(_apart(), {"a": _a(0.0), "b": _a(0.0)}, ONE)
    for _ in range(20):
        state, params = _aside(state, params, ONE)
    state, params = _steps(_apart(), state, params, ONE)
    return {"p": params["b"].item(), "mu": state.inner_states["b"].inner_state[0].mu["b"].item()}


# Missing gradients

m1a = alone.m1a


@by_hand
def m1b() -> Any:
    """A group for each parameter; the state of the one without a gradient is put aside and back."""
    state, params = _fresh(_apart(), {"a": _a(0.0), "b": _a(0.0)}, ONE)
    state, params = _aside(state, params, ONE | {"b": _a(0.0)})
    adam = state.inner_states["b"].inner_state[0]
    found = {"mu": adam.mu["b"].item(), "nu": adam.nu["b"].item()}
    _, new = _steps(_apart(), state, params, ONE)
    return found | {"next step": new["b"].item() - params["b"].item()}


def m2a() -> Any:
    """`selective_transform`; the branch has a gradient of zeros."""
    params = {"encoder": {"deep": _a(1.0)}, "head": _a(1.0)}
    tx = optax.selective_transform(optax.sgd(0.1), freeze_mask={"encoder": {"deep": True}, "head": False})
    _, params = _fresh(tx, params, {"encoder": {"deep": _a(0.0)}, "head": _a(1.0)})
    return {"branch": params["encoder"]["deep"].item(), "head": params["head"].item()}


def m2b() -> Any:
    """`selective_transform`."""
    params = {"encoder": _a(1.0), "head": _a(1.0)}
    tx = _selective(optax.sgd(0.1), names=("encoder", "head"))
    return _all(_fresh(tx, params, {"encoder": _a(1.0), "heda": _a(1.0)})[1])


# What masks do not change

r1, r1b, r2, r3, r3b, r3c, r4, r5, r6, r6b, r7, r9 = (
    getattr(alone, name) for name in "r1 r1b r2 r3 r3b r3c r4 r5 r6 r6b r7 r9".split()
)
s1, s2, s4, s5, s10 = alone.s1, alone.s2, alone.s4, alone.s5, alone.s10
j2, j3, j4 = alone.j2, alone.j3, alone.j4


# JAX


@by_hand
def j1() -> Any:
    w = _a(0.0)
    params, grads = {"w": w, "again": w}, {"w": _a(3.0), "again": _a(7.0)}
    tx = _owner_trains(optax.sgd(0.01), params, "again")
    step = jax.jit(lambda state, params, grads: _tied_step(tx, state, params, grads))
    state, params = step(tx.init(params), params, grads)
    donating = jax.jit(lambda state, params, grads: _tied_step(tx, state, params, grads), donate_argnums=(0, 1))
    for _ in range(99):
        state, params = donating(state, params, grads)
    return _all(params)


j1.__doc__ = _RECIPE


def j5() -> Any:
    """`selective_transform`."""
    whole = alone.operations(_selective(optax.adam(0.1), names=("large", "small")), False)
    return {"fewer": int(alone.operations(_selective(optax.adam(0.1), "large", names=("large", "small")), False) < 0.1 * whole)}
