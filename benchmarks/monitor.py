"""What a monitor costs that samples every tenth step, beside steps that nobody watches: `python -m benchmarks.monitor`."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, models, timing
from benchmarks.figures import Figure, Outcome
from benchmarks.models import Sizes, filled, shapes_of
from benchmarks.timing import Effort, Timing, race
from optimisers.interop.torch_optim import Optimizer

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results"
EVERY, TARGET = 10, 0.05
PLAIN, MEMORY, FILE = "update_", "sampled, in memory", "sampled, in a file"
CASES = {"a": "GPT-2 small", "b": "many small arrays"}


class Steps:
    """A training whose steps are plain, or are all sampled."""

    def __init__(self, state: op.State, model: Any, grads: Any) -> None:
        self.state, self.model, self.grads = state, model, grads

    def plain(self) -> None:
        self.state, self.model = op.update_(self.state, self.model, self.grads)

    def sampled(self, monitor: op.Monitor) -> Callable[[], None]:
        def step() -> None:
            self.state, self.model = monitor.update_(self.state, self.model, self.grads)
            # What is kept of each sample is little, but a race takes many.
            monitor.recording = op.Recording()

        return step


def _updates(model: Any, grads: Any, effort: Effort, file: Path) -> dict[str, Timing]:
    """`update_` alone, and with each step sampled."""
    steps = Steps(op.setup(op.AdamW(1e-3), model), model, grads)
    contestants = {PLAIN: steps.plain, MEMORY: steps.sampled(op.Monitor(every=1))}
    contestants[FILE] = steps.sampled(op.Monitor(file, every=1))
    return race(contestants, effort)


def _share(timings: Mapping[str, Timing], name: str, plain: str) -> float:
    """What samples add to a step, on average, when every tenth is one."""
    return (timings[name].minimum / timings[plain].minimum - 1) / EVERY


def _figures(section: str, label: str, timings: Mapping[str, Timing], plain: str = PLAIN) -> list[Figure]:
    names = [name for name in timings if name != plain]
    return [Figure(section, f"{label}, {name}, against {plain}", _share(timings, name, plain), TARGET) for name in names]


# What is measured -----------------------------------------------------------------------------------------------------


def _numpy(sizes: Sizes, effort: Effort, folder: Path) -> Outcome:
    return _both(sizes, effort, folder, "numpy", lambda tree: tree)


def _torch(sizes: Sizes, effort: Effort, folder: Path) -> Outcome:
    return _both(sizes, effort, folder, "torch", lambda tree: jax.tree.map(torch.from_numpy, tree))


def _both(sizes: Sizes, effort: Effort, folder: Path, section: str, make: Callable[[Any], Any]) -> Outcome:
    timings, figures = {}, []
    for case, label in CASES.items():
        model, grads = (make(filled(shapes_of(case, sizes), seed, scale)) for seed, scale in ((0, 0.02), (1, 0.01)))
        taken = _updates(model, grads, effort, folder / f"{section}-{case}.jsonl")
        timings |= {f"{label}, {name}": each for name, each in taken.items()}
        figures += _figures(section, label, taken)
    return Outcome(timings, figures)


def _jax(sizes: Sizes, effort: Effort, folder: Path) -> Outcome:
    """A compiled step, and the same recorded outside of it."""
    timings, figures = {}, []
    for case, label in CASES.items():
        model, grads = (jax.tree.map(jnp.asarray, filled(shapes_of(case, sizes), seed, 0.01)) for seed in (0, 1))
        taken = race(_compiled(model, grads), effort)
        timings |= {f"{label}, {name}": each for name, each in taken.items()}
        figures += _figures("jax", label, taken, "compiled update")
    return Outcome(timings, figures)


def _compiled(model: Any, grads: Any) -> dict[str, Callable[[], None]]:
    state, monitor, update = op.setup(op.AdamW(1e-3), model), op.Monitor(every=1), jax.jit(op.update)

    def plain() -> None:
        jax.block_until_ready(update(state, model, grads))

    def recorded() -> None:
        after = update(state, model, grads)
        monitor.record(state, model, grads, *after)
        jax.block_until_ready(after)

    return {"compiled update": plain, "recorded": recorded}


def _training(sizes: Sizes, effort: Effort, folder: Path) -> Outcome:
    """Whole steps of a transformer in PyTorch, forward and backward, with `update_` and with an optimizer that is attached to."""
    width = 16 * (sizes.width // 16 or 1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2)
    batch = torch.randn(4, 64, width)
    optimizer, monitor = Optimizer(module, op.AdamW(1e-3)), op.Monitor(folder / "training.jsonl", every=1)
    steps = Steps(op.setup(op.AdamW(1e-3), module), module, None)
    sampled = steps.sampled(op.Monitor(folder / "steps.jsonl", every=1))

    def with_gradients(step: Callable[[], object]) -> Callable[[], None]:
        def whole() -> None:
            module.zero_grad()
            module(batch).square().mean().backward()
            step()

        return whole

    def attached() -> None:
        handle = monitor.attach(optimizer)
        optimizer.step()
        handle.remove()
        monitor.recording = op.Recording()

    plain = "training step"
    taken = race({plain: with_gradients(steps.plain), FILE: with_gradients(sampled)}, effort)
    shell = "training step of an Optimizer"
    theirs = race({shell: with_gradients(optimizer.step), "attached, in a file": with_gradients(attached)}, effort)
    return Outcome(
        taken | theirs, _figures("training", "a transformer", taken, plain) + _figures("training", "a transformer", theirs, shell)
    )


SECTIONS: Mapping[str, Callable[[Sizes, Effort, Path], Outcome]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "training": _training,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description=__doc__)
    parser.add_argument(
        "--only", metavar="SECTIONS", default=",".join(SECTIONS), help=f"comma-separated, of: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where monitor.json goes (a whole run: benchmarks/results)")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.out is None and not options.quick and len(chosen) == len(SECTIONS):
        options.out = RESULTS
    sizes, effort = (models.QUICK, timing.QUICK) if options.quick else (models.FULL, timing.FULL)
    torch.set_num_threads(machine.threads())
    described = machine.describe(sizes.single)
    console = Console(width=132)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            outcomes[name] = SECTIONS[name](sizes, effort, Path(folder))
            for who, taken in outcomes[name].timings.items():
                console.print(f"{name}: {who} {taken.minimum * 1e3:,.2f} ms (median {taken.median * 1e3:,.2f})")
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
    table = Table(
        "section", "figure", "measured", "target", "", title=f"cost of sampling every {EVERY}th step", title_justify="left"
    )
    for figure in figures:
        verdict = {None: "", True: "met", False: "missed"}[None if options.quick else figure.met]
        table.add_row(figure.section, figure.name, f"{figure.value:.1%}", f"≤ {TARGET:.0%}", verdict)
    console.print(table)
    if options.out is not None:
        timings = {name: {who: asdict(taken) for who, taken in each.timings.items()} for name, each in outcomes.items()}
        data = {"machine": described, "quick": options.quick, "every": EVERY, "timings": timings}
        data["figures"] = [figure.as_json() for figure in figures]
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "monitor.json").write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"written: {options.out / 'monitor.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
