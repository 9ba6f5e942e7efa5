"""What a heat map is drawn of, and how its values become colours and its steps places."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["TITLES", "Columns", "Scale", "edges_of", "scale_of"]

TITLES = {"grad_norm": "gradient norm", "update_ratio": "update / weight", "lr": "learning rate"}
"""The quantities that are drawn, and what a person calls them."""


class Columns(NamedTuple):
    """A recording as it is drawn: a row for each parameter, a column for each step."""

    paths: tuple[str, ...]
    steps: np.ndarray
    frozen: np.ndarray
    values: Mapping[str, np.ndarray]
    """By quantity."""
    known: Mapping[str, np.ndarray]
    """Where a value was recorded, by quantity."""


class Scale(NamedTuple):
    """How values become colours: between two numbers, by their logarithm or as they are."""

    low: float
    high: float
    logarithmic: bool


def scale_of(columns: Columns, quantity: str) -> Scale:
    """The scale of a quantity: logarithmic, but for learning rates that hardly differ. What is below it has its lowest colour."""
    values = columns.values[quantity]
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return Scale(0.0, 1.0, False)
    low, high = float(values.min()), float(values.max())
    if quantity == "lr" and high < 100 * low:
        return Scale(0.0, high, False)
    low = max(low, high * 1e-10, np.finfo(np.float64).tiny)
    return Scale(low, high, True) if low < high else Scale(high / math.sqrt(10), min(high * math.sqrt(10), 1e308), True)


def edges_of(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the cell of each sample begins and ends: half-way to its neighbours, but not across a gap."""
    if len(steps) == 1:
        return steps - 0.5, steps + 0.5
    gaps = np.diff(steps).astype(np.float64)
    before, after = np.concatenate([gaps[:1], gaps]), np.concatenate([gaps, gaps[-1:]])
    left = np.where(before > 2 * after, after, before) / 2
    right = np.where(after > 2 * before, before, after) / 2
    return steps - left, steps + right
