"""What a state holds for one parameter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, itemsize_of, library_of
from optimisers.backends.rows import Runs
from optimisers.model.paths import Path
from optimisers.model.reading import equal_values
from optimisers.rules.base import Rule
from optimisers.rules.numbers import split
from optimisers.text import notes_of, path_text

__all__ = ["Leaf", "bytes_of", "line_of", "same_leaf", "same_value"]


@dataclass(frozen=True)
class Leaf:
    """What a state holds for one parameter.

    - `path`, `shape`, `dtype`: of the parameter; `rule`: its update rule.
    - `slots`: its state arrays by name; empty while the parameter is frozen and has never trained.
    - `step`: how many steps it has taken. `frozen`: whether it moves at all; `frozen_rows`: rows that do not.
    - `ties`: the paths of its other occurrences, each with how it is seen from there (`"same"`, `"transposed"`, `"reshaped"`).
    - `masked`: the paths of occurrences whose gradient does not count.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    rule: Rule
    slots: Mapping[str, Any]
    step: Any
    frozen: bool
    frozen_rows: Runs
    ties: Mapping[Path, str]
    masked: frozenset[Path]

    def __reduce__(self) -> tuple[Any, ...]:
        # Views of dicts, which cannot be written, cannot be pickled either.
        values = (getattr(self, each.name) for each in fields(self))
        return Leaf, tuple([dict(value) if isinstance(value, Mapping) else value for value in values])

    def __repr__(self) -> str:
        notes = [f"slots={list(self.slots)}", f"step={self.step}"]
        notes += ["frozen"] if self.frozen else []
        notes += [f"frozen_rows={self.frozen_rows}"] if self.frozen_rows else []
        notes += [f"ties={list(map(str, self.ties))}"] if self.ties else []
        return f"Leaf({str(self.path)!r}, {self.dtype}{list(self.shape)}, {self.rule!r}, {', '.join(notes)})"

    @property
    def notes(self) -> list[str]:
        """What is particular about it, in words."""
        return notes_of(self.shape, self.frozen, self.frozen_rows, self.ties, self.masked)

    @property
    def nbytes(self) -> int:
        """The bytes of its slots."""
        return sum(map(bytes_of, self.slots.values()))


def bytes_of(slot: Any) -> int:
    """The bytes of a slot, wherever its parts lie."""
    return math.prod(slot.shape) * (itemsize_of(dtype_name(slot)) or 0)


def line_of(leaf: Leaf, rule: str) -> tuple[str, ...]:
    """A leaf as the cells of a line, with what stands for its rule."""
    return path_text(leaf.path), f"{leaf.dtype}{list(leaf.shape)}", rule, f"step {leaf.step}", ", ".join(leaf.notes)


def same_leaf(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves are equal, their arrays value by value, NaN like NaN."""
    facts = [(x.path, x.shape, x.dtype, x.frozen, x.frozen_rows, dict(x.ties), x.masked, tuple(x.slots)) for x in (a, b)]
    same = facts[0] == facts[1] and _same_rule(a.rule, b.rule) and same_value(a.step, b.step)
    return same and all(_same_array(a.slots[name], b.slots[name]) for name in a.slots)


def _same_rule(a: Rule, b: Rule) -> bool:
    if a is b:
        return True
    (form, numbers), (other, others) = split(a), split(b)
    return form == other and same_value(tuple(numbers), tuple(others))


def same_value(a: Any, b: Any) -> bool:
    """Whether two memories are equal: numbers, arrays, and mappings and tuples of them."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return _same_array(a, b) if hasattr(a, "dtype") and hasattr(b, "dtype") else bool(a == b)


def _same_array(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if library_of(a) != library_of(b) or a.dtype != b.dtype:
        return False
    if library_of(a) == "jax":
        # They may lie on different devices.
        a, b = np.asarray(a), np.asarray(b)
    return equal_values(a, b)
