"""Renaming paths: by a mapping of branches or regular expressions, or by a function."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from optimisers.errors import PathError, suggest
from optimisers.model.paths import Path, branches
from optimisers.model.torch_nodes import without_shells

__all__ = ["Rename", "check_targets", "plain_names", "renamer"]

Rename: TypeAlias = Mapping[Any, Any] | Callable[[Path], Any] | None
"""From old paths to new ones: a mapping from branches (or regular expressions over spelled paths) to branches, or a function from a
path to one. `None` in the place of a new path drops what was there."""


def renamer(rename: Rename, paths: Collection[Path]) -> Callable[[Path], Path | None]:
    """The function from an old path to the new one, or to `None`.

    All names change at once, so two may be swapped. Of branches that enclose one another the innermost counts, and before all
    regular expressions.

    **Raises** `PathError` for what renames nothing, and for new names that are none.
    """
    if rename is None:
        return lambda path: path
    if callable(rename):
        return lambda path: _as_path(rename(path), path)
    if not isinstance(rename, Mapping):
        raise PathError(f"rename is a mapping of paths or a function, not {type(rename).__name__}")
    renamed = {Path(key): value for key, value in rename.items() if not isinstance(key, re.Pattern)}
    if len(renamed) < sum(not isinstance(key, re.Pattern) for key in rename):
        raise PathError("rename: two of the keys are one path")
    patterns = [(key, value) for key, value in rename.items() if isinstance(key, re.Pattern)]
    for branch in renamed:
        if not any(path.startswith(branch) for path in paths):
            raise PathError(f'rename: no parameter stands at or below "{branch}"{suggest(str(branch), branches(paths))}')
    for pattern, _ in patterns:
        if not any(pattern.search(str(path)) for path in paths):
            raise PathError(f"rename: no path matches the regular expression {pattern.pattern!r}")

    def new_name(path: Path) -> Path | None:
        for depth in range(len(path), -1, -1):
            if path[:depth] in renamed:
                branch = _as_path(renamed[Path(path[:depth])], path)
                return None if branch is None else Path((*branch, *path[depth:]))
        for pattern, new in patterns:
            if pattern.search(str(path)):
                return None if new is None else _as_path(_replaced(pattern, new, path), path)
        return path

    return new_name


def check_targets(
    rename: Rename, new_name: Callable[[Path], Path | None], paths: Collection[Path], places: Collection[Path]
) -> None:
    """Check that of what each wish renames, by `new_name`, something arrives at a place of the new model.

    **Raises** `PathError`, naming the nearest.
    """
    if rename is None:
        return
    for among in [paths] if callable(rename) else (_meant(wish, paths) for wish in rename):
        moved = [(old, new) for old in among if (new := new_name(old)) is not None]
        if callable(rename):
            moved = [(old, new) for old, new in moved if old != new]
        if moved and not any(new in places for _, new in moved):
            old, new = moved[0]
            raise PathError(
                f'rename: "{old}" becomes "{new}", where the model has nothing (None is for what goes)'
                f"{suggest(str(new), branches(places))}"
            )


def _meant(wish: Any, paths: Collection[Path]) -> list[Path]:
    """The paths that a key of a mapping is about."""
    if isinstance(wish, re.Pattern):
        return [path for path in paths if wish.search(str(path))]
    branch = Path(wish)
    return [path for path in paths if path.startswith(branch)]


def _replaced(pattern: re.Pattern[Any], new: Any, path: Path) -> str:
    try:
        return pattern.sub(new, str(path))
    except (re.error, TypeError, IndexError) as error:
        raise PathError(f"rename: {pattern.pattern!r} -> {new!r} cannot be carried out on {path}: {error}") from None


def _as_path(new: Any, old: Path) -> Path | None:
    if new is None:
        return None
    if not isinstance(new, (str, int, tuple)) or isinstance(new, bool):
        raise PathError(f'rename: "{old}" becomes {new!r}, which is no path')
    return Path(new)


def plain_names(rename: Rename, names: Collection[Path], places: Collection[Path]) -> Callable[[Path], Path | None]:
    """The renaming that is asked for; then shells in front of names go, where that makes them names of the model."""
    asked = renamer(rename, names)

    def new_name(path: Path) -> Path | None:
        new = asked(path)
        if new is None or new in places:
            return new
        return next((bare for bare in without_shells(new) if bare in places), new)

    return new_name
