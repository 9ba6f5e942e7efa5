"""What saving and loading cost, beside safetensors' own functions on the same arrays: `python -m benchmarks.files`."""

import os
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy

import optimisers as op
from benchmarks.figures import OURS, Figure, Outcome, ratio
from benchmarks.suite import Scale, Suite
from benchmarks.timing import Timing

__all__ = ["SUITE"]

THEIRS = "safetensors"
FULL, QUICK = 5_000_000, 1_000
"""Elements of each of 25 parameters; with the two moments of Adam and float32, 1.5 GB in all."""


def _whole(scale: Scale) -> Outcome:
    """A state and its model to a file and back."""
    model: Any = {f"p{at}": np.full(QUICK if scale.quick else FULL, 0.5, np.float32) for at in range(25)}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    arrays = {**model, **{f"{leaf.path}/{name}": slot for leaf in state.leaves() for name, slot in leaf.slots.items()}}
    total = sum(array.nbytes for array in arrays.values())
    ours, theirs = (str(scale.folder / f"{name}.safetensors") for name in (OURS, THEIRS))

    def synced() -> None:
        safetensors.numpy.save_file(arrays, theirs)
        with open(theirs, "rb") as written:
            os.fsync(written.fileno())

    saving = scale.race({OURS: lambda: op.save(ours, state, model), THEIRS: synced})
    loading = scale.race({OURS: lambda: op.load(ours, model), THEIRS: lambda: safetensors.numpy.load_file(theirs)})
    save, load = f"save, {OURS}", f"load, {OURS}"
    figures = [
        Figure("whole", "save, against save_file and fsync", ratio(saving, OURS, THEIRS), 1.25, save),
        Figure("whole", "load, checksums verified, against load_file", ratio(loading, OURS, THEIRS), 1.25, load),
        Figure("whole", "memory of save, share of the bytes", _peak(lambda: op.save(ours, state, model)) / total, 1.2),
        Figure("whole", "memory of load, share of the bytes", _peak(lambda: op.load(ours, model)) / total, 1.2),
    ]
    timings = _named("save", saving) | _named("load", loading)
    # Each byte is read and written once.
    return Outcome(timings, figures, dict.fromkeys(timings, 2 * total))


def _named(what: str, timings: dict[str, Timing]) -> dict[str, Timing]:
    return {f"{what}, {who}": taken for who, taken in timings.items()}


def _peak(function: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what was there. Mapped files are not in it."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


SUITE = Suite("files", __doc__, {"whole": _whole}, packages=("safetensors",))

if __name__ == "__main__":
    sys.exit(SUITE.main())
