"""The page of all measurements and the figures of the README, out of the results that are kept: `python -m benchmarks.page`."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.style import context

from benchmarks import charts, machine
from benchmarks.figures import OURS, RESULTS

__all__ = ["CHARTS", "PAGE", "README", "TITLES", "main", "page", "read", "readme"]

README = Path(__file__).parents[1] / "README.md"
PAGE = README.parent / "docs" / "benchmarks.md"
CHARTS = PAGE.parent / "assets" / "benchmarks"

TITLES = {
    "step": "A step on NumPy arrays",
    "torch_step": "A step on modules of PyTorch",
    "jax_step": "A step in JAX",
    "rules": "Every rule beside its counterparts",
    "growth": "Growth",
    "files": "Files",
    "monitor": "Watching",
    "package": "The package",
}
SAID = {
    "step": "(a) the shapes of GPT-2 small, 124 M elements; (b) 2,000 arrays of 256 elements; (c) 300 of 768; (d) one of 30 M; "
    "(e) 10 of 64. Float32. *Without Numba* is the reference backend.",
    "torch_step": "`update_` on a module, and as a `torch.optim.Optimizer`; *on lists* is what runs where nothing "
    "is compiled and PyTorch has no fused kernel; *without Numba* takes those kernels.",
    "jax_step": "Against Optax, on one device, the CPU. *Bytes accessed* are those of XLA's own account of the compiled step.",
    "rules": "One array of 30 M float32 elements (Muon: 512 × 512). Milliseconds a step, the least of a run; in parentheses "
    "the time of optimisers, relative to it. PyTorch's Muon multiplies in bfloat16, which some processors have units for.",
    "files": "A state and a model of 1.5 GB, against the writer and reader of safetensors on the same arrays.",
    "monitor": "What a `Monitor` that samples every tenth step adds to a step, as a share of its time.",
    "growth": "Milliseconds, by the number of parameters of 16 elements, and by that of the elements of one parameter, in float32 "
    "(there one contestant after the other, since the largest leave no room for two).",
    "package": "The time that `import optimisers` takes after `import numpy`, and what `pip` downloads.",
}
_INTRO = """# Benchmarks

<!-- Written by `python -m benchmarks.page` out of `benchmarks/results`. -->

`make bench` measures all of it again and writes this page, in less than 20 minutes on two cores.

Each contestant takes a step in turn, again and again, in one process; what is compared are the least times of each (of the import
the median), so that both met the machine at its best. A ratio below 1 means that optimisers takes less. Every figure stands
beside the target that it was aimed at; what is missed is said as well. The ms are those of ours, or of what the row names, in the
race that gave the figure: rows of different races are not to be divided by one another, since the machine does not stay the same.
All of it is on a CPU; no accelerator was measured. The *roofline* is the time in which memory moves the bytes that a step has to
read and write at the least (for AdamW seven times the parameter). How fast it moves them is measured just before, on all threads,
by a loop that *sweeps* over seven such streams and hardly computes; a plain copy is slower, since it reads what it is about to
overwrite. On a shared machine the sweep may meet a worse moment than the step, and arrays that stay in the processor's cache can
be faster than memory. Other machines give other ratios: run it on yours.
"""


def main() -> None:
    """Write the page, the charts beside it, and the figures of the README."""
    results = read()
    CHARTS.mkdir(parents=True, exist_ok=True)
    for name, figure in charts.draw(results).items():
        # The same numbers give the same file.
        with context({**charts.STYLE, "svg.hashsalt": name}):
            figure.savefig(CHARTS / f"{name}.svg", metadata={"Date": None, "Description": charts.digest(results[name])})
    PAGE.write_text(page(results), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), results), encoding="utf-8")


def read() -> dict[str, Any]:
    """The results that there are, by name, in the order of the page."""
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in TITLES
        if (RESULTS / f"{name}.json").exists()
    }


# The page ---------------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """The text of the page."""
    return "\n".join([_INTRO, *(_section(name, result) for name, result in results.items())]).rstrip() + "\n"


def _section(name: str, result: Any) -> str:
    title = TITLES[name]
    chart = f"![{title}: a chart of the figures below](assets/benchmarks/{name}.svg){{ .chart }}"
    tables = {"growth": _growth, "rules": _times}.get(name, _figures)(result)
    parts = [f"## {title}", SAID[name], f"`python -m benchmarks.{name}` on {machine.spelled(result['machine'])}.", chart, *tables]
    return "\n\n".join(parts) + "\n"


def _figures(result: Any) -> list[str]:
    verdict = {True: "met", False: "**missed**", None: ""}
    rows = []
    for name, each in charts.named(result["figures"]).items():
        timing = result["timings"].get(each["section"], {}).get(each["of"])
        times = ["", ""] if timing is None else [_milliseconds(timing["minimum"]), _roofline(result, timing)]
        rows.append([name, *_pair(each), verdict[each["met"]], *times])
    return [_table(["figure", "measured", "at most", "", "ms", "roofline, ms"], rows)]


def _growth(result: Any) -> list[str]:
    found = []
    for kind, sizes in charts.by_kind(result).items():
        who = list(next(iter(sizes.values())))
        rows = [
            [f"{size:,}", *(_milliseconds(taken[name]["minimum"]) for name in who), _roofline(result, taken[who[0]])]
            for size, taken in sizes.items()
        ]
        found.append(_table([kind, *who, "roofline of a step"], rows))
    return found


def _times(result: Any) -> list[str]:
    others = list(dict.fromkeys(who for taken in result["timings"].values() for who in taken if who != OURS))
    rows = []
    for rule, taken in result["timings"].items():
        ours = taken[OURS]["minimum"]
        theirs = [
            f"{_milliseconds(taken[who]['minimum'])} ({_short(ours / taken[who]['minimum'])})" if who in taken else ""
            for who in others
        ]
        rows.append([rule, _milliseconds(ours), _roofline(result, taken[OURS]), *theirs])
    missed = [f"{each['name']} ({_short(each['value'])})" for each in result["figures"] if each["met"] is False]
    aims = "Aimed at: 1.0 of PyTorch's best, and 0.25 of its default for elementwise rules. "
    return [
        _table(["", OURS, "roofline", *others], rows),
        aims + ("**Missed**: " + "; ".join(missed) + "." if missed else "All met."),
    ]


def _roofline(result: Any, timing: Any) -> str:
    seconds = charts.roofline(result, timing)
    return "" if seconds is None else _milliseconds(seconds)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _pair(figure: Any) -> tuple[str, str]:
    """What was measured and what was aimed at, in digits that tell them apart."""
    value, target = _short(figure["value"]), _short(figure["target"])
    return (f"{figure['value']:.3g}" if value == target else value), target


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"


# The README -----------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- Written by `python -m benchmarks.page`. -->\n", "<!-- Up to here. -->"
# What is told, against what, and the figures: their suite and names, or an end of names, of which the median is told.
_TOLD: list[tuple[str, str, str, list[str]]] = [
    (
        "NumPy: the shapes of GPT-2 small, 124 M elements",
        "PyTorch's fused AdamW / plain NumPy",
        "step",
        ["(a) AdamW, against PyTorch fused", "(a) AdamW, against NumPy, whole arrays"],
    ),
    (
        "2,000 arrays of 256 / 300 of 768 / 10 of 64 / one of 30 M",
        "PyTorch fused",
        "step",
        [f"({case}) AdamW, against PyTorch fused" for case in "bced"],
    ),
    ("90 % of the elements frozen", "none frozen", "step", ["(a) 90 % of the elements frozen, against none"]),
    ("100 groups of hyperparameters", "one group", "step", ["(b) 100 groups of hyperparameters, against 1"]),
    ("with `ClipGlobalNorm`", "without", "step", ["(a) ClipGlobalNorm + AdamW, against AdamW"]),
    *(
        (
            f"{label}: {model}",
            "PyTorch fused / default",
            "torch_step",
            [f"{model}, {who}, against {against}" for against in ("PyTorch fused", "PyTorch default")],
        )
        for label, who in (("PyTorch module", OURS), ("as an `Optimizer` of PyTorch", f"{OURS}, as an optimiser of PyTorch"))
        for model in ("GPT-2 small", "2,000 × 256")
    ),
    ("JAX, compiled: GPT-2 small", "Optax under `jit`", "jax_step", ["GPT-2 small, compiled step, against Optax"]),
    ("JAX, first call: 2,000 arrays", "Optax under `jit`", "jax_step", ["2,000 arrays, first compiled call, against Optax"]),
    ("JAX without `jit`: 1,000 arrays", "Optax", "jax_step", ["1,000 arrays, step without jit, against Optax"]),
    (
        "JAX: 20 groups / Optax's `partition`",
        "one group",
        "jax_step",
        [f"500 arrays, 20 groups against 1: step{who}" for who in ("", ", Optax")],
    ),
    (
        "every rule that they have as well, 30 M elements (`Muon`: 512 × 512), the median",
        "PyTorch's best / default / Optax under `jit`",
        "rules",
        [", against PyTorch's best", ", against PyTorch default", ", against Optax, jitted"],
    ),
    (
        "`save` / `load` of 1.5 GB",
        "safetensors' own functions",
        "files",
        ["save, against save_file and fsync", "load, checksums verified, against load_file"],
    ),
    (
        "a `Monitor`'s share of the training of a transformer",
        "without",
        "monitor",
        ["a transformer, sampled, in a file, against training step"],
    ),
]


def readme(text: str, results: Mapping[str, Any]) -> str:
    """The text of the README with the figures in their place."""
    before, _, rest = text.partition(_BEGIN)
    rows = [[what, against, " / ".join(_told(results[suite], name) for name in names)] for what, against, suite, names in _TOLD]
    about = f"On {machine.spelled(results['step']['machine'])}:"
    return f"{before}{_BEGIN}\n{about}\n\n{_table(['what', 'against', 'ratio'], rows)}\n\n{_END}{rest.partition(_END)[2]}"


def _told(result: Any, name: str) -> str:
    return _short(statistics.median(each["value"] for each in result["figures"] if each["name"].endswith(name)))


if __name__ == "__main__":
    main()
