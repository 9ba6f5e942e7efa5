"""Files turned into those of another tool: checkpoints of PyTorch into this library's, and back; values alone, too."""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

from optimisers.backends.arrays import dtype_name, library_of
from optimisers.backends.conversion import converted
from optimisers.errors import PathError, StateError, listed
from optimisers.files.checkpoint import save, without_model
from optimisers.files.document import path_of, read
from optimisers.files.replacing import replacing
from optimisers.files.tensors import write
from optimisers.interop.torch_groups import follows_schedule
from optimisers.model.reading import parameters_of
from optimisers.model.ties import SAME
from optimisers.state import State
from optimisers.surgery import adapt

__all__ = ["convert"]

TORCH = (".pt", ".pth", ".bin")
"""How the names of state dicts of `torch.save` end; a checkpoint of Lightning, which is read alone, ends in `.ckpt`."""


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
    which: int | None = None,
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
    - `which`: the number of the optimizer, where a checkpoint of Lightning has several.

    A state dict of PyTorch knows nothing of what is frozen, of schedules, or of the counts of SGD and Lion; what it lacks is said.

    **Raises** `StateError` for what cannot be read or written so; `OSError` as reading and writing do. No file has changed then.
    """
    if only not in (None, "model", "state"):
        raise StateError(f'only={only!r}: give "model" or "state"')
    ending = File(out).suffix
    if ending != ".safetensors" and ending not in TORCH:
        raise StateError(f"{out}: the ending of a name tells what is to be written: .safetensors, or {', '.join(TORCH)}")
    found = _read(file, model, kind, names, which)
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
    lost = ", ".join(_lost(state, found.extra))
    return "the state dict of an optimizer of PyTorch, its parameters by param_names" + (f"; without {lost}" if lost else "")


# Reading --------------------------------------------------------------------------------------------------------------


def _read(
    file: Any, model: Any = None, kind: str | None = None, names: Sequence[str] | None = None, which: int | None = None
) -> _Found:
    if File(file).is_dir():
        if model is not None or which is not None:
            raise StateError(f"{file} is a folder of the Trainer, with its model and one optimizer; leave model and which out")
        return _read_trainer(file, kind, names)
    if File(file).suffix not in (*TORCH, ".ckpt"):
        if model is not None or kind is not None or names is not None or which is not None:
            raise StateError(f"{file} tells itself what it holds; model, kind, names and which are for files of PyTorch")
        contents = read(file)
        if contents.document is None:
            return _Found(None, contents.arrays)
        loaded = without_model(contents, None, file)
        return _Found(loaded.state, loaded.model, loaded.extra)
    return _read_torch(file, model, kind, names, which)


_MODELS = ("state_dict", "model", "model_state_dict")
"""Under what programs keep the values of a model beside its optimizer."""


def _read_torch(file: Any, model: Any, kind: str | None, names: Sequence[str] | None, which: int | None) -> _Found:
    from optimisers.interop.torch_checkpoints import optimizer_in, read_checkpoint
    from optimisers.interop.torch_import import from_torch

    held = read_checkpoint(file)
    if not isinstance(held, Mapping):
        raise StateError(f"{file} holds a {type(held).__name__}, and neither an optimizer nor a module")
    if held and all(hasattr(each, "dtype") for each in held.values()):
        if model is not None or kind is not None or names is not None or which is not None:
            raise StateError(f"{file} holds values of a model alone; model, kind, names and which are for an optimizer")
        return _Found(None, _named(file, held))
    optimizer, step = optimizer_in(held, file, which)
    if model is not None:
        inside = _read(model)
        if inside.values is None:
            raise StateError(f"{model} holds no values of a model")
        if names is None and not all("param_names" in group for group in optimizer["param_groups"]):
            raise StateError(
                f"{file} has no names of its parameters, and {model} does not tell their order; give their names, in the order in "
                "which the optimizer was given them (--names)"
            )
        values = _everywhere(inside.state, {name: _as_torch(each) for name, each in inside.values.items()})
    elif (key := next((each for each in _MODELS if isinstance(held.get(each), Mapping)), None)) is not None:
        values = {name: each for name, each in held[key].items() if hasattr(each, "dtype")}
    else:
        raise StateError(
            f"{file} holds an optimizer, and no values of its model under {' or '.join(map(repr, _MODELS))}; give a file with "
            "them, too (--model)"
        )
    values = _named(file, values)
    return _Found(from_torch(optimizer, _tree(values), kind=kind, names=names, step=step), _spelled(values))


def _named(file: Any, values: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Values whose names are texts.

    **Raises** `StateError`.
    """
    odd = next((name for name in values if not isinstance(name, str)), None)
    if odd is not None:
        raise StateError(f"{file}: {odd!r} is the name of an array in it, and no text; rename it")
    return values


def _read_trainer(folder: Any, kind: str | None, names: Sequence[str] | None) -> _Found:
    """A folder of the Trainer. Its model tells the order of the parameters, so it is made, by a class of Transformers itself."""
    import transformers

    from optimisers.interop.torch_checkpoints import from_checkpoint

    # No code that lies in the folder is run, whatever it asks for.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
    except ValueError as error:
        raise StateError(f"{folder} is no folder of the Trainer, or its model asks for code of its own: {error}") from error
    name = next(iter(config.architectures or ()), None)
    cls = getattr(transformers, str(name), None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise StateError(f"{folder}: its model is a {name}, which Transformers does not have; use from_checkpoint in Python")
    module = cls.from_pretrained(folder, **options)
    return _Found(from_checkpoint(folder, module, kind=kind, names=names), _spelled(module.state_dict()))


def _spelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the spelled paths under which a state has them."""
    return {str(path_of(name)): value for name, value in values.items()}


def _everywhere(state: State | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by their names, those of ties at each place."""
    found = dict(values)
    for record in state.parameters if state is not None else ():
        for path, view, _ in record.places[1:]:
            found.setdefault(str(path), view.apply(values[str(record.path)]))
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
    # What is a tensor already may share its memory with others, by which ties are known.
    return array if library_of(array) == "torch" else converted(array, dtype_name(array), "torch", None)


# Writing --------------------------------------------------------------------------------------------------------------


def _write_values(out: Any, state: State | None, values: Mapping[str, Any]) -> None:
    if File(out).suffix == ".safetensors":
        values = _everywhere(state, values)
        # As other tools keep them: once, where places hold the same.
        places = parameters_of(OrderedDict(values))
        again = {alias.path for record, _ in places for alias in record.aliases if alias.view == SAME}
        write(out, {name: each for name, each in values.items() if (name,) not in again}, None)
        return
    _torch_save(_everywhere(state, {name: _as_torch(each) for name, each in values.items()}), out)


def _write_optimizer(out: Any, state: State, values: Mapping[str, Any] | None) -> None:
    from optimisers.interop.torch_export import to_state_dict

    if values is None:
        raise StateError("the state dict of an optimizer goes by the arrays of its model, and the file has none")
    trained = {str(record.path): _as_torch(values[str(record.path)]) for record in state.parameters}
    module = _tree(_everywhere(state, trained))
    there, report = adapt(state, module)
    if report.fresh or report.dropped:
        raise StateError(
            f"PyTorch cannot take the state over: {listed({'lost': list(map(str, [*report.fresh, *report.dropped]))})}"
        )
    _torch_save(to_state_dict(there, module), out)


def _lost(state: State, extra: Any) -> Iterator[str]:
    """What a state dict of PyTorch does not hold."""
    if any(record.frozen for record in state.parameters):
        yield "what is frozen"
    if any(follows_schedule(value) for rule in state.rules for member in rule.members for value in member.hyperparameters.values()):
        yield "schedules (their values of now)"
    if not any(member.counts for rule in state.rules for member in rule.members):
        yield "counts of steps"
    if extra is not None:
        yield "what else the run kept"


def _torch_save(value: Any, out: Any) -> None:
    import torch

    with replacing(out) as name:
        torch.save(value, name)
