"""Schedules: hyperparameters as functions of the state's step. Each is a value; any other callable serves as well.

The step counts from 0: the first update sees `schedule(0)`.
"""

import math
from dataclasses import dataclass
from typing import Any

import array_api_compat

from optimisers.errors import HyperparameterError

__all__ = ["Constant", "Cosine", "Joined", "Linear", "Schedule", "Shifted", "warmup"]


class Schedule:
    """A function of the step that can be printed, compared, hashed and pickled."""

    def __call__(self, step: Any) -> Any:
        """The value at a step: a number for a number, an array for an array (or a tracer)."""
        raise NotImplementedError  # every schedule defines it

    def starting_at(self, step: int) -> "Shifted":
        """This schedule, with its step 0 at a later step: `state.adjust(lr=schedule.starting_at(state.step))`.

        >>> from optimisers.schedules import Linear
        >>> Linear(0.0, 1.0, 4).starting_at(100)(102)
        0.5
        """
        return Shifted(self, step)

    def then(self, other: "Schedule | float", after: int) -> "Joined":
        """This schedule for `after` steps, then another one, which counts its steps from there.

        >>> from optimisers.schedules import Constant
        >>> Constant(1.0).then(0.1, after=5)(5)
        0.1
        """
        return Joined((self, _schedule(other)), (after,))


@dataclass(frozen=True)
class Constant(Schedule):
    """Always the same value.

    >>> Constant(0.1)(1000)
    0.1
    """

    value: float

    def __call__(self, step: Any) -> Any:
        return self.value


@dataclass(frozen=True)
class Shifted(Schedule):
    """Another schedule that begins at a later step; before it, its first value.

    >>> Shifted(Linear(0.0, 1.0, 4), 100)(101)
    0.25
    """

    schedule: Schedule
    start: int

    def __call__(self, step: Any) -> Any:
        later = step - self.start
        return self.schedule(_where(later > 0, later, 0))


@dataclass(frozen=True)
class Linear(Schedule):
    r"""A straight line from `start` to `stop` over `steps` steps, then `stop`.

    >>> [Linear(0.0, 1.0, 4)(step) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        _check_steps(self, self.steps)

    def __call__(self, step: Any) -> Any:
        return self.start + (self.stop - self.start) * _share(step, self.steps)


@dataclass(frozen=True)
class Cosine(Schedule):
    r"""Half a cosine from `start` down to `stop` over `steps` steps, then `stop`.

    $\mathrm{stop} + (\mathrm{start} - \mathrm{stop})\,(1 + \cos(\pi t/T))/2$.

    >>> [round(Cosine(1.0, 2)(step), 3) for step in range(4)]
    [1.0, 0.5, 0.0, 0.0]

    Source: Loshchilov and Hutter (2017), without restarts.
    """

    start: float
    steps: int
    stop: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(self, self.steps)

    def __call__(self, step: Any) -> Any:
        return self.stop + (self.start - self.stop) * (1 + _cos(math.pi * _share(step, self.steps))) / 2


@dataclass(frozen=True)
class Joined(Schedule):
    """Schedules one after another; the second begins at the first boundary, and counts its steps from there.

    >>> Joined((Linear(0.0, 1.0, 2), Constant(0.5)), (2,))(3)
    0.5
    """

    schedules: tuple[Schedule, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(map(_schedule, self.schedules)))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        if len(self.schedules) != len(self.boundaries) + 1 or list(self.boundaries) != sorted(set(self.boundaries)):
            raise HyperparameterError(f"{self!r}: between n schedules there are n - 1 boundaries, in ascending order")

    def __call__(self, step: Any) -> Any:
        value = self.schedules[0](step)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            value = _where(step >= boundary, schedule(step - boundary), value)
        return value


def warmup(schedule: "Schedule | float", steps: int, start: float = 0.0) -> Joined:
    """A linear rise from `start` to where a schedule begins, over `steps` steps, and then that schedule.

    >>> rate = warmup(Cosine(1.0, 10), 4)
    >>> rate(0), rate(2), rate(4), round(rate(14), 3)
    (0.0, 0.5, 1.0, 0.0)
    """
    then = _schedule(schedule)
    return Joined((Linear(start, then(0), steps), then), (steps,))


def _schedule(value: Any) -> Schedule:
    return Constant(float(value)) if isinstance(value, (int, float)) else value


def _check_steps(schedule: Schedule, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise HyperparameterError(f"{schedule!r}: steps is a whole number of at least 1")


def _share(step: Any, steps: int) -> Any:
    """How much of the way is done, from 0 to 1."""
    if isinstance(step, (int, float)):
        return min(max(step, 0), steps) / steps
    library = array_api_compat.array_namespace(step)
    return library.clip(step, 0, steps) / steps


def _cos(x: Any) -> Any:
    return math.cos(x) if isinstance(x, (int, float)) else array_api_compat.array_namespace(x).cos(x)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return (
        (x if condition else y)
        if isinstance(condition, bool)
        else array_api_compat.array_namespace(condition).where(condition, x, y)
    )
