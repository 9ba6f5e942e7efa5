"""Modules of PyTorch as nodes: their parameters and submodules are their children, under the names of `state_dict`.

Buffers are no children, so they do not train. The shells that `torch.compile` and data parallelism put around a module are left out
of paths, so that one state serves the module with and without them.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from optimisers.model.paths import BOXED

__all__ = ["apart", "declared", "is_idle", "is_module"]

_SHELLS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}


def is_module(kind: type) -> bool:
    """Whether PyTorch is loaded and a type is one of its modules."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.nn.Module)


def declared(kind: type) -> type:
    """The class that a module was declared as: parametrisations and FSDP2 put classes of their own in front."""
    made = kind.__module__.startswith("torch.") and kind.__name__.startswith(("Parametrized", "FSDP"))
    return next((base for base in kind.__mro__[1:] if not base.__name__.startswith("FSDP")), kind) if made else kind


def is_idle(array: Any) -> bool:
    """Whether an array is a parameter of a module that asks for no gradient as yet."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.nn.Parameter) and not array.requires_grad


def apart(module: Any) -> tuple[Mapping[Hashable, Any], Callable[[Mapping[Hashable, Any]], Any]]:
    """The children of a module by key, and the function that makes such a module of others."""
    inner = _SHELLS.get(type(module).__name__)
    children = {_key(name, inner): child for each in (module._parameters, module._modules) for name, child in each.items()}

    def make(new: Mapping[Hashable, Any]) -> Any:
        # Some modules refuse copy.copy.
        made: Any = object.__new__(type(module))
        made.__dict__.update(module.__dict__)
        for kind in ("_parameters", "_modules"):
            made.__dict__[kind] = {name: new[_key(name, inner)] for name in made.__dict__[kind]}
        if hasattr(made, "_init_flat_weights"):
            made._init_flat_weights()  # a recurrent module has a list of its weights beside them
        return made

    return children, make


def _key(name: str, inner: str | None) -> Hashable:
    if name == inner:
        return BOXED
    return int(name) if name.isdecimal() and str(int(name)) == name else name
