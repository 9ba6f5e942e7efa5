"""Timing contestants in turn, so that a noisy machine is as noisy to one as to the next."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Effort", "Step", "Timing", "race"]

Step = Callable[[], object]

_BRIEF = 0.1


@dataclass(frozen=True)
class Timing:
    """The seconds of one step: the least and the median over all samples."""

    minimum: float
    median: float
    samples: int
    steps: int
    """How many steps each sample took."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    seconds: float
    """About what one contestant takes, pauses aside."""
    fewest: int
    most: int
    sample: float
    """The least seconds of one sample: shorter steps are taken several at a time."""
    limit: float
    """The most seconds of a race, once everyone has had a turn: on a busy machine PyTorch's threads wait for each other long."""
    pause: float
    """Seconds of rest before each sample. An OpenMP worker spins for up to ten milliseconds after its work is done, and
    would take a core from the contestant that comes next."""


FULL = Effort(seconds=0.8, fewest=3, most=60, sample=0.01, limit=20.0, pause=0.015)
QUICK = Effort(seconds=0.02, fewest=2, most=3, sample=0.001, limit=2.0, pause=0.0)


def race(steps: Mapping[str, Step], effort: Effort) -> dict[str, Timing]:
    """Time all contestants, one sample of each in turn, the slow ones in fewer rounds.

    **Arguments:**

    - `steps`: a function for each contestant that takes one step.
    - `effort`: how much is measured.
    """
    with _no_collection():
        batches, wanted, samples, brief = _calibrated(steps, effort)
        rounds, names = max(wanted.values()), list(steps)
        end = time.perf_counter() + effort.limit
        for turn in range(rounds):
            for name in names:
                if (turn + 1) * wanted[name] // rounds > turn * wanted[name] // rounds:
                    time.sleep(effort.pause)
                    if name in brief:
                        steps[name]()
                    samples[name].append(_seconds(steps[name], batches[name]) / batches[name])
            names.append(names.pop(0))
            if time.perf_counter() > end and all(samples.values()):
                break
    return {name: Timing(min(taken), statistics.median(taken), len(taken), batches[name]) for name, taken in samples.items()}


def _calibrated(
    steps: Mapping[str, Step], effort: Effort
) -> tuple[dict[str, int], dict[str, int], dict[str, list[float]], set[str]]:
    """After a step to warm up: how many steps make a sample, how many more samples are wanted than there are, those of slow steps,
    and whose step is brief enough that another one goes before each sample, to fill the caches after the pause."""
    batches, wanted, samples, brief = {}, {}, {}, set()
    for name, step in steps.items():
        step()
        time.sleep(effort.pause)
        once = _seconds(step, 1)
        batches[name] = max(1, math.ceil(effort.sample / once))
        wanted[name] = min(effort.most, max(effort.fewest, int(effort.seconds / (once * batches[name]))))
        samples[name] = []
        if once < _BRIEF:
            brief.add(name)
        else:
            samples[name].append(once)
            wanted[name] -= 1
    return batches, wanted, samples, brief


def _seconds(step: Step, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - start


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the timed regions."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
