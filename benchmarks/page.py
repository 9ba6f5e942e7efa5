"""The page of all measurements, out of the results that are kept: `python -m benchmarks.page`."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.style import context

__all__ = ["CHARTS", "PAGE", "charts", "digest", "main", "page"]

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
CHARTS = PAGE.parent / "assets" / "benchmarks"

TITLES = {
    "step": "A step on NumPy arrays",
    "torch_step": "A step on modules of PyTorch",
    "jax_step": "A step in JAX",
    "rules": "Every rule beside its counterparts",
    "files": "Files",
    "monitor": "Watching",
    "growth": "Growth",
}
SAID = {
    "step": "(a) the shapes of GPT-2 small, 124 M elements; (b) 2,000 arrays of 256 elements; (c) 300 of 768; (d) one of 30 M; "
    "(e) 10 of 64. Float32. *Without Numba* is the reference backend.",
    "torch_step": "`update_` on a module, and as a `torch.optim.Optimizer`; *on lists* is what runs where nothing is compiled.",
    "jax_step": "Against Optax, on one device, the CPU. *Bytes accessed* are those of XLA's own account of the compiled step.",
    "rules": "One array of 30 M float32 elements (Muon: 1,024 × 1,024). Milliseconds a step, the least of a run; in parentheses "
    "the time of optimisers, relative to it.",
    "files": "A state and a model of 1.5 GB, against the writer and reader of safetensors on the same arrays.",
    "monitor": "What a `Monitor` adds to a step, as a share of its time.",
    "growth": "Milliseconds, by the number of parameters of 16 elements, and by that of the elements of one parameter, in float32. "
    "The roofline is the time in which memory moves what AdamW has to move, seven times the parameter, as fast as a copy does.",
}
OURS = "optimisers"
_BLUE, _RED, _GREY = "#1f5fa8", "#b0452a", "#777777"
_STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_INTRO = """# Benchmarks

<!-- Written by `python -m benchmarks.page` out of `benchmarks/results`. -->

Each contestant takes a step in turn, again and again, in one process; what is compared are the least times of each, so that both
met the machine at its best. A ratio below 1 means that optimisers takes less. Every figure stands beside the target that it was
aimed at; what is missed is said as well. Other machines give other ratios: run it on yours.
"""


def main() -> None:
    """Write the page, and the charts beside it."""
    results = read()
    CHARTS.mkdir(parents=True, exist_ok=True)
    for name, figure in charts(results).items():
        # The same numbers give the same file.
        with context({**_STYLE, "svg.hashsalt": name}):
            figure.savefig(CHARTS / f"{name}.svg", metadata={"Date": None, "Description": digest(results[name])})
    PAGE.write_text(page(results), encoding="utf-8")


def read() -> dict[str, Any]:
    """The results that there are, by name, in the order of the page."""
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    return {name: found[name] for name in (*TITLES, *found) if name in found}


def digest(result: Any) -> str:
    """What tells whether a chart was drawn from these numbers."""
    return sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def page(results: Mapping[str, Any]) -> str:
    """The text of the page."""
    return "\n".join([_INTRO, *(_section(name, result) for name, result in results.items())]).rstrip() + "\n"


def _section(name: str, result: Any) -> str:
    title = TITLES.get(name, name.replace("_", " ").capitalize())
    chart = f"![{title}: a chart of the figures below](assets/benchmarks/{name}.svg){{ .chart }}"
    tables = {"growth": lambda: _growth_tables(result), "figures": lambda: _figures(result["figures"])}
    table = next((tables[key]() for key in tables if key in result), None) or _times(result["timings"])
    parts = [f"## {title}", SAID.get(name, ""), f"`python -m benchmarks.{name}` on {_machine(result['machine'])}.", chart, table]
    return "\n\n".join(filter(None, parts)) + "\n"


def _machine(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['cpu']}, {found['threads']} threads ({found['simd']}), {found['memory_gib']} GiB, which copies "
        f"{found['copy_gb_per_second']} GB/s; {found['system']}, Python {found['python']}, {versions}"
    )


def _figures(figures: Sequence[Any]) -> str:
    verdict = {True: "met", False: "**missed**", None: ""}
    rows = [f"| {each['name']} | {_short(each['value'])} | {_short(each['target'])} | {verdict[each['met']]} |" for each in figures]
    return "\n".join(["| figure | measured | at most | |", "|---|---|---|---|", *rows])


def _growth_tables(result: Any) -> str:
    found = []
    for kind, sizes in result["growth"].items():
        who = list(next(iter(sizes.values())))
        times = {size: [taken[name]["minimum"] for name in who] for size, taken in sizes.items()}
        if kind == "elements":
            who.append("roofline")
            times = {size: [*taken, result["roofline"][size]] for size, taken in times.items()}
        head = [f"| {kind} | {' | '.join(who)} |", "|---" * (len(who) + 1) + "|"]
        rows = [f"| {int(size):,} | {' | '.join(map(_milliseconds, taken))} |" for size, taken in times.items()]
        found.append("\n".join([*head, *rows]))
    return "\n\n".join(found)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"


def _times(timings: Mapping[str, Any]) -> str:
    others = list(dict.fromkeys(who for taken in timings.values() for who in taken if who != OURS))
    head = [f"| | {OURS} | {' | '.join(others)} |", "|---" * (len(others) + 2) + "|"]
    return "\n".join([*head, *(_row(rule, taken, others) for rule, taken in timings.items())])


def _row(rule: str, taken: Mapping[str, Any], others: Sequence[str]) -> str:
    ours = taken[OURS]["minimum"]
    cells = [
        f"{taken[who]['minimum'] * 1e3:.1f} ({_short(ours / taken[who]['minimum'])})" if who in taken else "" for who in others
    ]
    return f"| {rule} | {ours * 1e3:.1f} | {' | '.join(cells)} |"


def _named(figures: Sequence[Any]) -> dict[str, Any]:
    """The figures by name; where sections have figures of one name, with their section."""
    names = [each["name"] for each in figures]
    return {
        name if names.count(name) == 1 else f"{each['section']}: {name}": each for name, each in zip(names, figures, strict=True)
    }


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"


def charts(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The chart of each result."""
    with context(_STYLE):
        return {
            name: _growing(each) if "growth" in each else _aims(each["figures"]) if "figures" in each else _against(each["timings"])
            for name, each in results.items()
        }


def _growing(result: Any) -> Figure:
    """Times by size, both logarithmic: a straight line that rises as fast as the size is linear growth."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasSVG(figure)
    for axis, (kind, sizes) in zip(figure.subplots(1, 2), result["growth"].items(), strict=True):
        x = [int(size) for size in sizes]
        for name in next(iter(sizes.values())):
            axis.plot(x, [taken[name]["minimum"] * 1e3 for taken in sizes.values()], marker="o", markersize=3, label=name)
        if kind == "elements":
            axis.plot(x, [result["roofline"][size] * 1e3 for size in sizes], color="black", linestyle="--", label="roofline")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(kind)
        axis.set_ylabel("milliseconds")
        axis.legend(frameon=False, fontsize=7)
    return figure


def _aims(figures: Sequence[Any]) -> Figure:
    """A dot for each figure, a tick where it should be at most."""
    shown = {name: each for name, each in _named(figures).items() if each["value"] > 1e-3}
    figure, axis = _canvas(len(shown))
    for at, each in enumerate(shown.values()):
        colour = _RED if each["met"] is False else _BLUE
        axis.plot([each["value"]], [at], "o", color=colour, markersize=6)
        if each["target"] is not None:
            axis.plot([each["value"], each["target"]], [at, at], color=colour, linewidth=1, alpha=0.4)
            axis.plot([each["target"]], [at], "|", color="black", markersize=11, markeredgewidth=1.5)
    axis.set_yticks(range(len(shown)), list(shown))
    axis.set_xlabel("ratio (log); a tick: at most")
    return figure


def _against(timings: Mapping[str, Any]) -> Figure:
    """The time of ours relative to that of each other, a row a rule."""
    figure, axis = _canvas(len(timings))
    others = list(dict.fromkeys(who for taken in timings.values() for who in taken if who != OURS))
    for who, mark, colour in zip(others, "osD^vP", (_RED, "#e08a5f", "#7a5195", "#2f8f6b", _GREY, "black"), strict=False):
        points = [(taken[OURS]["minimum"] / taken[who]["minimum"], at) for at, taken in enumerate(timings.values()) if who in taken]
        axis.plot(*zip(*points, strict=True), mark, color=colour, markersize=5, label=f"against {who}")
    axis.set_yticks(range(len(timings)), list(timings))
    axis.set_xlabel(f"time of {OURS}, relative to others (log)")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.0))
    return figure


def _canvas(rows: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9, 1.0 + 0.24 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.add_subplot()
    axis.set_xscale("log")
    axis.axvline(1, color=_GREY, linewidth=0.8)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.grid(axis="y", color="#eeeeee")
    axis.set_axisbelow(True)
    return figure, axis


if __name__ == "__main__":
    main()
