"""Looking at a state: a table for the terminal."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimisers.state import Leaf, State, check_state

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Summary", "size_of", "summary"]


@dataclass(frozen=True)
class Summary:
    """A table of a state. `print` shows it; a `rich` console shows it in colour.

    `rows` are its cells; `rules` are the rules that the rows name by letters; `total` is the line below.
    """

    rows: tuple[tuple[str, ...], ...]
    rules: tuple[tuple[str, str], ...]
    total: str

    HEADINGS = ("parameter", "shape", "dtype", "rule", "steps", "state", "notes")

    def __rich__(self) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        below = "\n".join([*(f"{letter} = {rule}" for letter, rule in self.rules), self.total])
        table = Table(box=box.SIMPLE_HEAD, caption=Text(below, style=""), caption_justify="left", pad_edge=False)
        for heading in self.HEADINGS:
            table.add_column(heading, justify="right" if heading in ("steps", "state") else "left", overflow="fold")
        for row in self.rows:
            # Text, not str: paths and rules may hold what rich would read as markup.
            table.add_row(*map(Text, row), style="dim" if row[-1].startswith("frozen") else "")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        widths = [max(map(len, column)) for column in zip(self.HEADINGS, *self.rows, strict=True)]
        longest = max((len(rule) + 6 for _, rule in self.rules), default=0)
        width = max(80, longest, sum(widths) + 4 * len(widths))
        console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")  # type: ignore[attr-defined]


def summary(state: State) -> Summary:
    """A table of a state: for each parameter its shape, dtype, rule, step count, the bytes of its slots, ties and what is frozen.

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
    rules = {leaf.rule.key: repr(leaf.rule) for leaf in leaves}
    letters = {key: _letter(at) for at, key in enumerate(rules)}
    rows = tuple(_row(leaf, letters[leaf.rule.key]) for leaf in leaves)
    return Summary(rows, tuple((letters[key], rule) for key, rule in rules.items()), f"{count}{asleep}; {size} of state")


def _letter(at: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    return (_letter(at // 26 - 1) if at >= 26 else "") + chr(ord("A") + at % 26)


def _row(leaf: Leaf, rule: str) -> tuple[str, ...]:
    shape = " × ".join(map(str, leaf.shape)) or "scalar"
    return str(leaf.path) or "(the model)", shape, leaf.dtype, rule, str(leaf.step), size_of(leaf.nbytes), _notes(leaf)


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
