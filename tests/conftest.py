"""What the tests share: the list of rules, the list of backends, and ways to make, run and compare arrays."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import optimisers as op

pytest_plugins = ["tests.browser"]

# Before JAX is imported.
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
EPS = {name: 2.0**-bits for name, bits in zip(DTYPES, (10, 7, 23, 52, 23, 52), strict=True)}
"""The distance from 1 to the next number."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_dropped() -> Iterator[None]:
    """What JAX has compiled for the tests of one module serves no other, and would slow down the collection of garbage in all."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
        gc.collect()


# Backends -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """A way to run a step: an array library, and which of this library's backends takes its arrays."""

    name: str
    dtypes: tuple[str, ...]
    make: Callable[[np.ndarray], Any]
    """An array of the library, from a NumPy array, with memory of its own."""
    read: Callable[[Any], np.ndarray]
    """A NumPy array that sees the same memory."""
    switch: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __str__(self) -> str:
        return self.name

    def array(self, values: Any, dtype: str = "float64") -> Any:
        return self.make(np.array(values, numpy_dtype(dtype)))

    def active(self) -> AbstractContextManager[Any]:
        """Inside, arrays of the library run in this backend."""
        return self.switch()


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _to_strict(array: np.ndarray) -> Any:
    import array_api_strict

    return array_api_strict.asarray(array, copy=True)


def _to_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def _to_jax(array: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.array(array)


BACKENDS = (
    Backend("numba", DTYPES, np.array, np.asarray),
    Backend("blocks", DTYPES, np.array, np.asarray, op.reference_only),
    Backend("strict", ("float32", "float64", "complex64", "complex128"), _to_strict, np.asarray),
    Backend("torch", DTYPES, _to_torch, _from_torch),
    Backend("lists", ("float32", "float64", "complex64", "complex128"), _to_torch, _from_torch, op.reference_only),
    Backend("jax", ("bfloat16", "float32", "float64", "complex64"), _to_jax, np.asarray),
)
NUMPY_BACKENDS = BACKENDS[:2]
SHARING_BACKENDS = tuple(each for each in BACKENDS if each.name not in ("strict", "jax"))
"""Those whose arrays can see one memory through several views."""


def _param(backends: tuple[Backend, ...]) -> Any:
    return pytest.fixture(params=[pytest.param(each, id=each.name) for each in backends])


@_param(BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend in turn, switched on."""
    with request.param.active():
        yield request.param


@_param(NUMPY_BACKENDS)
def numpy_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend for NumPy arrays in turn, switched on."""
    with request.param.active():
        yield request.param


@_param(tuple(each for each in BACKENDS if "bfloat16" in each.dtypes))
def half_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend that has half precision in turn, switched on."""
    with request.param.active():
        yield request.param


@_param(SHARING_BACKENDS)
def sharing_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend whose arrays may share memory in turn, switched on."""
    with request.param.active():
        yield request.param


SETTINGS = [(each, dtype) for each in BACKENDS for dtype in each.dtypes]


@pytest.fixture(params=[pytest.param(each, id=f"{each[0]}-{each[1]}") for each in SETTINGS])
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, str]]:
    """Every backend with every dtype it has, switched on."""
    with request.param[0].active():
        yield request.param


# Rules ----------------------------------------------------------------------------------------------------------------


@op.rule
class Trust(op.Rule):
    """A rule of a user's own that needs two norms of each parameter: the length of the step follows that of the parameter."""

    lr: op.Hyper = 0.1

    slots = {"velocity": op.LIKE}
    scope = "leaf"
    sums = 2

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, "keep": 0.5}

    def measure(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
        velocity = h.keep * velocity + g
        return xp.abs2(p), xp.abs2(velocity)

    def measured(xp: Any, h: Any, weights: Any, steps: Any) -> dict[str, Any]:
        return {"ratio": xp.sqrt(weights) / xp.maximum(xp.sqrt(steps), 1e-12)}

    def kernel(xp: Any, g: Any, p: Any, h: Any, velocity: Any) -> Any:
        velocity = h.keep * velocity + g
        return h.lr * h.ratio * velocity, velocity


@op.rule
class Centred(op.Rule):
    """A rule of a user's own on whole arrays: takes the mean of a matrix's gradient away, and remembers it."""

    share: op.Hyper = 0.5

    slots = {"removed": op.LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"share": self.share}

    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        (removed,) = slots
        mean = xp._library.mean(g) if len(g.shape) > 1 else g - g
        return g - h.share * mean, (removed + (g - (g - h.share * mean)),)


_MADE: Mapping[str, op.Rule] = {
    # Limits that are tight enough to take hold of the gradients below.
    "ClipGrad": op.ClipGrad(0.6),
    "ClipNorm": op.ClipNorm(2.0),
    "ClipGlobalNorm": op.ClipGlobalNorm(2.0),
    "ClipAdaptive": op.ClipAdaptive(0.5),
    # A trust region, and a first guess, in which the few steps of a test go somewhere.
    "LARS": op.LARS(trust_coefficient=0.5),
    "Prodigy": op.Prodigy(d0=0.5),
    "AdaDelta": op.AdaDelta(eps=1e-2),
    "Muon": op.Muon(fallback=op.Nesterov(0.1)),
}
"""Rules whose defaults are not for small tests."""


def rule_classes() -> list[type[op.Rule]]:
    """Every public rule, but for the chain."""
    public = [getattr(op, name) for name in op.__all__]
    return [each for each in public if isinstance(each, type) and issubclass(each, op.Rule) and each not in (op.Rule, op.Chain)]


def _instance(cls: type[op.Rule]) -> op.Rule:
    """A rule with a learning rate of 0.1; a part of a chain beside plain descent."""
    made = _MADE.get(cls.__name__) or cls()
    if "lr" in made.hyperparameters:
        return made.adjusted(lr=1.0 if cls.__name__ == "AdaDelta" else 0.1)
    return op.Chain(made, op.Descent(0.1)) if made.rank == 0 else op.Chain(op.Descent(0.1), made)


RULES: Mapping[str, op.Rule] = {cls.__name__: _instance(cls) for cls in rule_classes()} | {
    "SGD-momentum": op.SGD(0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD-nesterov": op.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSProp-centered": op.RMSProp(0.1, centered=True, momentum=0.5, weight_decay=0.1),
    "RMSProp-momentum": op.RMSProp(0.1, momentum=0.5),
    "AdamW-amsgrad": op.AdamW(0.1, amsgrad=True),
    "AdamW-cautious": op.AdamW(0.1, cautious=True),
    "AdamW-cautious-amsgrad": op.AdamW(0.1, amsgrad=True, cautious=True),
    "NAdam-decoupled": op.NAdam(0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam-trusting": op.RAdam(0.1, betas=(0.9, 0.5), weight_decay=0.1, decoupled_weight_decay=True),
    "LARS-nesterov": op.LARS(0.1, trust_coefficient=0.5, nesterov=True),
    "Adafactor-whole": op.Adafactor(0.1, factored=False, relative_step=False, scale_parameter=False, eps=(1e-15, 1e-3)),
    "Prodigy-safeguarded": op.Prodigy(0.1, d0=0.5, beta3=0.9, safeguard_warmup=True),
    "Chain-empty": op.Chain(),
    "Chain-norm": op.Chain(op.ClipGlobalNorm(2.0), op.AdamW(0.1, weight_decay=0.1)),
    "Chain-long": op.Chain(op.SkipNonFinite(), op.ClipNorm(2.0), op.Adam(0.1), op.WeightDecay(0.01)),
    "Chain-accumulating": op.Chain(op.AccumGrad(2), op.ClipGrad(0.6), op.Adam(0.1)),
    "Trust-amid": op.Chain(op.ClipGrad(0.6), Trust(0.1), op.WeightDecay(0.01)),
    "Centred-amid": op.Chain(op.ClipGlobalNorm(2.0), Centred(), op.Adam(0.1)),
}


def trains(rule: op.Rule, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a rule takes a parameter of this kind."""
    return not any(member.refuses(shape, dtype) for member in rule.rule_for(shape, dtype).members)


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> op.Rule:
    """Every rule in turn: those of the library by their public names, some chains, and a user's own."""
    return RULES[request.param]


# Making and comparing -------------------------------------------------------------------------------------------------


def leaf(state: op.State, path: Any) -> op.Leaf:
    """The leaf at a path."""
    found = state[path]
    assert isinstance(found, op.Leaf)
    return found


def branch(state: op.State, path: Any) -> op.State:
    """The state of a branch."""
    found = state[path]
    assert isinstance(found, op.State)
    return found


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers whose parts are of size 0.5 to 1.5, so that no sign hangs on a rounding."""

    def part() -> Any:
        return rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape)

    values = part() + 1j * part() if dtype.startswith("complex") else part()
    return np.asarray(values).astype(numpy_dtype(dtype))


def wide(array: np.ndarray) -> np.ndarray:
    """The same numbers in double precision."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def dtype_of(array: Any) -> str:
    """The name of an array's dtype: `"float32"`."""
    return getattr(array.dtype, "name", None) or str(array.dtype).rpartition(".")[2]


def bits(backend: Backend, array: Any) -> bytes:
    """An array as bytes."""
    return np.ascontiguousarray(backend.read(array)).tobytes()


def all_bits(backend: Backend, state: op.State, model: Mapping[str, Any]) -> dict[str, Any]:
    """Every array of a state and a flat model as bytes, and every count."""
    found: dict[str, Any] = {name: bits(backend, array) for name, array in model.items()}
    for each in state.leaves():
        found[f"{each.path} step"] = each.step
        found |= {f"{each.path} {name}": bits(backend, slot) for name, slot in each.slots.items()}
    return found | {"step": state.step, "memory": state.memory}


def assert_apart(arrays: Mapping[str, np.ndarray]) -> None:
    """Check that no two arrays share memory."""
    named = list(arrays.items())
    for at, (name, array) in enumerate(named):
        for other, second in named[at + 1 :]:
            assert not np.shares_memory(array, second), f"{name} shares memory with {other}"


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Check that two arrays agree within a share of the largest number (at least 1)."""
    found, expected = wide(np.asarray(found)), wide(np.asarray(expected))
    assert found.shape == expected.shape
    assert np.isfinite(expected).all()
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    off = float(np.abs(found - expected).max(initial=0.0))
    assert off <= tolerance * scale, f"off by {off:.3g}, allowed {tolerance * scale:.3g}"


def train(rule: Any, model: Any, *gradients: Any, in_place: bool = False) -> tuple[op.State, Any]:
    """A fresh state and one step for each gradient."""
    state = rule if isinstance(rule, op.State) else op.setup(rule, model)
    for grads in gradients:
        state, model = (op.update_ if in_place else op.update)(state, model, grads)
    return state, model


def steps_of(state: op.State) -> dict[str, int]:
    """How many steps each parameter has taken."""
    return {str(each.path): int(each.step) for each in state.leaves()}


def trained_on(backend: Backend, rule: Any, shapes: dict[str, Any], steps: int = 3) -> tuple[op.State, Any]:
    """A state and a model of ones of these shapes, after some steps with gradients of one half."""
    model = {name: backend.array(np.full(shape, 1.0)) for name, shape in shapes.items()}
    state = op.setup(rule, model)
    for _ in range(steps):
        state, model = op.update(state, model, {name: backend.array(np.full(shape, 0.5)) for name, shape in shapes.items()})
    return state, model
