"""What the pages of the site get at build time: formulas as MathML, the table of rules, links from names to the reference.

Nothing is left to a script of a browser, or to the network.
"""

import html
import re
from typing import Any

import numpy as np
from house import picture
from latex2mathml.converter import convert

import optimisers as op
from optimisers.schedules import Cosine

__all__ = ["formula", "on_page_content", "on_page_markdown", "table_of_rules"]

_SPAN = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_MATH = re.compile(r"\$([^$]+)\$")
_CODE = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"<code>(?:op\.)?(\w+)(?:\(\))?</code>")
_APART = re.compile(r"(<pre.*?</pre>|<a .*?</a>|<h[1-6].*?</h[1-6]>)", re.DOTALL)
_DOCTEST = re.compile(
    r'<span class="o">&lt;</span><span class="n">BLANKLINE</span><span class="o">&gt;</span>|<span class="c1"># doctest:.*?</span>'
)
_BAR = re.compile(r'<mo(?: fence="false")? stretchy="false">(?=&#x(?:0007C|02016);)')
_WORDS = re.compile(r"\\(?:mathrm|text)\{([^{}]*)\}")

# Words that mean something else at least as often: arguments, attributes.
_AMBIGUOUS = {"errors", "evaluation", "grad", "register", "rule", "schedules", "select", "training"}
_LINKED = {
    **{name: f"optimisers.{name}" for name in op.__all__ if name not in _AMBIGUOUS},
    **{name: f"optimisers.errors.{name}" for name in op.errors.__all__},
    **{
        name: f"optimisers.interop.{module}.{name}"
        for module, names in {
            "optax": "as_optax from_optax",
            "optax_states": "state_from_optax state_to_optax",
            "torch_checkpoints": "from_checkpoint",
            "torch_import": "from_torch",
            "torch_export": "to_torch to_state_dict",
            "torch_optim": "Optimizer",
        }.items()
        for name in names.split()
    },
}


_MADE = {"<!-- formulas -->": lambda: table_of_rules(), "<!-- house -->": picture, "<!-- tree -->": lambda: tree()}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the table of rules and the picture of the house where a page asks for them."""
    for mark, make in _MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def on_page_content(html: str, **kwargs: Any) -> str:
    """Render formulas, and link the names of the library outside of code, headings and links. What only doctest reads goes."""
    html = _DOCTEST.sub("", html)
    html = _SPAN.sub(lambda found: formula(found[3], block=found[2] == "["), html)
    parts = _APART.split(html)
    return "".join(part if at % 2 else _NAME.sub(_link, part) for at, part in enumerate(parts))


def formula(tex: str, *, block: bool = False) -> str:
    """A formula as MathML, which browsers render themselves.

    >>> formula("x^2")
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>'
    """
    plain = _WORDS.sub(lambda found: rf"\text{{{found[1]}}}".replace(r"\_", "_"), html.unescape(tex))
    made = convert(plain.strip(), display="block" if block else "inline")
    # A bar stands close to what it encloses.
    return _BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">', made)


def table_of_rules() -> str:
    """What each rule computes, and where it comes from, out of the docstrings."""
    rows = [_row(name) for name in sorted(op.__all__, key=str.lower) if _is_rule(getattr(op, name))]
    head = "<thead><tr><th>rule</th><th>what it does</th><th>source</th></tr></thead>"
    return f'<div class="formulas"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def tree() -> str:
    """The tree by which the state of the guide to looking shows itself in a notebook."""
    table = np.ones((50, 8))
    model = {"embed": table, "trunk": [np.eye(8), np.eye(8)], "head": {"weight": table.T, "bias": np.zeros(50)}}
    state = op.setup({"trunk": op.Momentum(0.1), "**": op.Momentum(Cosine(0.2, 100))}, model, frozen="trunk.0")
    state, _ = op.update(state, model, model)
    # Apart from the styles of the site.
    return f'<div class="notebook" data-search-exclude><template shadowrootmode="open">{state._repr_html_()}</template></div>'


def _is_rule(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, op.Rule) and value is not op.Rule


def _row(name: str) -> str:
    text = getattr(op, name).__doc__ or ""
    first, *rest = re.split(r"\n\s*\n", re.split(r"\n\s*(?:\*\*Arguments|Slots:|Memory:|Example:)", text)[0])
    said = " ".join([first, *(each for each in rest if "$" in each)])
    source = text.partition("Source:")[2].strip().partition("\n\n")[0]
    cells = (_inline(" ".join(each.split())) for each in (said, source))
    return (
        f'<tr><td><autoref identifier="optimisers.{name}"><code>{name}</code></autoref></td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _inline(text: str) -> str:
    """Text with formulas and code in it as HTML."""
    parts = _MATH.split(text)
    return "".join(formula(part) if at % 2 else _CODE.sub(r"<code>\1</code>", html.escape(part)) for at, part in enumerate(parts))


def _link(found: re.Match[str]) -> str:
    place = _LINKED.get(found[1])
    return f'<autoref optional identifier="{place}">{found[0]}</autoref>' if place else found[0]
