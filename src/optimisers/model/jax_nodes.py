"""Nodes that JAX can open: Equinox modules, Flax's modules and states, and all types registered with `jax.tree_util`.

What JAX takes for static, such as sizes and activations, is none of their children. A variable of Flax NNX is a box around one
array: its path is that of the array, and only those of the kind `nnx.Param` train.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

__all__ = ["BOXED", "apart", "is_node", "other_variables", "trains"]


class _Boxed:
    """The key of what is in a box. It is left out of paths."""

    def __repr__(self) -> str:
        return "BOXED"


BOXED = _Boxed()


def is_node(value: Any) -> bool:
    """Whether JAX is loaded and opens this value."""
    jax = sys.modules.get("jax")
    return jax is not None and not jax.tree_util.all_leaves([value])


def trains(kind: type) -> bool:
    """Whether what is below nodes of a type trains."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is None or not issubclass(kind, nnx.Variable) or issubclass(kind, nnx.Param)


def apart(node: Any) -> tuple[Mapping[Hashable, Any], Callable[[Mapping[Hashable, Any]], Any]]:
    """The children of a node by key, and the function that makes such a node of others."""
    import jax

    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    nnx = sys.modules.get("flax.nnx")
    boxed = nnx is not None and isinstance(node, nnx.Variable)
    children = {BOXED if boxed else _key(path[0]): child for path, child in found}
    return children, lambda new: jax.tree.unflatten(structure, new.values())


def other_variables(model: Any) -> dict[Any, Any]:
    """The variables of Flax NNX in a model that do not train, by path: running means, random streams."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable) and not trains(type(node))}


def _key(entry: Any) -> Hashable:
    """The plain key of a step of a path of JAX."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
