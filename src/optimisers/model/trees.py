"""Opening a model into the arrays it holds, by path, and putting arrays back.

Containers are optree's business. Types that it does not know (dataclasses, subclasses of dict and list) are registered
with it, in a namespace of our own, when they are first met.
"""

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import optree

from optimisers.backends.arrays import library_of
from optimisers.errors import ModelError, OptimiserWarning
from optimisers.model.paths import Path

__all__ = ["Occurrence", "Structure", "flatten", "opened", "register"]

_NAMESPACE = "optimisers"
_MEMORY_OF_STRUCTURES = 256


class Occurrence(NamedTuple):
    """One place in a model, as it was opened."""

    path: Path
    owners: tuple[type, ...]
    """The types of the nodes that enclose it, outermost first."""
    trains: bool
    """Whether the types that enclose it let it train."""


class Structure:
    """What is known of all models with one structure: the places of their leaves."""

    def __init__(self, spec: optree.PyTreeSpec) -> None:
        self.spec = spec
        fields = any(issubclass(kind, tuple) and kind is not tuple for kind in self._types)
        # Reading keys off the accessors takes much longer, and only fields of tuples have names that the plain paths lack.
        self.paths = [Path(map(_key, each)) for each in spec.accessors()] if fields else [Path(path) for path in spec.paths()]
        self._occurrences: list[Occurrence] | None = None

    def leaves_of(self, model: Any) -> list[Any] | None:
        """The leaves of a model that has this structure, or `None`. Ten times as fast as opening it anew.

        Where the structure has a leaf, anything counts as one, except a mapping in the place of the whole model.
        """
        # optree prints a dict with other keys into its error, which takes far longer than opening it.
        if isinstance(model, dict) and model.keys() != self._root_keys:
            return None
        try:
            return self.spec.flatten_up_to(model)  # type: ignore[arg-type]
        except ValueError:
            return None

    def rebuild(self, model: Any, leaves: Iterable[Any]) -> Any:
        """A model like this one, which has this structure, with other leaves."""
        # The very model tells the order of its dicts, and what its nodes hold beside their children.
        return optree.tree_unflatten(flatten(model)[1], leaves)

    @cached_property
    def places(self) -> dict[Path, int]:
        """The number of the leaf at each path."""
        return {path: at for at, path in enumerate(self.paths)}

    @cached_property
    def _root_keys(self) -> set[Hashable] | None:
        """The keys of the model, where it is a dict."""
        return set(self.spec.entries()) if self.spec.type is not None and issubclass(self.spec.type, dict) else None

    @cached_property
    def _types(self) -> set[type]:
        """The types of all nodes."""
        types, specs = set[type](), [self.spec]
        while specs:
            spec = specs.pop()
            if spec.type is not None:
                types.add(spec.type)
                specs += spec.children()
        return types

    @property
    def occurrences(self) -> list[Occurrence]:
        """Every leaf's place, in traversal order."""
        if self._occurrences is None:
            self._occurrences = [Occurrence(path, *place) for path, place in zip(self.paths, self._places(), strict=True)]
        return self._occurrences

    def _places(self) -> Iterator[tuple[tuple[type, ...], bool]]:
        """For each leaf the types that enclose it, and whether they let it train. Leaves of one node share a tuple."""
        stack: list[tuple[optree.PyTreeSpec, tuple[type, ...], bool]] = [(self.spec, (), True)]
        while stack:
            spec, owners, trains = stack.pop()
            kind = spec.type
            if kind is None:
                yield owners, trains
                continue
            below, chosen = (*owners, kind), _TRAINABLE.get(kind)
            keys = spec.entries() if chosen is not None else ()
            for at, child in reversed(list(enumerate(spec.children()))):
                stack.append((child, below, trains and (chosen is None or keys[at] in chosen)))


def _key(entry: Any) -> Hashable:
    return entry.field if isinstance(entry, (optree.NamedTupleEntry, optree.StructSequenceEntry)) else entry.entry


def flatten(model: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """All leaves of a model in traversal order (dict keys sorted), and its structure.

    **Raises** `ModelError` for a model that refers to itself.
    """
    try:
        leaves, spec = optree.tree_flatten(model, none_is_leaf=True, namespace=_NAMESPACE)
        while _open_types(set(map(type, leaves)), leaves):
            leaves, spec = optree.tree_flatten(model, none_is_leaf=True, namespace=_NAMESPACE)
    except RecursionError:
        raise ModelError(_too_deep(model)) from None
    return leaves, spec


_structures: dict[optree.PyTreeSpec, Structure] = {}


def opened(model: Any) -> tuple[list[Any], Structure]:
    """All leaves of a model, and what is known of all models of its structure."""
    leaves, spec = flatten(model)
    structure = _structures.get(spec)
    if structure is None:
        if len(_structures) >= _MEMORY_OF_STRUCTURES:
            _structures.clear()
        structure = _structures[spec] = Structure(spec)
    return leaves, structure


# Types ----------------------------------------------------------------------------------------------------------------

_LOCK = Lock()
_CLOSED: set[type] = {type(None), bool, int, float, complex, str, bytes}
"""Types known to be leaves."""
_OPEN: set[type] = set()
"""Types registered here."""
_REGISTERED: dict[type, tuple[Any, Any]] = {}
"""For types that the user registered, how their children are found, and how they are rebuilt."""
_TRAINABLE: dict[type, frozenset[Hashable]] = {}
"""For types that do not train whole, the children that do."""


def register(
    cls: Any = None,
    *,
    children: Iterable[str] | Callable[[Any], Mapping[Hashable, Any]] | None = None,
    rebuild: Callable[[Any, Mapping[Hashable, Any]], Any] | None = None,
    trainable: Collection[Hashable] | None = None,
) -> Any:
    """Tell how a type of your own is opened, and which of its children train. Also a class decorator.

    Dataclasses need this only to say which of their fields train.

    **Arguments:**

    - `cls`: the type.
    - `children`: the names of the attributes that are children (all attributes of an object by default; a dataclass's fields), or
      a function from an object to a mapping of its children.
    - `rebuild`: a function from an object and the mapping of its new children to a new object. By default a shallow copy
      whose attributes are set.
    - `trainable`: the keys of the children that train; by default all. What is below the others passes through
      untouched, like the running statistics of a normalisation.

    **Raises** `ModelError` for a type that is registered already, or one that cannot be.

    Example:
        >>> import numpy as np, optimisers as op
        >>> @op.register(children=["weight", "average"], trainable=["weight"])
        ... class Norm:
        ...     def __init__(self):
        ...         self.weight, self.average = np.ones(3), np.zeros(3)
        >>> [str(path) for path in op.trainables({"norm": Norm()})]
        ['norm.weight']
    """
    if cls is None:
        return lambda cls: register(cls, children=children, rebuild=rebuild, trainable=trainable)
    if not isinstance(cls, type):
        raise ModelError(f"register takes a type, not {cls!r}")
    names = None if children is None or callable(children) else tuple(children)
    if names is None and not callable(children) and dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
    look = children if callable(children) else _attributes(names)
    if not _enter(cls, look, _with_attributes, rebuild):
        raise ModelError(f"{cls.__name__} is registered already")
    _REGISTERED[cls] = (look, rebuild)
    if trainable is not None:
        _TRAINABLE[cls] = frozenset(trainable)
    return cls


class _Shell:
    """What of a node is not among its children. Any two with equal keys are equal: structure is a matter of type and keys.

    Structures are remembered, so a shell must not keep the arrays of the node alive: where it can, it refers to it weakly.
    """

    __slots__ = ("keys", "node")

    def __init__(self, node: Any, keys: tuple[Hashable, ...], *, whole: bool) -> None:
        self.keys = keys
        try:
            self.node: Callable[[], Any] = weakref.ref(node)
        except TypeError:
            # An object with slots and nothing else: beside its children, its class is all there is.
            self.node = (lambda: node) if whole else (lambda: None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)


_Look = Callable[[Any], Mapping[Hashable, Any]]
_Fill = Callable[[Any, Mapping[Hashable, Any]], Any]
_Rebuild = Callable[[Any, Mapping[Hashable, Any]], Any]


def _enter(cls: type, look: _Look, fill: _Fill, rebuild: _Rebuild | None = None) -> bool:
    """Register a type with optree; `False` when it is registered already.

    `fill` puts children into a shallow copy of the node, `rebuild` makes a new node from the node itself.
    """

    def open_(node: Any) -> tuple[tuple[Any, ...], _Shell, tuple[Hashable, ...]]:
        children = look(node)
        keys = tuple(children)
        return tuple(children.values()), _Shell(node, keys, whole=rebuild is not None), keys

    def close(shell: _Shell, children: Iterable[Any]) -> Any:
        node, new = shell.node(), dict(zip(shell.keys, children, strict=True))
        if rebuild is not None:
            return rebuild(node, new)
        made = cls.__new__(cls) if node is None else copy.copy(node)  # type: ignore[call-overload]
        for name in [name for name in getattr(made, "__dict__", ()) if isinstance(getattr(cls, name, None), cached_property)]:
            del made.__dict__[name]  # it was worked out from the old children
        return fill(made, new)

    with _LOCK:
        if cls in _OPEN:
            return False
        try:
            optree.register_pytree_node(cls, open_, close, namespace=_NAMESPACE)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise ModelError(f"{cls.__name__} cannot be registered: {error}") from None
        _OPEN.add(cls)
        _CLOSED.discard(cls)
        return True


def _attributes(names: tuple[str, ...] | None) -> _Look:
    def look(node: Any) -> Mapping[Hashable, Any]:
        return vars(node) if names is None else {name: getattr(node, name) for name in names if hasattr(node, name)}

    return look


def _with_attributes(made: Any, children: Mapping[Hashable, Any]) -> Any:
    for name, value in children.items():
        object.__setattr__(made, str(name), value)
    return made


def _with_items(made: Any, children: Mapping[Hashable, Any]) -> Any:
    for key, value in children.items():
        made[key] = value
    return made


def _open_types(kinds: set[type], leaves: list[Any]) -> bool:
    """Register the types among some leaves that are containers after all; returns whether there were any."""
    opened = False
    for kind in kinds - _CLOSED:
        if kind in _OPEN:
            continue
        above = next((base for base in kind.__mro__[1:] if base in _TRAINABLE or base in _REGISTERED), None)
        if above is not None:
            opened |= _enter_below(kind, above)
        elif dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
            opened |= _enter(kind, _attributes(names), _with_attributes)
        elif issubclass(kind, dict):
            opened |= _enter(kind, lambda node: {key: node[key] for key in _sorted(node)}, _with_items)
        elif issubclass(kind, list):
            opened |= _enter(kind, lambda node: dict(enumerate(node)), _with_items)
        elif issubclass(kind, tuple):
            opened |= _enter(kind, lambda node: dict(enumerate(node)), lambda made, new: type(made)(new.values()))
        else:
            _CLOSED.add(kind)
            _warn_of_hidden_arrays(kind, leaves)
    return opened


def _enter_below(kind: type, above: type) -> bool:
    """Register a subclass of a registered type as that is; fields of its own train."""
    look, rebuild = _REGISTERED[above]
    if dataclasses.is_dataclass(kind):
        look = _attributes(tuple(field.name for field in dataclasses.fields(kind)))
    if above in _TRAINABLE:
        own = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        old = {field.name for field in dataclasses.fields(above)} if dataclasses.is_dataclass(above) else set()
        _TRAINABLE[kind] = _TRAINABLE[above] | (own - old)
    return _enter(kind, look, _with_attributes, rebuild)


def _sorted(keys: Iterable[Hashable]) -> list[Hashable]:
    """Keys as optree sorts those of a dict: by value, else by type and value, else as they come."""
    for order in (lambda key: key, lambda key: (type(key).__qualname__, key)):
        try:
            return sorted(keys, key=order)
        except TypeError:
            continue
    return list(keys)


def _warn_of_hidden_arrays(kind: type, leaves: list[Any]) -> None:
    for leaf in leaves:
        if (
            type(leaf) is kind
            and library_of(leaf) is None
            and any(library_of(value) for value in getattr(leaf, "__dict__", {}).values())
        ):
            warnings.warn(
                f"the model holds a {kind.__name__}, which holds arrays but cannot be opened, so they do not train; "
                f"call optimisers.register({kind.__name__}) to open it",
                OptimiserWarning,
                stacklevel=5,
            )
            return


def _too_deep(model: Any) -> str:
    """Why a model cannot be opened: the path at which it refers to itself, or its depth."""
    trail: list[tuple[Any, list[tuple[Hashable, Any]]]] = [(model, _children(model))]
    keys: list[Hashable] = []
    while trail:
        rest = trail[-1][1]
        if not rest:
            trail.pop()
            del keys[-1:]
            continue
        key, child = rest.pop()
        for at, (above, _) in enumerate(trail):
            if above is child:
                where = Path(keys[:at])
                return (
                    f"the model refers to itself: {Path([*keys, key])} is {where or 'the model itself'} again; "
                    "a model is a tree, so keep the back-reference out of its fields"
                )
        children = _children(child)
        if children:
            trail.append((child, children))
            keys.append(key)
        if len(trail) > 100_000:
            break
    return f"the model is nested more than {optree.MAX_RECURSION_DEPTH} levels deep; make it flatter, or use a dict of paths"


def _children(node: Any) -> list[tuple[Hashable, Any]]:
    children, _ = optree.tree_flatten(node, is_leaf=lambda each: each is not node, none_is_leaf=True, namespace=_NAMESPACE)
    if len(children) == 1 and children[0] is node:
        return []
    paths = optree.tree_paths(node, is_leaf=lambda each: each is not node, none_is_leaf=True, namespace=_NAMESPACE)
    return [(path[0], child) for path, child in zip(paths, children, strict=True)][::-1]
