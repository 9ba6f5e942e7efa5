"""The static half of a state: what is known of every parameter but its arrays and numbers."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from optimisers.backends.rows import Runs, complement
from optimisers.model.paths import Path
from optimisers.model.ties import SAME, View
from optimisers.rules.program import Program

__all__ = [
    "Alias",
    "Layout",
    "Parameter",
]


class Alias(NamedTuple):
    """A further occurrence of a parameter, and how it is seen from there."""

    path: Path
    view: View
    owners: tuple[type, ...] = ()


class Parameter(NamedTuple):
    """The record of one parameter: all that is static about it.

    - `path`: the canonical path; `aliases`: the other occurrences; `owners`: the types of the enclosing nodes, outermost first.
    - `shape`, `dtype`, `library`, `device`: of its array.
    - `frozen`, `frozen_rows`, `masked` (the paths of occurrences whose gradient does not count).
    - `state_dtype`: the dtype asked for its slots, or `None`.
    - `group`, `counter`: which of the state's rules and step counts are its own.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    library: str
    device: Any = None
    owners: tuple[type, ...] = ()
    aliases: tuple[Alias, ...] = ()
    masked: frozenset[Path] = frozenset()
    frozen: bool = False
    frozen_rows: Runs = ()
    state_dtype: str | None = None
    group: int = 0
    counter: int = 0

    @property
    def paths(self) -> tuple[Path, ...]:
        """The canonical path, then the aliases'."""
        return (self.path, *(alias.path for alias in self.aliases))

    @property
    def places(self) -> tuple[Alias, ...]:
        """All occurrences, the canonical one first, each with how the parameter is seen from there."""
        return (Alias(self.path, SAME, self.owners), *self.aliases)

    def view_at(self, path: Path) -> View:
        """How the parameter is seen from one of its paths."""
        return next((alias.view for alias in self.aliases if alias.path == path), SAME)

    @property
    def name(self) -> Any:
        """The last key of the canonical path: `"weight"`."""
        return self.path[-1] if self.path else None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def occurrences(self) -> "tuple[Parameter, ...]":
        """One record for each occurrence, as if it stood alone."""
        if not self.aliases:
            return (self,)
        return tuple(self._replace(path=each.path, owners=each.owners, aliases=()) for each in self.places)

    @property
    def live_rows(self) -> Runs | None:
        """The rows that train, or `None` for all."""
        return complement(self.frozen_rows, self.shape[0]) if self.frozen_rows else None


class Layout:
    """All records of a state, and the program of each group. Equal layouts are one object."""

    def __init__(self, parameters: tuple[Parameter, ...], programs: tuple[Program, ...], excluded: frozenset[Path]) -> None:
        self.parameters = parameters
        self.programs = programs
        self.excluded = excluded
        """Paths of arrays that could train but are none of the state's business (`setup(trainable=…)`)."""
        self.cache: dict[Any, Any] = {}
        """What other modules keep for this layout: plans, positions."""

    @classmethod
    def of(cls, parameters: Iterable[Parameter], programs: Iterable[Program], excluded: frozenset[Path] = frozenset()) -> "Layout":
        """The one layout with these contents."""
        key = (tuple(parameters), tuple(programs), excluded)
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = cls(*key)
        return found

    def __repr__(self) -> str:
        return f"Layout({len(self.parameters)} parameters, {len(self.programs)} groups)"

    @cached_property
    def libraries(self) -> frozenset[str]:
        """The array libraries of the parameters."""
        return frozenset(parameter.library for parameter in self.parameters)

    @cached_property
    def index(self) -> dict[Path, int]:
        """The number of the parameter at each path, canonical or alias."""
        return {path: at for at, parameter in enumerate(self.parameters) for path in parameter.paths}


_interned: WeakValueDictionary[Any, Layout] = WeakValueDictionary()
