"""Gradients of a loss with respect to the live parameters of a model, by JAX or PyTorch."""

from collections.abc import Callable
from typing import Any

from optimisers.errors import GradientError
from optimisers.flat import partition
from optimisers.model.jax_nodes import is_variable
from optimisers.model.layout import Parameter
from optimisers.model.torch_nodes import is_idle, is_parameter, lending
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
        raise GradientError(
            f"value_and_grad differentiates models of JAX or of PyTorch, and this one has {' and '.join(libraries) or 'no'} "
            f"parameters that are live; {_remedy(live, libraries)}"
        )
    if any(is_variable(owner) for record in live for owner in record.owners[-1:]):
        return _by_nnx(loss, state, has_aux)

    masked = {str(path) for record in live if record.masked for path in record.paths}

    def call(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        params, rebuild = partition(state, model)
        if libraries == ["torch"]:
            params = {name: _asking(tensor, masked=name in masked) for name, tensor in params.items()}
        with lending():
            return engine(lambda params: loss(rebuild(params), *args, **kwargs), params, has_aux)

    return call


def _remedy(live: list[Parameter], libraries: list[str]) -> str:
    if not live:
        return "thaw some first: state.thaw(…)"
    if len(libraries) < 2:
        return "take partition(state, model), and the gradient with respect to its parameters from a package that knows them"
    first, second = (next(record.path for record in live if record.library == each) for each in libraries[:2])
    return f'"{first}" is an array of {libraries[0]}, "{second}" one of {libraries[1]}: convert or freeze one kind'


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


def _by_jax(loss: Callable[..., Any], params: dict[str, Any], has_aux: bool) -> tuple[Any, dict[str, Any]]:
    import jax

    value, gradients = jax.value_and_grad(loss, has_aux=has_aux)(params)
    return value, _uphill(gradients)


def _uphill(gradients: dict[str, Any]) -> dict[str, Any]:
    """The gradients of complex parameters as they point uphill."""
    return {name: array.conj() if array.dtype.kind == "c" else array for name, array in gradients.items()}


def _by_nnx(loss: Callable[..., Any], state: State, has_aux: bool) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """With Flax's own transformation, which brings back what the loss writes into the model and its other arguments."""
    from flax import nnx

    def of_params(params: dict[str, Any], model: Any, args: Any, kwargs: Any) -> Any:
        # A graph is differentiated in place: the parameters go into the variables of the model that the trace has.
        _, rebuild = partition(state, model)
        nnx.update(model, nnx.state(rebuild(params), nnx.Param))
        return loss(model, *args, **kwargs)

    def call(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        params, _ = partition(state, model)
        value, gradients = nnx.value_and_grad(of_params, has_aux=has_aux)(params, model, args, kwargs)
        return value, _uphill(gradients)

    return call


def _asking(tensor: Any, *, masked: bool) -> Any:
    """What to differentiate with respect to: the very parameter of a module, wherever that holds it; else a tensor in its place.

    What its owner asked no gradient for gets none here either. Where a place of a parameter is masked, the others differ from it.
    """
    if is_parameter(tensor) and not masked:
        return tensor
    return tensor.detach().requires_grad_(not is_idle(tensor))


def _by_torch(loss: Callable[..., Any], params: dict[str, Any], has_aux: bool) -> tuple[Any, dict[str, Any]]:
    import torch

    with torch.enable_grad():
        found = loss(params)
        value = found[0] if has_aux else found
        if not isinstance(value, torch.Tensor):
            raise GradientError(f"the loss is a {type(value).__name__}, not a tensor; return it without .item() or float()")
        if value.numel() != 1:
            raise GradientError(f"the loss is of shape {list(value.shape)}, not one number; return its mean or its sum")
        if value.is_inference():
            raise GradientError("torch.inference_mode keeps no gradients; leave it before value_and_grad")
        asking = {name: tensor for name, tensor in params.items() if tensor.requires_grad}
        gradients = [None] * len(asking)
        if value.grad_fn is not None and asking:
            gradients = torch.autograd.grad(value, list(asking.values()), allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise GradientError("the loss does not depend on any live parameter of the model that it was given")
    shown = (value.detach(), *found[1:]) if has_aux else value.detach()
    return shown, {name: tensor for name, tensor in zip(asking, gradients, strict=True) if tensor is not None}
