"""One family of exceptions; each message names the path and says what to do."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "DtypeError",
    "GradientError",
    "HyperparameterError",
    "ModelError",
    "OptimiserError",
    "OptimiserWarning",
    "PathError",
    "ShapeError",
    "StateError",
    "TieError",
]


class OptimiserError(Exception):
    """The base of every error that this library raises."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a sentence should be read as one.
        return str(self.args[0]) if self.args else ""


class PathError(OptimiserError, KeyError):
    """A path, glob or selector that matches nothing, or that cannot be read."""


class HyperparameterError(OptimiserError, ValueError):
    """A hyperparameter that no rule has, or a value out of its range."""


class UnknownNameError(HyperparameterError, AttributeError):
    """A name that a kernel asks for and that is not there; `hasattr`, and `getattr` with a default, take it for an answer."""


class ShapeError(OptimiserError, ValueError):
    """An array of another shape than its parameter's."""


class DtypeError(OptimiserError, TypeError):
    """An array of a dtype that cannot serve here."""


class GradientError(OptimiserError, ValueError):
    """Gradients that are missing altogether, or that do not belong to the model."""


class TieError(OptimiserError, ValueError):
    """Arrays that overlap in part, a tie that cannot be made, or one that no longer holds."""


class ModelError(OptimiserError, TypeError):
    """A model that cannot be opened, or that is not the one the state was made for."""


class StateError(OptimiserError, ValueError):
    """A request that contradicts the state or another request."""


class OptimiserWarning(UserWarning):
    """Something that is allowed but is probably not what was meant."""


def suggest(name: str, options: Iterable[str]) -> str:
    """The tail of an error message: the nearest of the options, or a few of them.

    >>> suggest("encodr", ["encoder", "decoder"])
    '; did you mean "encoder"?'
    """
    names = sorted({str(option) for option in options})
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {_quoted(near[0])}?"
    if not names:
        return "; there are none"
    shown = ", ".join(map(_quoted, names[:5]))
    return f"; there are {shown}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def where(path: object) -> str:
    """The spelling of a path in a message; of the empty one, what it stands for.

    >>> where("a.b"), where("")
    ('a.b', 'the model')
    """
    return str(path) or "the model"


def listed(problems: Mapping[str, Sequence[str]]) -> str:
    """All that is wrong, by kind, in one line; of each kind the first few.

    >>> listed({"missing": ["a", "b"], "unexpected": []})
    'missing: a, b'
    """
    return "; ".join(
        f"{word}: {', '.join(some[:12])}" + (f" and {len(some) - 12} more" if len(some) > 12 else "")
        for word, some in problems.items()
        if some
    )


def _quoted(name: str) -> str:
    # Paths whose keys hold dots are spelled with quotes already.
    return name if '"' in name else f'"{name}"'
