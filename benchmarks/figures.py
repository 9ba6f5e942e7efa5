"""The figures that are aimed at: a measured ratio beside its target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import FUSED, NAIVE, OURS, REFERENCE
from benchmarks.timing import Timing

__all__ = ["Figure", "Outcome", "contest", "ratio"]

AGAINST_FUSED = {"a": 1.10, "b": 0.4, "c": 0.4, "d": 1.10, "e": 0.7}
AGAINST_NAIVE = {"a": 1 / 15}
REFERENCE_AGAINST_NAIVE = {"d": 0.6}
FROZEN = {90: 0.15}
GROUPS = {100: 1.15}
CLIPPED = 1.35
A_BYTE = 1.25
SETUP = 12.0
MEMORY = 0.05


@dataclass(frozen=True)
class Figure:
    """A ratio, and the most it may be."""

    section: str
    name: str
    value: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; `None` where there is none."""
        return None if self.target is None else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        """The figure and the verdict."""
        return {"section": self.section, "name": self.name, "value": self.value, "target": self.target, "met": self.met}


@dataclass(frozen=True)
class Outcome:
    """What a section measured."""

    timings: Mapping[str, Timing]
    figures: list[Figure]


def ratio(timings: Mapping[str, Timing], name: str, against: str) -> float:
    """The ratio of two minima."""
    return timings[name].minimum / timings[against].minimum


def contest(case: str, timings: Mapping[str, Timing]) -> list[Figure]:
    """The figures of one of the cases (a) to (e)."""
    figures = [Figure(case, f"({case}) AdamW, against {FUSED}", ratio(timings, OURS, FUSED), AGAINST_FUSED[case])]
    figures.append(Figure(case, f"({case}) AdamW, against {NAIVE}", ratio(timings, OURS, NAIVE), AGAINST_NAIVE.get(case)))
    if REFERENCE in timings:
        name = f"({case}) without Numba, against {NAIVE}"
        figures.append(Figure(case, name, ratio(timings, REFERENCE, NAIVE), REFERENCE_AGAINST_NAIVE.get(case)))
    return figures
