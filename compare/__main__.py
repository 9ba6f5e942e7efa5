"""Runs every case of every library in a process of its own, and writes the table: `make compare`."""

import json
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from compare.cases import CASES
from compare.contenders import CONTENDERS, Contender, answer_apart, has
from compare.outcomes import NONE, judged
from compare.page import page, tables

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "behaviour.md"
AT_ONCE = 2


def measured(contenders: list[Contender]) -> dict[str, Any]:
    """What became of every case."""
    jobs = [(each, case) for each in contenders for case in CASES.values()]
    found: dict[str, Any] = {each.name: {} for each in contenders}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = pool.map(_outcome, jobs)
        for (who, case), outcome in zip(jobs, track(outcomes, "cases", len(jobs), console=Console(stderr=True)), strict=True):
            found[who.name][case.name] = outcome
    return found


def _outcome(job: Any) -> dict[str, Any]:
    who, case = job
    return judged(case, answer_apart(who, case.name)) if has(who, case.name) else {"outcome": NONE}


def main() -> int:
    """Run, write, print. Not zero where a case of this library is not right."""
    here = [each for each in CONTENDERS.values() if not each.missing]
    results = {
        "python": platform.python_version(),
        "versions": {name: number for each in here for name, number in each.versions.items()},
        "left out": {each.name: f"{', '.join(each.missing)} is not installed" for each in CONTENDERS.values() if each.missing},
        "results": measured(here),
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    console = Console()
    for table in tables(results):
        console.print(table)
    console.print(f"written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    ours = [each for who in here if who.array for each in results["results"][who.name].values()]
    return int(any(each["outcome"] in ("wrong", "error") for each in ours))


if __name__ == "__main__":
    sys.exit(main())
