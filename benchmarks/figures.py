"""What a section of a benchmark finds: times, and ratios of them beside what is aimed at; where it is kept, and for whom."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing

__all__ = ["FOREACH", "FUSED", "LOOP", "NAIVE", "OURS", "REFERENCE", "RESULTS", "Figure", "Outcome", "ratio"]

RESULTS = Path(__file__).parent / "results"
OURS, REFERENCE = "optimisers", "optimisers without Numba"
NAIVE = "NumPy, whole arrays"
LOOP, FOREACH, FUSED = "PyTorch loop", "PyTorch foreach", "PyTorch fused"


@dataclass(frozen=True)
class Figure:
    """A ratio, and the most it may be."""

    section: str
    name: str
    value: float
    target: float | None = None
    of: str | None = None
    """Whose time it is, by its name among the times of the section."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; `None` where there is none."""
        return None if self.target is None else self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        """The figure and the verdict."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Outcome:
    """What a section measured."""

    timings: Mapping[str, Timing] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    moved: Mapping[str, int] = field(default_factory=dict)
    """The bytes that memory has to move at the least, for those whose times have such a bound."""

    def as_json(self) -> dict[str, Any]:
        """The times, with the bytes where there is a bound."""
        return {name: {**asdict(taken), "bytes": self.moved.get(name)} for name, taken in self.timings.items()}


def ratio(timings: Mapping[str, Timing], name: str, against: str) -> float:
    """The ratio of two minima."""
    return timings[name].minimum / timings[against].minimum
