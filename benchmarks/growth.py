"""How times grow with the number of parameters and of elements, on log-log charts: `python -m benchmarks.growth`."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, timing
from benchmarks.contestants import FUSED, OURS, Ours, torch_variants
from benchmarks.timing import Timing, race

__all__ = ["main", "roofline"]

RESULTS = Path(__file__).parent / "results"
COUNTS = (10, 100, 1_000, 10_000, 100_000)
"""How many parameters, of 16 elements each."""
ELEMENTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""How many elements, in one parameter."""
STREAMS = 7
"""What AdamW moves for each element: parameter, gradient and two moments read, all but the gradient written."""
_ARRAYS = 4
"""How many arrays of the size of the model a step holds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where growth.json goes (a whole run: benchmarks/results)")
    options = parser.parse_args(arguments)
    out = RESULTS if options.out is None and not options.quick else options.out
    torch.set_num_threads(machine.threads())
    console = Console(width=132)
    effort = timing.QUICK if options.quick else replace(timing.FULL, seconds=1.0, limit=20.0)
    described = machine.describe(50_000 if options.quick else 100_000_000)
    parameters = {count: _parameters(count, effort) for count in (COUNTS[:3] if options.quick else COUNTS)}
    console.print(_table("milliseconds, by the number of parameters", parameters))
    elements = {count: _elements(count, effort) for count in (ELEMENTS[:3] if options.quick else ELEMENTS) if _fits(count)}
    console.print(_table("milliseconds, by the number of elements", elements))
    bandwidth = described["copy_gb_per_second"] * 1e9
    for count, timings in elements.items():
        share = roofline(count, bandwidth) / timings[OURS].minimum
        console.print(f"{count:>13,} elements: {share:.2f} of the bandwidth of a copy")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        data = {
            "machine": described,
            "quick": options.quick,
            "growth": {name: _plain(found) for name, found in (("parameters", parameters), ("elements", elements))},
            "roofline": {str(count): roofline(count, bandwidth) for count in elements},
        }
        (out / "growth.json").write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"written: {out / 'growth.json'}")
    return 0


def roofline(elements: int, bandwidth: float) -> float:
    """The seconds that a step of AdamW in float32 takes at least, when memory moves so many bytes a second."""
    return STREAMS * 4 * elements / bandwidth


def _fits(elements: int) -> bool:
    """Whether a step of so many elements fits into three quarters of the memory that is free."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return _ARRAYS * 4 * elements < 0.75 * free


def _parameters(count: int, effort: timing.Effort) -> dict[str, Timing]:
    """What is done with a model of so many small parameters."""
    names = [f"layer{at}" for at in range(count)]
    model: Any = {"trunk": {name: np.zeros(16, np.float32) for name in names[::2]}}
    model["head"] = {name: np.zeros(16, np.float32) for name in names[1::2]}
    grads = {branch: {name: np.full(16, 0.01, np.float32) for name in inner} for branch, inner in model.items()}
    state = op.setup(op.AdamW(1e-3), model)
    step, theirs = Ours(None, model, grads, state=state), torch_variants(model, grads, [FUSED])[FUSED]
    timings = race({f"update_, {OURS}": step, f"step, {FUSED}": theirs}, effort)
    renamed = {"body": model["trunk"], "head": model["head"]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"

        def saved() -> None:
            op.save(file, step.state, model)

        saved()
        others: dict[str, Callable[[], object]] = {
            "setup": lambda: op.setup(op.AdamW(1e-3), model),
            "freeze": lambda: step.state.freeze("trunk"),
            "adapt": lambda: op.adapt(step.state, renamed, rename={"trunk": "body"}),
            "save": saved,
            "load": lambda: op.load(file, model),
        }
        return timings | race(others, effort)


def _elements(count: int, effort: timing.Effort) -> dict[str, Timing]:
    """A step on one parameter of so many elements. At the largest size, there is room for one contestant at a time."""
    timings: dict[str, Timing] = {}
    for name in (OURS, FUSED):
        model, grads = ({"weight": np.full(count, value, np.float32)} for value in (0.02, 0.01))
        step = Ours(op.AdamW(1e-3), model, grads) if name == OURS else _in_torch(model, grads)
        del model, grads
        timings |= race({name: step}, effort)
        del step
    return timings


def _in_torch(model: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray]) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.from_numpy(model["weight"]))
    param.grad = torch.from_numpy(grads["weight"])
    return torch.optim.AdamW([param], lr=1e-3, fused=True).step


def _plain(found: Mapping[int, Mapping[str, Timing]]) -> dict[str, Any]:
    return {str(count): {name: asdict(taken) for name, taken in timings.items()} for count, timings in found.items()}


def _table(title: str, found: Mapping[int, Mapping[str, Timing]]) -> Table:
    table = Table("", *next(iter(found.values())), title=title, title_justify="left")
    for count, timings in found.items():
        table.add_row(f"{count:,}", *(f"{taken.minimum * 1e3:,.3g}" for taken in timings.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
