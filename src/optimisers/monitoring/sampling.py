"""The sample of one step: put together from norms and learning rates, and handed to a writer as scalars."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optimisers.model.layout import Layout
from optimisers.monitoring.lines import Sample
from optimisers.rules.values import is_traced
from optimisers.state import State

__all__ = ["rates_of", "sample_of", "write"]


class _Columns(NamedTuple):
    """What samples of one layout have in common."""

    names: tuple[str, ...]
    groups: np.ndarray
    frozen: np.ndarray


def _columns(layout: Layout) -> _Columns:
    if "columns" not in layout.cache:
        records = layout.parameters
        layout.cache["columns"] = _Columns(
            tuple([str(record.path) for record in records]),
            np.array([record.group for record in records], np.int64),
            np.array([record.frozen for record in records], bool),
        )
    return layout.cache["columns"]


def sample_of(state: State, number: int, stepped: Sequence[int], squares: np.ndarray, rates: np.ndarray) -> Sample:
    """The sample of a step.

    **Arguments:**

    - `state`: before the step; `number`: the count after it; `stepped`: the parameters that took it.
    - `squares`: for each parameter the sums of squares of gradient, step, and parameter before it, in three rows.
    - `rates`: of each group, as `rates_of` finds them.
    """
    columns, chosen = _columns(state.layout), np.array(stepped, np.intp)
    values, known = np.full((3, len(state)), np.nan), np.zeros((3, len(state)), bool)
    gradient, moved, length = np.sqrt(squares[:, chosen])
    with np.errstate(all="ignore"):
        ratio = moved / length
    for row, column, there in (
        (0, gradient, True),
        (1, ratio, length != 0),
        (2, rates[columns.groups[chosen]], ~np.isnan(rates)[columns.groups[chosen]]),
    ):
        values[row, chosen], known[row, chosen] = column, there
    return Sample(number, time.time(), columns.names, values, known, columns.frozen)


def rates_of(state: State) -> np.ndarray:
    """The learning rate of each group at the state's step; NaN for a rule that has none."""
    found = []
    for rule in state.rules:
        rate = rule.rate and rule.rate[1]
        value: Any = rate(state.step) if callable(rate) else rate
        known = value is not None and not is_traced(value) and getattr(value, "shape", ()) == ()
        found.append(float(np.asarray(value)) if known else np.nan)
    return np.array(found)


def write(writer: Any, sample: Sample, state: State, rates: np.ndarray) -> None:
    """Hand a sample to a writer. A learning rate goes once, under the first of the parameters that share it."""
    paths = [path or "model" for path in sample.paths]
    for row, tag in enumerate(("grad_norm", "update_ratio")):
        for at in np.flatnonzero(sample.known[row]):
            writer.add_scalar(f"{tag}/{paths[at]}", float(sample.values[row, at]), sample.step)
    seen = set()
    for at, group in enumerate(_columns(state.layout).groups):
        # Equal schedules are one, so that what is shared does not hang on what two of them happen to return.
        own = state.rules[group].rate
        rate = own and own[1]
        if not np.isnan(rates[group]) and (key := _key(rate)) not in seen:
            seen.add(key)
            writer.add_scalar(f"lr/{paths[at]}", float(rates[group]), sample.step)


def _key(rate: Any) -> Any:
    """What stands for a rate in a set: itself, or its identity where it cannot be hashed."""
    try:
        hash(rate)
    except TypeError:
        return id(rate)
    return rate
