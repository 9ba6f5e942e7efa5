"""MLX on the CPU: `nn.Module`, `nn.value_and_grad`, `freeze`, `optimizer.update`."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from compare.ours import killed_while_saving


class Net(nn.Module):
    """Parameters by name; what is a mapping is a module."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, Net(**value) if isinstance(value, dict) else value)


def _a(values: Any, dtype: Any = mx.float32) -> Any:
    return mx.array(values, dtype)


def _adam(lr: float = 0.1) -> Any:
    """As in the paper; the default leaves the correction of the bias out."""
    return optim.Adam(lr, bias_correction=True)


def _step(optimizer: Any, net: Any, loss: Any) -> None:
    _, grads = nn.value_and_grad(net, loss)(net)
    optimizer.update(net, grads)


def _all(net: Any) -> Any:
    return {name: value.tolist() for name, value in tree_flatten(net.parameters())}


def _tied() -> Any:
    w = _a([1.0, 2.0])
    return Net(w=w, again=w, c=_a([1.0, 2.0]))


def _tied_loss(net: Any) -> Any:
    return (3 * net.w).sum() + (7 * net.again).sum() + (10 * net.c).sum()


# Ties


def t1() -> Any:
    """Two attributes of a module hold the same array."""
    net = _tied()
    _step(optim.SGD(0.1), net, _tied_loss)
    return _all(net)


def t1b() -> Any:
    net = _tied()
    _step(optim.SGD(0.1), net, lambda net: (7 * net.again).sum())
    return {name: net[name].tolist() for name in ("w", "again")}


def t2() -> Any:
    w = _a([[1.0, 2, 3], [4, 5, 6]])
    net = Net(w=w, transpose=w.T)
    _step(optim.SGD(0.1), net, lambda net: net.w.sum() + (_a([[1.0, 2], [3, 4], [5, 6]]) * net.transpose).sum())
    return _all(net)


def t3() -> Any:
    """`tree_map` of `mx.clip` over the gradients."""
    w = _a([0.0])
    net = Net(w=w, again=w)
    _, grads = nn.value_and_grad(net, lambda net: (8 * net.w + 8 * net.again).sum())(net)
    optim.SGD(1.0).update(net, tree_map(lambda g: mx.clip(g, -10, 10), grads))
    return _all(net)


def t4() -> Any:
    net = Net(a=_a([1.0]), b=_a([1.0]))
    _step(optim.SGD(0.1), net, lambda net: (net.a + 10 * net.b).sum())
    return _all(net)


def t6() -> Any:
    """Two attributes of a module hold the same array."""
    x, g, optimizer = _a([0.0]), _a([1.0]), _adam()
    net = Net(x=x, again=x)
    optimizer.update(net, {"x": g, "again": g})
    return {"x": net.x.tolist(), "count": optimizer.step.item()}


def t7() -> Any:
    """`embedding.as_linear`."""
    net = nn.Embedding(4, 3)
    net.weight = mx.zeros((4, 3))
    one = _a([1.0, 0, 0])
    _, grads = nn.value_and_grad(net, lambda net: 1.5 * net(mx.array(0))[0] + 1.5 * net.as_linear(one)[0])(net)
    grads, norm = optim.clip_grad_norm(grads, 1.0)
    optim.SGD(1.0).update(net, grads)
    return {"norm": norm.item(), "table": net.weight[0, 0].item()}


def t8() -> Any:
    """Modules are not pickled: `copy.deepcopy`."""
    net, optimizer = copy.deepcopy((_tied(), optim.SGD(0.1)))
    _step(optimizer, net, _tied_loss)
    return _all(net)


def t9() -> Any:
    """`tree_flatten`, and a concatenation."""
    w = _a([1.0, 2.0])
    net = Net(w=w, again=w, z=_a([3.0]))
    flat = mx.concatenate([value for _, value in tree_flatten(net.parameters())])
    _, grads = nn.value_and_grad(net, lambda net: (3 * net.w + 7 * net.again).sum() + net.z.sum())(net)
    return {"length": len(flat.tolist()), "gradient": mx.concatenate([value for _, value in tree_flatten(grads)]).tolist()}


# Freezing


def f1() -> Any:
    """`freeze(keys=…)`, `optimizer.learning_rate`; after `unfreeze`, `optimizer.init` (without it: a `KeyError`)."""
    net, optimizer = Net(x=_a([1.0, 2.0]), y=_a([3.0, 4.0])), optim.SGD(0.1)

    def loss(net: Any) -> Any:
        return (_a([1.0, 10.0]) * net.x).sum() + (_a([100.0, 1000.0]) * net.y).sum()

    net.freeze(keys="y")
    _step(optimizer, net, loss)
    first = {name: net[name].tolist() for name in ("x", "y")}
    net.unfreeze(keys="y")
    optimizer.init(net.trainable_parameters())
    optimizer.learning_rate = 0.2
    _step(optimizer, net, loss)
    return first | {f"then {name}": net[name].tolist() for name in ("x", "y")}


def _frozen_later(given: Any) -> Any:
    found = {}
    rules = {
        "SGD with momentum": optim.SGD(0.1, momentum=0.9),
        "Adam": _adam(),
        "AdamW": optim.AdamW(0.1, weight_decay=0.1, bias_correction=True),
    }
    for name, optimizer in rules.items():
        net = Net(p=_a(1.0), other=_a(1.0))
        _step(optimizer, net, lambda net: net.p + net.other)
        net.freeze(keys="p")
        for _ in range(3):
            _, grads = nn.value_and_grad(net, lambda net: net.p + net.other)(net)
            optimizer.update(net, grads | given)
        found[name] = net.p.item()
    return found


def f2a() -> Any:
    """`freeze(keys=…)`."""
    return _frozen_later({})


def f2() -> Any:
    """`freeze(keys=…)`, and the gradient is given to `update`, where `nn.value_and_grad` would have left it out."""
    return _frozen_later({"p": _a(0.0)})


def _clipped(y: Any, given: Any) -> Any:
    net = Net(x=_a([0.0, 0.0]), y=_a(y))
    net.freeze(keys="y")
    _, grads = nn.value_and_grad(net, lambda net: (_a([3.0, 4.0]) * net.x).sum() + net.y.sum())(net)
    grads, _ = optim.clip_grad_norm(grads | given, 1.0)
    optim.SGD(1.0).update(net, grads)
    return {name: net[name].tolist() for name in ("x", "y")}


def f3() -> Any:
    """As F2; `clip_grad_norm`."""
    return _clipped([1.0], {"y": _a([float("nan")])})


def f4a() -> Any:
    """`freeze(keys=…)`, `clip_grad_norm`."""
    return _clipped([0.0, 0.0], {})


def f4() -> Any:
    """As F3."""
    return _clipped([0.0, 0.0], {"y": _a([0.0, 12.0])})


def f5() -> Any:
    """There is one count for all parameters."""
    net, optimizer = Net(a=_a(0.0), b=_a(0.0)), _adam()
    net.freeze(keys="b")
    optimizer.init(net.parameters())
    for at in range(11):
        if at == 10:
            net.unfreeze(keys="b")
        _step(optimizer, net, lambda net: net.a + net.b)
    return {name: net[name].item() for name in ("a", "b")} | {"mu of a": optimizer.state["a"]["m"].item()}


def f6() -> Any:
    """After `unfreeze`, `optimizer.init(net.trainable_parameters())`."""
    net, optimizer = Net(a=_a(0.0), b=_a(0.0)), _adam()
    net.freeze(keys="b")
    _step(optimizer, net, lambda net: net.a + net.b)
    nbytes = sum(each.nbytes for _, each in tree_flatten(optimizer.state.get("b", {})))
    net.unfreeze(keys="b")
    optimizer.init(net.trainable_parameters())
    _step(optimizer, net, lambda net: net.a + net.b)
    return {"bytes": nbytes, "first step": net.b.item()}


def _saved(optimizer: Any) -> Any:
    """As its documentation saves and loads a state."""
    file = "optimizer.safetensors"
    mx.save_safetensors(file, dict(tree_flatten(optimizer.state)))
    return tree_unflatten(list(mx.load(file).items()))


def f7() -> Any:
    """`mx.save_safetensors` of `tree_flatten(optimizer.state)`."""
    net, optimizer = Net(a=_a(0.0), b=_a(0.0)), _adam()
    for at in range(3):
        if at == 2:
            net.freeze(keys="b")
        _step(optimizer, net, lambda net: net.a + net.b)
    state, optimizer = _saved(optimizer), _adam()
    optimizer.state = state
    net.unfreeze(keys="b")
    mu, before = optimizer.state["b"]["m"].item(), net.b.item()
    _step(optimizer, net, lambda net: net.a + net.b)
    return {"mu": mu, "next step": net.b.item() - before}


def f8() -> Any:
    """`mx.stop_gradient` on these rows, since parameters freeze as a whole."""
    net, optimizer = Net(e=mx.ones((3, 1))), optim.AdamW(0.1, weight_decay=0.1)
    for _ in range(3):
        _step(optimizer, net, lambda net: 0 * net.e[:1].sum() + mx.stop_gradient(net.e[1:]).sum())
    return {"rows": net.e[:, 0].tolist()}


def f9() -> Any:
    """`freeze` of one of the two modules."""
    w = _a([1.0, 2.0])
    net = Net(a={"w": w}, b={"w": w})
    net.a.freeze()
    _step(optim.SGD(0.1), net, lambda net: net.a.w.sum() + net.b.w.sum())
    return {"a": net.a.w.tolist(), "b": net.b.w.tolist()}


def f10() -> Any:
    net, optimizer = Net(p=_a(0.0)), _adam()
    _step(optimizer, net, lambda net: net.p)
    for _ in range(20):
        net.freeze()
        net.unfreeze()
    _step(optimizer, net, lambda net: net.p)
    return {"p": net.p.item(), "mu": optimizer.state["p"]["m"].item()}


# Missing gradients


def m1a() -> Any:
    net, optimizer = Net(p=_a(0.0)), _adam()
    _step(optimizer, net, lambda net: net.p)
    _step(optimizer, net, lambda net: 0 * net.p)
    return {"mu": optimizer.state["p"]["m"].item(), "nu": optimizer.state["p"]["v"].item()}


def m1b() -> Any:
    """The parameter is left out of the tree of gradients."""
    net, optimizer, one = Net(p=_a(0.0), q=_a(0.0)), _adam(), _a(1.0)
    optimizer.update(net, {"p": one, "q": one})
    optimizer.update(net, {"q": one})
    before, found = net.p.item(), {"mu": optimizer.state["p"]["m"].item(), "nu": optimizer.state["p"]["v"].item()}
    optimizer.update(net, {"p": one, "q": one})
    return found | {"next step": net.p.item() - before}


def m2a() -> Any:
    """The branch is left out of the tree of gradients."""
    net = Net(encoder={"deep": _a(1.0)}, head=_a(1.0))
    optim.SGD(0.1).update(net, {"head": _a(1.0)})
    return {"branch": net.encoder.deep.item(), "head": net.head.item()}


def m2b() -> Any:
    net = Net(encoder=_a(1.0), head=_a(1.0))
    optim.SGD(0.1).update(net, {"encoder": _a(1.0), "heda": _a(1.0)})
    return _all(net)


# Rules


def _decayed(clip: bool) -> Any:
    net = Net(x=_a([1.0, 10.0, 100.0]))
    grads = {"x": _a([1.0, 2.0, 3.0])}
    optim.SGD(1.0, weight_decay=0.1).update(net, tree_map(lambda g: mx.clip(g, -2, 2), grads) if clip else grads)
    return _all(net)


def r1() -> Any:
    """`weight_decay`."""
    return _decayed(False)


def r1b() -> Any:
    """`tree_map` of `mx.clip`, `weight_decay`."""
    return _decayed(True)


def r2() -> Any:
    """`bias_correction=True`, here and in all cases."""
    net, optimizer = Net(p=_a([1.0, 2.0])), _adam()
    for _ in range(3):
        optimizer.update(net, {"p": _a([0.5, -0.25])})
    return _all(net)


def _gathered(optimizer: Any, net: Any, grads: Any) -> None:
    total = grads[0]
    for each in grads[1:]:
        total = tree_map(mx.add, total, each)
    optimizer.update(net, tree_map(lambda g: g / len(grads), total))


def r3() -> Any:
    """`tree_map` adds the gradients up, as its examples do."""
    net = Net(x=_a(1.0))
    before = net.x.item()
    _gathered(optim.SGD(0.1), net, [{"x": _a(g)} for g in (3.0, 6.0, 0.0)])
    return {"before": before, "after": net.x.item()}


def r3b() -> Any:
    """As R3."""
    net = Net(x=_a(1.0), y=_a(2.0))
    _gathered(optim.SGD(0.1, weight_decay=0.01), net, [{"x": _a(33.0), "y": _a(0.0)}, {"x": _a(0.0), "y": _a(444.0)}])
    return _all(net)


def r4() -> Any:
    """The parameter is float32, and is cast in the loss."""
    net, optimizer = Net(p=_a(1.0)), optim.SGD(1e-3)
    for _ in range(100):
        _step(optimizer, net, lambda net: net.p.astype(mx.bfloat16).astype(mx.float32))
    return _all(net)


def r5() -> Any:
    net = Net(p=_a([1.0, 1.0], mx.float16))
    _adam().update(net, {"p": _a([0.0, 1e-8], mx.float16)})
    return _all(net)


def r6() -> Any:
    """Hyperparameters are attributes."""
    net, optimizer = Net(x=_a(1.0)), optim.SGD(0.1)
    optimizer.learning_rat = 0.2
    optimizer.update(net, {"x": _a(1.0)})
    return _all(net)


def r6b() -> Any:
    net = Net(x=_a(1.0))
    optim.SGD(-0.1).update(net, {"x": _a(1.0)})
    return _all(net)


def r7() -> Any:
    """The gradient is given."""
    net, optimizer = Net(p=_a(0j, mx.complex64)), _adam()
    for _ in range(500):
        optimizer.update(net, {"p": net.p - (1 + 1j)})
    p = complex(net.p.item())
    return {"real": p.real, "imaginary": p.imag}


def r9() -> Any:
    net = Net(bias=_a([1.0]))
    optim.SGD(0.1).update(net, {"bias": _a([1.0, 2.0, 3.0])})
    return _all(net)


# State and files


def s1() -> Any:
    """`mx.save_safetensors` of `tree_flatten(optimizer.state)`."""
    ones = mx.ones((2, 2))
    net, optimizer = Net(p1=ones, p2=ones), _adam()
    optimizer.update(net, {"p1": ones, "p2": 5 * ones})
    state, optimizer = _saved(optimizer), _adam()
    optimizer.state = state
    optimizer.init(Net(p2=ones, p1=ones).trainable_parameters())
    return {f"mu of {name}": optimizer.state[name]["m"][0, 0].item() for name in ("p1", "p2")}


def s2() -> Any:
    """As S1."""
    old, optimizer = Net(trunk=mx.ones(1), head=mx.ones((10, 2))), _adam()
    optimizer.update(old, {"trunk": mx.ones(1), "head": mx.ones((10, 2))})
    state, optimizer = _saved(optimizer), _adam()
    optimizer.state = state
    new = Net(trunk=mx.ones(1), head=mx.ones((3, 2)))
    optimizer.update(new, {"trunk": mx.ones(1), "head": mx.ones((3, 2))})
    mx.eval(new.parameters())
    return {"head": new.head.tolist()}


def s4() -> Any:
    """As S1."""
    net, optimizer = {"step": _a(0.0), "mu": _a(0.0), "a.b": _a(0.0), "a": {"b": _a(0.0)}}, _adam()
    optimizer.apply_gradients({"step": _a(1.0), "mu": _a(2.0), "a.b": _a(3.0), "a": {"b": _a(4.0)}}, net)
    state = _saved(optimizer)
    found = {name: state[name]["m"].item() for name in ("step", "mu", "a.b")}
    return found | {"b in a": state["a"]["b"]["m"].item()}


def s5() -> Any:
    """`mx.save_safetensors`."""
    net, optimizer = Net(p=mx.arange(8.0).reshape(2, 4).T), _adam(0.0)
    optimizer.update(net, {"p": net.p})
    file = "net.safetensors"
    net.save_weights(file)
    state, net = _saved(optimizer), Net(p=mx.zeros((4, 2)))
    net.load_weights(file)
    return {"p": net.p.tolist(), "mu": state["p"]["m"].tolist()}


def s7() -> Any:
    """`load_weights`."""
    net, file = Net(p=mx.ones(1000)), Path("net.safetensors")
    net.save_weights(str(file))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    net.load_weights(str(file))
    mx.eval(net.parameters())
    return {"p": net.p[-1].item()}


def s8() -> Any:
    """`save_weights` writes into the file itself."""
    net, file = Net(p=mx.ones(1_000_000)), Path("net.safetensors")
    net.save_weights(str(file))
    killed_while_saving("compare.peer_mlx", file)
    net.load_weights(str(file))
    mx.eval(net.parameters())
    return {"p": net.p[0].item()}


def overwrite(file: str) -> None:
    """Save other values over the file."""
    Net(p=mx.full((1_000_000,), 2.0)).save_weights(file)
