"""Files turned into those of another tool: checkpoints of PyTorch into this library's, and back; values alone, too."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

from optimisers.errors import PathError, StateError
from optimisers.files.checkpoint import load, path_of, save
from optimisers.files.tensors import replacing, write
from optimisers.model.reading import parameters_of
from optimisers.model.ties import SAME
from optimisers.state import State
from optimisers.surgery import adapt

__all__ = ["convert"]

TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""How the names of files of `torch.save` end."""


class _Found(NamedTuple):
    """What a file holds: a state, the values of a model by spelled path, what else the run kept; each may be `None`."""

    state: State | None
    values: Mapping[str, Any] | None
    extra: Any = None


def convert(
    file: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    *,
    model: "str | os.PathLike[str] | None" = None,
    kind: str | None = None,
    names: Sequence[str] | None = None,
    only: str | None = None,
) -> str:
    """Write what is in a file as a file of another kind, which the ending of its name tells. Returns what was written, in words.

    **Arguments:**

    - `file`: a safetensors file of this library or another tool; or of PyTorch (`.pt`, `.pth`, `.bin`, `.ckpt`) a checkpoint of
      Lightning, the state dict of an optimizer or of a module; or a folder of the Trainer of Transformers.
    - `out`: `.safetensors`, for this library, or for all tools where there is no state; or `.pt`, `.pth`, `.bin`: the state dict
      of an optimizer of PyTorch, or that of a module where there is no state.
    - `model`: a file with the values of the model, where `file` has an optimizer alone.
    - `kind`, `names`: the class of the optimizer and the names of its parameters, where a state dict does not tell.
    - `only`: `"model"` or `"state"`, to leave the other out.

    **Raises** `StateError` for what cannot be read or written so; `OSError` as reading and writing do. No file has changed then.
    """
    if only not in (None, "model", "state"):
        raise StateError(f'only={only!r}: give "model" or "state"')
    ending = File(out).suffix
    if ending != ".safetensors" and ending not in TORCH:
        raise StateError(f"{out}: the ending of a name tells what is to be written: .safetensors, or {', '.join(TORCH)}")
    found = _read(file, model, kind, names)
    state = None if only == "model" else found.state
    if only == "state" and state is None:
        raise StateError(f"{file} holds no state")
    if state is None:
        if found.values is None:
            raise StateError(f"{file} holds no values of a model")
        _write_values(out, found.state, found.values)
        return "values of a model"
    if ending == ".safetensors":
        values = None if only == "state" else found.values
        save(out, state, None if values is None else _tree(_everywhere(state, values)), extra=found.extra)
        return f"{state!r}" + ("" if values is None else " and the values of its model")
    _write_optimizer(out, state, found.values)
    return "the state dict of an optimizer of PyTorch, its parameters by param_names"


# Reading --------------------------------------------------------------------------------------------------------------


def _read(file: Any, model: Any, kind: str | None, names: Sequence[str] | None) -> _Found:
    if File(file).is_dir():
        return _read_trainer(file, kind, names)
    if File(file).suffix not in TORCH:
        loaded = load(file)
        if model is not None:
            raise StateError(f"{file} names its parameters itself; --model is for the state dict of an optimizer")
        return _Found(loaded.state, loaded.model, loaded.extra)
    return _read_torch(file, model, kind, names)


def _read_torch(file: Any, model: Any, kind: str | None, names: Sequence[str] | None) -> _Found:
    from optimisers.interop.torch_checkpoints import optimizer_in, read_checkpoint
    from optimisers.interop.torch_import import from_torch

    held = read_checkpoint(file)
    if not isinstance(held, Mapping):
        raise StateError(f"{file} holds a {type(held).__name__}, and neither an optimizer nor a module")
    if held and all(hasattr(each, "dtype") for each in held.values()):
        return _Found(None, held)
    optimizer, step = optimizer_in(file)
    if "state_dict" in held and model is None:
        values = held["state_dict"]
    elif model is None:
        raise StateError(f"{file} holds an optimizer alone; give a file with the values of its model, too (--model)")
    else:
        values = _read(model, None, None, None).values or {}
        named = all("param_names" in group for group in optimizer["param_groups"])
        if names is None and not named and File(model).suffix not in TORCH:
            raise StateError(
                f"{file} has no names of its parameters, and {model} does not tell their order; give their names, in the order in "
                "which the optimizer was given them (--names)"
            )
    values = dict(zip(values, map(_as_torch, values.values()), strict=True))
    return _Found(from_torch(optimizer, _tree(values), kind=kind, names=names, step=step), values)


def _read_trainer(folder: Any, kind: str | None, names: Sequence[str] | None) -> _Found:
    """A folder of the Trainer. Its model tells the order of the parameters, so it is made, by a class of Transformers itself."""
    import transformers

    from optimisers.interop.torch_checkpoints import from_checkpoint

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = next(iter(config.architectures or ()), None)
    cls = getattr(transformers, str(name), None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise StateError(f"{folder}: its model is a {name}, which Transformers does not have; use from_checkpoint in Python")
    module = cls.from_pretrained(folder, local_files_only=True)
    return _Found(from_checkpoint(folder, module, kind=kind, names=names), module.state_dict())


def _everywhere(state: State | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by their names, those of ties at each place."""
    found = dict(values)
    for record in state.parameters if state is not None else ():
        for alias in record.aliases:
            found.setdefault(str(alias.path), alias.view.apply(values[str(record.path)]))
    return found


def _tree(values: Mapping[str, Any]) -> Any:
    """Values by name as nested mappings, in their order.

    **Raises** `PathError` for a name that is also a branch.
    """
    tree: OrderedDict[Any, Any] = OrderedDict()
    for name, value in values.items():
        if not path_of(name):
            return value  # a model that is one array
        *above, last = path_of(name)
        node = tree
        for key in above:
            node = node.setdefault(key, OrderedDict())
            if not isinstance(node, OrderedDict):
                raise PathError(f"{name} lies below another array")
        node[last] = value
    return tree


def _as_torch(array: Any) -> Any:
    from optimisers.backends.arrays import dtype_name
    from optimisers.model.slots import converted

    return converted(array, dtype_name(array), "torch", None)


# Writing --------------------------------------------------------------------------------------------------------------


def _write_values(out: Any, state: State | None, values: Mapping[str, Any]) -> None:
    if File(out).suffix == ".safetensors":
        values = _everywhere(state, values)
        # As other tools keep them: once, where places hold the same.
        places = parameters_of(OrderedDict(values))
        again = {alias.path for record, _ in places for alias in record.aliases if alias.view == SAME}
        write(out, {name: each for name, each in values.items() if (name,) not in again}, None)
        return
    _torch_save(_everywhere(state, dict(zip(values, map(_as_torch, values.values()), strict=True))), out)


def _write_optimizer(out: Any, state: State, values: Mapping[str, Any] | None) -> None:
    from optimisers.interop.torch_import import to_state_dict

    if values is None:
        raise StateError("the state dict of an optimizer goes by the arrays of its model, and the file has none")
    trained = {str(record.path): _as_torch(values[str(record.path)]) for record in state.parameters}
    module = _tree(_everywhere(state, trained))
    _torch_save(to_state_dict(adapt(state, module)[0], module), out)


def _torch_save(value: Any, out: Any) -> None:
    import torch

    with replacing(out) as name:
        torch.save(value, name)
