"""Schedules: hyperparameters as functions of the state's step. Each is a value; any other callable serves as well.

The step counts from 0: the first update sees `schedule(0)`.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import array_api_compat

from optimisers.errors import HyperparameterError
from optimisers.rules.values import is_traced

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "InverseSqrt",
    "Joined",
    "Linear",
    "Polynomial",
    "Scaled",
    "Schedule",
    "Shifted",
    "one_cycle",
    "piecewise",
    "warmup",
    "warmup_stable_decay",
]


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

    def then(self, other: Any, after: int) -> "Joined":
        """This schedule for `after` steps, then another one (or a number, or any function), which counts its steps from there.

        >>> from optimisers.schedules import Constant
        >>> Constant(1.0).then(0.1, after=5)(5)
        0.1
        """
        return Joined((self, other), (after,))

    @property
    def length(self) -> int:
        """About how many steps show what the schedule does."""
        steps = getattr(self, "steps", None)
        return steps + steps // 10 if isinstance(steps, int) else 100

    def plot(self, steps: int | None = None, *, axes: Any = None) -> Any:
        """Draw the values at steps 0 to `steps` (by default `length`), with Matplotlib.

        **Arguments:** `axes`: where to draw; by default those of a new figure. **Returns** the axes, so that
        `schedule.plot(1000).figure.savefig("rate.png")` makes a file.

        **Raises** `ImportError` without Matplotlib, `HyperparameterError` for a number of steps that is none.
        """
        if steps is not None and (_whole(steps) is None or steps < 1):
            raise HyperparameterError(f"plot takes a number of steps, and not {steps!r}; plot(…).figure.savefig(…) makes a file")
        if axes is None:
            from matplotlib.figure import Figure

            axes = Figure(figsize=(6, 3), layout="constrained").subplots()
        steps = self.length if steps is None else steps
        axes.plot(range(steps + 1), [self(step) for step in range(steps + 1)])
        axes.set_xlabel("step")
        axes.set_title(repr(self), fontsize="small", wrap=True)
        axes.grid(alpha=0.3)
        return axes


class _Checked(Schedule):
    """A schedule of this module, whose fields are checked by their types."""

    def __post_init__(self) -> None:
        """Check the fields: numbers, whole numbers of at least 1, another schedule."""
        for field in fields(self):  # type: ignore[arg-type]  # every schedule is a dataclass
            value = getattr(self, field.name)
            if field.name == "schedule":
                object.__setattr__(self, "schedule", _schedule(value))
            elif field.type is int:
                _check_whole(self, field.name)
            elif field.type is float or (field.type == float | None and value is not None):
                _check_number(self, field.name)


@dataclass(frozen=True)
class Constant(_Checked):
    """Always the same value.

    >>> Constant(0.1)(1000)
    0.1
    """

    value: float

    def __call__(self, step: Any) -> Any:
        return self.value


@dataclass(frozen=True)
class Shifted(_Checked):
    """Another schedule, or any function of the step, that begins at a later step; before it, its first value.

    >>> Shifted(Linear(0.0, 1.0, 4), 100)(101)
    0.25
    """

    schedule: Any
    start: float

    @property
    def length(self) -> int:
        return int(self.start) + getattr(self.schedule, "length", 100)

    def __call__(self, step: Any) -> Any:
        later = step - self.start
        return self.schedule(_where(later > 0, later, 0))


@dataclass(frozen=True)
class Scaled(_Checked):
    """Another schedule, or any function of the step, times a number.

    >>> Scaled(Linear(0.0, 1.0, 4), 0.5)(2)
    0.25
    """

    schedule: Any
    factor: float

    @property
    def length(self) -> int:
        return getattr(self.schedule, "length", 100)

    def __call__(self, step: Any) -> Any:
        return self.schedule(step) * self.factor


@dataclass(frozen=True)
class Linear(_Checked):
    r"""A straight line from `start` to `stop` over `steps` steps, then `stop`.

    >>> [Linear(0.0, 1.0, 4)(step) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """

    start: float
    stop: float
    steps: int

    def __call__(self, step: Any) -> Any:
        return self.start + (self.stop - self.start) * _share(step, self.steps)


@dataclass(frozen=True)
class Cosine(_Checked):
    r"""Half a cosine from `start` down to `stop` over `steps` steps, then `stop`.

    $\mathrm{stop} + (\mathrm{start} - \mathrm{stop})\,(1 + \cos(\pi t/T))/2$.

    >>> [round(Cosine(1.0, 2)(step), 3) for step in range(4)]
    [1.0, 0.5, 0.0, 0.0]

    Source: Loshchilov and Hutter (2017), without restarts.
    """

    start: float
    steps: int
    stop: float = 0.0

    def __call__(self, step: Any) -> Any:
        return self.stop + (self.start - self.stop) * (1 + _cos(math.pi * _share(step, self.steps))) / 2


@dataclass(frozen=True)
class Joined(_Checked):
    """Schedules one after another; the second begins at the first boundary, and counts its steps from there.

    Numbers and any functions of the step may stand among them. None is asked for a step before its first.

    >>> Joined((Linear(0.0, 1.0, 2), Constant(0.5)), (2,))(3)
    0.5
    """

    schedules: tuple[Any, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.schedules, (tuple, list)) or not isinstance(self.boundaries, (tuple, list)):
            raise HyperparameterError("Joined takes a tuple of schedules, and a tuple of the steps at which the next begins")
        object.__setattr__(self, "schedules", tuple(map(_schedule, self.schedules)))
        found = [_whole(each) for each in self.boundaries]
        boundaries = [each for each in found if each is not None and each >= 0]
        object.__setattr__(self, "boundaries", tuple(boundaries if len(boundaries) == len(found) else self.boundaries))
        if len(boundaries) < len(found) or len(self.schedules) != len(self.boundaries) + 1 or boundaries != sorted(set(boundaries)):
            raise HyperparameterError(
                f"{self!r}: between n schedules there are n - 1 boundaries, whole numbers of at least 0, in ascending order"
            )

    @property
    def length(self) -> int:
        return self.boundaries[-1] + getattr(self.schedules[-1], "length", 100) if self.boundaries else 100

    def __call__(self, step: Any) -> Any:
        if isinstance(step, (int, float)):
            at = bisect_right(self.boundaries, step)
            return self.schedules[at](step - self.boundaries[at - 1] if at else step)
        value = self.schedules[0](step)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            # Two numbers would be of the library's usual dtype, not of that of the steps.
            value = step * 0 + value if isinstance(value, (int, float)) else value
            value = _where(step >= boundary, schedule(_larger(step - boundary, 0)), value)
        return value


@dataclass(frozen=True)
class Exponential(_Checked):
    r"""Multiplied by `rate` every `steps` steps, smoothly, or all at once with `stairs`; never below `least`.

    $\mathrm{start}\cdot\mathrm{rate}^{t/T}$.

    >>> Exponential(1.0, 0.5, 10)(20), Exponential(1.0, 0.5, 10, stairs=True)(19)
    (0.25, 0.5)
    """

    start: float
    rate: float
    steps: int = 1
    stairs: bool = False
    least: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rate, (int, float)) and self.rate <= 0:
            raise HyperparameterError(f"{self!r}: rate is above 0")

    @property
    def length(self) -> int:
        return self.steps * 10

    def __call__(self, step: Any) -> Any:
        step = _larger(step, 0)
        periods = step // self.steps if self.stairs else step / self.steps
        try:
            power = self.rate**periods
        except OverflowError:
            power = math.inf
        return self.start * power if self.least is None else _larger(self.start * power, self.least)


@dataclass(frozen=True)
class Polynomial(_Checked):
    r"""From `start` to `stop` over `steps` steps along a power of what is left:
    $\mathrm{stop} + (\mathrm{start}-\mathrm{stop})(1-t/T)^k$.

    >>> Polynomial(1.0, 0.0, 10, power=2.0)(5)
    0.25
    """

    start: float
    stop: float
    steps: int
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.power, (int, float)) and self.power <= 0:
            raise HyperparameterError(f"{self!r}: power is above 0")

    def __call__(self, step: Any) -> Any:
        return self.stop + (self.start - self.stop) * (1 - _share(step, self.steps)) ** self.power


@dataclass(frozen=True)
class CosineRestarts(_Checked):
    r"""Half a cosine from `start` to `stop`, again and again, each `factor` times as long as the one before.

    >>> rate = CosineRestarts(1.0, 4, factor=2)
    >>> [round(rate(step), 3) for step in (0, 2, 4, 8, 12)]
    [1.0, 0.5, 1.0, 0.5, 1.0]

    Source: Loshchilov and Hutter (2017).
    """

    start: float
    steps: int
    stop: float = 0.0
    factor: int = 1

    @property
    def length(self) -> int:
        return 3 * self.steps if self.factor == 1 else self.steps * (1 + self.factor + self.factor**2)

    def __call__(self, step: Any) -> Any:
        step = _larger(step, 0)
        if self.factor == 1:
            share = (step % self.steps) / self.steps
        else:
            # Cycle n begins after steps · (factor^n - 1)/(factor - 1), a whole number. The logarithm is rounded, so it only tells
            # the cycle or the one after it.
            cycle = _floor(_log(step * (self.factor - 1) / self.steps + 1) / math.log(self.factor) + 0.5)
            cycle = _where(step < self._begin(cycle), cycle - 1, cycle)
            share = (step - self._begin(cycle)) / (self.steps * self.factor**cycle)
        return self.stop + (self.start - self.stop) * (1 + _cos(math.pi * share)) / 2

    def _begin(self, cycle: Any) -> Any:
        return _floor(self.steps * (self.factor**cycle - 1) / (self.factor - 1) + 0.5)


@dataclass(frozen=True)
class InverseSqrt(_Checked):
    r"""A linear rise to `peak` over `warmup` steps, then $\mathrm{peak}\sqrt{w/t}$.

    >>> rate = InverseSqrt(1.0, 4)
    >>> rate(2), rate(4), rate(16)
    (0.5, 1.0, 0.5)

    Source: Vaswani et al. (2017).
    """

    peak: float
    warmup: int

    @property
    def length(self) -> int:
        return 10 * self.warmup

    def __call__(self, step: Any) -> Any:
        late = _larger(step, self.warmup)
        return self.peak * _share(step, self.warmup) * (self.warmup / late) ** 0.5


def warmup(schedule: Any, steps: int, start: float = 0.0) -> Joined:
    """A linear rise from `start` to where a schedule (or a number, or any function of the step) begins, over `steps` steps, and
    then that schedule.

    >>> rate = warmup(Cosine(1.0, 10), 4)
    >>> rate(0), rate(2), rate(4), round(rate(14), 3)
    (0.0, 0.5, 1.0, 0.0)
    """
    then = _schedule(schedule)
    if (-1 if (whole := _whole(steps)) is None else whole) < 0:
        raise HyperparameterError(f"warmup(…, {steps!r}): the steps of the rise come second, a whole number of at least 0")
    return Joined((Linear(start, then(0), steps), then), (steps,)) if steps else Joined((then,), ())


def one_cycle(peak: float, steps: int, warmup: float = 0.3, start_factor: float = 1 / 25, stop_factor: float = 1e-4 / 25) -> Joined:
    """Up to `peak` along half a cosine in the first share of the steps, then down along another.

    `start_factor` and `stop_factor` are the ends, as shares of the peak.

    >>> rate = one_cycle(1.0, 10)
    >>> [round(rate(step), 6) for step in (0, 3, 10)]
    [0.04, 1.0, 4e-06]

    Source: Smith and Topin (2018); the numbers are those of `optax.cosine_onecycle_schedule`.
    """
    if not isinstance(warmup, (int, float)) or not 0 <= warmup <= 1:
        raise HyperparameterError(f"one_cycle(warmup={warmup!r}): warmup is the share of the steps that rise, in [0, 1]")
    if (_whole(steps) or 0) < 1:
        raise HyperparameterError(f"one_cycle(steps={steps!r}): steps is a whole number of at least 1")
    for name, value in (("peak", peak), ("start_factor", start_factor), ("stop_factor", stop_factor)):
        if not _is_number(value):
            raise HyperparameterError(f"one_cycle({name}={value!r}): {name} is a number")
    rise = max(1, int(warmup * steps))
    return Joined((Cosine(peak * start_factor, rise, peak), Cosine(peak, max(1, steps - rise), peak * stop_factor)), (rise,))


def warmup_stable_decay(peak: float, warmup: int, stable: int, decay: int, stop: float = 0.0) -> Joined:
    """A linear rise, a plateau, a linear fall: `warmup`, `stable` and `decay` steps, of which any may be 0.

    >>> rate = warmup_stable_decay(1.0, 2, 3, 4)
    >>> [rate(step) for step in (0, 2, 5, 7, 9)]
    [0.0, 1.0, 1.0, 0.5, 0.0]

    Source: Hu et al. (2024).
    """
    for name, steps in (("warmup", warmup), ("stable", stable), ("decay", decay)):
        if (-1 if _whole(steps) is None else steps) < 0:
            raise HyperparameterError(f"warmup_stable_decay({name}={steps!r}): {name} is a whole number of at least 0")
    rise, plateau, fall = Linear(0.0, peak, max(1, warmup)), Constant(peak), Linear(peak, stop, max(1, decay))
    parts = [(rise, 0)] * (warmup > 0) + [(plateau, warmup)] * (stable > 0)
    parts += [(fall if decay else Constant(stop), warmup + stable)]
    return Joined(tuple([part for part, _ in parts]), tuple([begin for _, begin in parts[1:]]))


def piecewise(values: Sequence[float], boundaries: Sequence[int]) -> Joined:
    """One value after another: the second from the first boundary on.

    >>> rate = piecewise([1.0, 0.1, 0.01], [10, 20])
    >>> rate(9), rate(10), rate(25)
    (1.0, 0.1, 0.01)
    """
    return Joined(tuple(map(Constant, values)), tuple(boundaries))


def _schedule(value: Any) -> Schedule:
    if _is_number(value):
        return Constant(float(value))
    if not callable(value) or isinstance(value, type):
        raise HyperparameterError(f"{value!r} is neither a schedule nor a number nor a function of the step")
    return value  # type: ignore[return-value]


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or getattr(value, "shape", None) == ()


def _check_number(schedule: Schedule, name: str) -> None:
    """Check that a field is a number, and make it a Python number; a tracer stays."""
    value: Any = getattr(schedule, name)
    if is_traced(value):
        return
    if not _is_number(value) or value != value:
        raise HyperparameterError(f"{schedule!r}: {name} is a number")
    if hasattr(value, "item"):
        object.__setattr__(schedule, name, value.item())


def _check_whole(schedule: Schedule, name: str) -> None:
    value = _whole(getattr(schedule, name))
    if value is None or value < 1:
        raise HyperparameterError(f"{schedule!r}: {name} is a whole number of at least 1")
    object.__setattr__(schedule, name, value)


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _share(step: Any, steps: int) -> Any:
    """How much of the way is done, from 0 to 1."""
    if isinstance(step, (int, float)):
        return min(max(step, 0), steps) / steps
    library = array_api_compat.array_namespace(step)
    # A compiler may divide by multiplying, which rounds to above 1.
    return library.clip(library.clip(step, 0, steps) / steps, 0.0, 1.0)


def _cos(x: Any) -> Any:
    return math.cos(x) if isinstance(x, (int, float)) else array_api_compat.array_namespace(x).cos(x)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return (
        (x if condition else y)
        if isinstance(condition, bool)
        else array_api_compat.array_namespace(condition).where(condition, x, y)
    )


def _floor(x: Any) -> Any:
    return math.floor(x) if isinstance(x, (int, float)) else array_api_compat.array_namespace(x).floor(x)


def _log(x: Any) -> Any:
    return math.log(x) if isinstance(x, (int, float)) else array_api_compat.array_namespace(x).log(x)


def _larger(x: Any, y: Any) -> Any:
    return max(x, y) if isinstance(x, (int, float)) else _where(x >= y, x, y)
