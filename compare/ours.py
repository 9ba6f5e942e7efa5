"""This library, on trees of NumPy's, JAX's and PyTorch's arrays; gradients are given."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import optimisers as op

FILE = "state.safetensors"


class Arrays:
    """Makes arrays of a library, and reads them."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self, values: Any, dtype: str = "float32") -> Any:
        if self.library == "torch":
            import torch

            return torch.tensor(values, dtype=getattr(torch, dtype))
        if self.library == "jax":
            import jax.numpy as jnp

            return jnp.array(values, dtype)
        if dtype == "bfloat16":
            import ml_dtypes

            return np.array(values, ml_dtypes.bfloat16)
        return np.array(values, dtype)

    def read(self, array: Any) -> Any:
        """A list of numbers, or a number."""
        return array.tolist() if self.library == "torch" else np.asarray(array).tolist()


def _all(array: Arrays, model: Any) -> Any:
    return {name: array.read(value) for name, value in model.items()}


def _steps(state: Any, model: Any, *grads: Any) -> Any:
    for each in grads:
        state, model = op.update(state, model, each)
    return state, model


def _tied(array: Arrays) -> Any:
    w = array([1.0, 2.0])
    return {"w": w, "again": w, "c": array([1.0, 2.0])}


def _tied_grads(array: Arrays) -> Any:
    return {"w": array([3.0, 3.0]), "again": array([7.0, 7.0]), "c": array([10.0, 10.0])}


def _slot(array: Arrays, state: Any, path: str, name: str = "mu") -> Any:
    return array.read(state[path].slots[name])


# Ties


def t1(array: Arrays) -> Any:
    model = _tied(array)
    return _all(array, _steps(op.setup(op.Descent(0.1), model), model, _tied_grads(array))[1])


def t1b(array: Arrays) -> Any:
    model = _tied(array)
    return _all(array, _steps(op.setup(op.Descent(0.1), model), model, {"again": array([7.0, 7.0])})[1])


def t2(array: Arrays) -> Any:
    w = array([[1.0, 2, 3], [4, 5, 6]])
    model = {"w": w, "transpose": w.T}
    # JAX copies when it transposes, so there the tie is named.
    ties = [("transpose", "w", "transpose")] if array.library == "jax" else []
    grads = {"w": array([[1.0, 1, 1], [1, 1, 1]]), "transpose": array([[1.0, 2], [3, 4], [5, 6]])}
    return _all(array, _steps(op.setup(op.Descent(0.1), model, ties=ties), model, grads)[1])


def t3(array: Arrays) -> Any:
    w = array([0.0])
    model = {"w": w, "again": w}
    state = op.setup(op.Chain(op.ClipGrad(10.0), op.Descent(1.0)), model)
    return _all(array, _steps(state, model, {"w": array([8.0]), "again": array([8.0])})[1])


def t4(array: Arrays) -> Any:
    model = {"a": array([1.0]), "b": array([1.0])}
    return _all(array, _steps(op.setup(op.Descent(0.1), model), model, {"a": array([1.0]), "b": array([10.0])})[1])


def t4b(array: Arrays) -> Any:
    if array.library == "jax":
        return None
    whole = array([0.0, 1, 2, 3, 4, 5])
    op.setup(op.Descent(0.1), {"first": whole[:4], "second": whole[2:]})
    return {}


def t5(array: Arrays) -> Any:
    model = {"a": array([1.0]), "b": array([1.0])}
    state = op.setup(op.Descent(0.1), model).tie("b", "a")
    return _all(array, _steps(state, model, {"a": array([3.0]), "b": array([7.0])})[1])


def t6(array: Arrays) -> Any:
    x, g = array([0.0]), array([1.0])
    state, model = _steps(op.setup(op.Adam(0.1), [x, x]), [x, x], [g, g])
    return {"x": array.read(model[0]), "count": int(state["0"].step)}


def t7(array: Arrays) -> Any:
    table = array(np.zeros((4, 3)).tolist())
    model = {"embed": table, "head": table}
    partial = np.zeros((4, 3))
    partial[0, 0] = 1.5
    grads = {"embed": array(partial.tolist()), "head": array(partial.tolist())}
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.Descent(1.0)), model)
    norm = float(op.global_norm(grads, state))
    return {"norm": norm, "table": array.read(_steps(state, model, grads)[1]["embed"])[0][0]}


def t8(array: Arrays) -> Any:
    model = _tied(array)
    state, model = pickle.loads(pickle.dumps((op.setup(op.Descent(0.1), model), model)))
    return _all(array, _steps(state, model, _tied_grads(array))[1])


def t9(array: Arrays) -> Any:
    w = array([1.0, 2.0])
    flat, rebuild = op.destructure((w, w, array([3.0])))

    def loss(flat: Any) -> Any:
        first, second, z = rebuild(flat)
        return (3 * first).sum() + (7 * second).sum() + z.sum()

    if array.library == "jax":
        import jax

        return {"length": len(flat), "gradient": array.read(jax.grad(loss)(flat))}
    if array.library == "torch":
        flat = flat.detach().requires_grad_()
        loss(flat).backward()
        return {"length": len(flat), "gradient": array.read(flat.grad)}
    # NumPy has no gradients of its own: the loss is linear, so differences are exact.
    ones = np.eye(len(flat), dtype=flat.dtype)
    return {"length": len(flat), "gradient": [float(loss(flat + one) - loss(flat)) for one in ones]}


# Freezing


def f1(array: Arrays) -> Any:
    model = {"x": array([1.0, 2.0]), "y": array([3.0, 4.0])}
    grads = {"x": array([1.0, 10.0]), "y": array([100.0, 1000.0])}
    state, model = _steps(op.setup(op.Descent(0.1), model).freeze("y"), model, grads)
    first = _all(array, model)
    _, model = _steps(state.thaw("y").adjust(lr=0.2), model, grads)
    return first | {f"then {name}": value for name, value in _all(array, model).items()}


RULES = {
    "SGD with momentum": op.SGD(0.1, momentum=0.9),
    "Adam": op.Adam(0.1),
    "AdamW": op.AdamW(0.1, weight_decay=0.1),
}


def _frozen_later(array: Arrays, later: Any) -> Any:
    found = {}
    for name, rule in RULES.items():
        model = {"p": array(1.0)}
        state, model = _steps(op.setup(rule, model), model, {"p": array(1.0)})
        _, model = _steps(state.freeze("p"), model, later, later, later)
        found[name] = array.read(model["p"])
    return found


def f2a(array: Arrays) -> Any:
    return _frozen_later(array, {"p": None})


def f2(array: Arrays) -> Any:
    return _frozen_later(array, {"p": array(0.0)})


def _clipped(array: Arrays, y: Any, given: Any) -> Any:
    model = {"x": array([0.0, 0.0]), "y": array(y)}
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.Descent(1.0)), model).freeze("y")
    grads = {"x": array([3.0, 4.0])} | ({} if given is None else {"y": array(given)})
    return _all(array, _steps(state, model, grads)[1])


def f3(array: Arrays) -> Any:
    return _clipped(array, [1.0], [float("nan")])


def f4a(array: Arrays) -> Any:
    return _clipped(array, [0.0, 0.0], None)


def f4(array: Arrays) -> Any:
    return _clipped(array, [0.0, 0.0], [0.0, 12.0])


def f5(array: Arrays) -> Any:
    model = {"a": array(0.0), "b": array(0.0)}
    grads = {"a": array(1.0), "b": array(1.0)}
    state, model = _steps(op.setup(op.Adam(0.1), model, frozen="b"), model, *[grads] * 10)
    state, new = _steps(state.thaw("b"), model, grads)
    return _all(array, new) | {"mu of a": _slot(array, state, "a")}


def f6(array: Arrays) -> Any:
    model = {"a": array(0.0), "b": array(0.0)}
    state = op.setup(op.Adam(0.1), model, frozen="b")
    _, new = _steps(state.thaw("b"), model, {"b": array(1.0)})
    return {"bytes": state["b"].nbytes, "first step": array.read(new["b"])}


def f7(array: Arrays) -> Any:
    model = {"a": array(0.0), "b": array(0.0)}
    grads = {"a": array(1.0), "b": array(1.0)}
    state, model = _steps(op.setup(op.Adam(0.1), model), model, grads, grads)
    state, model = _steps(state.freeze("b"), model, grads)
    file = Path(FILE)
    op.save(file, state, model)
    state, model, *_ = op.load(file, {"a": array(0.0), "b": array(0.0)})
    state = state.thaw("b")
    mu, before = _slot(array, state, "b"), array.read(model["b"])
    return {"mu": mu, "next step": array.read(_steps(state, model, grads)[1]["b"]) - before}


def f8(array: Arrays) -> Any:
    model = {"e": array([[1.0], [1.0], [1.0]])}
    state = op.setup(op.AdamW(0.1, weight_decay=0.1), model).freeze("e", rows=[1, 2])
    _, model = _steps(state, model, *[{"e": array([[0.0], [0.0], [0.0]])}] * 3)
    return {"rows": [row[0] for row in array.read(model["e"])]}


def f9(array: Arrays) -> Any:
    w = array([1.0, 2.0])
    model = {"a": w, "b": w}
    state = op.setup(op.Descent(0.1), model).freeze("a")
    return _all(array, _steps(state, model, {"a": array([1.0, 1.0]), "b": array([1.0, 1.0])})[1])


def f10(array: Arrays) -> Any:
    model, grads = {"p": array(0.0)}, {"p": array(1.0)}
    state, model = _steps(op.setup(op.Adam(0.1), model), model, grads)
    for _ in range(20):
        state = state.freeze("p").thaw("p")
    state, model = _steps(state, model, grads)
    return {"p": array.read(model["p"]), "mu": _slot(array, state, "p")}


# Missing gradients


def m1a(array: Arrays) -> Any:
    model = {"p": array(0.0)}
    state, _ = _steps(op.setup(op.Adam(0.1), model), model, {"p": array(1.0)}, {"p": array(0.0)})
    return {name: _slot(array, state, "p", name) for name in ("mu", "nu")}


def m1b(array: Arrays) -> Any:
    model, one = {"p": array(0.0), "q": array(0.0)}, array(1.0)
    state, model = _steps(op.setup(op.Adam(0.1), model), model, {"p": one, "q": one}, {"p": None, "q": one})
    found = {name: _slot(array, state, "p", name) for name in ("mu", "nu")}
    _, new = _steps(state, model, {"p": one, "q": one})
    return found | {"next step": array.read(new["p"]) - array.read(model["p"])}


def m2a(array: Arrays) -> Any:
    model = {"encoder": {"deep": array(1.0)}, "head": array(1.0)}
    _, model = _steps(op.setup(op.Descent(0.1), model), model, {"encoder": None, "head": array(1.0)})
    return {"branch": array.read(model["encoder"]["deep"]), "head": array.read(model["head"])}


def m2b(array: Arrays) -> Any:
    model = {"encoder": array(1.0), "head": array(1.0)}
    return _all(array, _steps(op.setup(op.Descent(0.1), model), model, {"encoder": array(1.0), "heda": array(1.0)})[1])


# Rules


def _one(array: Arrays, rule: Any, values: Any, *grads: Any) -> Any:
    model = {"x": array(values)}
    return array.read(_steps(op.setup(rule, model), model, *[{"x": array(each)} for each in grads])[1]["x"])


def r1(array: Arrays) -> Any:
    return {"x": _one(array, op.Chain(op.WeightDecay(0.1), op.Descent(1.0)), [1.0, 10.0, 100.0], [1.0, 2.0, 3.0])}


def r1b(array: Arrays) -> Any:
    rule = op.Chain(op.ClipGrad(2.0), op.WeightDecay(0.1), op.Descent(1.0))
    return {"x": _one(array, rule, [1.0, 10.0, 100.0], [1.0, 2.0, 3.0])}


def r2(array: Arrays) -> Any:
    return {"p": _one(array, op.Adam(0.1), [1.0, 2.0], *[[0.5, -0.25]] * 3)}


def r3(array: Arrays) -> Any:
    rule = op.Chain(op.AccumGrad(3), op.Descent(0.1))
    return {"before": _one(array, rule, 1.0, 3.0, 6.0), "after": _one(array, rule, 1.0, 3.0, 6.0, 0.0)}


def r3b(array: Arrays) -> Any:
    model = {"x": array(1.0), "y": array(2.0)}
    state = op.setup(op.Chain(op.AccumGrad(2), op.WeightDecay(0.01), op.Descent(0.1)), model)
    grads = {"x": array(33.0), "y": array(0.0)}, {"x": array(0.0), "y": array(444.0)}
    return _all(array, _steps(state, model, *grads)[1])


def r3c(array: Arrays) -> Any:
    model = {"x": array(1.0)}
    state = op.setup(op.Chain(op.AccumGrad(4), op.Descent(0.1)), model)
    state, model = _steps(state, model, {"x": array(3.0)}, {"x": array(6.0)}, {"x": array(0.0)})
    return _all(array, _steps(state.adjust(n=2), model, {"x": array(3.0)})[1])


def r4(array: Arrays) -> Any:
    model = {"p": array(1.0, "bfloat16")}
    state = op.setup(op.Chain(op.MixedPrecision(), op.Descent(1e-3)), model)
    _, model = _steps(state, model, *[{"p": array(1.0, "bfloat16")}] * 100)
    return {"p": float(array.read(model["p"]))}


def r5(array: Arrays) -> Any:
    model = {"p": array([1.0, 1.0], "float16")}
    _, model = _steps(op.setup(op.Adam(0.1), model), model, {"p": array([0.0, 1e-8], "float16")})
    return _all(array, model)


def r6(array: Arrays) -> Any:
    model = {"x": array(1.0)}
    state = op.setup(op.Descent(0.1), model).adjust(learning_rat=0.2)
    return _all(array, _steps(state, model, {"x": array(1.0)})[1])


def r6b(array: Arrays) -> Any:
    return {"x": _one(array, op.Descent(-0.1), 1.0, 1.0)}


def r7(array: Arrays) -> Any:
    model = {"p": array(0j, "complex64")}
    state = op.setup(op.Adam(0.1), model)
    for _ in range(500):
        state, model = op.update(state, model, {"p": model["p"] - (1 + 1j)})
    p = complex(array.read(model["p"]))
    return {"real": p.real, "imaginary": p.imag}


def r9(array: Arrays) -> Any:
    model = {"bias": array([1.0])}
    return _all(array, _steps(op.setup(op.Descent(0.1), model), model, {"bias": array([1.0, 2.0, 3.0])})[1])


# State and files


def _reloaded(state: Any, model: Any, other: Any) -> Any:
    file = Path(FILE)
    op.save(file, state, model)
    return op.load(file, other)


def s1(array: Arrays) -> Any:
    ones = [[1.0, 1.0], [1.0, 1.0]]
    model = {"p1": array(ones), "p2": array(ones)}
    grads = {"p1": array(ones), "p2": array([[5.0, 5.0], [5.0, 5.0]])}
    state, model = _steps(op.setup(op.Adam(0.1), model), model, grads)
    state, *_ = _reloaded(state, model, {"p2": array(ones), "p1": array(ones)})
    return {f"mu of {name}": _slot(array, state, name)[0][0] for name in ("p1", "p2")}


def _headed(array: Arrays, classes: int) -> Any:
    return {"trunk": array([1.0]), "head": array([[1.0, 1.0]] * classes)}


def s2(array: Arrays) -> Any:
    old, new = _headed(array, 10), _headed(array, 3)
    state, model = _steps(op.setup(op.Adam(0.1), old), old, old)
    state, *_ = _reloaded(state, model, new)
    return _all(array, _steps(state, new, new)[1])


def s4(array: Arrays) -> Any:
    def made(*values: float) -> Any:
        return {"step": array(values[0]), "mu": array(values[1]), "a.b": array(values[2]), "a": {"b": array(values[3])}}

    model = made(0.0, 0.0, 0.0, 0.0)
    state, model = _steps(op.setup(op.Adam(0.1), model), model, made(1.0, 2.0, 3.0, 4.0))
    state, *_ = _reloaded(state, model, made(0.0, 0.0, 0.0, 0.0))
    paths = {"step": ("step",), "mu": ("mu",), "a.b": ("a.b",), "b in a": ("a", "b")}
    return {name: array.read(state[path].slots["mu"]) for name, path in paths.items()}


def s5(array: Arrays) -> Any:
    model = {"p": array([[0.0, 1, 2, 3], [4, 5, 6, 7]]).T}
    state, _ = _steps(op.setup(op.Adam(0.0), model), model, {"p": model["p"]})
    state, model, *_ = _reloaded(state, model, {"p": array([[0.0] * 2] * 4)})
    return {"p": array.read(model["p"]), "mu": _slot(array, state, "p")}


def s7(array: Arrays) -> Any:
    model = {"p": array([1.0] * 1000)}
    file = Path(FILE)
    op.save(file, op.setup(op.Adam(0.1), model), model)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    op.load(file, model)
    return {}


def s8(array: Arrays) -> Any:
    file = Path(FILE)
    model = {"p": array([1.0] * 1_000_000)}
    op.save(file, op.setup(op.Descent(0.1), model), model)
    killed_while_saving("compare.ours", array.library, file)
    return {"p": array.read(op.load(file, model).model["p"])[0]}


def killed_while_saving(module: str, *arguments: Any) -> None:
    """Run `overwrite` of a module where the kernel kills whoever writes more than 1 MiB to a file."""
    code = (
        "import importlib, resource, signal, sys\n"
        "module = importlib.import_module(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "module.overwrite(*sys.argv[2:])\n"
    )
    command = [sys.executable, "-c", code, module, *map(str, arguments)]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": root}, check=False, capture_output=True)
    if done.returncode != -signal.SIGXFSZ:
        raise AssertionError(f"it was to be killed, and ended with {done.returncode}")


def overwrite(library: str, file: str) -> None:
    """Save other values over the file."""
    model = {"p": Arrays(library)([2.0] * 1_000_000)}
    op.save(file, op.setup(op.Descent(0.1), model), model)


def s10(array: Arrays) -> Any:
    model = {"p": array([1.0], "bfloat16")}
    state, model = _steps(op.setup(op.Adam(0.1), model), model, {"p": array([1.0], "bfloat16")})
    state, *_ = _reloaded(state, model, {"p": array([1.0], "bfloat16")})
    return {"dtype": str(state["p"].slots["mu"].dtype).removeprefix("torch.")}
