"""The library's docstrings as Markdown for the reference: examples become blocks of code, rules show their hyperparameters."""

import re
from typing import Any

import griffe

__all__ = ["Docstrings", "as_markdown"]

_EXAMPLE = re.compile(r"^Example:\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)
_PROMPTS = re.compile(r"(?:^>>> .*\n?(?:^.+\n?)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites what Griffe has read."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of anything."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Give a rule the constructor that its decorator makes of its fields."""
        if not any(str(decorator.value) == "rule" for decorator in cls.decorators) or "__init__" in cls.members:
            return
        fields = [each for each in cls.members.values() if isinstance(each, griffe.Attribute) and each.annotation is not None]
        kind = griffe.ParameterKind.positional_or_keyword
        parameters = [
            griffe.Parameter(each.name, annotation=each.annotation, kind=kind, default=each.value)
            for each in fields
            if not str(each.annotation).startswith("ClassVar")
        ]
        itself = griffe.Parameter("self", annotation=None, kind=kind, default=None)
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(itself, *parameters)))


def as_markdown(text: str) -> str:
    """A docstring in which examples are fenced.

    >>> as_markdown("One sentence.\\n\\nExample:\\n    >>> 1 + 1\\n    2")
    'One sentence.\\n\\n**Example:**\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\n'
    """
    if _EXAMPLE.search(text):
        return _EXAMPLE.sub(lambda found: f"**Example:**\n\n{_fenced(_dedented(found[1]))}", text)
    return _PROMPTS.sub(lambda found: _fenced(found[0]), text)


def _dedented(block: str) -> str:
    return "\n".join(line[4:] for line in block.rstrip().splitlines())


def _fenced(block: str) -> str:
    return f"```pycon\n{block.rstrip()}\n```\n\n"
