"""Looking at a state: a table for the terminal."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimisers.leaf import Leaf
from optimisers.rules.base import Rule, member_names
from optimisers.state import State, check_state
from optimisers.text import letter_of, path_text, shape_text, size_of

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Summary", "summary"]

_TEXTS = ("parameter", "array", "shape", "dtype", "rule", "notes")


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
            # Names are read whole: other columns give way first.
            wrap = heading not in ("parameter", "array", "dtype", "shape")
            table.add_column(heading, justify="left" if heading in _TEXTS else "right", overflow="fold", no_wrap=not wrap)
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
    columns = _Columns(state)
    texts = {rule.key: columns.text(rule) for rule in state.rules}
    letters = {text: letter_of(at) for at, text in enumerate(dict.fromkeys(texts[leaf.rule.key] for leaf in leaves))}
    rows = tuple(_row(leaf, letters[texts[leaf.rule.key]], columns.cells(leaf.rule)) for leaf in leaves)
    headings = ("parameter", "shape", "dtype", "rule", *columns.names, "steps", "state", "notes")
    return Summary(
        headings,
        rows,
        tuple((letter, text) for text, letter in letters.items()),
        "; ".join([f"{count}{asleep}; {size} of state", *([state.memory_line] if state.memory_line else [])]),
    )


class _Columns:
    """The hyperparameters that have a column of their own: those that differ between parameters, or follow a schedule.

    Where a chain has several of one name, they are told apart by their members: `adamw.weight_decay`.
    """

    def __init__(self, state: State) -> None:
        found = {rule.key: _numbers(rule, state.step) for rule in state.rules}
        names = list(dict.fromkeys(place for each in found.values() for place in each))
        plain = [[name for _, name in each] for each in found.values()]
        self.differing = {place for place in names if len({each[place] for each in found.values() if place in each}) > 1}
        moving = {
            place
            for rule in state.rules
            for place in found[rule.key]
            if callable(_member(rule, place[0]).hyperparameters[place[1]])
        }
        shown = [place for place in names if place in self.differing | moving]
        self.names = tuple(
            dict.fromkeys(".".join(place) if any(each.count(place[1]) > 1 for each in plain) else place[1] for place in shown)
        )
        self._shown = shown
        self._found = found

    def cells(self, rule: Rule) -> list[str]:
        """The values of a rule, in the order of the columns."""
        values: dict[str, str] = {}
        for place in self._shown:
            value = self._found[rule.key].get(place)
            if value is not None:
                values[".".join(place) if ".".join(place) in self.names else place[1]] = value
        return [values.get(name, "") for name in self.names]

    def text(self, rule: Rule) -> str:
        """The text of a rule, with … for what differs and has a column."""
        members = []
        for name, member in zip(member_names(rule.members), rule.members, strict=True):
            values = {key: _ELSEWHERE if (name, key) in self.differing else value for key, value in member.hyperparameters.items()}
            members.append(member.with_values(values))
        return repr(members[0]) if rule.members == (rule,) else f"{type(rule).__name__}({', '.join(map(repr, members))})"


def _numbers(rule: Rule, step: Any) -> dict[tuple[str, str], str]:
    """The numbers of a rule at a step as text, by member and name."""
    found = {}
    for member, now in zip(member_names(rule.members), [each.at(step) for each in rule.members], strict=True):
        for name, value in now.hyperparameters.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[member, name] = f"{value:.4g}"
            elif hasattr(value, "dtype"):
                array: Any = value
                found[member, name] = f"{float(array):.4g}" if array.shape == () else f"{len(array)} values"
    return found


def _member(rule: Rule, name: str) -> Rule:
    return rule.members[member_names(rule.members).index(name)]


def _row(leaf: Leaf, rule: str, numbers: list[str]) -> tuple[str, ...]:
    last = str(leaf.step), size_of(leaf.nbytes), ", ".join(leaf.notes)
    return path_text(leaf.path), shape_text(leaf.shape), leaf.dtype, rule, *numbers, *last
