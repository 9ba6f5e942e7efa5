"""Reading a model: which parameters it has, and where the parameters of a state stand in it."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from optimisers.backends.arrays import device_of, dtype_name, library_of, trainable_dtype
from optimisers.backends.conversion import copied
from optimisers.errors import ModelError, TieError, suggest, where
from optimisers.model.layout import Alias, Layout, Parameter
from optimisers.model.paths import Path
from optimisers.model.select import Selectable, matching
from optimisers.model.ties import View, find_ties, same_memory
from optimisers.model.torch_nodes import check_values, standing_as
from optimisers.model.trees import Structure, opened, own_buffers
from optimisers.rules.base import Rule
from optimisers.rules.values import is_traced

__all__ = ["Opened", "equal_values", "open_with", "parameters_of", "parted"]

_STRUCTURES = 8
_CHANGED = "call adapt(state, model) for the changed model"


def parameters_of(model: Any) -> list[tuple[Parameter, Any]]:
    """The parameters of a model, each once, with their arrays; ties are found.

    **Raises** `ModelError` for what is no model, or refers to itself, `TieError` for arrays that overlap in part.
    """
    if isinstance(model, Iterator):
        raise ModelError(f"give the model itself, whose places name the parameters, and not a {type(model).__name__} of arrays")
    if isinstance(model, Rule):
        raise ModelError(f"{model!r} is a rule, and stands where the model should; mind the order of the arguments")
    leaves, structure = opened(model)
    places = [at for at, leaf in enumerate(leaves) if _trains(leaf) and structure.occurrences[at].trains]
    _check_values([(structure.paths[at], leaves[at]) for at in places])
    found = []
    for group in find_ties([structure.paths[at] for at in places], [leaves[at] for at in places]):
        at = places[group[0][0]]
        array = leaves[at]
        aliases = tuple(Alias(structure.paths[places[k]], view, structure.occurrences[places[k]].owners) for k, view in group[1:])
        record = Parameter(
            path=structure.paths[at],
            shape=tuple(array.shape),
            dtype=dtype_name(array),
            library=library_of(array) or "",
            device=device_of(array, library_of(array) or ""),
            owners=structure.occurrences[at].owners,
            aliases=aliases,
        )
        found.append((record, array))
    return found


def parted(found: Sequence[tuple[Parameter, Any]], trainable: Selectable) -> tuple[list[tuple[Parameter, Any]], frozenset[Path]]:
    """The parameters of a model that are to train, with their arrays, and the places of the others.

    **Raises** `PathError` when there are none to train.
    """
    chosen = set(matching([record for record, _ in found], trainable))
    others = (path for at, (record, _) in enumerate(found) if at not in chosen for path in record.paths)
    return [each for at, each in enumerate(found) if at in chosen], frozenset(others)


def _check_values(found: Sequence[tuple[Path, Any]]) -> None:
    """Check that tensors have values, and that traced arrays belong to a trace of JAX that is still under way.

    **Raises** `ModelError`, naming the path.
    """
    for path, array in found:
        if library_of(array) == "torch":
            check_values(path, array)
    # The first one of each trace will do.
    traced = {id(getattr(array, "_trace", None)): (path, array) for path, array in reversed(found) if is_traced(array)}
    for path, array in traced.values():
        try:
            array.reshape(-1)[:0]
        except Exception as error:
            if type(error).__name__ != "UnexpectedTracerError":
                raise
            raise ModelError(
                f'"{where(path)}" is a traced array that was kept from a jax.jit, grad or vmap which is over; return the model '
                "from the function instead of storing it on the side"
            ) from error


def _trains(leaf: Any) -> bool:
    return library_of(leaf) is not None and trainable_dtype(dtype_name(leaf))


class _Places(NamedTuple):
    """Where the parameters of a layout stand among the leaves of a structure."""

    structure: Structure
    canonical: tuple[int, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    """From all leaves, those at the canonical paths."""
    aliases: tuple[tuple[int, int, View], ...]
    """For each alias: the number of the parameter, the place, the view."""
    others: tuple[tuple[int, type], ...]
    """The places of leaves that are no parameters, and their types."""


class Opened:
    """A model opened with a layout at hand."""

    def __init__(self, layout: Layout, model: Any, leaves: list[Any], places: _Places) -> None:
        self.layout = layout
        self.leaves = leaves
        self.structure = places.structure
        self.canonical = places.canonical
        self.aliases = places.aliases
        self.pick = places.pick
        self._model = model

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The array at the canonical path of each parameter."""
        return self.pick(self.leaves)

    def check_ties(self, *, frozen: bool = False) -> None:
        """Check that all occurrences of each live parameter still hold the same values, or of frozen ones as well.

        **Raises** `TieError`, naming both paths.
        """
        for at, place, view in self.aliases:
            array, alias = self.leaves[self.canonical[at]], self.leaves[place]
            parameter = self.layout.parameters[at]
            if (
                array is alias
                or (parameter.frozen and not frozen)
                or library_of(array) is None
                or tuple(array.shape) != parameter.shape
            ):
                continue
            if library_of(alias) is None:
                raise ModelError(
                    f"{self.structure.paths[place]} is tied to {parameter.path}, but the model holds {type(alias).__name__} there; "
                    "put the array back, or call adapt(state, model) for the changed model"
                )
            if not same_memory(array, alias, view) and not equal_values(view.apply(array), alias):
                raise TieError(
                    f"{parameter.path} and {self.structure.paths[place]} are tied, but the model holds different values there; "
                    f'make them equal, or call state.untie("{self.structure.paths[place]}")'
                )

    def put(self, changed: dict[int, Any]) -> Any:
        """A model with other arrays for some parameters, at every occurrence; the others are shared with this one."""
        return self._put(list(self.leaves), changed)

    def _put(self, leaves: list[Any], changed: dict[int, Any]) -> Any:
        for at, array in changed.items():
            place = self.canonical[at]
            leaves[place] = standing_as(array, leaves[place])
        for at, place, view in self.aliases:
            if at in changed:
                leaves[place] = standing_as(view.apply(leaves[self.canonical[at]]), leaves[place])
        return self.rebuild(leaves)

    def copy(self, changed: dict[int, Any]) -> Any:
        """A model with other arrays for some parameters that shares no array with this one: all else is copied, buffers as well."""
        taken = {*self.canonical, *(place for _, place, _ in self.aliases)}
        own: dict[int, Any] = {}
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            if place not in taken and library_of(leaf) is not None:
                if id(leaf) not in own:
                    own[id(leaf)] = standing_as(copied(leaf), leaf)
                leaves[place] = own[id(leaf)]
        model = self._put(leaves, {at: changed[at] if at in changed else copied(array) for at, array in enumerate(self.arrays)})
        own_buffers(model)
        return model

    def rebuild(self, leaves: list[Any]) -> Any:
        """The model with other leaves."""
        return self.structure.rebuild(self._model, leaves)


def open_with(layout: Layout, model: Any) -> Opened:
    """Open a model and find the parameters of a layout in it.

    **Raises** `ModelError` when the model lacks one of them, or has parameters that the layout does not know.
    """
    known: list[_Places] = layout.cache.setdefault("places", [])
    for places in known:
        leaves = places.structure.leaves_of(model)
        if leaves is not None and all(type(leaves[at]) is kind and not _trains(leaves[at]) for at, kind in places.others):
            return Opened(layout, model, leaves, places)
    leaves, structure = opened(model)
    places = _find(layout, structure, leaves)
    del known[_STRUCTURES - 1 :]
    known.insert(0, places)
    return Opened(layout, model, leaves, places)


def _find(layout: Layout, structure: Structure, leaves: list[Any]) -> _Places:
    at = structure.places
    for parameter in layout.parameters:
        for path in parameter.paths:
            if path not in at:
                hint = suggest(str(path), map(str, structure.paths))
                raise ModelError(f'the state has a parameter at "{where(path)}", the model has nothing there{hint}; {_CHANGED}')
    for place, leaf in enumerate(leaves):
        path = structure.paths[place]
        if _trains(leaf) and structure.occurrences[place].trains and path not in layout.index and path not in layout.excluded:
            raise ModelError(
                f'the model has a parameter at "{where(path)}" that the state does not know; {_CHANGED}, or leave it out with '
                "setup(trainable=…)"
            )
    canonical = tuple(at[parameter.path] for parameter in layout.parameters)
    aliases = tuple((k, at[alias.path], alias.view) for k, parameter in enumerate(layout.parameters) for alias in parameter.aliases)
    taken = {*canonical, *(place for _, place, _ in aliases)}
    others = tuple((place, type(leaf)) for place, leaf in enumerate(leaves) if place not in taken and not _trains(leaf))
    return _Places(structure, canonical, picker(canonical), aliases, others)


def equal_values(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same values; a traced one is taken to."""
    if library_of(a) != library_of(b) or tuple(a.shape) != tuple(b.shape):
        return False
    try:
        same = (a == b) | ((a != a) & (b != b))
        return bool(same.all()) if hasattr(same, "all") else bool(a.__array_namespace__().all(same))
    except Exception as error:  # a traced array has no values to compare
        if "racer" in type(error).__name__:
            return True
        raise


def picker(places: tuple[int, ...]) -> Any:
    """A function from a sequence to the tuple of its items at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda sequence: tuple(sequence[place] for place in places)
