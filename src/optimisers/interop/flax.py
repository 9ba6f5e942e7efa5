"""Flax NNX: the state inside an `nnx.Optimizer` whose transformation is a rule (`as_optax`)."""

from typing import Any

import jax
from flax import nnx
from flax.nnx.training.optimizer import to_opt_state

from optimisers.errors import StateError
from optimisers.state import State

__all__ = ["get_state", "set_state"]


def get_state(optimizer: nnx.Optimizer) -> State:
    """The state inside an optimizer, with arrays where the optimizer has variables.

    **Raises** `StateError` when the transformation of the optimizer is none made by `as_optax`.

    Example:
        >>> from flax import nnx
        >>> import optimisers as op
        >>> from optimisers.interop.flax import get_state, set_state
        >>> from optimisers.interop.optax import as_optax
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, as_optax(op.AdamW(1e-3)), wrt=nnx.Param)
        >>> set_state(optimizer, get_state(optimizer).freeze("bias").adjust(lr=1e-4))
        >>> get_state(optimizer)
        State(step=0, 2 parameters, 1 frozen, AdamW(lr=0.0001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01))
    """
    state = optimizer.opt_state
    if not isinstance(state, State):
        raise StateError(
            f"the optimizer has a {type(state).__name__}, and no State; make it with optimisers.interop.optax.as_optax"
        )
    return jax.tree.map(lambda leaf: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf, state, is_leaf=_is_variable)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def set_state(optimizer: nnx.Optimizer, state: State) -> None:
    """Put a state back into the optimizer that it came from, changed by `freeze`, `adjust`, `replace` or any other method."""
    get_state(optimizer)
    optimizer.opt_state = nnx.data(to_opt_state(jax.tree.map(lambda leaf: leaf, state)))
