"""The table as Markdown for the documentation, and for a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from compare.cases import CASES, FAMILIES, Case, Raises
from compare.outcomes import ERROR, NONE, RIGHT, WRONG, differing, shown

__all__ = ["counts", "page", "tables"]

_INTRODUCTION = """# What other libraries do

Small inputs whose right result is known, run through other optimiser libraries and through this one. Each library is used as its
documentation shows it. What is right is what this library promises, and its tests hold it to; another may have meant something
else. Cases keep the letters and numbers of those tests, and those that ask for what only this library has are left out, hence the
gaps. Where a library has no means of its own and a few lines of its user's serve, these were written, and the cell says
*by hand*. Every cell was computed by the run: `make compare` does it again, in an environment of its own, and writes this page.

- **right**: the values below the case came out; where an error is the right answer, an error that has the words below the case.
- **wrong**: other values came out, or any where there should be an error. Those that differ are shown.
- **error**: it stopped where there is a result, or with an error that lacks the words. Its first line is among the notes.
- **—**: the case does not apply, or the library offers no way.

"Its gradient is there all the same" is an input that some libraries meet only when a gradient is handed to them, since they leave
frozen parameters out of their own gradients; there the row before shows their own loop.
"""


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [_INTRODUCTION, _header(results)]
    for family in FAMILIES:
        parts += [f"## {family}\n", _table(results, family)]
    return "\n".join(parts)


def _header(results: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in sorted(results["versions"].items()))
    lines = [f"Python {results['python']}; {versions}.", "On the CPU; Keras with its JAX backend.", ""]
    lines += [f"{name} is left out: {reason}.\n" for name, reason in results["left out"].items()]
    lines += ["| | right | of these by hand | wrong | error | — |", "|---|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(map(str, counts(found)))} |" for name, found in results["results"].items()]
    return "\n".join([*lines, ""])


def counts(found: Mapping[str, Any]) -> tuple[int, ...]:
    """How many are right, of these by hand, wrong, errors, and none."""
    outcomes = [each["outcome"] for each in found.values()]
    by_hand = sum(each["outcome"] == RIGHT and each.get("by hand", False) for each in found.values())
    return outcomes.count(RIGHT), by_hand, *(outcomes.count(kind) for kind in (WRONG, ERROR, NONE))


def _columns(results: Mapping[str, Any], family: str) -> list[str]:
    """Those who have something to say in a family."""
    names = [case.name for case in _of(family)]
    return [who for who, found in results["results"].items() if any(found[name]["outcome"] != NONE for name in names)]


def _of(family: str) -> Iterator[Case]:
    return (case for case in CASES.values() if case.family == family)


def _table(results: Mapping[str, Any], family: str) -> str:
    columns, notes = _columns(results, family), dict[str, int]()
    lines = [f"| case | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case in _of(family):
        cells = []
        for who in columns:
            found = results["results"][who][case.name]
            marks = [str(notes.setdefault(note, len(notes) + 1)) for note in _notes(found)]
            cells.append(_cell(case, found, "**") + (f" <sup>{' '.join(marks)}</sup>" if marks else ""))
        text = f"**{case.name}** {case.text}<br>{_right(case)}"
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (text, *cells))} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items()), ""])


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [" ".join(found["note"].split())] if "note" in found else []
    return [*notes, f"`{found['error'].replace('`', chr(39))}`"] if found["outcome"] == ERROR else notes


def _right(case: Case) -> str:
    if isinstance(case.right, Raises):
        return f"→ an error with {', '.join(f'`{word}`' for word in case.right.words)}" if case.right.words else "→ an error"
    return "→ " + ", ".join(f"{name} = {shown(value)}" for name, value in case.right.items())


def _cell(case: Case, found: Mapping[str, Any], strong: str = "") -> str:
    by_hand = ", by hand" if found.get("by hand") else ""
    if found["outcome"] == WRONG:
        right = {} if isinstance(case.right, Raises) else case.right
        differ = [
            name for name in found["found"] if name not in right or differing(found["found"][name], right[name], case.tolerance)
        ]
        return f"{strong}wrong{strong}{by_hand}: " + ", ".join(f"{name} = {shown(found['found'].get(name))}" for name in differ)
    return {RIGHT: f"right{by_hand}", ERROR: f"{strong}error{strong}{by_hand}", NONE: "—"}[found["outcome"]]


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each family, for a terminal."""
    colours = {RIGHT: "green", WRONG: "red", ERROR: "yellow", NONE: "dim"}
    for family in FAMILIES:
        columns = _columns(results, family)
        table = Table(title=family, show_lines=True)
        for name in ("case", *columns):
            table.add_column(name, overflow="fold")
        for case in _of(family):
            found = [results["results"][who][case.name] for who in columns]
            cells = [f"[{colours[each['outcome']]}]{_cell(case, each).replace('[', chr(92) + '[')}[/]" for each in found]
            table.add_row(f"{case.name} {case.text}".replace("[", "\\["), *cells)
        yield table
