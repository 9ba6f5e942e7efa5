"""Opening a model into the arrays it holds, by path, and putting arrays back."""

from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import optree

from optimisers.errors import ModelError
from optimisers.model.jax_nodes import is_nnx_module, is_variable
from optimisers.model.nodes import NAMESPACE, TRAINABLE, open_types, rebuilding
from optimisers.model.paths import BOXED, Path
from optimisers.model.torch_nodes import buffers, copy_buffers, declared, is_module

__all__ = ["Structure", "buffers_of", "flatten", "opened", "own_buffers"]

_MEMORY_OF_STRUCTURES = 256


class Occurrence(NamedTuple):
    """What encloses one place in a model."""

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
        paths = [tuple(map(_key, each)) for each in spec.accessors()] if fields else spec.paths()
        boxes = any(BOXED in path for path in paths)
        self.paths = [Path([key for key in path if key is not BOXED] if boxes else path) for path in paths]

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
        with rebuilding():
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

    @cached_property
    def occurrences(self) -> list[Occurrence]:
        """For each leaf what encloses it, in traversal order."""
        return list(self._occurrences())

    def _occurrences(self) -> Iterator[Occurrence]:
        # Leaves of one node share a tuple.
        stack: list[tuple[optree.PyTreeSpec, tuple[type, ...], bool, bool]] = [(self.spec, (), True, True)]
        while stack:
            spec, owners, trains, bare = stack.pop()
            kind = spec.type
            if kind is None:
                yield Occurrence(owners, trains and bare)
                continue
            # In a module of Flax NNX an array trains in a variable alone.
            bare = is_variable(kind) or (bare and not is_nnx_module(kind))
            below, chosen = (*owners, declared(kind)), TRAINABLE.get(kind)
            keys = spec.entries() if chosen is not None else ()
            for at, child in reversed(list(enumerate(spec.children()))):
                stack.append((child, below, trains and (chosen is None or keys[at] in chosen), bare))


def _key(entry: Any) -> Hashable:
    return entry.field if isinstance(entry, (optree.NamedTupleEntry, optree.StructSequenceEntry)) else entry.entry


def flatten(model: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """All leaves of a model in traversal order (dict keys sorted), and its structure.

    **Raises** `ModelError` for a model that refers to itself.
    """
    try:
        leaves, spec = optree.tree_flatten(model, none_is_leaf=True, namespace=NAMESPACE)
        while open_types(leaves):
            leaves, spec = optree.tree_flatten(model, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError:
        raise ModelError(_too_deep(model)) from None
    return leaves, spec


def buffers_of(model: Any) -> dict[Path, Any]:
    """The persistent buffers of the modules of PyTorch in a model, which are no nodes of it, by path."""
    found = (buffers(module, above) for above, module in _modules(model))
    return {path: buffer for each in found for path, buffer in each}


def own_buffers(model: Any) -> None:
    """Give modules of PyTorch in a model that was made anew copies of the buffers that they share with the old one."""
    own: dict[int, Any] = {}
    for _, module in _modules(model):
        copy_buffers(module, own)


def _modules(model: Any) -> list[tuple[Any, Any]]:
    """The outermost modules of PyTorch, with the paths that they stand at."""
    leaves, spec = optree.tree_flatten(model, is_leaf=lambda each: is_module(type(each)), none_is_leaf=True, namespace=NAMESPACE)
    return [(path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if is_module(type(leaf))]


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


def _too_deep(model: Any) -> str:
    """Why a model cannot be opened: the path at which it refers to itself, or its depth."""
    trail: list[tuple[Any, list[tuple[Hashable, Any]]]] = [(model, _children(model))]
    keys: list[Hashable] = []
    above = {id(model): 0}
    while trail:
        node, rest = trail[-1]
        if not rest:
            trail.pop()
            del keys[-1:], above[id(node)]
            continue
        key, child = rest.pop()
        if id(child) in above:
            where = Path(keys[: above[id(child)]])
            return (
                f"the model refers to itself: {Path([*keys, key])} is {where or 'the model itself'} again; "
                "a model is a tree, so keep the back-reference out of its fields"
            )
        children = _children(child)
        if children:
            above[id(child)] = len(trail)
            trail.append((child, children))
            keys.append(key)
        if len(trail) > 100_000:
            break
    return f"the model is nested more than {optree.MAX_RECURSION_DEPTH} levels deep; make it flatter, or use a dict of paths"


def _children(node: Any) -> list[tuple[Hashable, Any]]:
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        return []
    level = optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)
    return list(zip(level.entries, level.children, strict=True))[::-1]
