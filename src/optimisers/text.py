"""Words for a person: sizes, what is particular about a parameter, what stands for a rule."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optimisers.backends.rows import Runs

__all__ = ["letter_of", "notes_of", "path_text", "rows_text", "shape_text", "size_of"]


def path_text(path: object) -> str:
    """The spelling of a path; of the empty one, what it stands for."""
    return str(path) or "(the model)"


def shape_text(shape: Sequence[int]) -> str:
    """The axes of an array.

    >>> shape_text((2, 3)), shape_text(())
    ('2 × 3', 'scalar')
    """
    return " × ".join(map(str, shape)) or "scalar"


def rows_text(rows: Runs, of: int) -> str:
    """How many rows are frozen."""
    return f"{sum(stop - start for start, stop in rows):,} of {of:,} rows frozen"


def notes_of(shape: "tuple[int, ...]", frozen: bool, rows: Runs, ties: Mapping[Any, str], masked: Iterable[Any]) -> list[str]:
    """What is particular about a parameter.

    >>> notes_of((3, 2), False, ((0, 1),), {"head.weight": "transposed"}, [])
    ['1 of 3 rows frozen', 'tied: head.weight (transposed)']
    """
    notes = ["frozen"] if frozen else []
    notes += [rows_text(rows, shape[0])] if rows else []
    notes += [f"tied: {path}" + (f" ({view})" if view != "same" else "") for path, view in ties.items()]
    return notes + [f"masked: {path}" for path in sorted(map(str, masked))]


def size_of(nbytes: float) -> str:
    """Bytes as a person reads them.

    >>> size_of(112), size_of(3 * 2**20)
    ('112 B', '3.0 MiB')
    """
    value: Any = nbytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def letter_of(at: int) -> str:
    """What stands for the rule of this number: A, B, …, Z, AA, AB, …

    >>> letter_of(0), letter_of(27)
    ('A', 'AB')
    """
    return (letter_of(at // 26 - 1) if at >= 26 else "") + chr(ord("A") + at % 26)
