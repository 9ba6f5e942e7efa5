"""Ranges of rows: those of a parameter that train, or that are frozen."""

from itertools import pairwise

import numpy as np

__all__ = ["Runs", "complement", "element_ranges", "mask_of", "row_mask", "runs_of"]

Runs = tuple[tuple[int, int], ...]
"""Ranges of rows (start, stop), ascending and apart."""


def mask_of(runs: Runs, size: int) -> np.ndarray:
    """The boolean vector that is true in the ranges."""
    mask = np.zeros(size, bool)
    for start, stop in runs:
        mask[start:stop] = True
    return mask


def runs_of(mask: np.ndarray) -> Runs:
    """The ranges where a boolean vector is true.

    >>> runs_of(np.array([True, True, False, True]))
    ((0, 2), (3, 4))
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def complement(runs: Runs, size: int) -> Runs:
    """The ranges that are left of `range(size)`.

    >>> complement(((0, 2), (3, 4)), 6)
    ((2, 3), (4, 6))
    """
    edges = [0, *(edge for run in runs for edge in run), size]
    return tuple((start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop)


def element_ranges(rows: Runs | None, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The live elements of a contiguous array, as ranges."""
    size = int(np.prod(shape, dtype=np.int64))
    if rows is None:
        return [(0, size)] if size else []
    width = size // shape[0] if shape[0] else 0
    return [(start * width, stop * width) for start, stop in rows if width]


def row_mask(rows: Runs | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """A boolean vector over the rows that train; `None` for all."""
    return None if rows is None else mask_of(rows, shape[0])
