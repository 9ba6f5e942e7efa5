"""Modules of PyTorch as nodes: their parameters and submodules are their children, under the names of `state_dict`.

Buffers are no children, so they do not train. The shells that `torch.compile` and data parallelism put around a module are left out
of paths, so that one state serves the module with and without them.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from typing import Any

from optimisers.errors import ModelError
from optimisers.model.paths import BOXED, Path

__all__ = ["apart", "check_values", "declared", "is_idle", "is_module", "is_parameter", "standing_as"]

# Where PyTorch has the classes of shells, and the name that they give the module inside.
_SHELLS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
}


def is_module(kind: type) -> bool:
    """Whether PyTorch is loaded and a type is one of its modules."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.nn.Module)


def declared(kind: type) -> type:
    """The class that a module was declared as: parametrisations and FSDP2 put classes of their own in front."""
    made = kind.__module__.startswith("torch.") and kind.__name__.startswith(("Parametrized", "FSDP"))
    return next((base for base in kind.__mro__[1:] if not base.__name__.startswith("FSDP")), kind) if made else kind


def is_parameter(array: Any) -> bool:
    """Whether an array is a parameter of a module of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.nn.Parameter)


def is_idle(array: Any) -> bool:
    """Whether an array is a parameter of a module that asks for no gradient as yet."""
    return is_parameter(array) and not array.requires_grad


def check_values(path: Path, tensor: Any) -> None:
    """Check that a tensor has values, each in a place of its own.

    **Raises** `ModelError`, naming the path.
    """
    torch = sys.modules["torch"]
    if torch.nn.parameter.is_lazy(tensor):
        raise ModelError(f'"{path}" has no shape as yet, since its module is lazy; run the module once, then call setup')
    if tensor.is_meta:
        raise ModelError(f'"{path}" is on the meta device, where it has no values; call module.to_empty(device=…) first')
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ModelError(f'"{path}" is a {layout} tensor, and only dense ones train; call to_dense(), or leave it out of the model')
    if tensor.is_conj() or tensor.is_neg():
        raise ModelError(f'"{path}" shows the memory of another tensor conjugated or negated; call resolve_conj().resolve_neg()')


def standing_as(array: Any, old: Any) -> Any:
    """An array as what it replaces: in the place of a parameter of a module, a parameter that shares its memory."""
    if old is array or not is_parameter(old):
        return array
    from optimisers.backends.torch import like

    return like(old, array.detach())


def apart(module: Any) -> tuple[Mapping[Hashable, Any], Callable[[Mapping[Hashable, Any]], Any]]:
    """The children of a module by key, and the function that makes such a module of others."""
    inner = _inside(type(module))
    children = {_key(name, inner): child for each in (module._parameters, module._modules) for name, child in each.items()}

    def make(new: Mapping[Hashable, Any]) -> Any:
        # Some modules refuse copy.copy.
        made: Any = object.__new__(type(module))
        own_of_each = vars(sys.modules["torch"].nn.Module())
        made.__dict__.update(module.__dict__)
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_modules"):
                made.__dict__[name] = {own: new[_key(own, inner)] for own in value}
            elif name in own_of_each and isinstance(value, (dict, set)):
                made.__dict__[name] = copy(value)  # what is registered with one module is none of the other's
        if hasattr(made, "_init_flat_weights"):
            made._init_flat_weights()  # a recurrent module has a list of its weights beside them
        return made

    return children, make


def _inside(kind: type) -> str | None:
    """The name of the module inside, where a type is a shell."""
    for base in kind.__mro__:
        if (base.__module__, base.__name__) in _SHELLS:
            return _SHELLS[base.__module__, base.__name__]
    return None


def _key(name: str, inner: str | None) -> Hashable:
    if name == inner:
        return BOXED
    return int(name) if name.isdecimal() and str(int(name)) == name else name
