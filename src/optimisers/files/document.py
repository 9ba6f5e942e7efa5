"""The document of a state: all of it but its arrays, as plain data by name, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name
from optimisers.errors import OptimiserError, PathError, StateError
from optimisers.files import plain_data, tensors
from optimisers.files.plain_rules import plain_value, rule_as_data, rule_from_data
from optimisers.files.tensors import Contents
from optimisers.model.layout import Alias, Layout, Parameter
from optimisers.model.paths import Path
from optimisers.model.ties import View, shape_through
from optimisers.rules.base import Rule
from optimisers.rules.program import program_of
from optimisers.slots import slot_dtypes
from optimisers.state import State

__all__ = [
    "described",
    "extra_of",
    "path_of",
    "paths_of",
    "read",
    "record_of",
    "restored",
    "slot_name",
    "slot_names",
    "spelled",
]

_SCHEMA = 2
_MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: lambda document: {**document, "extra": None}}
"""From each older schema to the next: what a document of it lacks."""


def slot_name(path: str, slot: str) -> str:
    """The name of a slot in a file, of a path as it is spelled there. Paths quote their slashes, so the last one divides."""
    return f"{path}/{slot}"


def path_of(name: str) -> Path:
    """A name of another tool as a path."""
    try:
        return Path(name)
    except PathError:
        return Path((name,))


def slot_names(document: Any) -> set[str]:
    """The names of all slots that a document speaks of.

    **Raises** `StateError` for a document that describes no state.
    """
    try:
        return {slot_name(entry["path"], slot) for entry in document["parameters"] for slot in entry["slots"] or ()}
    except (KeyError, TypeError) as error:
        raise StateError(f"the document describes no state ({type(error).__name__}: {error})") from error


def paths_of(document: Any) -> list[Path]:
    """All paths that a document speaks of.

    **Raises** `StateError` for a document that describes no state.
    """
    try:
        own = [path for entry in document["parameters"] for path in (entry["path"], *(alias for alias, _ in entry["ties"]))]
        return list(map(Path, [*own, *document["excluded"]]))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the document describes no state ({type(error).__name__}: {error})") from error


def described(state: State, extra: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document of a state and of what a run keeps beside it, and their arrays by name.

    **Raises** `StateError` for what cannot be written: a path with keys of some other type, the memory of a rule that is code,
    extra data that are not plain.
    """
    arrays: dict[str, Any] = {}

    def keep(value: Any) -> str:
        name = f"/numbers/{len(arrays)}"
        arrays[name] = value
        return name

    def number(value: Any) -> Any:
        return {"array": keep(value)} if getattr(value, "shape", ()) != () else plain_value(value)

    rules = [rule_as_data(rule, keep) for rule in state.rules]
    counters, step = list(map(number, state.counters)), number(state.step)
    memory = {name: {key: _memory(name, value, number) for key, value in own.items()} for name, own in state.memory.items()}
    parameters = []
    for record, own in zip(state.parameters, state.slots, strict=True):
        names = [name for name, _ in state.layout.programs[record.group].slots]
        for name, slot in zip(names, own or (), strict=False):
            if slot is not None:
                arrays[slot_name(spelled(record.path), name)] = slot
        parameters.append(
            {
                "path": spelled(record.path),
                "shape": list(record.shape),
                "dtype": record.dtype,
                "library": record.library,
                "rule": record.group,
                "counter": record.counter,
                "slots": None
                if own is None
                else [name if slot is not None else None for name, slot in zip(names, own, strict=True)],
                "frozen": record.frozen,
                "frozen_rows": [list(run) for run in record.frozen_rows],
                "masked": sorted(map(spelled, record.masked)),
                "ties": [[spelled(each.path), [list(map(_listed, step)) for step in each.view.steps]] for each in record.aliases],
                "state_dtype": record.state_dtype,
            }
        )
    document = {
        "schema": _SCHEMA,
        "step": step,
        "counters": counters,
        "rules": rules,
        "memory": memory,
        "parameters": parameters,
        "excluded": sorted(map(spelled, state.layout.excluded)),
        "detached": sorted(map(spelled, state.detached)),
        "extra": _extra(extra, keep),
    }
    return document, arrays


def _extra(extra: Any, keep: Callable[[Any], str]) -> Any:
    try:
        return plain_data.as_data(extra, keep)
    except RecursionError:
        raise StateError("extra is nested too deeply, or holds itself; a file holds trees") from None


def _listed(part: Any) -> Any:
    return list(part) if isinstance(part, tuple) else part


def spelled(path: Path) -> str:
    """The spelling of a path.

    **Raises** `StateError` for one that cannot be read back.
    """
    # The one name that safetensors keeps for itself.
    text = str(path) if path != ("__metadata__",) else path.quoted
    try:
        text.encode()
        same = Path(text) == path
    except (OptimiserError, UnicodeEncodeError):
        same = False
    if not same:
        raise StateError(f"{text!a}: a key of this path is no text, number or literal, so no file can name it")
    return text


def _memory(name: str, value: Any, number: Callable[[Any], Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float)) or hasattr(value, "dtype"):
        return number(value)
    raise StateError(
        f"{name} keeps a {type(value).__name__} for the whole tree, which a file of this library cannot hold; save the state with "
        "the checkpointer of its own library"
    )


# Back -----------------------------------------------------------------------------------------------------------------


def read(file: Any, *, verify: bool = True) -> Contents:
    """What is in a file, its document in the schema of today.

    **Raises** `StateError` for a file that is damaged, or of a later schema; `OSError` for one that cannot be read.
    """
    contents = tensors.read(file, verify=verify)
    return contents if contents.document is None else contents._replace(document=_migrated(contents.document, file))


def extra_of(contents: Contents, file: Any) -> Any:
    """What a run kept beside its state; its arrays as copies."""
    try:
        return plain_data.from_data(contents.document["extra"], lambda name: np.array(contents.arrays[name]))
    except (KeyError, TypeError) as error:
        raise StateError(f"{file}: the document in it is damaged ({type(error).__name__}: {error})") from error


def restored(document: Any, arrays: Mapping[str, Any], given: Callable[[Parameter], Rule] | None, file: Any) -> State:
    """The state that a document describes, of NumPy arrays.

    **Arguments:** `given`: a function from a record to a rule like its own, to take from what is code.

    **Raises** `StateError` for a document that describes no state.
    """
    try:
        return _restored(document, arrays, given, file)
    except OptimiserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"{file}: the document in it describes no state ({type(error).__name__}: {error})") from error


def _migrated(document: Any, file: Any) -> Mapping[str, Any]:
    """A document in the schema of today."""
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise StateError(f"{file}: the document in it has no schema that could be read")
    if schema > _SCHEMA:
        raise StateError(f"{file} is of schema {schema}, and this library reads up to {_SCHEMA}; update it")
    for older in range(schema, _SCHEMA):
        document = {**_MIGRATIONS[older](dict(document)), "schema": older + 1}
    return document


def _restored(document: Mapping[str, Any], arrays: Mapping[str, Any], given: Any, file: Any) -> State:
    def number(value: Any) -> Any:
        return np.array(arrays[value["array"]]) if isinstance(value, Mapping) else value

    parameters = [record_of(entry) for entry in document["parameters"]]
    first = {record.group: record for record in reversed(parameters)}
    rules = [
        rule_from_data(
            data,
            given(first[at]) if given is not None and at in first else None,
            lambda name: np.array(arrays[name]),
            f"{file}: {first[at].path if at in first else 'a rule'}",
        )
        for at, data in enumerate(document["rules"])
    ]
    programs = [program_of(rule) for rule in rules]
    counters = tuple(map(number, document["counters"]))
    step = number(document["step"])
    for value in (*counters, step):
        if isinstance(value, bool) or not isinstance(value, (int, np.ndarray)) or np.any(np.asarray(value) < 0):
            raise StateError(f"{file}: a count in it is {value!r}")
    slots = []
    for record, entry in zip(parameters, document["parameters"], strict=True):
        if not (0 <= record.group < len(rules) and 0 <= record.counter < len(counters)):
            raise StateError(f"{file}: {record.path} names a rule or a count that is not there")
        slots.append(None if entry["slots"] is None else _slots(record, entry["slots"], programs[record.group], arrays, file))
    memory = {name: {key: number(value) for key, value in own.items()} for name, own in document["memory"].items()}
    excluded, detached = (frozenset(map(Path, document[name])) for name in ("excluded", "detached"))
    layout = Layout.of(parameters, programs, excluded)
    if len(layout.index) != sum(len(record.paths) for record in parameters):
        raise StateError(f"{file}: two parameters in it have one path")
    state = State(layout, tuple(rules), counters, step, tuple(slots), {}, detached)
    return state.arranged(parameters, slots, memory=memory)


def record_of(entry: Mapping[str, Any]) -> Parameter:
    """The record of a parameter that a document describes.

    **Raises** errors of several kinds for data that describe none.
    """
    shape = tuple(map(int, entry["shape"]))
    aliases = []
    for path, steps in entry["ties"]:
        view = View(tuple([(str(kind), tuple(map(int, a)), tuple(map(int, b))) for kind, a, b in steps]))
        shape_through(view, shape)  # it has to be one
        aliases.append(Alias(Path(path), view))
    rows = tuple([(int(start), int(stop)) for start, stop in entry["frozen_rows"]])
    edges = [edge for run in rows for edge in run]
    if edges != sorted(set(edges)) or (edges and not 0 <= edges[0] < edges[-1] <= shape[0]):
        raise StateError(f"{entry['path']}: its frozen rows are {rows}")
    record = Parameter(
        path=Path(entry["path"]),
        shape=shape,
        dtype=str(entry["dtype"]),
        library="numpy",
        aliases=tuple(aliases),
        frozen=bool(entry["frozen"]),
        frozen_rows=rows,
        state_dtype=entry["state_dtype"],
        group=entry["rule"],
        counter=entry["counter"],
    )
    return record._replace(masked=frozenset(map(Path, entry["masked"])) & {*record.paths})


def _slots(record: Parameter, names: Any, program: Any, arrays: Mapping[str, Any], file: Any) -> tuple[Any, ...]:
    kinds, dtypes = program.slots, slot_dtypes(record, program)
    if len(names) != len(kinds):
        raise StateError(f"{file}: {record.path} has {len(names)} slots in it, and its rule keeps {len(kinds)}")
    found = []
    for (name, kind), dtype, there in zip(kinds, dtypes, names, strict=True):
        if there is None:
            found.append(None)
            continue
        array = arrays[slot_name(spelled(record.path), name)]
        # Of an ensemble there is an axis in front for each of its members.
        wanted = tuple(kind.shape(record.shape) if kind.shape else record.shape)
        if dtype_name(array) != dtype or tuple(array.shape)[len(array.shape) - len(wanted) :] != wanted:
            raise StateError(f"{file}: {record.path}/{name} is {array.dtype.name}{list(array.shape)}, not {dtype}{list(wanted)}")
        found.append(array)
    return tuple(found)
