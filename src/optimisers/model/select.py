"""Selectors: which parameters are meant, by path, name, enclosing type, number of axes or predicate; `|`, `&` and `~` combine them.

Wherever a selector is taken, these stand for one: a string or a tuple of keys (a path or a glob), a type (of an enclosing node),
a function from a `Parameter` to a truth value, and a list or set of selectors (any of them).
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from optimisers.backends.arrays import library_of
from optimisers.errors import PathError, suggest
from optimisers.model.jax_nodes import is_node
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path, Pattern
from optimisers.model.torch_nodes import is_module

__all__ = ["Selectable", "Selector", "as_selector", "check_names", "matching", "name", "ndim", "path", "where", "within"]


class Selector:
    """A choice of parameters. A tied parameter is chosen when any of its occurrences is; `~` chooses all the others.

    >>> from optimisers import select
    >>> select.path("encoder") & ~select.name("bias")
    path("encoder") & ~name("bias")
    """

    def __init__(
        self,
        test: Callable[[Parameter], bool],
        shown: str,
        *,
        compound: bool = False,
        pattern: Any = None,
        branch: tuple[Any, ...] | None = None,
        names: "tuple[Selector, ...] | None" = None,
    ) -> None:
        self._test = test
        self._shown = shown
        self._compound = compound
        self.pattern = pattern
        """The path or glob that it is."""
        self.branch = branch
        """The branch that it is, where that is all it is."""
        self.names = (self,) if names is None else names
        """The selectors in it that name something of the model, and so have to match something."""

    def selects(self, parameter: Parameter) -> bool:
        """Whether a parameter is chosen."""
        return bool(self._test(parameter))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selector) and self._test == other._test

    def __hash__(self) -> int:
        return hash(self._test)

    def __or__(self, other: "Selectable") -> "Selector":
        second = as_selector(other)
        return self._joined("|", second, _AnyOf((self, second)))

    def __and__(self, other: "Selectable") -> "Selector":
        second = as_selector(other)
        return self._joined("&", second, _AllOf((self, second)))

    def __invert__(self) -> "Selector":
        return Selector(_Not(self), f"~{self._grouped}", names=self.names)

    def _joined(self, sign: str, other: "Selector", test: Callable[[Parameter], bool]) -> "Selector":
        return Selector(test, f"{self._grouped} {sign} {other._grouped}", compound=True, names=self.names + other.names)

    @property
    def _grouped(self) -> str:
        return f"({self._shown})" if self._compound else self._shown

    def __repr__(self) -> str:
        return self._shown


# What selectors ask of a parameter: values, so that selectors can be compared, copied and pickled -----------------------------


@dataclass(frozen=True)
class _At:
    wish: str | Path

    def __call__(self, parameter: Parameter) -> bool:
        return any(map(_pattern(self.wish).matches, parameter.paths))


@lru_cache(maxsize=4096)
def _pattern(wish: str | Path) -> Pattern:
    return Pattern(wish)


@dataclass(frozen=True)
class _Named:
    names: tuple[Any, ...]

    def __call__(self, parameter: Parameter) -> bool:
        return any(each[-1] in self.names for each in parameter.paths if each)


@dataclass(frozen=True)
class _Within:
    types: tuple[type, ...]

    def __call__(self, parameter: Parameter) -> bool:
        return any(issubclass(owner, self.types) for each in parameter.occurrences for owner in each.owners)


@dataclass(frozen=True)
class _Axes:
    count: int

    def __call__(self, parameter: Parameter) -> bool:
        return parameter.ndim == self.count


@dataclass(frozen=True)
class _Holds:
    predicate: Callable[[Parameter], bool]

    def __call__(self, parameter: Parameter) -> bool:
        try:
            return self.predicate(parameter)
        except AttributeError as error:
            if not isinstance(error.obj, Parameter):
                raise
            name = getattr(self.predicate, "__name__", self.predicate)
            raise PathError(
                f"the function {name} is given the record of each parameter (path, shape, dtype, owners, …), which has no "
                f'"{error.name}", and not the model; a branch is selected by its path'
            ) from error


@dataclass(frozen=True)
class _AnyOf:
    parts: tuple[Selector, ...]

    def __call__(self, parameter: Parameter) -> bool:
        return any(part.selects(parameter) for part in self.parts)


@dataclass(frozen=True)
class _AllOf:
    parts: tuple[Selector, ...]

    def __call__(self, parameter: Parameter) -> bool:
        return all(part.selects(parameter) for part in self.parts)


@dataclass(frozen=True)
class _Not:
    part: Selector

    def __call__(self, parameter: Parameter) -> bool:
        return not self.part.selects(parameter)


# Making them ----------------------------------------------------------------------------------------------------------

Selectable: TypeAlias = Selector | str | int | tuple[Any, ...] | type | Callable[[Parameter], bool] | Iterable[Any]


def path(pattern: "str | int | tuple[Any, ...]") -> Selector:
    """By path: the parameter there, or all those below it. `*` and `?` stand within a key, `**` for any number of keys."""
    wish = pattern if isinstance(pattern, str) else Path(pattern)
    return Selector(_At(wish), f'path("{wish}")', pattern=pattern, branch=_pattern(wish).branch)


def name(*names: Any) -> Selector:
    """By the last key of a path: `name("bias")`."""
    shown = ", ".join(f'"{each}"' if isinstance(each, str) else repr(each) for each in names)
    return Selector(_Named(names), f"name({shown})")


def within(*types: type) -> Selector:
    """By the type of any node that encloses the parameter: `within(LayerNorm)`."""
    return Selector(_Within(types), f"within({', '.join(each.__name__ for each in types)})")


def ndim(count: int) -> Selector:
    """By the number of axes: `ndim(1)` for vectors."""
    return Selector(_Axes(count), f"ndim({count})", names=())


def where(predicate: Callable[[Parameter], bool]) -> Selector:
    """By a function of the parameter's record.

    **Raises** `PathError` for a function that asks the record for what the model has, when it is called.
    """
    return Selector(_Holds(predicate), f"where({getattr(predicate, '__name__', predicate)})", names=())


def as_selector(wish: Selectable) -> Selector:
    """The selector that a value stands for.

    **Raises** `PathError` when it stands for none.
    """
    if isinstance(wish, Selector):
        return wish
    if isinstance(wish, (str, tuple)) or (isinstance(wish, int) and not isinstance(wish, bool)):
        return path(wish)
    if isinstance(wish, type):
        return within(wish)
    if isinstance(wish, (list, set, frozenset)):
        parts = [as_selector(each) for each in wish]
        names = tuple([each for part in parts for each in part.names])
        shown = f"[{', '.join(map(str, parts))}]"
        return Selector(_AnyOf(tuple(parts)), shown, names=names)
    if wish is not None and (is_module(type(wish)) or is_node(wish) or library_of(wish)):
        kind = f"an array of {library_of(wish)}" if library_of(wish) else f"a {type(wish).__name__}"
        raise PathError(f"{kind} selects nothing: give the path of the branch or the parameter, as the state shows it")
    if callable(wish):
        return where(wish)
    raise PathError(f"{wish!r} selects nothing: give a path, a glob, a type, a function of the parameter, or a list of these")


def matching(parameters: Sequence[Parameter], wish: Selectable, excluded: Iterable[Path] = ()) -> list[int]:
    """The numbers of the parameters that are selected; `excluded` are places of the model that are no parameters of the state.

    **Raises** `PathError` when there are none, or a path, name or type in a combination matches none, with the nearest path.
    """
    selector = as_selector(wish)
    check_names(parameters, selector)
    found = [at for at, parameter in enumerate(parameters) if selector.selects(parameter)]
    if not found:
        pattern = selector.pattern
        if pattern is not None and any(map(Pattern(pattern if isinstance(pattern, str) else Path(pattern)).matches, excluded)):
            raise PathError(
                f"{_shown(selector)} was left out of training when the state was made, and is no parameter of it; "
                "adapt(state, model, trainable=…) brings it in"
            )
        raise PathError(f"no parameter matches {_shown(selector)}{_nearest(parameters, selector.pattern)}")
    return found


def check_names(parameters: Sequence[Parameter], selector: Selector) -> None:
    """Check that whatever a combination names is there, or a typo would go unnoticed.

    **Raises** `PathError`.
    """
    for each in selector.names:
        if each is not selector and not any(map(each.selects, parameters)):
            raise PathError(f"no parameter matches {_shown(each)}, in {selector}{_nearest(parameters, each.pattern)}")


def _shown(selector: Selector) -> str:
    wish = selector.pattern
    return str(selector) if wish is None else f'"{wish if isinstance(wish, str) else Path(wish)}"'


def _nearest(parameters: Sequence[Parameter], wish: Any) -> str:
    """The pattern with each unknown key replaced by the nearest known one, if that matches; else the nearest path."""
    if not isinstance(wish, (str, tuple)) or not parameters:
        return "" if parameters else "; the state has no parameters"
    spelling = wish if isinstance(wish, str) else str(Path(wish))
    paths = [each for parameter in parameters for each in parameter.paths]
    known = {str(Path((key,))) for each in paths for key in each}
    keys = [key if key in known or "*" in key or "?" in key else _closest(key, known) for key in spelling.split(".")]
    guess = ".".join(keys)
    if guess != spelling and any(map(Pattern(guess).matches, paths)):
        return f'; did you mean "{guess}"?'
    return suggest(spelling, {str(each) for each in paths})


def _closest(key: str, known: Iterable[str]) -> str:
    bare = {each.strip('"'): each for each in known}
    near = difflib.get_close_matches(key, bare, n=1)
    return bare[near[0]] if near else key
