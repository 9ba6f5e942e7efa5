"""Gradients of a loss with respect to the live parameters of a model, by JAX or PyTorch."""

from collections.abc import Callable
from functools import reduce
from typing import Any

from optimisers.errors import GradientError
from optimisers.gradients import partition
from optimisers.model.jax_nodes import is_variable, trains
from optimisers.state import State, check_state

__all__ = ["grad", "value_and_grad"]


def value_and_grad(loss: Callable[..., Any], state: State, *, has_aux: bool = False) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function that calls a loss and differentiates it with respect to the live parameters.

    Frozen parameters cost no gradient, tied ones get one gradient, summed, and masked occurrences give none. In JAX it composes
    with `jit`, `vmap`, `scan` and `checkpoint`; the gradient of a complex parameter is conjugated, so that it points uphill, as in
    PyTorch and as `update` takes it. Variables of Flax NNX that the loss writes to, such as running means, change in the model.

    **Arguments:**

    - `loss`: a function `loss(model, *args, **kwargs)` that returns a real number, or with `has_aux` a pair of it and anything.
    - `state`: the state of the model, from `setup`.
    - `has_aux`: whether the loss returns a pair.

    **Returns** a function `(model, *args, **kwargs) -> (value, gradients)`: what the loss returns, and a mapping from path to array
    that goes into `update` as it is.

    **Raises** `GradientError` when the model is neither of JAX nor of PyTorch, and what `partition` raises.

    Example:
        >>> import jax.numpy as jnp, optimisers as op
        >>> w = jnp.ones(2)
        >>> model = {"embed": w, "head": w, "trunk": jnp.ones(2)}
        >>> state = op.setup(op.Descent(0.1), model).freeze("trunk")
        >>> def loss(model, x):
        ...     return (model["embed"] * model["trunk"] * model["head"] * x).sum()
        >>> value, grads = op.value_and_grad(loss, state)(model, 3.0)
        >>> float(value), {name: array.tolist() for name, array in grads.items()}
        (6.0, {'embed': [6.0, 6.0]})
    """
    check_state(state, "value_and_grad")
    live = [record for record in state.parameters if not record.frozen]
    libraries = sorted({record.library for record in live})
    engine = {"jax": _by_jax, "torch": _by_torch}.get(libraries[0]) if len(libraries) == 1 else None
    if engine is None:
        found = " and ".join(libraries) or "no"
        raise GradientError(
            f"value_and_grad differentiates models of JAX or of PyTorch, and this one has {found} parameters that are live; "
            "take partition(state, model), and the gradient with respect to its parameters from a package that knows them"
        )

    if any(is_variable(owner) for record in live for owner in record.owners[-1:]):
        engine = _by_nnx

    def call(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        params, rebuild = partition(state, model)
        return engine(model, params, rebuild, lambda model: loss(model, *args, **kwargs), has_aux)

    return call


def grad(loss: Callable[..., Any], state: State, *, has_aux: bool = False) -> Callable[..., Any]:
    """`value_and_grad` without the value: a function from a model to its gradients, or to gradients and the rest with `has_aux`.

    Example:
        >>> import jax.numpy as jnp, optimisers as op
        >>> model = {"w": jnp.asarray([1.0, 2.0])}
        >>> state = op.setup(op.Descent(0.1), model)
        >>> op.grad(lambda model: (model["w"] ** 2).sum(), state)(model)["w"].tolist()
        [2.0, 4.0]
    """
    both = value_and_grad(loss, state, has_aux=has_aux)

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = both(model, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call


_Loss = Callable[[Any], Any]


def _by_jax(model: Any, params: dict[str, Any], rebuild: _Loss, loss: _Loss, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    import jax

    value, gradients = jax.value_and_grad(lambda params: loss(rebuild(params)), has_aux=has_aux)(params)
    return value, {name: array.conj() if jax.numpy.iscomplexobj(array) else array for name, array in gradients.items()}


def _by_nnx(model: Any, params: dict[str, Any], rebuild: _Loss, loss: _Loss, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    """What the loss writes into other variables of its copy of the model has to leave the trace with it."""
    variables, kinds = _other_variables(model), dict[Any, type]()

    def with_variables(copy: Any) -> tuple[Any, Any]:
        found = loss(copy)
        value, aux = found if has_aux else (found, None)
        after = _other_variables(copy)
        kinds.update({path: type(variable) for path, variable in after.items()})
        now = {path: variable.get_value() for path, variable in after.items()}
        return value, (aux, {p: new for p, new in now.items() if p not in variables or new is not variables[p].get_value()})

    (value, (aux, written)), gradients = _by_jax(model, params, rebuild, with_variables, has_aux=True)
    for path, new in written.items():
        if path in variables:
            variables[path].set_value(new)
        else:
            owner = reduce(lambda node, key: node[key] if isinstance(key, int) else getattr(node, key), path[:-1], model)
            setattr(owner, path[-1], kinds[path](new))
    return (value, aux) if has_aux else value, gradients


def _other_variables(model: Any) -> dict[Any, Any]:
    """The variables in a model that do not train, by path: running means, random streams."""
    from flax import nnx

    return {path: node for path, node in nnx.iter_graph(model) if is_variable(type(node)) and not trains(type(node))}


def _by_torch(model: Any, params: dict[str, Any], rebuild: _Loss, loss: _Loss, has_aux: bool) -> tuple[Any, dict[str, Any]]:
    import torch

    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        found = loss(rebuild(leaves))
        value = found[0] if has_aux else found
        if value.grad_fn is None:
            raise GradientError("the loss does not depend on any live parameter of the model that it was given")
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    shown = (value.detach(), *found[1:]) if has_aux else value.detach()
    return shown, {name: tensor for name, tensor in zip(leaves, gradients, strict=True) if tensor is not None}
