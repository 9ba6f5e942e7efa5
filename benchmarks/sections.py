"""What is measured, section by section."""

import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import optimisers as op
from benchmarks import elementwise, figures
from benchmarks.contestants import Ours, adamw
from benchmarks.figures import Figure, Outcome, contest, ratio
from benchmarks.models import Sizes, arrays_of, filled, nbytes, shapes_of
from benchmarks.timing import Effort, Timing, race

__all__ = ["FROZEN", "GROUPS", "SECTIONS", "Report"]

FROZEN = (0, 50, 90, 99)
GROUPS = (1, 5, 20, 100)
_HEAT = 6

Report = Callable[[float], None]
Section = Callable[[Sizes, Effort, Report], Outcome]


def _case(case: str) -> Section:
    def section(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
        timings = race(adamw(shapes_of(case, sizes), reference=case == "d"), effort, report)
        return Outcome(timings, contest(case, timings))

    return section


def _frozen(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """(a) with growing shares of the elements frozen. All states share the model and the slots."""
    model, grads = _model_and_gradients("a", sizes)
    whole = op.setup(op.AdamW(1e-3), model)
    order = [name for name, _ in arrays_of(model)]
    states = {percent: _freeze_share(whole, order, percent / 100) for percent in FROZEN}
    steps = {f"{percent} % frozen": Ours(None, model, grads, state=state) for percent, state in states.items()}
    timings = race(steps, effort, report)
    found = [
        Figure(
            "frozen",
            f"(a) {percent} % of the elements frozen, against none",
            ratio(timings, f"{percent} % frozen", f"{FROZEN[0]} % frozen"),
            figures.FROZEN.get(percent),
        )
        for percent in FROZEN[1:]
    ]
    return Outcome(timings, found)


def _freeze_share(state: op.State, order: list[str], share: float) -> op.State:
    """Freeze a share of all elements, from the front of the model: whole arrays, and rows of the one where it ends."""
    records = {str(record.path): record for record in state.parameters}
    left = round(share * sum(record.size for record in records.values()))
    whole: list[str] = []
    for name in order:
        record = records[name]
        if record.size > left:
            rows = left * record.shape[0] // record.size
            state = state.freeze(whole) if whole else state
            return state.freeze(name, rows=slice(rows)) if rows else state
        whole.append(name)
        left -= record.size
    return state.freeze(whole)


def _groups(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """(b) with growing numbers of learning rates."""
    grads = filled(shapes_of("b", sizes), seed=1, scale=0.01)
    steps = {_named(count): Ours(_grouped(count), filled(shapes_of("b", sizes), seed=0, scale=0.02), grads) for count in GROUPS}
    timings = race(steps, effort, report)
    found = [
        Figure(
            "groups",
            f"(b) {_named(count)} of hyperparameters, against 1",
            ratio(timings, _named(count), _named(1)),
            figures.GROUPS.get(count),
        )
        for count in GROUPS[1:]
    ]
    return Outcome(timings, found)


def _named(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


def _grouped(count: int) -> Any:
    return lambda record: op.AdamW(1e-3 / (1 + int(str(record.path).removeprefix("layer")) % count))


def _rules(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """Every elementwise rule on (d): the time for a byte moved, against AdamW's in the same heat."""
    model, grads = _model_and_gradients("d", sizes)
    every = elementwise.elementwise()
    names = [name for name in every if name != elementwise.YARDSTICK]
    heats = [names[at : at + _HEAT] for at in range(0, len(names), _HEAT)]
    timings: dict[str, Timing] = {}
    found: list[Figure] = []
    for at, heat in enumerate(heats):
        steps = {name: Ours(every[name], model, grads) for name in (elementwise.YARDSTICK, *heat)}
        moved = {name: elementwise.bytes_moved(step.state) for name, step in steps.items()}
        taken = race(steps, effort, lambda share, at=at: report((at + share) / len(heats)))
        for name in heat:
            relative = ratio(taken, name, elementwise.YARDSTICK) * moved[elementwise.YARDSTICK] / moved[name]
            found.append(Figure("rules", f"(d) {name}, a byte, against {elementwise.YARDSTICK}", relative, figures.A_BYTE))
        timings |= taken
    return Outcome(timings, found)


def _clip(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """(a) with the global norm clipped."""
    model, grads = _model_and_gradients("a", sizes)
    alone, clipped = "AdamW", "Chain(ClipGlobalNorm, AdamW)"
    steps = {
        alone: Ours(op.AdamW(1e-3), model, grads),
        clipped: Ours(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-3)), model, grads),
    }
    timings = race(steps, effort, report)
    return Outcome(
        timings, [Figure("clip", "(a) ClipGlobalNorm + AdamW, against AdamW", ratio(timings, clipped, alone), figures.CLIPPED)]
    )


def _setup(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """`setup` of many small parameters, and of ten times as many."""
    steps = {}
    for count in sizes.setup:
        model = {f"layer{at}": {"weight": np.zeros(4, np.float32)} for at in range(count)}
        steps[_counted(count)] = lambda model=model: op.setup(op.AdamW(1e-3), model)
    timings = race(steps, effort, report)
    small, large = map(_counted, sizes.setup)
    return Outcome(timings, [Figure("setup", f"setup of {large}, against {small}", ratio(timings, large, small), figures.SETUP)])


def _counted(count: int) -> str:
    return f"{count:,} parameters"


def _memory(sizes: Sizes, effort: Effort, report: Report) -> Outcome:
    """What `update_` needs on (a) beyond model and state, as a share of the model."""
    model, grads = _model_and_gradients("a", sizes)
    size = nbytes(model)
    step = Ours(op.AdamW(1e-3), model, grads)
    step()
    step()
    growth = {"allocated": _traced(step)}
    resident = _resident(step)
    if resident is not None:
        growth["resident"] = resident
    report(1.0)
    name = "(a) memory of update_ beyond model and state, share of the model"
    return Outcome({}, [Figure("memory", f"{name} ({kind})", grown / size, figures.MEMORY) for kind, grown in growth.items()])


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


def _model_and_gradients(case: str, sizes: Sizes) -> tuple[Any, Any]:
    shapes = shapes_of(case, sizes)
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
