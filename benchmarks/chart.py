"""The measurements as a bar chart."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.contestants import FOREACH, FUSED, LOOP, NAIVE, OURS, REFERENCE
from benchmarks.elementwise import YARDSTICK
from benchmarks.figures import Outcome, ratio
from benchmarks.sections import FROZEN

__all__ = ["draw"]

_CASES = {"a": "(a) GPT-2 small", "b": "(b) 2,000 × 256", "c": "(c) 300 × 768", "d": "(d) 1 × 30 M", "e": "(e) 10 × 64"}
_COLOURS = {NAIVE: "#9a9a9a", LOOP: "#f0c3a8", FOREACH: "#e08a5f", FUSED: "#b0452a", REFERENCE: "#8fb4dc", OURS: "#1f5fa8"}
_TARGET = {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 2))}
_LAYOUT = [["contests", "contests", "rules"], ["frozen", "groups", "rules"]]


def draw(outcomes: Mapping[str, Outcome], described: Mapping[str, Any], path: Path) -> None:
    """Draw whatever was measured, one panel a question."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(_LAYOUT, width_ratios=(1, 1, 0.8), height_ratios=(1.2, 1))  # type: ignore[arg-type]
    contests = {name: outcomes[name] for name in _CASES if name in outcomes}
    _panel(axes["contests"], _contests, contests)
    for name, panel in (("frozen", _frozen), ("groups", _groups), ("rules", _rules)):
        _panel(axes[name], panel, outcomes.get(name))
    figure.suptitle(
        f"One optimisation step in float32: {described['cpu']}, {described['threads']} threads. "
        "Minima of one interleaved run; dashed: the target."
    )
    figure.savefig(path, dpi=90)


def _panel(axis: Axes, draw_in: Callable[[Axes, Any], None], content: Any) -> None:
    if not content:
        axis.set_axis_off()
        return
    draw_in(axis, content)
    axis.spines[["top", "right"]].set_visible(False)


def _contests(axis: Axes, outcomes: Mapping[str, Outcome]) -> None:
    labelled: set[str] = set()
    for at, (case, outcome) in enumerate(outcomes.items()):
        present = [name for name in _COLOURS if name in outcome.timings]
        width = 0.84 / len(present)
        for place, name in enumerate(present):
            value = ratio(outcome.timings, name, FUSED)
            x = at + (place - (len(present) - 1) / 2) * width
            label = None if name in labelled else name
            bar = axis.bar(x, value, width * 0.94, color=_COLOURS[name], label=label)
            axis.bar_label(bar, fmt=_short, fontsize=7)
            labelled.add(name)
        x = at + (present.index(OURS) - (len(present) - 1) / 2) * width
        axis.hlines(figures.AGAINST_FUSED[case], x - width * 0.6, x + width * 0.6, **_TARGET)
    axis.set_yscale("log")
    values = [ratio(outcome.timings, name, FUSED) for outcome in outcomes.values() for name in outcome.timings]
    axis.set_ylim(min(values) / 2, max(values) * 8)
    axis.axhline(1, color=_COLOURS[FUSED], linewidth=0.8)
    axis.set_xticks(range(len(outcomes)), [_CASES[case] for case in outcomes])
    axis.set_ylabel(f"time, relative to {FUSED} (log)")
    axis.set_title("AdamW")
    axis.legend(frameon=False, ncols=3, loc="upper center")


def _frozen(axis: Axes, outcome: Outcome) -> None:
    shares = [str(percent) for percent in FROZEN]
    _bars(axis, shares, _relative(outcome))
    axis.step(
        np.arange(len(FROZEN)), [1 - percent / 100 for percent in FROZEN], where="mid", color="#777777", label="share still live"
    )
    for percent, target in figures.FROZEN.items():
        axis.hlines(target, FROZEN.index(percent) - 0.45, FROZEN.index(percent) + 0.45, **_TARGET)
    axis.set_xlabel("% of the elements frozen")
    axis.set_ylabel("time, relative to none")
    axis.set_title("(a) with frozen elements")
    axis.legend(frameon=False)


def _groups(axis: Axes, outcome: Outcome) -> None:
    _bars(axis, [name.split()[0] for name in outcome.timings], _relative(outcome))
    axis.axhline(figures.GROUPS[100], **_TARGET)
    axis.set_xlabel("groups of hyperparameters")
    axis.set_ylabel("time, relative to one group")
    axis.set_title("(b) with groups")


def _rules(axis: Axes, outcome: Outcome) -> None:
    names = [figure.name.removeprefix("(d) ").partition(", a byte")[0] for figure in outcome.figures]
    values = [figure.value for figure in outcome.figures]
    bars = axis.barh(range(len(values)), values, color=_COLOURS[OURS])
    axis.bar_label(bars, fmt=_short, fontsize=8, padding=2)
    axis.axvline(figures.A_BYTE, **_TARGET)
    axis.set_xlim(0, max(figures.A_BYTE, *values) * 1.1)
    axis.set_yticks(range(len(values)), names)
    axis.invert_yaxis()
    axis.set_xlabel(f"relative to {YARDSTICK}")
    axis.set_title("(d) time for a byte moved")


def _relative(outcome: Outcome) -> list[float]:
    first = next(iter(outcome.timings))
    return [ratio(outcome.timings, name, first) for name in outcome.timings]


def _bars(axis: Axes, names: list[str], values: list[float]) -> None:
    bars = axis.bar(names, values, 0.7, color=_COLOURS[OURS])
    axis.bar_label(bars, fmt=_short, fontsize=8)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"
