"""What all benchmarks share: sections measured in turn, the command line, and what is printed and kept of them."""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import machine, models, timing
from benchmarks.figures import RESULTS, Figure, Outcome
from benchmarks.models import Sizes
from benchmarks.timing import Effort, Step, Timing, race

__all__ = ["Scale", "Section", "Suite"]

# How far contestants may be apart, relative to how far they have moved: float32 rounds differently in another order.
_AGREE = 1e-3
# Below this share of idle time, other programs spoil the figures.
_IDLE = 0.9
_WIDTH = 132


@dataclass(frozen=True)
class Scale:
    """How large the models are, and how much is measured."""

    sizes: Sizes
    effort: Effort
    quick: bool
    folder: Path
    """For files: it is gone afterwards."""

    def race(self, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Time all contestants, in turn."""
        return race(steps, self.effort)


Section = Callable[[Scale], Outcome]


@dataclass(frozen=True)
class Suite:
    """A benchmark: what it measures, section by section; where contestants can, they first show that they compute the same."""

    name: str
    about: str | None
    sections: Mapping[str, Section]
    disagreement: Callable[[], float] | None = None
    """How far contestants are apart after some steps, relative to how far they have moved; `None` where they do not do the same."""
    effort: Effort = timing.FULL
    packages: tuple[str, ...] = ()
    """The peers, beyond those whose versions are always given."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print, write; returns 1 when the contestants do not compute the same."""
        options = self._options(arguments)
        torch.set_num_threads(machine.threads())
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        apart = None if self.disagreement is None else self.disagreement()
        if apart is not None and not apart <= _AGREE:
            console.print(f"the contestants do not take the same steps; relative to what these moved they are off by {apart:.2g}")
            return 1
        sizes, effort = (models.QUICK, timing.QUICK) if options.quick else (models.FULL, self.effort)
        described = machine.describe(sizes.single, self.packages)
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            outcomes = self._measured(options.only, Scale(sizes, effort, options.quick, Path(folder)), console)
        figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
        console.print(_table(figures, judged=not options.quick))
        console.print(machine.spelled(described))
        if described["idle_before"] is not None and described["idle_before"] < _IDLE:
            console.print(
                f"[yellow]Other programs were using the cores ({described['idle_before']:.0%} idle before the start). PyTorch's "
                "threads wait for each other by spinning, and then lose far more than ours; measure again on a quiet machine.[/]"
            )
        if options.out is not None:
            data = {
                "machine": described,
                "quick": options.quick,
                "disagreement": apart,
                "timings": {name: outcome.as_json() for name, outcome in outcomes.items()},
                "figures": [figure.as_json() for figure in figures],
            }
            path = options.out / f"{self.name}.json"
            path.write_text(json.dumps(data, indent=2) + "\n")
            console.print(f"written: {path}")
        return 0

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.about)
        parser.add_argument(
            "--only", nargs="+", metavar="SECTION", help=f"any of: {', '.join(map(repr, self.sections))} (default: all)"
        )
        parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help=f"where {self.name}.json goes (a whole run: {RESULTS.name}; else: nowhere)"
        )
        options = parser.parse_args(arguments)
        whole = options.only is None and not options.quick
        if options.out is None and whole:
            options.out = RESULTS
        if options.out is not None and options.out.resolve() == RESULTS and not whole:
            parser.error(f"a part, or a quick run, would take the place of what is kept in {RESULTS.name}; name another folder")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        options.only = list(self.sections) if options.only is None else options.only
        unknown = [name for name in options.only if name not in self.sections]
        if unknown:
            parser.error(f"no section {', '.join(unknown)}; there are {', '.join(self.sections)}")
        return options

    def _measured(self, only: Sequence[str], scale: Scale, console: Console) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        # Drawn between sections only: a thread that redraws by itself would take time from the contestants.
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
            bar = progress.add_task("", total=len(only))
            for done, name in enumerate(only):
                progress.update(bar, description=f"measuring {name}", completed=done, refresh=True)
                outcomes[name] = self.sections[name](scale)
                for who, taken in outcomes[name].timings.items():
                    least, median = f"{taken.minimum * 1e3:,.3f}", f"{taken.median * 1e3:,.3f}"
                    console.print(f"{name}: {who} {least} ms (median {median}, {taken.samples} × {taken.steps})")
        return outcomes


def _table(figures: Sequence[Figure], *, judged: bool) -> Table:
    table = Table("section", "figure", "measured", "target", "", title="ratios of minima", title_justify="left")
    for column in table.columns[2:4]:
        column.justify = "right"
    for figure in figures:
        target = "" if figure.target is None else f"≤ {figure.target:.3g}"
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met if judged else None]
        table.add_row(figure.section, figure.name, f"{figure.value:.3g}", target, verdict)
    return table
