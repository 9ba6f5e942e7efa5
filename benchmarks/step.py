"""What a step costs, against NumPy as people write it and against PyTorch: `python -m benchmarks.step`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import chart, machine, models, timing
from benchmarks.contestants import FUSED, disagreement
from benchmarks.figures import Figure, Outcome
from benchmarks.models import Sizes
from benchmarks.sections import SECTIONS
from benchmarks.timing import Effort

RESULTS = Path(__file__).parent / "results"
_AGREE = 1e-3
_WIDTH = 132
_IDLE = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 1 when the contestants do not compute the same."""
    options = _options(arguments)
    sizes, effort = (models.QUICK, timing.QUICK) if options.quick else (models.FULL, timing.FULL)
    torch.set_num_threads(machine.threads())
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    apart = disagreement(models.shapes_of("e", sizes))
    if max(apart.values()) > _AGREE:
        console.print(f"the contestants do not take the same steps; relative to the naive one they are off by {apart}")
        return 1
    described = machine.describe(sizes.single)
    outcomes = _measured(options.only, sizes, effort, console)
    _show(console, described, outcomes, judged=not options.quick)
    if options.out is not None:
        for path in _written(options.out, options.quick, described, apart, outcomes):
            console.print(f"written: {path}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument(
        "--only", metavar="SECTIONS", default=",".join(SECTIONS), help=f"comma-separated, of: {', '.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where step.json and step.png go (a whole run: benchmarks/results; else: nowhere)"
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.out is None and not options.quick and len(options.only) == len(SECTIONS):
        options.out = RESULTS
    return options


def _measured(only: Sequence[str], sizes: Sizes, effort: Effort, console: Console) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Drawn between samples only: a thread that redraws by itself would take time from the contestants.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("", total=len(only))
        for done, name in enumerate(only):

            def report(share: float, done: int = done) -> None:
                progress.update(bar, completed=done + share, refresh=True)

            progress.update(bar, description=f"measuring {name}", refresh=True)
            outcomes[name] = SECTIONS[name](sizes, effort, report)
            report(1.0)
    return outcomes


# What was found -------------------------------------------------------------------------------------------------------


def _show(console: Console, described: Mapping[str, Any], outcomes: Mapping[str, Outcome], *, judged: bool) -> None:
    for name, outcome in outcomes.items():
        if outcome.timings:
            console.print(_timings(name, outcome))
    console.print(_figures([figure for outcome in outcomes.values() for figure in outcome.figures], judged=judged))
    versions = ", ".join(f"{package} {version}" for package, version in described["versions"].items())
    console.print(
        f"{described['cpu']}, {described['cores']} cores, {described['threads']} threads, {described['simd']}, "
        f"{described['memory_gib']} GiB; copy {described['copy_gb_per_second']} GB/s; Python {described['python']}, {versions}"
    )
    idle = described["idle_before"]
    if idle is not None and idle < _IDLE:
        console.print(
            f"[yellow]Other programs were using the cores ({idle:.0%} idle before the start). PyTorch's threads wait for each "
            "other by spinning, and then lose far more than ours; measure again on a quiet machine.[/]"
        )


def _timings(name: str, outcome: Outcome) -> Table:
    against = FUSED if FUSED in outcome.timings else next(iter(outcome.timings))
    least = outcome.timings[against].minimum
    table = Table("", "minimum, ms", "median, ms", "samples", f"against {against}", title=name, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for contestant, taken in outcome.timings.items():
        minimum, median = f"{taken.minimum * 1e3:,.3f}", f"{taken.median * 1e3:,.3f}"
        table.add_row(contestant, minimum, median, f"{taken.samples} × {taken.steps}", f"{taken.minimum / least:.3f}")
    return table


def _figures(found: Sequence[Figure], *, judged: bool) -> Table:
    table = Table("figure", "measured", "target", "", title="ratios of minima", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for figure in found:
        target = "" if figure.target is None else f"≤ {figure.target:.3g}"
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met if judged else None]
        table.add_row(figure.name, f"{figure.value:.3g}", target, verdict)
    return table


def _written(
    folder: Path, quick: bool, described: Mapping[str, Any], apart: Mapping[str, float], outcomes: Mapping[str, Outcome]
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": described,
        "quick": quick,
        "disagreement": apart,
        "timings": {
            name: {contestant: asdict(taken) for contestant, taken in outcome.timings.items()} for name, outcome in outcomes.items()
        },
        "figures": [figure.as_json() for outcome in outcomes.values() for figure in outcome.figures],
    }
    paths = [folder / "step.json", folder / "step.png"]
    paths[0].write_text(json.dumps(data, indent=2) + "\n")
    chart.draw(outcomes, described, paths[1])
    return paths


if __name__ == "__main__":
    sys.exit(main())
