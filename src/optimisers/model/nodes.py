"""How the types of a model's nodes are opened into children, and put together again.

Containers are optree's business. Types that it does not know (PyTorch's modules, JAX pytrees, dataclasses, …) are registered
with it, in a namespace of our own, when they are first met.
"""

import copy
import dataclasses
import warnings
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
from optimisers.model import jax_nodes, torch_nodes

__all__ = ["NAMESPACE", "TRAINABLE", "open_types", "rebuilding", "register"]

NAMESPACE = "optimisers"

_LOCK = Lock()
_CLOSED: set[type] = {type(None), bool, int, float, complex, str, bytes}
"""Types known to be leaves."""
_WARNED: set[type] = set()
"""Types that hold arrays out of reach. They may be registered yet."""
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
    apart = _making(look, rebuild) if rebuild else _copying(look, _with_attributes)
    if not _enter(cls, apart, None if trainable is None else frozenset(trainable)):
        raise ModelError(f"{cls.__name__} is registered already")
    _REGISTERED[cls] = (look, rebuild)
    return cls


_Children = Mapping[Hashable, Any]
_Look = Callable[[Any], _Children]
_Make = Callable[[_Children], Any]
_Apart = Callable[[Any], tuple[_Children, _Make]]
"""From a node its children, and the function that makes such a node of others."""


class _Shell:
    """What of a node is not among its children. Any two with equal keys are equal: structure is a matter of type and keys.

    Structures are remembered, so a shell must not keep anything of the node alive.
    """

    __slots__ = ("identity", "keys")

    def __init__(self, keys: tuple[Hashable, ...], identity: int) -> None:
        self.keys = keys
        self.identity = identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)


class _Node:
    """A node of a model that is being rebuilt, and what was last made of it."""

    __slots__ = ("children", "made", "make", "node")

    def __init__(self, node: Any, make: _Make) -> None:
        self.node = node  # alive as long as its identity has to mean something
        self.make = make
        self.children: tuple[Any, ...] | None = None
        self.made: Any = None


_nodes: ContextVar[dict[int, _Node] | None] = ContextVar("nodes", default=None)


@contextmanager
def rebuilding() -> Iterator[None]:
    """Inside, a model can be opened and put together again with other leaves.

    A node that stands at several places of it is made once, as long as it has the same children there.
    """
    token = _nodes.set({})
    try:
        yield
    finally:
        _nodes.reset(token)


def _enter(cls: type, apart: _Apart, trainable: frozenset[Hashable] | None = None) -> bool:
    """Register a type with optree; `False` when it is registered already."""

    def open_(node: Any) -> tuple[tuple[Any, ...], _Shell, tuple[Hashable, ...]]:
        children, make = apart(node)
        nodes = _nodes.get()
        if nodes is not None:
            nodes.setdefault(id(node), _Node(node, make))
        keys = tuple(children)
        return tuple(children.values()), _Shell(keys, id(node)), keys

    def close(shell: _Shell, children: Iterable[Any]) -> Any:
        nodes, new = _nodes.get(), tuple(children)
        assert nodes is not None
        node = nodes[shell.identity]
        if node.children is None or not all(map(is_, node.children, new)):
            node.children, node.made = new, node.make(dict(zip(shell.keys, new, strict=True)))
        return node.made

    with _LOCK:
        if cls in _OPEN:
            return False
        if trainable is not None:
            TRAINABLE[cls] = trainable
        try:
            optree.register_pytree_node(cls, open_, close, namespace=NAMESPACE)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            TRAINABLE.pop(cls, None)
            raise ModelError(f"{cls.__name__} cannot be registered: {error}") from None
        _OPEN.add(cls)
        _CLOSED.discard(cls)
        return True


def _copying(look: _Look, fill: Callable[[Any, _Children], Any]) -> _Apart:
    """Nodes are made by putting children into a shallow copy of the old one."""

    def apart(node: Any) -> tuple[_Children, _Make]:
        def make(children: _Children) -> Any:
            made = copy.copy(node)
            for name in [n for n in getattr(made, "__dict__", ()) if isinstance(getattr(type(node), n, None), cached_property)]:
                del made.__dict__[name]  # it was worked out from the old children
            return fill(made, children)

        return look(node), make

    return apart


def _making(look: _Look, rebuild: Callable[[Any, _Children], Any]) -> _Apart:
    """Nodes are made by a function of the old one and the children."""
    return lambda node: (look(node), lambda children: rebuild(node, children))


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
        # Another thread may have opened it since.
        if kind in _OPEN:
            opened = True
            continue
        found = _apart_for(kind, next(leaf for leaf in leaves if type(leaf) is kind))
        if found is not None:
            _enter(kind, *found)
            opened = True
        elif not _hides_arrays(kind, leaves):
            _CLOSED.add(kind)
    return opened


def _apart_for(kind: type, node: Any) -> tuple[_Apart, frozenset[Hashable] | None] | None:
    """How nodes of a type are taken apart, and which of their children train; `None` when it is no container."""
    above = next((base for base in kind.__mro__[1:] if base in _REGISTERED), None)
    if above is not None:
        return _below(kind, above)
    if torch_nodes.is_module(kind):
        return torch_nodes.apart, None
    if jax_nodes.is_node(node):
        return jax_nodes.apart, None if jax_nodes.trains(kind) else frozenset()
    if dataclasses.is_dataclass(kind):
        return _copying(_attributes(tuple(field.name for field in dataclasses.fields(kind))), _with_attributes), None
    if issubclass(kind, dict):
        return _copying(lambda node: {key: node[key] for key in _sorted(node)}, _with_items), None
    if issubclass(kind, list):
        return _copying(lambda node: dict(enumerate(node)), _with_items), None
    if issubclass(kind, tuple):
        return _making(lambda node: dict(enumerate(node)), lambda node, new: type(node)(new.values())), None
    return None


def _below(kind: type, above: type) -> tuple[_Apart, frozenset[Hashable] | None]:
    """A subclass of a registered type is opened as that is; fields of its own train."""
    look, rebuild = _REGISTERED[above]
    if dataclasses.is_dataclass(kind):
        look = _attributes(tuple(field.name for field in dataclasses.fields(kind)))
    trainable = TRAINABLE.get(above)
    if trainable is not None:
        own = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        old = {field.name for field in dataclasses.fields(above)} if dataclasses.is_dataclass(above) else set()
        trainable |= own - old
    _REGISTERED[kind] = look, rebuild
    return _making(look, rebuild) if rebuild else _copying(look, _with_attributes), trainable


def _sorted(keys: Iterable[Hashable]) -> list[Hashable]:
    """Keys as optree sorts those of a dict: by value, else by type and value, else as they come."""
    for order in (lambda key: key, lambda key: (type(key).__qualname__, key)):
        try:
            return sorted(keys, key=order)
        except TypeError:
            continue
    return list(keys)


def _hides_arrays(kind: type, leaves: list[Any]) -> bool:
    """Whether leaves of a type hold arrays that cannot be reached, and a warning that they do."""
    for leaf in leaves:
        if type(leaf) is kind and library_of(leaf) is None and any(map(library_of, getattr(leaf, "__dict__", {}).values())):
            if kind not in _WARNED:
                _WARNED.add(kind)
                warnings.warn(
                    f"the model holds a {kind.__name__}, which holds arrays but cannot be opened, so they do not train; "
                    f"call optimisers.register({kind.__name__}) to open it",
                    OptimiserWarning,
                    stacklevel=6,
                )
            return True
    return False
