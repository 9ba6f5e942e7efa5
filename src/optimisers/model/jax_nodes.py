"""Nodes that JAX can open: Equinox modules, Flax's modules and states, and all types registered with `jax.tree_util`.

What JAX takes for static, such as sizes and activations, is none of their children. A variable of Flax NNX is a box around one
array: its path is that of the array, and only those of the kind `nnx.Param` train.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from optimisers.model.paths import BOXED

__all__ = ["apart", "is_key", "is_nnx_module", "is_node", "is_variable", "key_like", "key_numbers", "trains"]


def is_node(value: Any) -> bool:
    """Whether JAX is loaded and opens this value."""
    jax = sys.modules.get("jax")
    return jax is not None and not jax.tree_util.all_leaves([value])


def is_variable(kind: type) -> bool:
    """Whether a type is a variable of Flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(kind, nnx.Variable)


def trains(kind: type) -> bool:
    """Whether what is below nodes of a type trains."""
    return not is_variable(kind) or issubclass(kind, sys.modules["flax.nnx"].Param)


def is_nnx_module(kind: type) -> bool:
    """Whether a type is a module of Flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(kind, nnx.Pytree)


def is_key(array: Any) -> bool:
    """Whether an array holds keys of JAX's random numbers, such as the one that a Dropout of Flax keeps."""
    dtype = getattr(array, "dtype", None)
    return not isinstance(dtype, np.dtype) and str(dtype).startswith("key<")


def key_numbers(keys: Any) -> Any:
    """The whole numbers that keys consist of."""
    return sys.modules["jax"].random.key_data(keys)


def key_like(keys: Any, numbers: Any) -> Any:
    """Keys of the kind of others, of such numbers."""
    random = sys.modules["jax"].random
    return random.wrap_key_data(sys.modules["jax"].numpy.asarray(numbers), impl=random.key_impl(keys))


def apart(node: Any) -> tuple[Mapping[Hashable, Any], Callable[[Mapping[Hashable, Any]], Any]]:
    """The children of a node by key, and the function that makes such a node of others."""
    import jax

    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    boxed = is_variable(type(node))
    children: dict[Hashable, Any] = {BOXED if boxed else _key(path[0]): child for path, child in found}
    if len(children) < len(found):
        # Steps of different kinds that read alike.
        children = dict(enumerate(child for _, child in found))
    return children, lambda new: jax.tree.unflatten(structure, new.values())


def _key(entry: Any) -> Hashable:
    """The plain key of a step of a path of JAX."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
