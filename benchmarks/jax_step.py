"""What a step and a first call cost in JAX, on the CPU, beside Optax: `python -m benchmarks.jax_step`."""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, models, timing
from benchmarks.contestants import OURS, Step
from benchmarks.figures import Figure, Outcome, ratio
from benchmarks.models import Sizes, filled, shapes_of
from benchmarks.timing import Effort, Timing, race

RESULTS = Path(__file__).parent / "results"
OPTAX = "Optax"
FROZEN = 0.9
GROUPS = 20
_AGREE = 1e-3


@dataclass(frozen=True)
class Scale:
    """How large the models are, and how much is measured."""

    sizes: Sizes
    effort: Effort
    rounds: int
    """How often each first call is made."""
    divisor: int
    """By how much the numbers of arrays are divided."""

    def many(self, count: int, *lengths: int) -> dict[str, tuple[int]]:
        """The shapes of many vectors, of these lengths in turn."""
        return {f"layer{at}": (lengths[at % len(lengths)],) for at in range(count // self.divisor)}


FULL = Scale(models.FULL, timing.FULL, rounds=2, divisor=1)
QUICK = Scale(models.QUICK, timing.QUICK, rounds=1, divisor=50)


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


def first_calls(makers: Mapping[str, Callable[[], Step]], rounds: int) -> dict[str, Timing]:
    """Time first calls in turn. Each is made afresh, and finds nothing compiled."""
    samples: dict[str, list[float]] = {name: [] for name in makers}
    names = list(makers)
    for _ in range(rounds):
        for name in names:
            step = makers[name]()
            jax.clear_caches()
            gc.collect()
            start = time.perf_counter()
            step()
            samples[name].append(time.perf_counter() - start)
        names.reverse()
    return {name: Timing(min(taken), statistics.median(taken), rounds, 1) for name, taken in samples.items()}


def disagreement(steps: int = 5) -> float:
    """How far the two are apart after some steps, relative to how far the parameters have moved."""
    shapes = shapes_of("a", models.QUICK)
    ours, theirs = _ours(shapes), _optax(shapes)
    start = [np.array(leaf) for leaf in jax.tree.leaves(ours.model)]
    for _ in range(steps):
        ours()
        theirs()
    mine, others = ([np.array(leaf) for leaf in jax.tree.leaves(each.model)] for each in (ours, theirs))
    return _farthest(mine, others) / _farthest(start, others)


def _farthest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


# What is measured -----------------------------------------------------------------------------------------------------


def _step(scale: Scale) -> Outcome:
    shapes = shapes_of("a", scale.sizes)
    timings = race({OURS: _ours(shapes), OPTAX: _optax(shapes)}, scale.effort)
    return Outcome(timings, [Figure("step", "GPT-2 small, compiled step, against Optax", ratio(timings, OURS, OPTAX), 1.0)])


def _first(scale: Scale) -> Outcome:
    shapes = scale.many(2_000, 256)
    timings = first_calls({OURS: lambda: _ours(shapes), OPTAX: lambda: _optax(shapes)}, scale.rounds)
    return Outcome(
        timings, [Figure("first", "2,000 arrays, first compiled call, against Optax", ratio(timings, OURS, OPTAX), 0.75)]
    )


def _groups(scale: Scale) -> Outcome:
    shapes = scale.many(500, 256)
    group = {name: at % GROUPS for at, name in enumerate(shapes)}
    rates = [1e-3 / (1 + at) for at in range(GROUPS)]
    makers: dict[str, Callable[[], Step]] = {
        OURS: lambda: _ours(shapes),
        _grouped(OURS): lambda: _ours(shapes, lambda record: op.AdamW(rates[group[str(record.path)]])),
        OPTAX: lambda: _optax(shapes),
        _grouped(OPTAX): lambda: _optax(shapes, optax.partition(dict(enumerate(map(_adamw, rates))), group)),
    }
    firsts = first_calls(makers, scale.rounds)
    steps = race({name: make() for name, make in makers.items()}, scale.effort)
    name = f"500 arrays, {GROUPS} groups against 1"
    found = [
        Figure("groups", f"{name}: step", ratio(steps, _grouped(OURS), OURS), 1.15),
        Figure("groups", f"{name}: first call", ratio(firsts, _grouped(OURS), OURS), 1.5),
        Figure("groups", f"{name}: step, Optax", ratio(steps, _grouped(OPTAX), OPTAX)),
        Figure("groups", f"{name}: first call, Optax", ratio(firsts, _grouped(OPTAX), OPTAX)),
    ]
    return Outcome({**steps, **{f"{name}, first call": taken for name, taken in firsts.items()}}, found)


def _grouped(name: str) -> str:
    return f"{name}, {GROUPS} groups"


def _frozen(scale: Scale) -> Outcome:
    """Told by the compiler, not by the clock. Frozen arrays go in, are given back, and come out."""
    shapes = shapes_of("a", scale.sizes)
    ours = _ours(shapes)
    frozen = ours.state.freeze(_a_share(ours.state, FROZEN))
    none, most = (_accessed(ours.step, state, ours.model, ours.grads) for state in (ours.state, frozen))
    return Outcome({}, [Figure("frozen", "GPT-2 small, 90 % frozen, bytes accessed, against none frozen", most / none, 0.15)])


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
    small = scale.many(1_000, 16)
    steps = race({OURS: _ours(small, eager=True), OPTAX: _optax(small, eager=True)}, scale.effort)
    mixed = scale.many(2_000, 64, 128, 256)
    ours, compiled = f"{OURS}, first step", f"{OPTAX}, first compiled call"
    firsts = first_calls({ours: lambda: _ours(mixed, eager=True), compiled: lambda: _optax(mixed)}, rounds=1)
    against_compiled = "2,000 arrays, first step without jit, against Optax's first compiled call"
    found = [
        Figure("eager", "1,000 arrays, step without jit, against Optax", ratio(steps, OURS, OPTAX), 0.25),
        Figure("eager", against_compiled, ratio(firsts, ours, compiled), 0.1),
    ]
    return Outcome({**steps, **firsts}, found)


def _memory(scale: Scale) -> Outcome:
    """Bytes of the state of a model whose head is its embedding."""
    model, _ = _arrays(shapes_of("a", scale.sizes))
    model["head"] = {"weight": model["wte"]["weight"]}
    ours = _bytes(op.setup(op.AdamW(1e-3), model))
    theirs = _bytes(jax.eval_shape(_adamw(1e-3).init, model))
    name = f"GPT-2 small, tied, bytes of the state, {ours:,}, against Optax, {theirs:,}"
    return Outcome({}, [Figure("memory", name, ours / theirs)])


def _bytes(state: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


SECTIONS: Mapping[str, Callable[[Scale], Outcome]] = {
    "step": _step,
    "first": _first,
    "groups": _groups,
    "frozen": _frozen,
    "eager": _eager,
    "memory": _memory,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 1 when the two do not compute the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_step", description=__doc__)
    parser.add_argument(
        "--only", metavar="SECTIONS", default=",".join(SECTIONS), help=f"comma-separated, of: {', '.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where jax_step.json goes (a whole run: benchmarks/results; else: nowhere)"
    )
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.out is None and not options.quick and len(chosen) == len(SECTIONS):
        options.out = RESULTS
    console = Console(width=132)
    apart = disagreement()
    if apart > _AGREE:
        console.print(f"the contestants do not take the same steps; relative to what these moved they are off by {apart}")
        return 1
    scale = QUICK if options.quick else FULL
    described = machine.describe(scale.sizes.single)
    described["versions"] |= {"jax": jax.__version__, "optax": optax.__version__}
    outcomes: dict[str, Outcome] = {}
    for name in chosen:
        outcomes[name] = SECTIONS[name](scale)
        for who, taken in outcomes[name].timings.items():
            console.print(f"{name}: {who} {taken.minimum * 1e3:,.2f} ms (median {taken.median * 1e3:,.2f})")
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
    console.print(_table(figures, judged=not options.quick))
    if options.out is not None:
        timings = {name: {who: asdict(taken) for who, taken in each.timings.items()} for name, each in outcomes.items()}
        data = {"machine": described, "quick": options.quick, "disagreement": apart, "timings": timings}
        data["figures"] = [figure.as_json() for figure in figures]
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "jax_step.json"
        path.write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"written: {path}")
    return 0


def _table(figures: Sequence[Figure], *, judged: bool) -> Table:
    table = Table("figure", "measured", "target", "", title="ratios of minima", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for figure in figures:
        target = "" if figure.target is None else f"≤ {figure.target:.3g}"
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met if judged else None]
        table.add_row(figure.name, f"{figure.value:.3g}", target, verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
