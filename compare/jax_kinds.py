"""Whether a state comes out of JAX's transformations as it went in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["same_kinds"]


def same_kinds(state: Any, train: Callable[[Any], Any], model: Any) -> bool:
    """Whether structure, shapes, dtypes and weak types are those of `state` after training: compiled, and in an ensemble."""
    ensemble = jax.vmap(train)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), model))
    trained = [jax.jit(train)(model), jax.tree.map(lambda leaf: leaf[0], ensemble)]
    return all(_kinds(each) == _kinds(state) for each in trained)


def _kinds(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(each.shape, each.dtype.name) for each in map(jax.typeof, leaves)], [_weak(each) for each in leaves]


def _weak(leaf: Any) -> bool:
    return bool(jax.typeof(leaf).weak_type)
