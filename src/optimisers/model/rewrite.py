"""Records rewritten: tied, untied, seen from a branch, with rows frozen."""

from typing import Any

import numpy as np

from optimisers.backends.rows import Runs, mask_of, runs_of
from optimisers.errors import ShapeError, StateError, TieError, where
from optimisers.model.layout import Alias, Parameter
from optimisers.model.paths import Path
from optimisers.model.ties import SAME, View, named_view, rows_through, shape_through

__all__ = ["below", "rows_seen", "tied", "untied", "with_rows"]


def tied(goes: Parameter, alias: Path, stays: Parameter, path: Path, view: str | None) -> Parameter:
    """The record of two parameters made one.

    **Raises** `TieError` where that is not possible, naming both paths.
    """
    if goes.path == stays.path:
        raise TieError(f"{alias} and {path} are one parameter already")
    if path != stays.path:
        raise TieError(f"{path} is an alias itself; tie {alias} to {stays.path}")
    if alias != goes.path:
        raise TieError(f"{alias} is tied to {goes.path}; tie that path instead, or untie {alias} first")
    if view not in (None, "transpose", "reshape"):
        raise TieError(f'view={view!r} is unknown; give None, "transpose" or "reshape"')
    seen = named_view(view, stays.shape, goes.shape)
    if seen is None:
        hint = ' (view="transpose"?)' if view is None and stays.shape[::-1] == goes.shape else ""
        how = "that of" if view is None else f"a {view} of"
        raise TieError(f"{alias} has shape {goes.shape}, which is not {how} {path}: {stays.shape}{hint}")
    if (goes.dtype, goes.library) != (stays.dtype, stays.library):
        raise TieError(f"{alias} is {goes.library} {goes.dtype}, but {path} is {stays.library} {stays.dtype}; convert one of them")
    if goes.frozen != stays.frozen:
        one, other = (alias, path) if goes.frozen else (path, alias)
        raise TieError(f"{one} is frozen and {other} is not, and they would be one parameter; freeze or thaw both first")
    if goes.frozen_rows and not (rows_through(seen) and goes.frozen_rows == stays.frozen_rows):
        raise TieError(f"rows of {alias} are frozen, which {path} lacks; thaw them first, and freeze those of {path}")
    if goes.aliases and seen != SAME:
        raise TieError(f"{alias} has ties of its own, so it can only be tied as it is; tie {path} to it instead")
    aliases = (*stays.aliases, Alias(alias, seen, goes.owners), *goes.aliases)
    return stays._replace(aliases=aliases, masked=stays.masked | goes.masked)


def untied(parameter: Parameter, path: Path) -> tuple[Parameter, Parameter, View]:
    """The record that remains, the record of the occurrence that leaves, and how the latter was seen.

    **Raises** `TieError` where there is nothing to untie.
    """
    if not parameter.aliases:
        raise TieError(f"{where(path)} is not tied to anything")
    if path == parameter.path:
        others = " or ".join(str(alias.path) for alias in parameter.aliases)
        raise TieError(f"{path} is the canonical path of its parameter; untie {others}")
    alias = next(each for each in parameter.aliases if each.path == path)
    rest = parameter._replace(
        aliases=tuple(each for each in parameter.aliases if each is not alias), masked=parameter.masked - {path}
    )
    alone = parameter._replace(
        path=path,
        shape=shape_through(alias.view, parameter.shape),
        owners=alias.owners,
        aliases=(),
        masked=parameter.masked & {path},
        frozen_rows=rows_seen(parameter, alias.path, alias.view),
    )
    return rest, alone, alias.view


def below(parameter: Parameter, branch: Path) -> tuple[Parameter, View] | None:
    """A record as seen from a branch of the model, and how its array is seen there; `None` when no occurrence lies in it."""
    inside = [place for place in parameter.places if place.path.startswith(branch)]
    if not inside:
        return None
    first = inside[0]
    aliases = tuple(
        Alias(each.path.below(branch), first.view.inverse.then(each.view), each.owners[len(branch) :]) for each in inside[1:]
    )
    record = parameter._replace(
        path=first.path.below(branch),
        shape=shape_through(first.view, parameter.shape),
        owners=first.owners[len(branch) :],
        aliases=aliases,
        masked=frozenset(path.below(branch) for path in parameter.masked if path.startswith(branch)),
        frozen_rows=rows_seen(parameter, first.path, first.view),
    )
    return record, first.view


def rows_seen(parameter: Parameter, path: Path, view: View) -> Runs:
    """The frozen rows, as they are seen from a place.

    **Raises** `StateError` where they are no rows there.
    """
    if parameter.frozen_rows and not rows_through(view):
        raise StateError(
            f"rows of {parameter.path} are frozen, and at {path}, where it is seen {view}, they are no rows; thaw them first"
        )
    return parameter.frozen_rows


def with_rows(parameter: Parameter, rows: Any, *, frozen: bool) -> Parameter:
    """A record with more rows frozen, or fewer.

    **Raises** `ShapeError` for rows that do not fit.
    """
    if not parameter.shape:
        raise ShapeError(f"{where(parameter.path)} has no rows: it has no axes")
    size = parameter.shape[0]
    chosen = np.zeros(size, bool)
    try:
        mask = rows if isinstance(rows, slice) else np.asarray(rows)
        if isinstance(mask, np.ndarray) and mask.size == 0:
            mask = mask.astype(bool if mask.dtype == bool else np.int64)
        if isinstance(mask, np.ndarray) and mask.dtype == bool and mask.shape != (size,):
            raise IndexError(f"the mask has shape {mask.shape}")
        if isinstance(mask, np.ndarray) and mask.dtype != bool:
            mask = mask.astype(np.int64, casting="safe")
        chosen[mask] = True
        if isinstance(rows, slice) and size and not chosen.any():
            raise IndexError("it selects no row")
    except (IndexError, TypeError, ValueError) as error:
        raise ShapeError(f"{parameter.path} has {size} rows, and rows={rows!r} does not fit them: {error}") from None
    before = mask_of(parameter.frozen_rows, size)
    if frozen:
        return parameter._replace(frozen_rows=runs_of(before | chosen))
    # A parameter that was frozen whole now has all its other rows frozen.
    return parameter._replace(frozen=False, frozen_rows=runs_of((before | parameter.frozen) & ~chosen))
