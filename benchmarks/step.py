"""What a step costs, against NumPy as people write it and against PyTorch: `python -m benchmarks.step`."""

import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import optimisers as op
from benchmarks import elementwise
from benchmarks.contestants import Ours, adamw, disagreement
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import FUSED, NAIVE, OURS, REFERENCE, Figure, Outcome, ratio
from benchmarks.models import QUICK, filled, freeze_share, nbytes, shapes_of
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Timing

__all__ = ["FROZEN", "GROUPS", "SUITE"]

FROZEN = (0, 50, 90, 99)
GROUPS = (1, 5, 20, 100)
# What is aimed at.
AGAINST_FUSED = {"a": 1.10, "b": 0.4, "c": 0.4, "d": 1.10, "e": 0.7}
AGAINST_NAIVE = {"a": 1 / 15}
REFERENCE_AGAINST_NAIVE = {"d": 0.6}
FROZEN_AGAINST_NONE = {90: 0.15}
GROUPS_AGAINST_ONE = {100: 1.15}
CLIPPED = 1.35
A_BYTE = 1.25
SETUP = 12.0
MEMORY = 0.05
_HEAT = 6


def _case(case: str) -> Section:
    """AdamW, on one of the models (a) to (e)."""

    def section(scale: Scale) -> Outcome:
        steps = adamw(shapes_of(case, scale.sizes), reference=case == "d")
        timings = scale.race(steps)
        figures = [
            Figure(case, f"({case}) AdamW, against {FUSED}", ratio(timings, OURS, FUSED), AGAINST_FUSED[case], OURS),
            Figure(case, f"({case}) AdamW, against {NAIVE}", ratio(timings, OURS, NAIVE), AGAINST_NAIVE.get(case), OURS),
        ]
        if REFERENCE in timings:
            name, value = f"({case}) without Numba, against {NAIVE}", ratio(timings, REFERENCE, NAIVE)
            figures.append(Figure(case, name, value, REFERENCE_AGAINST_NAIVE.get(case), REFERENCE))
        return Outcome(timings, figures, dict.fromkeys(steps, bytes_moved(steps[OURS].state)))

    return section


def _frozen(scale: Scale) -> Outcome:
    """(a) with growing shares of the elements frozen. All states share the model and the slots."""
    model, grads = _model_and_gradients("a", scale)
    whole = op.setup(op.AdamW(1e-3), model)
    steps = {f"{percent} % frozen": Ours(None, model, grads, state=freeze_share(whole, percent / 100)) for percent in FROZEN}
    timings = scale.race(steps)
    figures = []
    for percent in FROZEN[1:]:
        name, value = f"{percent} % frozen", ratio(timings, f"{percent} % frozen", f"{FROZEN[0]} % frozen")
        described = f"(a) {percent} % of the elements frozen, against none"
        figures.append(Figure("frozen", described, value, FROZEN_AGAINST_NONE.get(percent), name))
    moved = {f"{percent} % frozen": bytes_moved(whole) * (100 - percent) // 100 for percent in FROZEN}
    return Outcome(timings, figures, moved)


def _groups(scale: Scale) -> Outcome:
    """(b) with growing numbers of learning rates."""
    model, grads = _model_and_gradients("b", scale)
    steps = {_groups_of(count): Ours(_grouped(count), model, grads) for count in GROUPS}
    timings = scale.race(steps)
    figures = []
    for count in GROUPS[1:]:
        name, value = f"(b) {count} groups of hyperparameters, against 1", ratio(timings, _groups_of(count), _groups_of(1))
        figures.append(Figure("groups", name, value, GROUPS_AGAINST_ONE.get(count), _groups_of(count)))
    return Outcome(timings, figures, {name: bytes_moved(step.state) for name, step in steps.items()})


def _groups_of(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


def _grouped(count: int) -> Any:
    return lambda record: op.AdamW(1e-3 / (1 + int(str(record.path).removeprefix("layer")) % count))


def _rules(scale: Scale) -> Outcome:
    """Every elementwise rule on (d): the time for a byte moved, against AdamW's in the same heat."""
    model, grads = _model_and_gradients("d", scale)
    every, yardstick = elementwise.elementwise(), elementwise.YARDSTICK
    names = [name for name in every if name != yardstick]
    timings: dict[str, Timing] = {}
    moved: dict[str, int] = {}
    figures: list[Figure] = []
    for at in range(0, len(names), _HEAT):
        heat = names[at : at + _HEAT]
        steps = {name: Ours(every[name], model, grads) for name in (yardstick, *heat)}
        moved |= {name: bytes_moved(step.state) for name, step in steps.items()}
        taken = scale.race(steps)
        for name in heat:
            value = ratio(taken, name, yardstick) * moved[yardstick] / moved[name]
            figures.append(Figure("rules", f"(d) {name}, a byte, against {yardstick}", value, A_BYTE, name))
        timings |= taken
    return Outcome(timings, figures, moved)


def _clip(scale: Scale) -> Outcome:
    """(a) with the global norm clipped, which reads all gradients once more."""
    model, grads = _model_and_gradients("a", scale)
    alone, clipped = "AdamW", "Chain(ClipGlobalNorm, AdamW)"
    steps = {
        alone: Ours(op.AdamW(1e-3), model, grads),
        clipped: Ours(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-3)), model, grads),
    }
    timings = scale.race(steps)
    moved = {alone: bytes_moved(steps[alone].state), clipped: bytes_moved(steps[clipped].state) + nbytes(model)}
    name = "(a) ClipGlobalNorm + AdamW, against AdamW"
    return Outcome(timings, [Figure("clip", name, ratio(timings, clipped, alone), CLIPPED, clipped)], moved)


def _setup(scale: Scale) -> Outcome:
    """`setup` of many small parameters, and of ten times as many."""
    steps = {}
    for count in scale.sizes.setup:
        model = {f"layer{at}": {"weight": np.zeros(4, np.float32)} for at in range(count)}
        steps[f"{count:,} parameters"] = lambda model=model: op.setup(op.AdamW(1e-3), model)
    timings = scale.race(steps)
    small, large = steps
    return Outcome(timings, [Figure("setup", f"setup of {large}, against {small}", ratio(timings, large, small), SETUP, large)])


def _memory(scale: Scale) -> Outcome:
    """What `update_` needs on (a) beyond model and state, as a share of the model."""
    model, grads = _model_and_gradients("a", scale)
    size = nbytes(model)
    step = Ours(op.AdamW(1e-3), model, grads)
    step()
    step()
    growth = {"allocated": _traced(step)}
    resident = _resident(step)
    if resident is not None:
        growth["resident"] = resident
    name = "(a) memory of update_ beyond model and state, share of the model"
    return Outcome(figures=[Figure("memory", f"{name} ({kind})", grown / size, MEMORY) for kind, grown in growth.items()])


def _traced(step: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy hold during a step beyond those before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _resident(step: Callable[[], object]) -> int | None:
    """The same for the resident memory of the process; `None` on systems that do not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith(key))


def _model_and_gradients(case: str, scale: Scale) -> tuple[Any, Any]:
    shapes = shapes_of(case, scale.sizes)
    return filled(shapes, seed=0, scale=0.02), filled(shapes, seed=1, scale=0.01)


SECTIONS: Mapping[str, Section] = {
    **{case: _case(case) for case in "abcde"},
    "frozen": _frozen,
    "groups": _groups,
    "rules": _rules,
    "clip": _clip,
    "setup": _setup,
    "memory": _memory,
}
SUITE = Suite("step", __doc__, SECTIONS, lambda: disagreement(shapes_of("e", QUICK)))

if __name__ == "__main__":
    sys.exit(SUITE.main())
