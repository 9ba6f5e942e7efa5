"""Looking at a state: a table for the terminal."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimisers.rules.base import Rule
from optimisers.state import Leaf, State, check_state

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Summary", "size_of", "summary"]

_TEXTS = ("parameter", "shape", "dtype", "rule", "notes")


class _Elsewhere:
    """Stands for a value that is shown at another place."""

    def __repr__(self) -> str:
        return "…"


_ELSEWHERE = _Elsewhere()


@dataclass(frozen=True)
class Summary:
    """A table of a state. `print` shows it; a `rich` console shows it in colour.

    `rows` are its cells under the `headings`; `rules` are the rules that the rows name by letters; `total` is the line below.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rules: tuple[tuple[str, str], ...]
    total: str

    def __rich__(self) -> "Group":
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        below = "\n".join([*(f"{letter} = {rule}" for letter, rule in self.rules), self.total])
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in self.headings:
            table.add_column(heading, justify="left" if heading in _TEXTS else "right", overflow="fold")
        for row in self.rows:
            # Text, not str: paths and rules may hold what rich would read as markup.
            table.add_row(*map(Text, row), style="dim" if row[-1].startswith("frozen") else "")
        return Group(table, Text(below))

    def __str__(self) -> str:
        from rich.console import Console

        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        longest = max((len(rule) + 6 for _, rule in self.rules), default=0)
        width = max(80, longest, sum(widths) + 4 * len(widths))
        console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")  # type: ignore[attr-defined]


def summary(state: State) -> Summary:
    """A table of a state: for each parameter its shape, dtype, rule, step count, the bytes of its slots, ties and what is frozen.

    Hyperparameters that are not the same for all parameters, and those that follow a schedule, have a column of their own, with
    their values at the state's step.

    **Returns** a `Summary`: `print` it, or give it to a `rich` console.

    Example:
        >>> import numpy as np, optimisers as op
        >>> print(op.summary(op.setup(op.Adam(), {"w": np.zeros(3), "v": np.ones((2, 2))}).freeze("v")).total)
        2 parameters, 7 elements, 4 of them frozen; 112 B of state
    """
    check_state(state, "summary")
    leaves = list(state.leaves())
    elements = sum(record.size for record in state.parameters)
    frozen = sum(record.size for record in state.parameters if record.frozen)
    size = size_of(sum(leaf.nbytes for leaf in leaves))
    count = f"{len(leaves):,} parameter{'s' * (len(leaves) != 1)}, {elements:,} elements"
    asleep = f", {frozen:,} of them frozen" if frozen else ""
    values = {rule.key: _values(rule, state.step) for rule in state.rules}
    differing = [name for name in _names(values.values()) if len({each[name] for each in values.values() if name in each}) > 1]
    shown = [name for name in _names(values.values()) if name in differing or any(_follows(rule, name) for rule in state.rules)]
    texts = {rule.key: _without(rule, differing) for rule in state.rules}
    letters = {text: _letter(at) for at, text in enumerate(dict.fromkeys(texts[leaf.rule.key] for leaf in leaves))}
    rows = tuple(_row(leaf, letters[texts[leaf.rule.key]], values[leaf.rule.key], shown) for leaf in leaves)
    headings = ("parameter", "shape", "dtype", "rule", *shown, "steps", "state", "notes")
    return Summary(headings, rows, tuple((letter, text) for text, letter in letters.items()), f"{count}{asleep}; {size} of state")


def _values(rule: Rule, step: Any) -> dict[str, float]:
    """The numbers of a rule at a step, by name; of one that several members have, the first member's."""
    found: dict[str, float] = {}
    for member in rule.members:
        for name, value in member.at(step).hyperparameters.items():
            if not isinstance(value, (bool, str, tuple, Rule)) and (isinstance(value, (int, float)) or hasattr(value, "dtype")):
                found.setdefault(name, float(value))
    return found


def _names(values: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in values for name in each))


def _follows(rule: Rule, name: str) -> bool:
    """Whether a hyperparameter follows a schedule."""
    return callable(rule.hyperparameters.get(name))


def _without(rule: Rule, names: Sequence[str]) -> str:
    """The text of a rule, with … for what has a column of its own."""
    members = [
        member.with_values({name: _ELSEWHERE if name in names else value for name, value in member.hyperparameters.items()})
        for member in rule.members
    ]
    return repr(members[0]) if rule.members == (rule,) else f"{type(rule).__name__}({', '.join(map(repr, members))})"


def _letter(at: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    return (_letter(at // 26 - 1) if at >= 26 else "") + chr(ord("A") + at % 26)


def _row(leaf: Leaf, rule: str, values: Mapping[str, float], shown: Sequence[str]) -> tuple[str, ...]:
    shape = " × ".join(map(str, leaf.shape)) or "scalar"
    numbers = [f"{values[name]:.4g}" if name in values else "" for name in shown]
    last = str(leaf.step), size_of(leaf.nbytes), _notes(leaf)
    return str(leaf.path) or "(the model)", shape, leaf.dtype, rule, *numbers, *last


def _notes(leaf: Leaf) -> str:
    notes = ["frozen"] if leaf.frozen else []
    if leaf.frozen_rows:
        notes.append(f"{sum(stop - start for start, stop in leaf.frozen_rows)} of {leaf.shape[0]} rows frozen")
    notes += [f"tied: {path}" + (f" ({view})" if view != "same" else "") for path, view in leaf.ties.items()]
    notes += [f"masked: {path}" for path in sorted(leaf.masked, key=str)]
    return ", ".join(notes)


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
