"""Paths: where an array stands in a model, as typed keys with a dotted spelling, and patterns over them."""

import ast
import re
from collections.abc import Hashable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Self

from optimisers.errors import PathError

__all__ = ["BOXED", "Path", "Pattern", "branches"]

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_PLAIN = re.compile(r'[^\s."*?/\\\[\]]+')
_ANY = "**"


class _Boxed:
    def __repr__(self) -> str:
        return "BOXED"


BOXED = _Boxed()
"""The key of what is in a box around one thing. It is left out of paths."""


class Path(tuple[Hashable, ...]):
    """The keys that lead from the model to one place in it.

    `str` and `int` keys stay apart. The spelling is dotted; a string key that holds a dot, a slash,
    a space, a wildcard or a quote, or that looks like an integer, is spelled in quotes; a key of
    another type (a tuple, say) as a literal in brackets.

    >>> path = Path("encoder.layers.0.weight")
    >>> tuple(path)
    ('encoder', 'layers', 0, 'weight')
    >>> print(Path(("params", "a.b", "0")))
    params."a.b"."0"

    **Raises** `PathError` when a spelling cannot be read.
    """

    __slots__ = ()

    def __new__(cls, keys: "str | int | Iterable[Hashable]" = ()) -> Self:
        if isinstance(keys, cls):
            return keys
        if isinstance(keys, str):
            return super().__new__(cls, _parsed(keys))
        if isinstance(keys, int):
            return super().__new__(cls, (keys,))
        if not isinstance(keys, Iterable):
            raise PathError(f"{keys!r} is no path; a path is text, such as 'layers.0.weight', or a tuple of keys")
        return super().__new__(cls, keys)

    def __str__(self) -> str:
        return ".".join([_spell(key) for key in self])

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def __truediv__(self, key: Hashable) -> "Path":
        """The path of one child: `path / "weight"`."""
        return Path((*self, key))

    @property
    def quoted(self) -> str:
        """The spelling with every key in quotes or brackets: another spelling of the same path."""
        return ".".join([_quote(str.__str__(key)) if isinstance(key, str) else f"[{key!r}]" for key in self])

    def startswith(self, branch: tuple[Hashable, ...]) -> bool:
        """Whether this path is the branch itself or lies below it."""
        return self[: len(branch)] == branch

    def below(self, branch: tuple[Hashable, ...]) -> "Path":
        """This path as seen from a branch that encloses it."""
        return Path(self[len(branch) :])


class Pattern:
    """A path with wildcards: `*` and `?` within a key, `**` for any number of keys.

    A pattern matches a path when it matches the whole of it or a branch that encloses it.

    >>> Pattern("encoder.*.weight").matches(Path("encoder.0.weight"))
    True
    >>> Pattern("**.bias").matches(Path("encoder.0.weight"))
    False
    """

    __slots__ = ("_keys", "_prefix")

    def __init__(self, spelling: str | Path) -> None:
        keys = spelling if isinstance(spelling, Path) else tuple(_glob(token) for token in _tokens(spelling))
        plain = not any(isinstance(key, _Glob) for key in keys)
        self._keys = keys
        self._prefix = tuple(keys) if plain else None

    @property
    def branch(self) -> tuple[Hashable, ...] | None:
        """The branch that it is, where it has no wildcard."""
        return self._prefix

    def matches(self, path: Path) -> bool:
        """Whether the pattern selects this path or a branch that encloses it."""
        if self._prefix is not None:
            return path.startswith(self._prefix)
        return _match(self._keys, path)


class _Glob(str):
    """An unquoted pattern key that holds wildcards."""

    __slots__ = ()


def _match(keys: tuple[Hashable, ...], path: tuple[Hashable, ...]) -> bool:
    # Positions of the pattern that are reachable after each key of the path: linear in both lengths.
    reached = _skip(keys, {0})
    for key in path:
        if len(keys) in reached:
            return True
        moved = {at if keys[at] == _ANY and isinstance(keys[at], _Glob) else at + 1 for at in reached if _fits(keys[at], key)}
        reached = _skip(keys, moved)
    return len(keys) in reached


def _skip(keys: tuple[Hashable, ...], reached: set[int]) -> set[int]:
    for at in sorted(reached):
        while at < len(keys) and isinstance(keys[at], _Glob) and keys[at] == _ANY:
            at += 1
            reached.add(at)
    return reached


def _fits(pattern: Hashable, key: Hashable) -> bool:
    if isinstance(pattern, _Glob):
        return pattern == _ANY or fnmatchcase(str(key), pattern)
    return pattern == key and isinstance(pattern, str) == isinstance(key, str)


@lru_cache(maxsize=100_000, typed=True)
def _spell(key: Hashable) -> str:
    if isinstance(key, str):
        key = str.__str__(key)  # an enumeration's member would show its own name
        if _PLAIN.fullmatch(key) and not _INTEGER.fullmatch(key):
            return key
        return _quote(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    return f"[{key!r}]"


def _quote(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@lru_cache(maxsize=100_000)
def _parsed(spelling: str) -> tuple[Hashable, ...]:
    return tuple(_key(token) for token in _tokens(spelling))


def _tokens(spelling: str) -> list[str]:
    """Split a spelling at its dots; quoted and bracketed keys stay whole, with their marks."""
    tokens: list[str] = []
    at = 0
    while at < len(spelling) or tokens:
        end = _end(spelling, at)
        tokens.append(spelling[at:end])
        if end == len(spelling):
            break
        if spelling[end] != ".":
            raise PathError(f"cannot read the path {spelling!r} at character {end}: keys are separated by dots")
        at = end + 1
    return tokens


def branches(paths: Iterable[Path]) -> set[str]:
    """The spellings of some paths and of all that encloses them.

    >>> sorted(branches([Path("a.b.c")]))
    ['a', 'a.b', 'a.b.c']
    """
    return {str(Path(path[:depth])) for path in paths for depth in range(1, len(path) + 1)}


def _end(spelling: str, at: int) -> int:
    mark = spelling[at : at + 1]
    if mark == '"':
        found = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL).match(spelling, at)
        if found:
            return found.end()
    elif mark == "[":
        close = spelling.find("]", at)
        while close >= 0:
            if _literal(spelling[at + 1 : close]) is not None:
                return close + 1
            close = spelling.find("]", close + 1)
    else:
        found = re.compile(r"[^.\"\[\]]+").match(spelling, at)
        if found:
            return found.end()
    problem = "an empty key is spelled with two quotes" if mark in (".", "") else "a quote or bracket is not closed"
    raise PathError(f"cannot read the path {spelling!r} at character {at}: {problem}")


def _literal(text: str) -> tuple[Hashable] | None:
    try:
        key = ast.literal_eval(text)
        hash(key)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return (key,)


def _key(token: str) -> Hashable:
    if token.startswith('"'):
        return re.sub(r"\\(.)", r"\1", token[1:-1], flags=re.DOTALL)
    if token.startswith("["):
        return ast.literal_eval(token[1:-1])
    return int(token) if _INTEGER.fullmatch(token) else token


def _glob(token: str) -> Hashable:
    wild = token[0] not in '"[' and ("*" in token or "?" in token)
    return _Glob(token) if wild else _key(token)
