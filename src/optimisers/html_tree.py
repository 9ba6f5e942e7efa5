"""A tree of parameters as HTML for a notebook: branches open and close, ties are links, and nothing is loaded from elsewhere."""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from operator import add
from typing import Any
from uuid import uuid4

from optimisers.backends.arrays import dtype_name
from optimisers.leaf import Leaf, bytes_of
from optimisers.model.paths import Path
from optimisers.text import letter_of, path_text, rows_text, shape_text, size_of

__all__ = ["tree"]

_LINES = 1000
"""No tree has more lines than this; of larger ones each branch shows its first few."""
_OPEN = 30
"""Levels of branches stand open as long as no more lines than this are seen."""
_DEPTH = 30
"""Below this depth parameters stand in one list, by dotted names."""
_NAME = 120
"""Longer names lose their middle."""
_LISTED = 100
"""Of rules, and of the further occurrences of one parameter, no more than this are listed."""

_STYLE = """
.optimisers-tree{font-size:13px;line-height:1.6;max-width:58rem;overflow-x:auto;font-variant-numeric:tabular-nums}
.optimisers-tree>details{min-width:42rem}
.optimisers-tree summary,.ot-line{display:flex;gap:1.5ch;padding:0 .6ch;border-radius:3px;list-style:none}
.optimisers-tree summary{cursor:pointer}
.optimisers-tree summary::-webkit-details-marker{display:none}
.optimisers-tree summary::before,.ot-line::before{content:"";flex:none;width:1ch;opacity:.6}
.optimisers-tree summary::before{content:"▸"}
.optimisers-tree details[open]>summary::before{content:"▾"}
.optimisers-tree summary:hover,.ot-line:hover{background:rgb(128 128 128/.12)}
.optimisers-tree :target{background:rgb(128 128 128/.25)}
.optimisers-tree a{color:inherit}
.optimisers-tree bdi{font-family:ui-monospace,Menlo,Consolas,monospace}
.ot-inside{margin-left:calc(1ch + 1px);border-left:1px solid rgb(128 128 128/.35);padding-left:1ch}
.ot-name{flex:1;min-width:16ch;overflow-wrap:anywhere}
.ot-mark{display:inline-block;line-height:1.3;margin-left:.5ch;font-size:.85em}
.ot-mark{border:1px solid rgb(128 128 128/.6);border-radius:3px;padding:0 .5ch}
.ot-shape,.ot-step,.ot-bytes{text-align:right}
.ot-shape,.ot-count,.ot-bytes{white-space:nowrap}
.ot-dtype{width:10ch}
.ot-rule{width:3ch}
.ot-step{width:10ch;overflow-wrap:anywhere}
.ot-bytes{width:9ch}
.ot-still>*{opacity:.7}
.ot-note{padding:0 .6ch 0 3.1ch;overflow-wrap:anywhere}
"""

# Links work without it, too, where the browser opens what encloses the target of a link. It is for frames without an address of
# their own, and keeps the notebook's address as it is.
_FOLLOW = (
    "const a=event.target.closest('a');if(a){event.preventDefault();"
    "const t=this.querySelector(a.getAttribute('href'));"
    "for(let d=t;d=d.parentElement.closest('details');)d.open=true;"
    "t.focus();t.animate({backgroundColor:['rgb(128 128 128/.6)','transparent']},2000)}"
)


@dataclass(eq=False)
class _Node:
    """A branch, or an occurrence of a parameter."""

    children: "dict[Hashable, _Node]" = field(default_factory=dict)
    path: Path = field(default_factory=Path)
    leaf: Leaf | None = None
    totals: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Of all below: parameters, elements, bytes of slots, frozen parameters, further occurrences of tied ones."""


@dataclass(eq=False)
class _Line:
    """A node that is shown, with the lines inside it and how many more are not shown."""

    name: str
    node: _Node
    inside: "list[_Line]" = field(default_factory=list)
    more: int = 0
    open: bool = False


def tree(leaves: Iterable[Leaf], title: str, note: str = "") -> str:
    """Parameters as a tree in HTML: a fragment that needs nothing else, for light and dark pages.

    A branch says how many parameters and elements it has, how many bytes of slots, and what of it is frozen. A tied parameter is a
    line at its canonical path; its other occurrences link there, and it links to them. Large trees are cut: each branch shows
    its first few lines and says how many more there are.

    **Arguments:** `title`, `note`: plain text, for the line at the top and the one below.

    Example:
        >>> import numpy as np, optimisers as op
        >>> state = op.setup(op.Adam(), {"a<b": np.zeros(3)})
        >>> "<bdi>a&lt;b</bdi>" in tree(state.leaves(), "A state")
        True
    """
    leaves = list(leaves)
    root = _grown(leaves)
    most = bisect_right(range(1, _LINES + 1), _LINES, key=lambda most: _count(root, most))
    top = _shown(_Line(title, root), most)
    page = _Page(leaves, _opened(top))
    return f'<div class="optimisers-tree" onclick="{_FOLLOW}"><style>{_STYLE}</style>{page.whole(top, note)}</div>'


# The tree -------------------------------------------------------------------------------------------------------------


def _grown(leaves: Sequence[Leaf]) -> _Node:
    """The tree of all occurrences, with its totals."""
    root = _Node()
    nodes: list[tuple[_Node, _Node]] = []
    canonical = [(leaf.path, leaf, (1, math.prod(leaf.shape), leaf.nbytes, int(leaf.frozen), 0)) for leaf in leaves]
    aliases = [(path, leaf, (0, 0, 0, 0, 1)) for leaf in leaves for path in leaf.ties]
    for path, leaf, totals in canonical + aliases:
        node = root
        for key in path or ("",):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
                nodes.append((child, node))
            node = child
        node.path, node.leaf, node.totals = path, leaf, totals
    for child, parent in reversed(nodes):
        parent.totals = tuple(map(add, parent.totals, child.totals))
    return root


def _within(node: _Node, most: int, depth: int) -> tuple[list[tuple[str, _Node]], int]:
    """The first lines inside a branch by name, and how many more there are. A branch that holds one thing is one line with it."""
    if depth >= _DEPTH:
        found = list(islice(_occurrences(node), most))
        return [(_name(keys), each) for keys, each in found], node.totals[0] + node.totals[4] - len(found)
    lines = []
    for key, child in islice(node.children.items(), most):
        keys = [key]
        while len(child.children) == 1:
            ((key, child),) = child.children.items()
            keys.append(key)
        # The model itself, as a parameter, has no key.
        lines.append((_name(keys if child.leaf is None else child.path[-len(keys) :]), child))
    return lines, len(node.children) - len(lines)


def _occurrences(node: _Node) -> Iterator[tuple[Sequence[Hashable], _Node]]:
    """All occurrences below a node, with the keys that lead there."""
    waiting: list[tuple[int, _Node]] = [(0, node)]
    while waiting:
        depth, each = waiting.pop()
        if each.leaf is not None:
            yield each.path[len(each.path) - depth :], each
        waiting += [(depth + 1, child) for child in reversed(each.children.values())]


def _count(node: _Node, most: int, depth: int = 0) -> int:
    """The lines of a tree whose branches show at most so many each; counting ends soon after there are too many."""
    lines, more = _within(node, most, depth)
    count = len(lines) + (more > 0)
    for _, child in lines:
        if child.children and count <= _LINES:
            count += _count(child, most, depth + 1)
    return count


def _shown(line: _Line, most: int, depth: int = 0) -> _Line:
    """A line with those inside it."""
    if line.node.children:
        inside, line.more = _within(line.node, most, depth)
        line.inside = [_shown(_Line(name, child), most, depth + 1) for name, child in inside]
    return line


def _opened(top: _Line) -> list[_Line]:
    """All lines, level by level; the branches of the first levels are opened."""
    lines: list[_Line] = []
    level, seen = [top], 0
    while level:
        inside = [each for line in level for each in line.inside]
        seen += len(inside)
        for line in level:
            line.open = line is top or seen <= _OPEN
        lines += level
        level = inside
    return lines


# The text -------------------------------------------------------------------------------------------------------------


class _Page:
    """Writes lines: knows the letters of the rules and the addresses of what links lead to."""

    def __init__(self, leaves: Sequence[Leaf], lines: Sequence[_Line]) -> None:
        rules = {leaf.rule.key: leaf.rule for leaf in leaves}
        self.rules = {key: (letter_of(at), repr(rule)) for at, (key, rule) in enumerate(rules.items())}
        self.many = len(rules) > 1
        # Random, since several trees may stand on one page, and a page may outlive the process.
        mark = f"optimisers-{uuid4().hex[:12]}"
        tied = [line.node for line in lines if line.node.leaf is not None and line.node.leaf.ties]
        self.addresses = {node.path: f"{mark}-{at}" for at, node in enumerate(tied)}

    def whole(self, top: _Line, note: str) -> str:
        """All lines, below the title."""
        return self.branch(top, f"<strong>{_text(top.name)}</strong>", self.legend() + (_note(note) if note else ""))

    def legend(self) -> str:
        """The rule, or the rules and their letters."""
        if not self.many:
            return "".join(_note(text) for _, text in self.rules.values())
        lines = "".join(_note(f"{letter} = {text}") for letter, text in islice(self.rules.values(), _LISTED))
        opened = " open" * (len(self.rules) <= 4)
        return f"<details{opened}><summary>{len(self.rules):,} rules</summary>{lines}{_more(len(self.rules) - _LISTED)}</details>"

    def line(self, line: _Line) -> str:
        leaf, path = line.node.leaf, line.node.path
        if leaf is None:
            return self.branch(line, _named(line.name))
        return self.parameter(line.name, leaf) if path == leaf.path else self.alias(line.name, leaf, path)

    def branch(self, line: _Line, name: str, above: str = "") -> str:
        parameters, elements, nbytes, frozen, tied = line.node.totals
        still = frozen == parameters > 0
        marks = ["frozen"] if still else [f"{frozen:,} of {parameters:,} frozen"] if frozen else []
        counts = [f"{parameters:,} parameter{'s' * (parameters != 1)}, {elements:,} elements"] if parameters or not tied else []
        counts += [f"{tied:,} tied"] if tied else []
        cells = _cell("name", name + _marks(marks)) + _cell("count", ", ".join(counts)) + _cell("bytes", size_of(nbytes))
        inside = above + "".join(map(self.line, line.inside)) + _more(line.more)
        opened = " open" * line.open
        return f'<details{opened}>{_summary(cells, still)}<div class="ot-inside">{inside}</div></details>'

    def parameter(self, name: str, leaf: Leaf) -> str:
        letter, rule = self.rules[leaf.rule.key]
        cells = _cell("name", _named(name) + _marks(_marks_of(leaf)))
        cells += self.facts(leaf.shape, leaf.dtype, letter, f"step {leaf.step}", leaf.nbytes)
        inside = [self.slot(*each) for each in leaf.slots.items()] or [_note("no slots")]
        ties = islice(leaf.ties.items(), _LISTED)
        inside += [f'<div class="ot-note">tied: {self.link(path)}{_view(view)}</div>' for path, view in ties]
        inside += [_more(len(leaf.ties) - _LISTED), _note(rule) if self.many else ""]
        summary = _summary(cells, leaf.frozen, self.address(leaf.path))
        return f'<details>{summary}<div class="ot-inside">{"".join(inside)}</div></details>'

    def slot(self, name: str, slot: Any) -> str:
        cells = _cell("name", _named(name)) + self.facts(slot.shape, dtype_name(slot), "", "", bytes_of(slot))
        return f'<div class="ot-line">{cells}</div>'

    def alias(self, name: str, leaf: Leaf, path: Path) -> str:
        cells = _cell("name", _named(name) + _marks(["masked"] if path in leaf.masked else []))
        cells += _cell("tie", f"tied to {self.link(leaf.path)}{_view(leaf.ties[path])}")
        return f'<div class="ot-line" tabindex="-1"{self.address(path)}>{cells}</div>'

    def facts(self, shape: Sequence[int], dtype: str, letter: str, step: str, nbytes: int) -> str:
        """The cells of an array."""
        rule = _cell("rule", letter) if self.many else ""
        sized = _cell("shape", shape_text(shape)) + _cell("dtype", _text(dtype))
        return sized + rule + _cell("step", _text(step)) + _cell("bytes", size_of(nbytes))

    def address(self, path: Path) -> str:
        return f' id="{self.addresses[path]}"' if path in self.addresses else ""

    def link(self, path: Path) -> str:
        """A link to an occurrence; its name alone where it is not shown."""
        name = _named(_name(path))
        return f'<a href="#{self.addresses[path]}">{name}</a>' if path in self.addresses else name


def _summary(cells: str, still: bool, address: str = "") -> str:
    kind = ' class="ot-still"' if still else ""
    return f"<summary{address}{kind}>{cells}</summary>"


def _cell(kind: str, content: str) -> str:
    # The space keeps cells apart where styles are stripped.
    return f' <span class="ot-{kind}">{content}</span>'


def _marks(marks: Iterable[str]) -> str:
    return "".join(_cell("mark", mark) for mark in marks)


def _marks_of(leaf: Leaf) -> list[str]:
    marks = ["frozen"] if leaf.frozen else []
    if leaf.frozen_rows:
        marks.append(rows_text(leaf.frozen_rows, leaf.shape[0]))
    return marks + ["tied"] * bool(leaf.ties) + ["masked"] * (leaf.path in leaf.masked)


def _view(view: str) -> str:
    return "" if view == "same" else f" ({_text(view)})"


def _note(text: str) -> str:
    return f'<div class="ot-note">{_text(text)}</div>'


def _more(count: int) -> str:
    return _note(f"… and {count:,} more") if count > 0 else ""


def _name(keys: Sequence[Hashable]) -> str:
    """The spelling of a path, without its middle where it is long."""
    name = path_text(Path(keys if len(keys) <= 2 * _NAME else (*keys[:_NAME], *keys[-_NAME:])))
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[-_NAME // 2 :]}"


def _named(name: str) -> str:
    # Names in Arabic or Hebrew are not to turn round what stands beside them.
    return f"<bdi>{_text(name)}</bdi>"


def _text(text: str) -> str:
    """Text as HTML; what cannot be seen (line breaks, marks of direction) is spelled out."""
    return escape(text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))
