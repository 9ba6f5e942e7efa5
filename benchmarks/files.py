"""What saving and loading cost, beside safetensors' own functions on the same arrays: `python -m benchmarks.files`."""

import argparse
import json
import os
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, timing
from benchmarks.figures import Figure, ratio
from benchmarks.timing import race

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results"
OURS, THEIRS = "optimisers", "safetensors"
FULL, QUICK = 5_000_000, 1_000
"""Elements of each of 25 parameters; with the two moments of Adam and float32, 1.5 GB in all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.files", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where files.json goes (a whole run: benchmarks/results)")
    options = parser.parse_args(arguments)
    out = RESULTS if options.out is None and not options.quick else options.out
    model = {f"p{at}": np.full(QUICK if options.quick else FULL, 0.5, np.float32) for at in range(25)}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    arrays = {**model, **{f"{leaf.path}/{name}": slot for leaf in state.leaves() for name, slot in leaf.slots.items()}}
    total = sum(array.nbytes for array in arrays.values())
    described = machine.describe(model["p0"].size)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        ours, theirs = (str(Path(folder) / f"{name}.safetensors") for name in (OURS, THEIRS))

        def synced() -> None:
            safetensors.numpy.save_file(arrays, theirs)
            with open(theirs, "rb") as written:
                os.fsync(written.fileno())

        effort = timing.QUICK if options.quick else timing.FULL
        saving = race({OURS: lambda: op.save(ours, state, model), THEIRS: synced}, effort)
        loading = race({OURS: lambda: op.load(ours, model), THEIRS: lambda: safetensors.numpy.load_file(theirs)}, effort)
        figures = [
            Figure("save", "save, against save_file and fsync", ratio(saving, OURS, THEIRS), 1.25),
            Figure("load", "load, checksums verified, against load_file", ratio(loading, OURS, THEIRS), 1.25),
            Figure("memory", "memory of save, share of the bytes", _peak(lambda: op.save(ours, state, model)) / total, 1.2),
            Figure("memory", "memory of load, share of the bytes", _peak(lambda: op.load(ours, model)) / total, 1.2),
        ]
    console = Console(width=120)
    table = Table("figure", "measured", "target", "", title=f"{total / 1e9:.2f} GB", title_justify="left")
    for figure in figures:
        verdict = {None: "", True: "met", False: "missed"}[None if options.quick else figure.met]
        table.add_row(figure.name, f"{figure.value:.3g}", f"≤ {figure.target:.3g}", verdict)
    console.print(table)
    if out is not None:
        timings = {
            name: {who: asdict(each) for who, each in taken.items()} for name, taken in {"save": saving, "load": loading}.items()
        }
        data: dict[str, Any] = {"machine": described, "quick": options.quick, "bytes": total, "timings": timings}
        data["figures"] = [figure.as_json() for figure in figures]
        out.mkdir(parents=True, exist_ok=True)
        (out / "files.json").write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"written: {out / 'files.json'}")
    return 0


def _peak(function: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what was there. Mapped files are not in it."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    sys.exit(main())
