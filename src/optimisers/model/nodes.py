"""How the types of a model's nodes are opened into children, and put together again.

Containers are optree's business. Types that it does not know (JAX pytrees, dataclasses, subclasses of dict and list) are registered
with it, in a namespace of our own, when they are first met.
"""

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from operator import is_
from threading import Lock
from typing import Any

import optree

from optimisers.backends.arrays import library_of
from optimisers.errors import ModelError, OptimiserWarning
from optimisers.model import jax_nodes

__all__ = ["NAMESPACE", "TRAINABLE", "open_types", "register", "sharing_nodes"]

NAMESPACE = "optimisers"

_LOCK = Lock()
_CLOSED: set[type] = {type(None), bool, int, float, complex, str, bytes}
"""Types known to be leaves."""
_OPEN: set[type] = set()
"""Types registered here."""
_REGISTERED: dict[type, tuple[Any, Any]] = {}
"""For types that the user registered, how their children are found, and how they are rebuilt."""
TRAINABLE: dict[type, frozenset[Hashable]] = {}
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
    if not _enter(cls, _rebuilding(look, rebuild) if rebuild else _copying(cls, look, _with_attributes)):
        raise ModelError(f"{cls.__name__} is registered already")
    _REGISTERED[cls] = (look, rebuild)
    if trainable is not None:
        TRAINABLE[cls] = frozenset(trainable)
    return cls


_Children = Mapping[Hashable, Any]
_Look = Callable[[Any], _Children]
_Fill = Callable[[Any, _Children], Any]
_Rebuild = Callable[[Any, _Children], Any]
_Make = Callable[[_Children], Any]
_Apart = Callable[[Any], tuple[_Children, _Make]]
"""From a node its children, and the function that makes such a node of others."""


class _Shell:
    """What of a node is not among its children. Any two with equal keys are equal: structure is a matter of type and keys.

    Structures are remembered, so a shell must not keep the arrays of the node alive.
    """

    __slots__ = ("identity", "keys", "make")

    def __init__(self, keys: tuple[Hashable, ...], make: _Make, identity: int) -> None:
        self.keys = keys
        self.make = make
        self.identity = identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)


_made: ContextVar[dict[int, tuple[tuple[Any, ...], Any]] | None] = ContextVar("made", default=None)


@contextmanager
def sharing_nodes() -> Iterator[None]:
    """Inside, a node that stands at several places of a model is put together once, as long as it has the same children there."""
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def _enter(cls: type, apart: _Apart) -> bool:
    """Register a type with optree; `False` when it is registered already."""

    def open_(node: Any) -> tuple[tuple[Any, ...], _Shell, tuple[Hashable, ...]]:
        children, make = apart(node)
        keys = tuple(children)
        return tuple(children.values()), _Shell(keys, make, id(node)), keys

    def close(shell: _Shell, children: Iterable[Any]) -> Any:
        children, known = tuple(children), _made.get()
        before, node = ((), None) if known is None else known.get(shell.identity, ((), None))
        if type(node) is cls and len(before) == len(children) and all(map(is_, before, children)):
            return node
        node = shell.make(dict(zip(shell.keys, children, strict=True)))
        if known is not None:
            known[shell.identity] = (children, node)
        return node

    with _LOCK:
        if cls in _OPEN:
            return False
        try:
            optree.register_pytree_node(cls, open_, close, namespace=NAMESPACE)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise ModelError(f"{cls.__name__} cannot be registered: {error}") from None
        _OPEN.add(cls)
        _CLOSED.discard(cls)
        return True


def _copying(cls: type, look: _Look, fill: _Fill) -> _Apart:
    """Nodes are made by putting children into a shallow copy of the old one."""

    def apart(node: Any) -> tuple[_Children, _Make]:
        # An object with slots and nothing else: beside its children, its class is all there is.
        old = _referred(node, otherwise=None)

        def make(children: _Children) -> Any:
            node = old()
            made = cls.__new__(cls) if node is None else copy.copy(node)  # type: ignore[call-overload]
            for name in [name for name in getattr(made, "__dict__", ()) if isinstance(getattr(cls, name, None), cached_property)]:
                del made.__dict__[name]  # it was worked out from the old children
            return fill(made, children)

        return look(node), make

    return apart


def _rebuilding(look: _Look, rebuild: _Rebuild) -> _Apart:
    """Nodes are made by a function of the old one and the children."""

    def apart(node: Any) -> tuple[_Children, _Make]:
        old = _referred(node, otherwise=node)
        return look(node), lambda children: rebuild(old(), children)

    return apart


def _as_tuple(node: Any) -> tuple[_Children, _Make]:
    cls = type(node)
    return dict(enumerate(node)), lambda children: cls(children.values())


def _referred(node: Any, otherwise: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(node)
    except TypeError:
        return lambda: otherwise


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


def open_types(leaves: list[Any]) -> bool:
    """Register the types among some leaves that are containers after all; returns whether there were any."""
    opened = False
    for kind in set(map(type, leaves)) - _CLOSED:
        if kind in _OPEN:
            continue
        above = next((base for base in kind.__mro__[1:] if base in _REGISTERED), None)
        if above is not None:
            opened |= _enter_below(kind, above)
        elif jax_nodes.is_node(next(leaf for leaf in leaves if type(leaf) is kind)):
            if not jax_nodes.trains(kind):
                TRAINABLE[kind] = frozenset()
            opened |= _enter(kind, jax_nodes.apart)
        elif dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
            opened |= _enter(kind, _copying(kind, _attributes(names), _with_attributes))
        elif issubclass(kind, dict):
            opened |= _enter(kind, _copying(kind, lambda node: {key: node[key] for key in _sorted(node)}, _with_items))
        elif issubclass(kind, list):
            opened |= _enter(kind, _copying(kind, lambda node: dict(enumerate(node)), _with_items))
        elif issubclass(kind, tuple):
            opened |= _enter(kind, _as_tuple)
        else:
            _CLOSED.add(kind)
            _warn_of_hidden_arrays(kind, leaves)
    return opened


def _enter_below(kind: type, above: type) -> bool:
    """Register a subclass of a registered type as that is; fields of its own train."""
    look, rebuild = _REGISTERED[above]
    if dataclasses.is_dataclass(kind):
        look = _attributes(tuple(field.name for field in dataclasses.fields(kind)))
    if above in TRAINABLE:
        own = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        old = {field.name for field in dataclasses.fields(above)} if dataclasses.is_dataclass(above) else set()
        TRAINABLE[kind] = TRAINABLE[above] | (own - old)
    _REGISTERED[kind] = look, rebuild
    return _enter(kind, _rebuilding(look, rebuild) if rebuild else _copying(kind, look, _with_attributes))


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
