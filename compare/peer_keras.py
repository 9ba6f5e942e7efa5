"""Keras 3 on its JAX backend: layers, `trainable`, `optimizer.apply`."""

import pickle
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from keras import ops

from compare.ours import killed_while_saving


class Net(keras.layers.Layer):
    """Variables by name; what is a mapping is a layer."""

    def __init__(self, dtype: str = "float32", **values: Any) -> None:
        super().__init__(dtype=dtype)
        for name, value in values.items():
            setattr(self, name, self._made(name, value, dtype))

    def _made(self, name: str, value: Any, dtype: str) -> Any:
        if isinstance(value, (keras.layers.Layer, keras.Variable)):
            return value
        start = np.asarray(value, dtype)
        return self.add_weight(shape=start.shape, initializer=lambda shape, dtype: ops.convert_to_tensor(start, dtype), name=name)


def _grads(net: Any, loss: Any) -> Any:
    variables = net.trainable_variables

    def value(values: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss(net)

    return jax.grad(value)([variable.value for variable in variables])


def _step(optimizer: Any, net: Any, loss: Any) -> None:
    optimizer.apply(_grads(net, loss), net.trainable_variables)


def _adam(lr: float = 0.1) -> Any:
    """With the paper's eps."""
    return keras.optimizers.Adam(lr, epsilon=1e-8)


def _apply(optimizer: Any, net: Any, *grads: Any) -> None:
    for each in grads:
        variables = net.trainable_variables
        optimizer.apply(
            [g if g is None else ops.convert_to_tensor(g, v.dtype) for g, v in zip(each, variables, strict=True)], variables
        )


def _list(variable: Any) -> Any:
    return ops.convert_to_numpy(variable).tolist()


def _moments(optimizer: Any, variable: Any) -> Any:
    at = optimizer._get_variable_index(variable)
    return {"mu": _list(optimizer._momentums[at]), "nu": _list(optimizer._velocities[at])}


def _tied() -> Any:
    first = Net(w=[1.0, 2.0])
    return Net(first=first, second=Net(w=first.w), c=[1.0, 2.0])


def _tied_loss(net: Any, first: float = 3, second: float = 7, c: float = 10) -> Any:
    return ops.sum(first * net.first.w) + ops.sum(second * net.second.w) + ops.sum(c * net.c)


def _places(net: Any) -> Any:
    return {"w": _list(net.first.w), "again": _list(net.second.w), "c": _list(net.c)}


# Ties


def t1() -> Any:
    """Two layers hold the same `Variable`."""
    net = _tied()
    _step(keras.optimizers.SGD(0.1), net, _tied_loss)
    return _places(net)


def t1b() -> Any:
    net = _tied()
    _step(keras.optimizers.SGD(0.1), net, lambda net: _tied_loss(net, 0, 7, 0))
    return {name: _places(net)[name] for name in ("w", "again")}


def t2() -> Any:
    """A `Variable` cannot see another's memory: there is one, and the model transposes it."""
    net = Net(w=[[1.0, 2, 3], [4, 5, 6]])
    g = ops.convert_to_tensor([[1.0, 2], [3, 4], [5, 6]])
    _step(keras.optimizers.SGD(0.1), net, lambda net: ops.sum(net.w) + ops.sum(g * ops.transpose(net.w)))
    return {"w": _list(net.w), "transpose": np.transpose(net.w.numpy()).tolist()}


def t3() -> Any:
    """`clipvalue`."""
    first = Net(w=[0.0])
    net = Net(first=first, second=Net(w=first.w))
    _step(keras.optimizers.SGD(1.0, clipvalue=10.0), net, lambda net: ops.sum(8 * net.first.w) + ops.sum(8 * net.second.w))
    return {"w": _list(net.first.w), "again": _list(net.second.w)}


def t4() -> Any:
    net = Net(a=[1.0], b=[1.0])
    _apply(keras.optimizers.SGD(0.1), net, [[1.0], [10.0]])
    return {"a": _list(net.a), "b": _list(net.b)}


def t5() -> Any:
    """`net.b = net.a`, two layers."""
    net, optimizer = Net(a=Net(w=[1.0]), b=Net(w=[1.0])), keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)
    net.b = net.a
    _step(optimizer, net, lambda net: ops.sum(3 * net.a.w) + ops.sum(7 * net.b.w))
    return {"a": _list(net.a.w), "b": _list(net.b.w)}


def t6() -> Any:
    x, optimizer = keras.Variable([0.0]), _adam()
    g = ops.convert_to_tensor([1.0])
    optimizer.apply([g, g], [x, x])
    return {"x": _list(x), "count": int(optimizer.iterations.numpy())}


def t7() -> Any:
    """`keras.layers.ReversibleEmbedding`; `global_clipnorm`."""
    layer = keras.layers.ReversibleEmbedding(4, 3, embeddings_initializer="zeros")
    layer.build()

    def loss(layer: Any) -> Any:
        back = layer(ops.convert_to_tensor([[1.0, 0, 0]]), reverse=True)
        return 1.5 * layer(ops.convert_to_tensor([0]))[0, 0] + 1.5 * back[0, 0]

    grads = _grads(layer, loss)
    norm = float(ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads)))
    keras.optimizers.SGD(1.0, global_clipnorm=1.0).apply(grads, layer.trainable_variables)
    return {"norm": norm, "table": _list(layer.trainable_variables[0])[0][0]}


def t8() -> Any:
    """A model that uses one layer at two places; the optimiser is made anew."""
    start = keras.initializers.Constant(np.array([[1.0], [2.0]]))
    shared, other = (keras.layers.Dense(1, use_bias=False, kernel_initializer=start, name=name) for name in ("shared", "c"))
    inputs = [keras.Input((2,)) for _ in range(3)]
    net = keras.Model(inputs, shared(inputs[0]) + shared(inputs[1]) + other(inputs[2]))
    net = pickle.loads(pickle.dumps(net))
    given = [ops.full((1, 2), value) for value in (3.0, 7.0, 10.0)]
    _step(keras.optimizers.SGD(0.1), net, lambda net: ops.sum(net(given)))
    w, c = (_list(ops.reshape(net.get_layer(name).kernel, -1)) for name in ("shared", "c"))
    return {"w": w, "again": w, "c": c}


def t9() -> Any:
    """A concatenation of `trainable_variables`."""
    net = _tied()
    net = Net(first=net.first, second=net.second, z=[3.0])
    flat = ops.concatenate([ops.reshape(each, -1) for each in net.trainable_variables])
    grads = _grads(net, lambda net: ops.sum(3 * net.first.w) + ops.sum(7 * net.second.w) + ops.sum(net.z))
    # The layer lists its own variables before those of its layers.
    order = sorted(grads, key=lambda g: -len(g))
    return {"length": len(flat), "gradient": np.concatenate([np.asarray(g) for g in order]).tolist()}


# Freezing


def f1() -> Any:
    """`variable.trainable`, `optimizer.learning_rate`; the optimiser is built before anything is frozen."""
    net, optimizer = Net(x=[1.0, 2.0], y=[3.0, 4.0]), keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)
    net.y.trainable = False
    _apply(optimizer, net, [[1.0, 10.0]])
    first = {"x": _list(net.x), "y": _list(net.y)}
    net.y.trainable = True
    optimizer.learning_rate = 0.2
    grads = {id(net.x): [1.0, 10.0], id(net.y): [100.0, 1000.0]}
    _apply(optimizer, net, [grads[id(variable)] for variable in net.trainable_variables])
    return first | {"then x": _list(net.x), "then y": _list(net.y)}


def _frozen_later(given: bool) -> Any:
    found = {}
    rules = {
        "SGD with momentum": keras.optimizers.SGD(0.1, momentum=0.9),
        "Adam": _adam(),
        "AdamW": keras.optimizers.AdamW(0.1, weight_decay=0.1, epsilon=1e-8),
    }
    for name, optimizer in rules.items():
        net = Net(p=1.0, other=1.0)
        _step(optimizer, net, lambda net: net.p + net.other)
        net.p.trainable = False
        for _ in range(3):
            if given:
                optimizer.apply([ops.zeros(()), ops.ones(())], [net.p, net.other])
            else:
                _step(optimizer, net, lambda net: net.p + net.other)
        found[name] = _list(net.p)
    return found


def f2a() -> Any:
    """`variable.trainable = False`; the loop takes `trainable_variables`."""
    return _frozen_later(False)


def f2() -> Any:
    """`variable.trainable = False`, and the gradient is given to `apply`, where a loop would have left it out."""
    return _frozen_later(True)


def _clipped(y: Any, given: Any) -> Any:
    net, optimizer = Net(x=[0.0, 0.0], y=y), keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    net.y.trainable = False
    x = ops.convert_to_tensor([3.0, 4.0])
    if given is None:
        _step(optimizer, net, lambda net: ops.sum(x * net.x) + ops.sum(net.y))
    else:
        optimizer.apply([x, ops.convert_to_tensor(given)], [net.x, net.y])
    return {"x": _list(net.x), "y": _list(net.y)}


def f3() -> Any:
    """As F2; `global_clipnorm`."""
    return _clipped([1.0], [float("nan")])


def f4a() -> Any:
    """`variable.trainable = False`, `global_clipnorm`."""
    return _clipped([0.0, 0.0], None)


def f4() -> Any:
    """As F3."""
    return _clipped([0.0, 0.0], [0.0, 12.0])


def f5() -> Any:
    """The optimiser is built with both (of what it was not built with it knows nothing); it has one count."""
    net, optimizer = Net(a=0.0, b=0.0), _adam()
    optimizer.build(net.trainable_variables)
    net.b.trainable = False
    for at in range(11):
        if at == 10:
            net.b.trainable = True
        _step(optimizer, net, lambda net: net.a + net.b)
    return {"a": _list(net.a), "b": _list(net.b), "mu of a": _moments(optimizer, net.a)["mu"]}


def f6() -> Any:
    """The optimiser is built with what is trainable, and made anew for the thawed variable, as its guide on fine-tuning says."""
    net, optimizer = Net(a=0.0, b=0.0), _adam()
    net.b.trainable = False
    _step(optimizer, net, lambda net: net.a + net.b)
    nbytes = 4 * (len(optimizer._momentums) - 1)
    net.b.trainable = True
    _step(_adam(), net, lambda net: net.a + net.b)
    return {"bytes": nbytes, "first step": _list(net.b)}


def _through_store(optimizer: Any, fresh: Any, variables: Any) -> Any:
    """As `model.save` writes and reads the state of an optimiser."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    file = Path("optimizer.npz")
    np.savez(file, **store)
    fresh.build(variables)
    with np.load(file) as found:
        fresh.load_own_variables(dict(found))
    return fresh


def f7() -> Any:
    """`save_own_variables`, `load_own_variables`, of which `model.save` is made."""
    net, optimizer = Net(a=0.0, b=0.0), _adam()
    optimizer.build(net.trainable_variables)
    both = net.trainable_variables
    for at in range(3):
        net.b.trainable = at < 2
        _step(optimizer, net, lambda net: net.a + net.b)
    optimizer = _through_store(optimizer, _adam(), both)
    net.b.trainable = True
    mu, before = _moments(optimizer, net.b)["mu"], _list(net.b)
    _step(optimizer, net, lambda net: net.a + net.b)
    return {"mu": mu, "next step": _list(net.b) - before}


def f8() -> Any:
    """`ops.stop_gradient` on these rows, since variables freeze as a whole."""
    net, optimizer = Net(e=[[1.0], [1.0], [1.0]]), keras.optimizers.AdamW(0.1, weight_decay=0.1)
    for _ in range(3):
        _step(optimizer, net, lambda net: 0 * ops.sum(net.e[:1]) + ops.sum(ops.stop_gradient(net.e[1:])))
    return {"rows": [row[0] for row in _list(net.e)]}


def f9() -> Any:
    """`layer.trainable = False` on one of the two layers."""
    net = _tied()
    net.first.trainable = False
    _step(keras.optimizers.SGD(0.1), net, lambda net: _tied_loss(net, 1, 1, 1))
    return {"a": _list(net.first.w), "b": _list(net.second.w)}


def f10() -> Any:
    net, optimizer = Net(p=0.0), _adam()
    _apply(optimizer, net, [1.0])
    for _ in range(20):
        net.p.trainable = False
        net.p.trainable = True
    _apply(optimizer, net, [1.0])
    return {"p": _list(net.p), "mu": _moments(optimizer, net.p)["mu"]}


# Missing gradients


def m1a() -> Any:
    net, optimizer = Net(p=0.0), _adam()
    _apply(optimizer, net, [1.0], [0.0])
    return _moments(optimizer, net.p)


def m1b() -> Any:
    """`None` in the list of gradients."""
    net, optimizer = Net(p=0.0, q=0.0), _adam()
    _apply(optimizer, net, [1.0, 1.0], [None, 1.0])
    found, before = _moments(optimizer, net.p), _list(net.p)
    _apply(optimizer, net, [1.0, 1.0])
    return found | {"next step": _list(net.p) - before}


def m2a() -> Any:
    """`None` in the list of gradients."""
    net = Net(branch=1.0, head=1.0)
    _apply(keras.optimizers.SGD(0.1), net, [None, 1.0])
    return {"branch": _list(net.branch), "head": _list(net.head)}


# Rules


def r1() -> Any:
    """`weight_decay`, which Keras decouples; at this learning rate that is the same."""
    net = Net(x=[1.0, 10.0, 100.0])
    _apply(keras.optimizers.SGD(1.0, weight_decay=0.1), net, [[1.0, 2.0, 3.0]])
    return {"x": _list(net.x)}


def r1b() -> Any:
    """`clipvalue`, `weight_decay`."""
    net = Net(x=[1.0, 10.0, 100.0])
    _apply(keras.optimizers.SGD(1.0, weight_decay=0.1, clipvalue=2.0), net, [[1.0, 2.0, 3.0]])
    return {"x": _list(net.x)}


def r2() -> Any:
    """`epsilon=1e-8`, here and in all cases."""
    net = Net(p=[1.0, 2.0])
    _apply(_adam(), net, *[[[0.5, -0.25]]] * 3)
    return {"p": _list(net.p)}


def r3() -> Any:
    """`gradient_accumulation_steps`."""
    net, optimizer = Net(x=1.0), keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    _apply(optimizer, net, [3.0], [6.0])
    before = _list(net.x)
    _apply(optimizer, net, [0.0])
    return {"before": before, "after": _list(net.x)}


def r3b() -> Any:
    """`gradient_accumulation_steps`; its decoupled decay is 0.01 of lr times the parameter, which is the same for SGD."""
    net, optimizer = Net(x=1.0, y=2.0), keras.optimizers.SGD(0.1, weight_decay=0.01, gradient_accumulation_steps=2)
    _apply(optimizer, net, [33.0, 0.0], [0.0, 444.0])
    return {"x": _list(net.x), "y": _list(net.y)}


def r3c() -> Any:
    """`optimizer.gradient_accumulation_steps = 2`."""
    net, optimizer = Net(x=1.0), keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    _apply(optimizer, net, [3.0], [6.0], [0.0])
    optimizer.gradient_accumulation_steps = 2
    _apply(optimizer, net, [3.0])
    return {"x": _list(net.x)}


def r4() -> Any:
    """`mixed_bfloat16`: the variable is float32, and the layer computes in bfloat16."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_bfloat16")
    layer.build((1, 1))
    optimizer = keras.optimizers.SGD(1e-3)
    for _ in range(100):
        _step(optimizer, layer, lambda layer: ops.cast(ops.sum(layer(ops.ones((1, 1)))), "float32"))
    return {"p": _list(layer.kernel)[0][0]}


def r5() -> Any:
    """Keras's own `epsilon`, 1e-7."""
    net = Net(dtype="float16", p=[1.0, 1.0])
    _apply(keras.optimizers.Adam(0.1), net, [[0.0, 1e-8]])
    return {"p": _list(net.p)}


def r6() -> Any:
    """Hyperparameters are attributes."""
    net, optimizer = Net(x=1.0), keras.optimizers.SGD(0.1)
    optimizer.learning_rat = 0.2
    _apply(optimizer, net, [1.0])
    return {"x": _list(net.x)}


def r6b() -> Any:
    net = Net(x=1.0)
    _apply(keras.optimizers.SGD(-0.1), net, [1.0])
    return {"x": _list(net.x)}


def r7() -> Any:
    """The gradient is given."""
    p, optimizer = keras.Variable(0j, dtype="complex64"), _adam()
    for _ in range(500):
        optimizer.apply([p.value - (1 + 1j)], [p])
    return {"real": complex(p.numpy()).real, "imaginary": complex(p.numpy()).imag}


def r9() -> Any:
    net = Net(bias=[1.0])
    _apply(keras.optimizers.SGD(0.1), net, [[1.0, 2.0, 3.0]])
    return {"bias": _list(net.bias)}


# State and files


def s1() -> Any:
    """`save_own_variables`, of which `model.save` is made, numbers variables."""
    ones = np.ones((2, 2))
    net, optimizer = Net(p1=ones, p2=ones), _adam()
    _apply(optimizer, net, [ones, 5 * ones])
    other = Net(p2=ones, p1=ones)
    optimizer = _through_store(optimizer, _adam(), other.trainable_variables)
    return {f"mu of {name}": _moments(optimizer, getattr(other, name))["mu"][0][0] for name in ("p1", "p2")}


def s2() -> Any:
    """As S1."""
    old, optimizer = Net(trunk=np.ones(1), head=np.ones((10, 2))), _adam()
    _apply(optimizer, old, [np.ones(1), np.ones((10, 2))])
    new = Net(trunk=np.ones(1), head=np.ones((3, 2)))
    optimizer = _through_store(optimizer, _adam(), new.trainable_variables)
    _apply(optimizer, new, [np.ones(1), np.ones((3, 2))])
    return {"head": _list(new.head)}


def s4() -> Any:
    """As S1; layers in the place of nested mappings."""

    def made() -> Any:
        net = Net(mu=0.0, a=Net(b=0.0))
        net.step = net.add_weight(shape=(), initializer="zeros", name="step")
        net.dotted = net.add_weight(shape=(), initializer="zeros", name="a.b")
        return net, {"step": net.step, "mu": net.mu, "a.b": net.dotted, "b in a": net.a.b}

    net, places = made()
    values = {id(variable): float(at) for at, variable in enumerate(places.values(), start=1)}
    optimizer = _adam()
    _apply(optimizer, net, [values[id(variable)] for variable in net.trainable_variables])
    net, places = made()
    optimizer = _through_store(optimizer, _adam(), net.trainable_variables)
    return {name: _moments(optimizer, variable)["mu"] for name, variable in places.items()}


def s5() -> Any:
    """As S1."""
    start = np.arange(8.0).reshape(2, 4).T
    net, optimizer = Net(p=start), _adam(0.0)
    _apply(optimizer, net, [start])
    optimizer = _through_store(optimizer, _adam(), net.trainable_variables)
    return {"p": _list(net.p), "mu": _moments(optimizer, net.p)["mu"]}


def _model(value: float, size: int) -> Any:
    start = keras.initializers.Constant(value)
    return keras.Sequential([keras.Input((size,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)])


def s7() -> Any:
    """`save_weights`, `load_weights`."""
    model, file = _model(1.0, 10_000), Path("net.weights.h5")
    model.save_weights(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    model.load_weights(file)
    return {"p": float(model.get_weights()[0][-1, 0])}


def s8() -> Any:
    """`save_weights` writes into the file itself."""
    model, file = _model(1.0, 1_000_000), Path("net.weights.h5")
    model.save_weights(file)
    killed_while_saving("compare.peer_keras", file)
    model.load_weights(file)
    return {"p": float(model.get_weights()[0][0, 0])}


def overwrite(file: str) -> None:
    """Save other values over the file."""
    _model(2.0, 1_000_000).save_weights(file)
