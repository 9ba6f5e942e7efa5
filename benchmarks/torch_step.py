"""What a step on PyTorch's modules costs, on the CPU, beside its own optimisers: `python -m benchmarks.torch_step`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, models, timing
from benchmarks.contestants import FOREACH, FUSED, OURS, Step
from benchmarks.figures import Figure, Outcome, ratio
from benchmarks.models import Sizes, filled, shapes_of
from benchmarks.rules import cases
from benchmarks.timing import Effort, Timing, race
from optimisers.backends import torch as torch_lists
from optimisers.interop.torch_optim import Optimizer

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results"
DEFAULT = "PyTorch default"
CLASS = "optimisers, as an optimiser of PyTorch"
FROZEN = 0.9
_VARIANTS: Mapping[str, dict[str, Any]] = {DEFAULT: {}, FUSED: {"fused": True}, FOREACH: {"foreach": True}}
# How far the contestants may be apart, relative to how far they have moved: float32 rounds differently in another order.
_AGREE = 1e-3
# Below this share of idle time, other programs spoil the figures.
_IDLE = 0.9


class _Module(torch.nn.Module):
    """A tree of arrays as parameters, each with its gradient."""

    def __init__(self, start: Any, grads: Any) -> None:
        super().__init__()
        pairs = enumerate(zip(start, grads, strict=True)) if isinstance(start, list) else ((k, (start[k], grads[k])) for k in start)
        for key, (mine, grad) in pairs:
            if isinstance(mine, np.ndarray):
                parameter = torch.nn.Parameter(torch.from_numpy(mine))
                parameter.grad = torch.from_numpy(grad)
                self.register_parameter(str(key), parameter)
            else:
                self.add_module(str(key), _Module(mine, grad))


def _module(shapes: Any) -> torch.nn.Module:
    return _Module(filled(shapes, seed=0, scale=0.02), filled(shapes, seed=1, scale=0.01))


class Ours:
    """`update_` on a module; without the compiled pass where `reference` says so."""

    def __init__(self, rule: Any, module: torch.nn.Module, *, state: op.State | None = None, reference: bool = False) -> None:
        self.state = op.setup(rule, module) if state is None else state
        self.module = module
        self.reference = reference

    def __call__(self) -> None:
        if self.reference:
            with op.reference_only():
                self._step()
        else:
            self._step()

    def _step(self) -> None:
        self.state, self.module = op.update_(self.state, self.module)


def _adamw(shapes: Any, theirs: Sequence[str], *, reference: bool = False) -> dict[str, Step]:
    """AdamW on modules of these shapes. PyTorch's variants share one; ours share another."""
    module = _module(shapes)
    steps: dict[str, Step] = {}
    shared: Any = None
    for name in theirs:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **_VARIANTS[name])
        optimizer.state = shared = optimizer.state if shared is None else shared
        steps[name] = optimizer.step
    mine = _module(shapes)
    steps[OURS] = Ours(op.AdamW(1e-3), mine, reference=reference)
    if not reference:
        steps[CLASS] = Optimizer(mine, op.AdamW(1e-3)).step
    return steps


def disagreement(steps: int = 5) -> float:
    """How far ours, in the compiled pass and on lists, are from PyTorch after some steps, relative to how far those have moved."""
    shapes = shapes_of("a", models.QUICK)
    start, theirs = _numbers(_module(shapes)), _module(shapes)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    ours = [Ours(op.AdamW(1e-3), _module(shapes), reference=reference) for reference in (False, True)]
    for _ in range(steps):
        optimizer.step()
        for each in ours:
            each()
    expected = _numbers(theirs)
    return max(_farthest(_numbers(each.module), expected) for each in ours) / _farthest(start, expected)


def _numbers(module: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in module.parameters()]


def _farthest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


# What is measured -----------------------------------------------------------------------------------------------------

Section = Callable[[Sizes, Effort], Outcome]


def _contest(case: str, label: Callable[[Sizes], str], targets: Mapping[str, float]) -> Section:
    def section(sizes: Sizes, effort: Effort) -> Outcome:
        timings = race(_adamw(shapes_of(case, sizes), list(targets)), effort)
        found = [
            Figure(case, f"{label(sizes)}, {who}, against {against}", ratio(timings, who, against), target)
            for who in (OURS, CLASS)
            for against, target in targets.items()
        ]
        return Outcome(timings, found)

    return section


def _rules(sizes: Sizes, effort: Effort) -> Outcome:
    """Every elementwise rule that `torch.optim` has, on one array."""
    timings: dict[str, Timing] = {}
    found: list[Figure] = []
    for name, case in cases().items():
        if case.torch is None or not case.elementwise:
            continue
        module = _module(shapes_of("d", sizes))
        theirs = case.torch(module.parameters(), **case.options or {})
        taken = race({OURS: Ours(case.ours, module), DEFAULT: theirs.step}, effort)
        timings |= {f"{name}, {who}": each for who, each in taken.items()}
        found.append(Figure("rules", f"{sizes.single:,} elements, {name}, against {DEFAULT}", ratio(taken, OURS, DEFAULT), 0.3))
    return Outcome(timings, found)


def _frozen(sizes: Sizes, effort: Effort) -> Outcome:
    """GPT-2 with 90 % of its elements frozen. Both states share the module."""
    module = _module(shapes_of("a", sizes))
    whole = op.setup(op.AdamW(1e-3), module)
    steps = {"none frozen": Ours(None, module, state=whole), "90 % frozen": Ours(None, module, state=_frozen_share(whole))}
    timings = race(steps, effort)
    value = ratio(timings, "90 % frozen", "none frozen")
    return Outcome(timings, [Figure("frozen", "GPT-2 small, 90 % frozen, against none", value, 0.15)])


def _frozen_share(state: op.State) -> op.State:
    """Whole parameters, from the front of the module, and rows of the one where the share ends."""
    left = round(FROZEN * sum(record.size for record in state.parameters))
    whole: list[str] = []
    for record in state.parameters:
        if record.size > left:
            rows = left * record.shape[0] // record.size
            state = state.freeze(whole) if whole else state
            return state.freeze(str(record.path), rows=slice(rows)) if rows else state
        whole.append(str(record.path))
        left -= record.size
    return state.freeze(whole)


def _lists(sizes: Sizes, effort: Effort) -> Outcome:
    """What runs where nothing is compiled: lists of tensors, as on devices that lack PyTorch's fused kernels, and those kernels."""
    timings: dict[str, Timing] = {}
    found: list[Figure] = []
    for case, label in (("a", _GPT2), ("b", _many(sizes))):
        for how, theirs, target, kernel in (
            ("on lists", FOREACH, 1.15, lambda *given: None),
            ("without Numba", FUSED, None, torch_lists.fused_kernel),
        ):
            with mock.patch.object(torch_lists, "fused_kernel", kernel):
                taken = race(_adamw(shapes_of(case, sizes), [theirs], reference=True), effort)
            timings |= {f"{label}, {how}, {who}": each for who, each in taken.items()}
            found.append(Figure("lists", f"{label}, {how}, against {theirs}", ratio(taken, OURS, theirs), target))
    return Outcome(timings, found)


_GPT2 = "GPT-2 small"


def _many(sizes: Sizes) -> str:
    return f"{sizes.many[0]:,} × {sizes.many[1]}"


SECTIONS: Mapping[str, Section] = {
    "a": _contest("a", lambda sizes: _GPT2, {FUSED: 1.10, DEFAULT: 0.25}),
    "b": _contest("b", _many, {FUSED: 0.8, DEFAULT: 0.3}),
    "rules": _rules,
    "frozen": _frozen,
    "lists": _lists,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 1 when the contestants do not compute the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_step", description=__doc__)
    parser.add_argument(
        "--only", metavar="SECTIONS", default=",".join(SECTIONS), help=f"comma-separated, of: {', '.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where torch_step.json goes (a whole run: benchmarks/results; else: nowhere)"
    )
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.out is None and not options.quick and len(chosen) == len(SECTIONS):
        options.out = RESULTS
    sizes, effort = (models.QUICK, timing.QUICK) if options.quick else (models.FULL, timing.FULL)
    torch.set_num_threads(machine.threads())
    console = Console(width=132)
    apart = disagreement()
    if apart > _AGREE:
        console.print(f"the contestants do not take the same steps; relative to what these moved they are off by {apart}")
        return 1
    described = machine.describe(sizes.single)
    outcomes: dict[str, Outcome] = {}
    for name in chosen:
        outcomes[name] = SECTIONS[name](sizes, effort)
        for who, taken in outcomes[name].timings.items():
            console.print(f"{name}: {who} {taken.minimum * 1e3:,.2f} ms (median {taken.median * 1e3:,.2f})")
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
    console.print(_table(figures, judged=not options.quick))
    if described["idle_before"] is not None and described["idle_before"] < _IDLE:
        console.print(f"[yellow]Other programs were using the cores ({described['idle_before']:.0%} idle before the start).[/]")
    if options.out is not None:
        timings = {name: {who: asdict(taken) for who, taken in each.timings.items()} for name, each in outcomes.items()}
        data = {"machine": described, "quick": options.quick, "disagreement": apart, "timings": timings}
        data["figures"] = [figure.as_json() for figure in figures]
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "torch_step.json"
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
