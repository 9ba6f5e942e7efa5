"""What a step and a first call cost in JAX, on the CPU, beside Optax: `python -m benchmarks.jax_step`."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optimisers as op
from benchmarks import models
from benchmarks.contestants import farthest
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import OURS, Figure, Outcome, ratio
from benchmarks.models import filled, shapes_of
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Step, Timing

__all__ = ["SUITE"]

OPTAX = "Optax"
FROZEN = 0.9
GROUPS = 20


class Contestant:
    """Steps from a state and a model, compiled and with these given back, or as they come."""

    def __init__(self, step: Any, state: Any, model: Any, grads: Any, *, eager: bool) -> None:
        self.step = step if eager else jax.jit(step, donate_argnums=(0, 1))
        self.state, self.model, self.grads = state, model, grads

    def __call__(self) -> None:
        self.state, self.model = self.step(self.state, self.model, self.grads)
        jax.block_until_ready(self.model)


def _ours(shapes: Any, rule: Any = None, *, eager: bool = False) -> Contestant:
    model, grads = _arrays(shapes)
    return Contestant(op.update, op.setup(op.AdamW(1e-3) if rule is None else rule, model), model, grads, eager=eager)


def _optax(shapes: Any, transformation: Any = None, *, eager: bool = False) -> Contestant:
    model, grads = _arrays(shapes)
    transformation = _adamw(1e-3) if transformation is None else transformation

    def step(state: Any, model: Any, grads: Any) -> Any:
        updates, state = transformation.update(grads, state, model)
        return state, optax.apply_updates(model, updates)

    return Contestant(step, transformation.init(model), model, grads, eager=eager)


def _arrays(shapes: Any) -> tuple[Any, Any]:
    start, grads = filled(shapes, seed=0, scale=0.02), filled(shapes, seed=1, scale=0.01)
    return jax.tree.map(jnp.array, start), jax.tree.map(jnp.array, grads)


def _adamw(lr: float) -> Any:
    return optax.adamw(lr, weight_decay=0.01)


def first_calls(makers: dict[str, Callable[[], Step]]) -> dict[str, Timing]:
    """Time first calls in turn, twice. Each is made afresh, and finds nothing compiled."""
    samples: dict[str, list[float]] = {name: [] for name in makers}
    for name in [*makers, *reversed(makers)]:
        step = makers[name]()
        jax.clear_caches()
        gc.collect()
        start = time.perf_counter()
        step()
        samples[name].append(time.perf_counter() - start)
    return {name: Timing(min(taken), statistics.median(taken), len(taken), 1) for name, taken in samples.items()}


def disagreement(steps: int = 5) -> float:
    """How far the two are apart after some steps, relative to how far the parameters have moved."""
    shapes = shapes_of("a", models.QUICK)
    ours, theirs = _ours(shapes), _optax(shapes)
    start = [np.array(leaf) for leaf in jax.tree.leaves(ours.model)]
    for _ in range(steps):
        ours()
        theirs()
    mine, others = ([np.array(leaf) for leaf in jax.tree.leaves(each.model)] for each in (ours, theirs))
    return farthest(mine, others) / farthest(start, others)


# What is measured -----------------------------------------------------------------------------------------------------


def _many(scale: Scale, count: int, *lengths: int) -> dict[str, tuple[int]]:
    """The shapes of many vectors, of these lengths in turn."""
    return {f"layer{at}": (lengths[at % len(lengths)],) for at in range(count // 50 if scale.quick else count)}


def _step(scale: Scale) -> Outcome:
    shapes = shapes_of("a", scale.sizes)
    steps = {OURS: _ours(shapes), OPTAX: _optax(shapes)}
    moved = dict.fromkeys(steps, bytes_moved(steps[OURS].state))
    timings = scale.race(steps)
    figure = Figure("step", "GPT-2 small, compiled step, against Optax", ratio(timings, OURS, OPTAX), 1.0, OURS)
    return Outcome(timings, [figure], moved)


def _first(scale: Scale) -> Outcome:
    shapes, eager = _many(scale, 2_000, 64, 128, 256), f"{OURS}, without jit"
    makers: dict[str, Callable[[], Step]] = {
        OURS: lambda: _ours(shapes),
        OPTAX: lambda: _optax(shapes),
        eager: lambda: _ours(shapes, eager=True),
    }
    timings = first_calls(makers)
    against_compiled = "2,000 arrays, first step without jit, against Optax's first compiled call"
    found = [
        Figure("first", "2,000 arrays, first compiled call, against Optax", ratio(timings, OURS, OPTAX), 0.75, OURS),
        Figure("first", against_compiled, ratio(timings, eager, OPTAX), 0.1, eager),
    ]
    return Outcome(timings, found)


def _groups(scale: Scale) -> Outcome:
    shapes = _many(scale, 500, 256)
    group = {name: at % GROUPS for at, name in enumerate(shapes)}
    rates = [1e-3 / (1 + at) for at in range(GROUPS)]
    makers: dict[str, Callable[[], Step]] = {
        OURS: lambda: _ours(shapes),
        _grouped(OURS): lambda: _ours(shapes, lambda record: op.AdamW(rates[group[str(record.path)]])),
        OPTAX: lambda: _optax(shapes),
        _grouped(OPTAX): lambda: _optax(shapes, optax.partition(dict(enumerate(map(_adamw, rates))), group)),
    }
    firsts = {f"{name}, first call": taken for name, taken in first_calls(makers).items()}
    timings = scale.race({name: make() for name, make in makers.items()}) | firsts
    name = f"500 arrays, {GROUPS} groups against 1"
    found = []
    for who, step, first in ((OURS, 1.15, 1.5), (OPTAX, None, None)):
        most, said = _grouped(who), "" if who == OURS else f", {who}"
        found.append(Figure("groups", f"{name}: step{said}", ratio(timings, most, who), step, most))
        calls = f"{most}, first call", f"{who}, first call"
        found.append(Figure("groups", f"{name}: first call{said}", ratio(timings, *calls), first, calls[0]))
    return Outcome(timings, found)


def _grouped(name: str) -> str:
    return f"{name}, {GROUPS} groups"


def _frozen(scale: Scale) -> Outcome:
    """Told by the compiler, not by the clock. Frozen arrays go in, are given back, and come out."""
    shapes = shapes_of("a", scale.sizes)
    ours = _ours(shapes)
    frozen = ours.state.freeze(_a_share(ours.state, FROZEN))
    none, most = (_accessed(ours.step, state, ours.model, ours.grads) for state in (ours.state, frozen))
    name = "GPT-2 small, 90 % frozen, bytes accessed, against none frozen"
    return Outcome(figures=[Figure("frozen", name, most / none, 0.15)])


def _a_share(state: op.State, share: float) -> list[str]:
    """Whole parameters that make up this share of the bytes, the largest first, those that fit."""
    left = round(share * sum(record.size for record in state.parameters))
    chosen: list[str] = []
    for record in sorted(state.parameters, key=lambda record: record.size, reverse=True):
        if record.size <= left:
            chosen.append(str(record.path))
            left -= record.size
    return chosen


def _accessed(step: Any, *arguments: Any) -> float:
    return step.lower(*arguments).compile().cost_analysis()["bytes accessed"]


def _eager(scale: Scale) -> Outcome:
    small = _many(scale, 1_000, 16)
    steps = scale.race({OURS: _ours(small, eager=True), OPTAX: _optax(small, eager=True)})
    name = "1,000 arrays, step without jit, against Optax"
    return Outcome(steps, [Figure("eager", name, ratio(steps, OURS, OPTAX), 0.25, OURS)])


def _memory(scale: Scale) -> Outcome:
    """Bytes of the state of a model whose head is its embedding."""
    model, _ = _arrays(shapes_of("a", scale.sizes))
    model["head"] = {"weight": model["wte"]["weight"]}
    ours = _bytes(op.setup(op.AdamW(1e-3), model))
    theirs = _bytes(jax.eval_shape(_adamw(1e-3).init, model))
    name = f"GPT-2 small, tied, bytes of the state, {ours:,}, against Optax, {theirs:,}"
    return Outcome(figures=[Figure("memory", name, ours / theirs)])


def _bytes(state: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


SECTIONS: Mapping[str, Section] = {
    "step": _step,
    "first": _first,
    "groups": _groups,
    "frozen": _frozen,
    "eager": _eager,
    "memory": _memory,
}
SUITE = Suite("jax_step", __doc__, SECTIONS, disagreement, packages=("jax", "optax"))

if __name__ == "__main__":
    sys.exit(SUITE.main())
