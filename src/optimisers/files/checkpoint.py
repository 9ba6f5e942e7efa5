"""Saving a run and going on with it: `save` and `load`."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optimisers.assignment import RuleFor, check_kind, chooser
from optimisers.backends.arrays import device_of, dtype_name, library_of, memory_of
from optimisers.backends.base import check_parameter
from optimisers.backends.conversion import converted
from optimisers.errors import ModelError, PathError, StateError, listed
from optimisers.files.document import described, extra_of, path_of, paths_of, read, restored, slot_names, spelled
from optimisers.files.tensors import Contents, write
from optimisers.model.jax_nodes import is_key, key_like, key_numbers
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import open_with, parameters_of
from optimisers.model.renaming import Rename, check_targets, plain_names
from optimisers.model.ties import shape_through
from optimisers.model.torch_nodes import is_parameter
from optimisers.model.trees import buffers_of, opened
from optimisers.rules.base import Rule
from optimisers.rules.descent import Descent
from optimisers.state import State, check_state, check_unspent
from optimisers.surgery import Adapted, Adapting

__all__ = ["Loaded", "load", "save", "without_model"]


class Loaded(NamedTuple):
    """What `load` found.

    - `state`: the state, or `None` in a file without one.
    - `model`: the model with the values of the file; without a model to put them into, a mapping from spelled paths to NumPy
      arrays, or `None` where the file holds no values.
    - `report`: what became of each parameter, or `None` without a model.
    - `extra`: what the run kept beside its state, or `None`; arrays in it are NumPy arrays.
    """

    state: Any
    model: Any
    report: Any
    extra: Any


def save(file: "str | os.PathLike[str]", state: State, model: Any = None, *, extra: Any = None) -> None:
    """Write a state to a safetensors file, by name, and with it the model: all that a resumed run needs.

    Slots stand under `<path>/<slot>` in it, parameters under `<path>`, tied ones once, and so do the other arrays of the model
    (integers, what does not train; of modules of PyTorch the persistent buffers). Everything else (rules and hyperparameters,
    counts, what is frozen or masked, ties) is in one JSON document in the metadata. The file is written under another name,
    flushed to the disk and renamed: whatever happens, the old file or the new one is whole.

    Schedules of this library are written; functions, and classes of rules of your own, are known by name alone and are given
    to `load` again.

    **Arguments:**

    - `file`: where to write.
    - `state`, `model`: the state, and the model to write with it.
    - `extra`: what else the run needs: nested mappings, lists, tuples, numbers, texts and arrays, such as the epoch, the place in
      the data, the state of a random generator. Arrays of any library come back as NumPy arrays, so a state of PyTorch's generator
      is given back with `torch.set_rng_state(torch.from_numpy(extra["rng"]))`.

    **Raises** `ModelError` for a model that is not the state's, `TieError` where tied places hold different values, `DtypeError`
    for a dtype that safetensors lacks, `StateError` for what no file can hold, `OSError` as writing does. The old file is whole
    then.

    Example:
        >>> import numpy as np, optimisers as op, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.safetensors"
        >>> model = {"w": np.ones(3)}
        >>> state, model = op.update(op.setup(op.Adam(), model), model, model)
        >>> op.save(file, state, model, extra={"epoch": 1})
        >>> again, values, _, extra = op.load(file, {"w": np.zeros(3)})
        >>> again == state, values["w"].tolist() == model["w"].tolist(), extra
        (True, True, {'epoch': 1})
    """
    check_state(state, "save")
    check_unspent(state)
    document, arrays = described(state, extra)
    if model is not None:
        view = open_with(state.layout, model)
        for record, array in zip(state.parameters, view.arrays, strict=True):
            check_parameter(record.path, record.shape, record.dtype, record.library, array)
        view.check_ties(frozen=True)
        arrays |= {spelled(record.path): array for record, array in zip(state.parameters, view.arrays, strict=True)}
        arrays |= {spelled(path): array for path, array in _others(state, model)}
    write(file, arrays, {**document, "values": model is not None})


def _others(state: State | None, model: Any) -> Iterator[tuple[Path, Any]]:
    """The arrays of a model that are no parameters of a state, with their paths; of keys for random numbers their own numbers."""
    leaves, structure = opened(model)
    for path, leaf in zip(structure.paths, leaves, strict=True):
        if library_of(leaf) is not None and (state is None or path not in state.layout.index):
            yield path, key_numbers(leaf) if is_key(leaf) else leaf
    yield from buffers_of(model).items()


def load(
    file: "str | os.PathLike[str]",
    model: Any = None,
    *,
    rule: "RuleFor | None" = None,
    strict: bool = True,
    rename: Rename = None,
    resize: Any = None,
    verify: bool = True,
) -> Loaded:
    """Read a state, and the values of the model, from a safetensors file.

    A state that was saved from one array library loads into a model of any other. Files of other tools, which hold values alone
    (`model.safetensors`), load too. Names with `module.` or `_orig_mod.` in front, as data parallelism and `torch.compile` put
    there, are those of the plain model. Nothing in a file is executed.

    **Arguments:**

    - `file`: from `save`.
    - `model`: the model to go on with. The parameters and buffers of modules of PyTorch are written in place; of all other models
      a new one is made. Without it, everything is read into NumPy arrays.
    - `rule`: as `setup` takes it; from it comes what is code in the rules (functions as schedules, classes of your own), and the
      rule of parameters that are new. The numbers come from the file.
    - `strict`: whether every parameter has to be there, with its shape, dtype and ties. Else what fits goes on, as in `adapt`.
    - `rename`, `resize`: as in `adapt`. What they speak of counts as fitting.
    - `verify`: whether checksums are compared, so that damage is noticed.

    **Returns** a `Loaded`: the state, the model, a report, and what else the run kept.

    **Raises** `StateError` for a file that is damaged, of a later schema, or does not fit, with all that is missing, unexpected or
    of another shape by path; `PathError`, `ShapeError` and `HyperparameterError` as `adapt` does; `OSError` for one that cannot be
    read. Nothing has changed then.

    Example: see `save`.
    """
    if not isinstance(file, (str, bytes, os.PathLike)):
        raise ModelError(f"load takes the name of a file and then the model, and not {type(file).__name__} first")
    if model is None and (rename is not None or resize is not None):
        raise StateError("load: rename and resize are for the model that the file is to fit; give it")
    contents = read(file, verify=verify)
    if rule is not None:
        check_kind(rule, "load")
    if model is None:
        return without_model(contents, rule, file)
    found = parameters_of(model)
    places = {path for record, _ in found for path in record.paths} | {path for path, _ in _others(None, model)}
    values = _values(contents)
    names = [*values, *({} if contents.document is None else paths_of(contents.document))]
    new_name = plain_names(rename, names, places)
    check_targets(rename, new_name, names, places)
    there = _renamed(values, new_name)
    if contents.document is None:
        if resize is not None or rule is not None:
            raise StateError(f"{file} holds values and no state; resize and rule are for states")
        return _values_alone(file, model, there, strict)
    records = {path: record for record, _ in found for path in record.paths}
    choose = None if rule is None else chooser(rule)

    def given(record: Parameter) -> Rule:
        assert choose is not None
        here = records.get(new_name(record.path) or record.path)
        return choose(record if here is None else here)

    extra = extra_of(contents, file)
    old = restored(contents.document, contents.arrays, None if choose is None else given, file)
    # Strictly nothing may be new, so any rule will do until that is told.
    for_new = Descent() if strict and rule is None else rule
    adapting = Adapting(old, found, new_name, resize, for_new, values=values)
    state, report = adapting.done()
    if strict:
        _check_fit(file, report, {path for path in report.dropped if new_name(path) is None}, resized=resize is not None)
    if contents.document.get("values") is not True:
        return Loaded(state, model, report, extra)
    known = places | {each for path in old.layout.index if (each := new_name(path)) is not None}
    others = _others_in(file, dict(_others(state, model)), there, strict, known)
    return Loaded(state, _put(model, adapting.carried, others), report, extra)


def _values(contents: Contents) -> dict[Path, np.ndarray]:
    """The values of a model in a file, by path."""
    if contents.document is None:
        return {path_of(name): array for name, array in contents.arrays.items()}
    slots = slot_names(contents.document)
    return {Path(name): array for name, array in contents.arrays.items() if name not in slots and not name.startswith("/")}


def without_model(contents: Contents, rule: "RuleFor | None", file: Any) -> Loaded:
    """What `load` gives of the contents of a file where there is no model to put them into."""
    values = {str(path): np.array(array) for path, array in _values(contents).items()}
    if contents.document is None:
        return Loaded(None, values, None, None)
    extra = extra_of(contents, file)
    state = restored(contents.document, contents.arrays, None if rule is None else chooser(rule), file)
    slots = tuple([own if own is None else tuple(map(_own, own)) for own in state.slots])
    return Loaded(state.evolved(slots=slots), values if contents.document.get("values") is True else None, None, extra)


def _own(array: Any) -> Any:
    """A copy that does not hang on the file."""
    return None if array is None else np.array(array)


def _renamed(values: Mapping[Path, Any], new_name: Callable[[Path], Path | None]) -> dict[Path, Any]:
    """Values by their new names.

    **Raises** `PathError` for two that get one.
    """
    found: dict[Path, Any] = {}
    for path, array in values.items():
        new = new_name(path)
        if new in found:
            raise PathError(f"two arrays of the file would both be called {new}; give them names of their own with rename=…")
        if new is not None:
            found[new] = array
    return found


def _check_fit(file: Any, report: Adapted, given_up: set[Path], *, resized: bool) -> None:
    problems = {
        "missing in it": [str(path) for path, reason in report.fresh.items() if reason == "new"],
        "not in the model": [str(path) for path in report.dropped if path not in given_up],
        "changed": [f"{path} ({reason})" for path, reason in report.fresh.items() if reason != "new"],
        "of another dtype": [f"{path} ({a} -> {b})" for path, (a, b) in report.converted.items() if a.split()[-1] != b.split()[-1]],
        "tied in the model alone": [f"{path} and {other}" for path, other in report.tied.items()],
        "tied in it alone": [f"{path} and {other}" for path, other in report.untied.items()],
    }
    if not resized:
        problems["changed"] += [f"{path} (shape {list(a)} -> {list(b)})" for path, (a, b) in report.resized.items()]
    grown = not resized and any("(shape " in each for each in problems["changed"])
    _raise(file, problems, ', and resize="keep" what both shapes have' if grown else "")


def _raise(file: Any, problems: Mapping[str, list[str]], more: str = "") -> None:
    if any(problems.values()):
        raise StateError(f"{file} does not fit the model; {listed(problems)}; load(…, strict=False) keeps what fits{more}")


def _others_in(
    file: Any, here: Mapping[Path, Any], there: Mapping[Path, Any], strict: bool, known: Collection[Path]
) -> dict[Path, Any]:
    """Values for the arrays of a model that are no parameters."""
    fits = {path: there[path] for path, array in here.items() if path in there and tuple(array.shape) == there[path].shape}
    narrowed = [path for path, array in fits.items() if not _holds(dtype_name(here[path]), array.dtype.name)]
    if strict:
        _raise(
            file,
            {
                "missing in it": [str(path) for path in here if path not in there],
                "not in the model": [str(path) for path in there if path not in known and path not in here],
                "changed": [f"{path} (shape)" for path in here if path in there and path not in fits],
                "of another dtype": [f"{path} ({there[path].dtype.name} -> {dtype_name(here[path])})" for path in narrowed],
            },
        )
    return {path: array for path, array in fits.items() if path not in narrowed}


def _holds(here: str, there: str) -> bool:
    """Whether values of one dtype can go into another: real numbers into real ones, and whatever keeps its value."""
    real = ("float", "bfloat")
    return (here.startswith(real) and there.startswith(real)) or here == there or bool(np.can_cast(there, here))


def _values_alone(file: Any, model: Any, there: Mapping[Path, Any], strict: bool) -> Loaded:
    """The values of a file of another tool. Of tied places one is enough."""
    parameters, missing = [], []
    unfit: dict[Path, str] = {}
    rest = dict(_others(None, model))
    unknown = [path for path in there if path not in rest]
    known = {*rest, *unknown}
    for record, _ in parameters_of(model):
        seen = [(path, view) for path, view, _ in record.places if path in there]
        for path in record.paths:
            rest.pop(path, None)
        if not seen:
            missing.append(record.path)
            continue
        path, view = seen[0]
        if not _holds(record.dtype, there[path].dtype.name):
            unfit[record.path] = f"{there[path].dtype.name} -> {record.dtype}"
        elif there[path].shape != shape_through(view, record.shape):
            unfit[record.path] = f"shape {list(there[path].shape)} -> {list(shape_through(view, record.shape))}"
        else:
            parameters.append((record, converted(view.undo(there[path]), record.dtype, record.library, record.device)))
    if strict:
        _raise(
            file,
            {
                "missing in it": list(map(str, missing)),
                "not in the model": list(map(str, unknown)),
                "changed": [f"{path} ({reason})" for path, reason in unfit.items()],
            },
        )
    report = Adapted(
        kept=tuple(record.path for record, _ in parameters),
        fresh=dict.fromkeys(missing, "not in the file") | unfit,
        dropped=tuple(unknown),
    )
    return Loaded(None, _put(model, parameters, _others_in(file, rest, there, strict, known)), report, None)


def _put(model: Any, parameters: Iterable[tuple[Parameter, Any]], others: Mapping[Path, Any]) -> Any:
    """The model with other values for its parameters and other places. Parameters and buffers of modules are written in place."""
    buffers, (leaves, structure) = buffers_of(model), opened(model)
    new, at = list(leaves), structure.places
    writes: list[tuple[Any, Any]] = []

    def put(path: Path, old: Any, value: Any) -> None:
        if path in buffers or is_parameter(old):
            writes.append((old, value))
        else:
            new[at[path]] = value

    for path, value in others.items():
        old = buffers[path] if path in buffers else leaves[at[path]]
        if is_key(old):
            new[at[path]] = key_like(old, value)
            continue
        library = library_of(old) or "numpy"
        put(path, old, converted(value, dtype_name(old), library, device_of(old, library)))
    for record, value in parameters:
        for path, view, _ in record.places:
            put(path, leaves[at[path]], view.apply(value))
    for old, _ in writes:
        memory = memory_of(old, "torch")
        if old.is_inference() or (memory is not None and memory.overlaps_itself):
            raise ModelError("the model holds a tensor that cannot be written (made in inference mode, or expanded); make it anew")
    if writes:
        import torch

        with torch.no_grad():
            for old, value in writes:
                old.copy_(value)
    return structure.rebuild(model, new) if any(a is not b for a, b in zip(new, leaves, strict=True)) else model
