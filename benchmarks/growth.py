"""How times grow with the number of parameters and of elements, on log-log charts: `python -m benchmarks.growth`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import optimisers as op
from benchmarks import machine, timing
from benchmarks.contestants import Ours, torch_variants
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import FUSED, OURS, Outcome
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Timing

__all__ = ["SUITE"]

COUNTS = (10, 100, 1_000, 10_000, 100_000)
"""How many parameters, of 16 elements each."""
ELEMENTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""How many elements, in one parameter."""
_QUICK = 1_000
"""The largest size of a quick run."""
_ARRAYS = 4
"""How many arrays of the size of the model a step holds."""


def _fits(elements: int) -> bool:
    """Whether a step of so many elements fits into most of the memory that is to be had."""
    return _ARRAYS * 4 * elements < 0.85 * machine.available()


def _parameters(count: int) -> Section:
    """What is done with a model of so many small parameters."""

    def section(scale: Scale) -> Outcome:
        if scale.quick and count > _QUICK:
            return Outcome()
        names = [f"layer{at}" for at in range(count)]
        model: Any = {"trunk": {name: np.zeros(16, np.float32) for name in names[::2]}}
        model["head"] = {name: np.zeros(16, np.float32) for name in names[1::2]}
        grads = {branch: {name: np.full(16, 0.01, np.float32) for name in inner} for branch, inner in model.items()}
        state = op.setup(op.AdamW(1e-3), model)
        step, theirs = Ours(None, model, grads, state=state), torch_variants(model, grads, [FUSED])[FUSED]
        steps = {f"update_, {OURS}": step, f"step, {FUSED}": theirs}
        timings = scale.race(steps)
        renamed = {"body": model["trunk"], "head": model["head"]}
        file = scale.folder / "run.safetensors"
        op.save(file, step.state, model)
        others: dict[str, Callable[[], object]] = {
            "setup": lambda: op.setup(op.AdamW(1e-3), model),
            "freeze": lambda: step.state.freeze("trunk"),
            "adapt": lambda: op.adapt(step.state, renamed, rename={"trunk": "body"}),
            "save": lambda: op.save(file, step.state, model),
            "load": lambda: op.load(file, model),
        }
        return Outcome(timings | scale.race(others), moved=dict.fromkeys(steps, bytes_moved(state)))

    return section


def _elements(count: int) -> Section:
    """A step on one parameter of so many elements. At the largest size, there is room for one contestant at a time."""

    def section(scale: Scale) -> Outcome:
        timings: dict[str, Timing] = {}
        moved: dict[str, int] = {}
        if (scale.quick and count > _QUICK) or not _fits(count):
            return Outcome()
        for name in (OURS, FUSED):
            model, grads = ({"weight": np.full(count, value, np.float32)} for value in (0.02, 0.01))
            step = Ours(op.AdamW(1e-3), model, grads) if name == OURS else _in_torch(model, grads)
            moved[name] = bytes_moved(step.state) if isinstance(step, Ours) else moved[OURS]
            del model, grads
            timings |= scale.race({name: step})
            del step
        return Outcome(timings, moved=moved)

    return section


def _in_torch(model: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray]) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.from_numpy(model["weight"]))
    param.grad = torch.from_numpy(grads["weight"])
    return torch.optim.AdamW([param], lr=1e-3, fused=True).step


SECTIONS: Mapping[str, Section] = {
    **{f"{count} parameters": _parameters(count) for count in COUNTS},
    **{f"{count} elements": _elements(count) for count in ELEMENTS},
}
SUITE = Suite("growth", __doc__, SECTIONS, effort=replace(timing.FULL, seconds=0.5, fewest=1, limit=20.0))

if __name__ == "__main__":
    sys.exit(SUITE.main())
