"""The charts of the measurements, out of the results that are kept."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.style import context

from benchmarks.figures import FOREACH, FUSED, LOOP, NAIVE, OURS, REFERENCE

__all__ = ["STYLE", "by_kind", "digest", "draw", "named", "roofline"]

STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_BLUE, _RED, _GREY = "#1f5fa8", "#b0452a", "#777777"
_CASES = {"a": "(a) GPT-2 small", "b": "(b) 2,000 × 256", "c": "(c) 300 × 768", "d": "(d) 1 × 30 M", "e": "(e) 10 × 64"}
_COLOURS = {
    NAIVE: "#9a9a9a",
    LOOP: "#f0c3a8",
    FOREACH: "#e08a5f",
    FUSED: _RED,
    REFERENCE: "#8fb4dc",
    OURS: _BLUE,
}


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The chart of each result."""
    kinds = {"step": _steps, "rules": _rules, "growth": _growth}
    with context(STYLE):
        return {name: kinds.get(name, _figures)(result) for name, result in results.items()}


def digest(result: Any) -> str:
    """What tells whether a chart was drawn from these numbers."""
    return sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def roofline(result: Any, timing: Any) -> float | None:
    """The seconds in which memory moves the bytes that it has to; `None` where none are said."""
    return None if timing["bytes"] is None else timing["bytes"] / (result["machine"]["memory_gb_per_second"] * 1e9)


def by_kind(result: Any) -> dict[str, dict[int, Any]]:
    """Sections named by a size and a kind: the times of each kind, by size."""
    found: dict[str, dict[int, Any]] = {}
    for section, timings in result["timings"].items():
        size, kind = section.split()
        if timings:
            found.setdefault(kind, {})[int(size)] = timings
    return found


def _steps(result: Any) -> Figure:
    """Who takes how long for AdamW, relative to PyTorch's fused kernel; and what freezing and groups do."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplot_mosaic([["contests", "contests"], ["frozen", "groups"]], height_ratios=(1.3, 1))
    timings = result["timings"]
    _contests(axes["contests"], result)
    for name, axis in (("frozen", axes["frozen"]), ("groups", axes["groups"])):
        first = next(iter(timings[name].values()))["minimum"]
        values = [taken["minimum"] / first for taken in timings[name].values()]
        bars = axis.bar([each.split()[0] for each in timings[name]], values, 0.7, color=_BLUE)
        axis.bar_label(bars, fmt="%.2g", fontsize=8)
        axis.margins(y=0.15)
    axes["frozen"].set_xlabel("% of the elements frozen, (a)")
    axes["groups"].set_xlabel("groups of hyperparameters, (b)")
    axes["frozen"].set_ylabel("time, relative to the first")
    return figure


def _contests(axis: Axes, result: Any) -> None:
    labelled: set[str] = set()
    for at, case in enumerate(_CASES):
        taken = result["timings"][case]
        present = [name for name in _COLOURS if name in taken]
        width = 0.84 / len(present)
        for place, name in enumerate(present):
            x = at + (place - (len(present) - 1) / 2) * width
            value = taken[name]["minimum"] / taken[FUSED]["minimum"]
            bar = axis.bar(x, value, width * 0.94, color=_COLOURS[name], label=None if name in labelled else name)
            axis.bar_label(bar, fmt="%.2g", fontsize=7)
            labelled.add(name)
    axis.set_yscale("log")
    axis.margins(y=0.1)
    axis.axhline(1, color=_RED, linewidth=0.8)
    axis.set_xticks(range(len(_CASES)), list(_CASES.values()))
    axis.set_ylabel(f"AdamW: time, relative to {FUSED} (log)")
    axis.legend(frameon=False, ncols=len(_COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=7.5)


def _figures(result: Any) -> Figure:
    """A dot for each figure, a tick where it should be at most."""
    shown = {name: each for name, each in named(result["figures"]).items() if each["value"] > 1e-3}
    figure, axis = _canvas(len(shown))
    for at, each in enumerate(shown.values()):
        colour = _RED if each["met"] is False else _BLUE
        axis.plot([each["value"]], [at], "o", color=colour, markersize=6)
        if each["target"] is not None:
            axis.plot([each["value"], each["target"]], [at, at], color=colour, linewidth=1, alpha=0.4)
            axis.plot([each["target"]], [at], "|", color="black", markersize=11, markeredgewidth=1.5)
    axis.set_yticks(range(len(shown)), list(shown))
    axis.set_xlabel("measured (log); a tick: at most")
    return figure


def named(figures: Sequence[Any]) -> dict[str, Any]:
    """The figures by name; where sections have figures of one name, with their section."""
    names = [each["name"] for each in figures]
    return {
        name if names.count(name) == 1 else f"{each['section']}: {name}": each for name, each in zip(names, figures, strict=True)
    }


def _rules(result: Any) -> Figure:
    """The time of ours relative to that of each other, a row a rule."""
    timings = result["timings"]
    figure, axis = _canvas(len(timings))
    others = list(dict.fromkeys(who for taken in timings.values() for who in taken if who != OURS))
    for who, mark, colour in zip(others, "osD^vP", (_RED, "#e08a5f", "#7a5195", "#2f8f6b", _GREY, "black"), strict=False):
        points = [(taken[OURS]["minimum"] / taken[who]["minimum"], at) for at, taken in enumerate(timings.values()) if who in taken]
        axis.plot(*zip(*points, strict=True), mark, color=colour, markersize=5, label=f"against {who}")
    axis.set_yticks(range(len(timings)), list(timings))
    axis.set_xlabel(f"time of {OURS}, relative to others (log)")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.0))
    return figure


def _growth(result: Any) -> Figure:
    """Times by size, both logarithmic: a straight line that rises as fast as the size is linear growth."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasSVG(figure)
    kinds = by_kind(result)
    for axis, (kind, sizes) in zip(figure.subplots(1, len(kinds)), kinds.items(), strict=True):
        who = list(next(iter(sizes.values())))
        for name in who:
            axis.plot(list(sizes), [taken[name]["minimum"] * 1e3 for taken in sizes.values()], marker="o", markersize=3, label=name)
        bound = [(roofline(result, taken[who[0]]) or 0) * 1e3 for taken in sizes.values()]
        axis.plot(list(sizes), bound, color="black", linestyle="--", label="roofline of a step")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(kind)
        axis.set_ylabel("milliseconds")
        axis.legend(frameon=False, fontsize=7)
    return figure


def _canvas(rows: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 1.0 + 0.24 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.add_subplot()
    axis.set_xscale("log")
    axis.axvline(1, color=_GREY, linewidth=0.8)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    return figure, axis
