"""The picture of the house: its rooms from top to bottom, and what is in each. Imports run downward only, which a test watches."""

from html import escape

__all__ = ["ROOMS", "picture"]

ROOMS = [
    [("the command", "`optimisers`: show, diff, convert, demo", "cli __main__ demo")],
    [
        ("files/", "save and load, by name", "files"),
        ("interop/", "PyTorch, Optax, Flax", "interop"),
        ("monitoring/", "norms, recordings, pages", "monitoring"),
    ],
    [
        ("a step", "what depends on the layout, what on sums, and the step", "plan decisions update"),
        ("setting up, gradients", "parameters found; gathered, flat, differentiated", "setup gradients flat differentiate"),
        ("changing", "another model, other rates, thawing, averages", "surgery composing by_parameter unfreezing evaluation"),
        ("looking", "a table", "report"),
    ],
    [
        ("state", "leaves by path; every method gives a new one", "state assignment leaf slots text pytree html_tree"),
        ("schedules", "numbers as functions of the step", "schedules"),
    ],
    [("model/", "paths, containers, ties, selectors, the layout: the static half of a state", "model")],
    [("backends/", "how a program of rules runs on the arrays of one library", "backends")],
    [("rules/", "the mathematics: hyperparameters, slots, one element", "rules")],
    [("errors", "one family, each names the path and the remedy", "errors")],
]

_WIDTH, _ROW, _GAP, _LEFT = 960, 74, 12, 46


def picture() -> str:
    """The picture as SVG, in the colours of the page."""
    height = len(ROOMS) * (_ROW + _GAP)
    boxes = [box for at, row in enumerate(ROOMS) for box in _row(row, at * (_ROW + _GAP))]
    arrow = (
        f'<g stroke="currentColor" fill="none" opacity="0.6"><path d="M14 10V{height - 24}"/>'
        f'<path d="M7 {height - 33}l7 10l7-10"/></g>'
        f'<text x="-{height // 2}" y="34" transform="rotate(-90)" text-anchor="middle" class="small">imports</text>'
    )
    return (
        f'<div class="picture" data-search-exclude><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="The house">'
        f"{arrow}{''.join(boxes)}</svg></div>"
    )


def _row(row: list[tuple[str, str, str]], top: int) -> list[str]:
    width = (_WIDTH - _LEFT - _GAP * (len(row) - 1)) / len(row)
    return [_box(_LEFT + at * (width + _GAP), top, width, *room) for at, room in enumerate(row)]


def _box(left: float, top: int, width: float, name: str, said: str, modules: str) -> str:
    middle = left + width / 2
    # Two lines where a box is narrow.
    half = len(said) // 2 if len(said) * 6.4 > width else len(said)
    cut = said.find(" ", half)
    lines = [said] if cut < 0 else [said[:cut], said[cut + 1 :]]
    texts = [f'<text x="{middle:.0f}" y="{top + 26}" class="name">{escape(name)}</text>']
    texts += [
        f'<text x="{middle:.0f}" y="{top + 46 + 15 * at}" class="small">{escape(line.replace("`", ""))}</text>'
        for at, line in enumerate(lines)
    ]
    return (
        f'<g text-anchor="middle"><title>{escape(modules)}</title>'
        f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_ROW}" rx="6"/>{"".join(texts)}</g>'
    )
