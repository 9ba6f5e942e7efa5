"""Modules of PyTorch as nodes: their parameters and submodules are their children, under the names of `state_dict`.

Buffers are no children, so they do not train. The shells that `torch.compile` and data parallelism put around a module are left out
of paths, so that one state serves the module with and without them.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cached_property, lru_cache, partial
from operator import is_
from types import MethodType
from typing import Any

from optimisers.errors import ModelError
from optimisers.model.paths import BOXED, Path

__all__ = [
    "apart",
    "buffers",
    "check_values",
    "copy_buffers",
    "declared",
    "is_idle",
    "is_module",
    "is_parameter",
    "lending",
    "standing_as",
    "without_shells",
]

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
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ModelError(f'"{path}" is a tensor of a torch.func transformation; call setup and update outside of it')
    if tensor.is_conj() or tensor.is_neg():
        raise ModelError(f'"{path}" shows the memory of another tensor conjugated or negated; call resolve_conj().resolve_neg()')


def standing_as(array: Any, old: Any) -> Any:
    """An array as what it replaces: in the place of a parameter of a module, a parameter that shares its memory."""
    if is_parameter(array) or not is_parameter(old):
        return array
    from optimisers.backends.torch import like

    return like(old, array.detach())


_lent: ContextVar[dict[int, tuple[Any, list[dict[str, Any]]]] | None] = ContextVar("lent", default=None)
"""Modules that hold other tensors for the time being, by identity, each with what it held before."""


@contextmanager
def lending() -> Iterator[None]:
    """Inside, a module that is rebuilt is not made anew: it holds its new children until the end, as in `functional_call`.

    So what reaches a module by another way than the tree, such as a compiled function, sees them too.
    """
    lent: dict[int, tuple[Any, list[dict[str, Any]]]] = {}
    token = _lent.set(lent)
    try:
        yield
    finally:
        _lent.reset(token)
        for module, before in lent.values():
            for registry, old in zip(_registries(module), before, strict=True):
                registry.update(old)
            _refresh(module)


def apart(module: Any) -> tuple[Mapping[Hashable, Any], Callable[[Mapping[Hashable, Any]], Any]]:
    """The children of a module by key, and the function that makes such a module of others."""
    inner = _inside(type(module))
    children = {_key(name, inner): child for registry in _registries(module) for name, child in registry.items()}

    def make(new: Mapping[Hashable, Any]) -> Any:
        lent = _lent.get()
        if lent is None or id(module) in lent:  # with other children it cannot be lent twice
            return _remade(module, new, inner)
        lent[id(module)] = module, [dict(registry) for registry in _registries(module)]
        for registry in _registries(module):
            registry.update({name: new[_key(name, inner)] for name in registry})
        _refresh(module)
        return module

    return children, make


def _registries(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._modules


def _refresh(module: Any) -> None:
    if hasattr(module, "_init_flat_weights"):
        module._init_flat_weights()  # a recurrent module has a list of its weights beside them


def _remade(module: Any, new: Mapping[Hashable, Any], inner: str | None) -> Any:
    """A module like another one with other children. Its buffers, and all else that is no child, are shared with that."""
    # Some modules refuse copy.copy.
    made: Any = object.__new__(type(module))
    everywhere = vars(sys.modules["torch"].nn.Module())
    instead = _Instead(module, made, new, inner)
    for name, value in vars(module).items():
        if name in ("_parameters", "_modules"):
            vars(made)[name] = {own: new[_key(own, inner)] for own in value}
        elif name in everywhere and isinstance(value, (dict, set)):
            vars(made)[name] = instead(copy(value))  # what is registered with one module is none of the other's
        elif name != "_compiled_call_impl":
            vars(made)[name] = instead(value)
    if inner == "_orig_mod":
        made._initialize()  # its compiled function is that of the module inside
    _refresh(made)
    return made


class _Instead:
    """What stands for a value of the old module in the new one: modules and parameters below it are the new ones."""

    def __init__(self, module: Any, made: Any, new: Mapping[Hashable, Any], inner: str | None) -> None:
        self._module, self._made, self._new, self._inner = module, made, new, inner

    @cached_property
    def _found(self) -> dict[int, Any]:
        found = {id(self._module): self._made}
        for registry in _registries(self._module):
            for name, old in registry.items():
                child = self._new[_key(name, self._inner)]
                found[id(old)] = child
                if hasattr(old, "modules"):
                    found |= zip(map(id, old.modules()), child.modules(), strict=False)
                    found |= zip(map(id, old.parameters()), child.parameters(), strict=False)
        return found

    def __call__(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            owner = self(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            parts = self([value.func, *value.args]), self(value.keywords)
            return partial(*parts[0], **parts[1])
        if type(value) in (list, tuple):
            items = [self(each) for each in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        if type(value) in (dict, OrderedDict):
            items = [self(each) for each in value.values()]
            return value if all(map(is_, items, value.values())) else type(value)(zip(value, items, strict=True))
        if is_module(type(value)) or is_parameter(value):
            return self._found.get(id(value), value)
        return value


def buffers(module: Any, above: tuple[Hashable, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """The persistent buffers of a module that stands at a path, with their paths."""
    inner = _inside(type(module))
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Path((*above, _key(name, None))), buffer
    for name, child in module._modules.items():
        if child is not None:
            yield from buffers(child, above if name == inner else (*above, _key(name, None)))


def copy_buffers(module: Any, own: dict[int, Any]) -> None:
    """Put copies in the place of all buffers of a module; `own` has those that were made already, by the identity of the old."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None:
                if id(buffer) not in own:
                    made = own[id(buffer)] = buffer.detach().clone()
                    own[id(made)] = made
                each._buffers[name] = own[id(buffer)]


def without_shells(path: Path) -> list[Path]:
    """A path without the names that shells around modules put into it."""
    bare = Path([key for key in path if key != "_orig_mod"])
    return [bare, Path(bare[1:])] if bare[:1] == ("module",) else [bare]


def _inside(kind: type) -> str | None:
    """The name of the module inside, where a type is a shell."""
    for base in kind.__mro__:
        if (base.__module__, base.__name__) in _SHELLS:
            return _SHELLS[base.__module__, base.__name__]
    return None


@lru_cache(maxsize=65_536)
def _key(name: str, inner: str | None) -> Hashable:
    if name == inner:
        return BOXED
    return int(name) if name.isdecimal() and str(int(name)) == name else name
