"""Looking at files: what is in one, how two differ, whether one fits another; and their names changed. Rules may be code here."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from optimisers.errors import PathError, StateError
from optimisers.files.document import path_of, paths_of, read, record_of, slot_name, slot_names, spelled
from optimisers.files.tensors import Contents, write
from optimisers.model.paths import Path
from optimisers.model.renaming import plain_names, renamer
from optimisers.model.ties import shape_through
from optimisers.report import Summary
from optimisers.text import letter_of, notes_of, path_text, shape_text, size_of

__all__ = ["contents_of", "diff", "misfits", "rename", "shown"]

_HEADINGS = ("parameter", "shape", "dtype", "rule", "steps", "state", "notes")


def contents_of(file: "str | os.PathLike[str]") -> dict[str, Any]:
    """What is in a file, as plain data: its parameters, with rule, count, flags, ties and bytes; other arrays; totals.

    **Raises** `StateError` for a file that is damaged, `OSError` for one that cannot be read.
    """
    return _told(read(file), file)


def _told(contents: Contents, file: Any) -> dict[str, Any]:
    others = {
        name: {"shape": list(array.shape), "dtype": array.dtype.name, "bytes": array.nbytes}
        for name, array in contents.arrays.items()
    }
    if contents.document is None:
        total = sum(each["bytes"] for each in others.values())
        return {"schema": None, "parameters": [], "arrays": others, "totals": {"parameters": 0, "elements": 0, "bytes": total}}
    try:
        parameters = [_parameter(entry, contents) for entry in contents.document["parameters"]]
        document = {key: contents.document[key] for key in ("schema", "step", "memory", "excluded", "detached")}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"{file}: the document in it describes no state ({type(error).__name__}: {error})") from error
    for entry in parameters:
        for name in [entry["path"], *(slot_name(entry["path"], slot) for slot in entry["slots"])]:
            others.pop(name, None)
    totals = {
        "parameters": len(parameters),
        "elements": sum(_size(entry["shape"]) for entry in parameters),
        "frozen": sum(entry["frozen"] for entry in parameters),
        "state bytes": sum(entry["bytes"] for entry in parameters),
        "bytes": sum(array.nbytes for array in contents.arrays.values()),
    }
    values = contents.document.get("values") is True
    extra = contents.document["extra"]
    return {**document, "values": values, "extra": extra, "parameters": parameters, "arrays": others, "totals": totals}


def _parameter(entry: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    document, record = contents.document, record_of(entry)
    path = spelled(record.path)
    slots = [slot for slot in entry["slots"] or () if slot is not None]
    return {
        "path": path,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "library": str(entry["library"]),
        "rule": _rule_text(document["rules"][entry["rule"]]),
        "step": document["counters"][entry["counter"]],
        "frozen": record.frozen,
        "frozen_rows": list(map(list, record.frozen_rows)),
        "ties": [spelled(alias.path) for alias in record.aliases],
        "masked": sorted(map(spelled, record.masked)),
        "slots": slots,
        "bytes": sum(contents.arrays[slot_name(path, slot)].nbytes for slot in slots),
    }


def _size(shape: Iterable[int]) -> int:
    return int(np.prod(list(shape), dtype=np.int64))


def _rule_text(data: Any) -> str:
    """A rule of a document as a person reads it."""
    if isinstance(data, list):
        return f"({', '.join(map(_rule_text, data))})"
    if not isinstance(data, Mapping):
        return repr(data)
    if "chain" in data:
        return f"Chain({', '.join(map(_rule_text, data['chain']))})"
    if "code" in data:
        return str(data["code"])
    if "array" in data:
        return "…"
    values = ", ".join(f"{name}={_rule_text(value)}" for name, value in data["with"].items())
    return f"{data.get('rule') or data.get('schedule')}({values})"


def shown(found: Mapping[str, Any]) -> Summary:
    """The contents of a file as a table."""
    letters: dict[str, str] = {}
    rows = []
    for entry in found["parameters"]:
        letter = letters.setdefault(entry["rule"], letter_of(len(letters)))
        ties = dict.fromkeys(entry["ties"], "same")
        notes = notes_of(entry["shape"], entry["frozen"], entry["frozen_rows"], ties, entry["masked"])
        name, shape = path_text(entry["path"]), shape_text(entry["shape"])
        rows.append((name, shape, entry["dtype"], letter, str(entry["step"]), size_of(entry["bytes"]), ", ".join(notes)))
    for name, each in found["arrays"].items():
        rows.append((name, shape_text(each["shape"]), each["dtype"], "", "", size_of(each["bytes"]), "no parameter"))
    totals = found["totals"]
    if not found["parameters"]:
        plain = tuple(
            (name, shape_text(each["shape"]), each["dtype"], size_of(each["bytes"])) for name, each in found["arrays"].items()
        )
        return Summary(("array", "shape", "dtype", "bytes"), plain, (), f"{size_of(totals['bytes'])} in all, and no state")
    many = "s" * (totals["parameters"] != 1)
    parts = [f"{totals['parameters']:,} parameter{many}, {totals['elements']:,} elements", f"step {found['step']}"]
    parts += [f"{size_of(totals['state bytes'])} of state", f"{size_of(totals['bytes'])} in all"]
    return Summary(_HEADINGS, tuple(rows), tuple((letter, text) for text, letter in letters.items()), "; ".join(parts))


# Two files ------------------------------------------------------------------------------------------------------------


def diff(first: "str | os.PathLike[str]", second: "str | os.PathLike[str]") -> dict[str, Any]:
    """How the second file differs from the first, as plain data.

    - `added`, `gone`: names of arrays; `reshaped`: names with both shapes, `cast`: with both dtypes.
    - `moved`: for arrays of other values the greatest change, and the length of the change relative to that of the old values.
    - `changed`: for parameters what else is different: rule, count, flags, ties.
    - `run`: the count of steps, what rules keep for the whole tree, what does not train, where it is different: both.
    - `extra`: what else the runs kept, where it is different: both.
    """
    a, b = read(first), read(second)
    found: dict[str, Any] = {
        "added": sorted(b.arrays.keys() - a.arrays.keys()),
        "gone": sorted(a.arrays.keys() - b.arrays.keys()),
        "reshaped": {},
        "cast": {},
        "moved": {},
        "changed": {},
        "run": {},
        "extra": {},
    }
    for name in sorted(a.arrays.keys() & b.arrays.keys()):
        old, new = a.arrays[name], b.arrays[name]
        if old.dtype != new.dtype:
            found["cast"][name] = [old.dtype.name, new.dtype.name]
        if old.shape != new.shape:
            found["reshaped"][name] = [list(old.shape), list(new.shape)]
        elif not np.array_equal(_bits(old), _bits(new)):
            found["moved"][name] = _distance(old, new)
    both = [_told(a, first), _told(b, second)]
    facts = [{entry["path"]: entry for entry in each["parameters"]} for each in both]
    for path in sorted(facts[0].keys() & facts[1].keys()):
        keys = ("rule", "step", "frozen", "frozen_rows", "ties", "masked")
        own = {key: [facts[0][path][key], facts[1][path][key]] for key in keys if facts[0][path][key] != facts[1][path][key]}
        if own:
            found["changed"][path] = own
    # A file of values alone has nothing of a run.
    for key in ("step", "memory", "excluded", "detached") if all("step" in each for each in both) else ():
        pair = [each.get(key) for each in both]
        if pair[0] != pair[1]:
            found["run"][key] = pair
    extras = [each.get("extra") for each in both]
    extras = [each if isinstance(each, dict) else {} if each is None else {"extra": each} for each in extras]
    for key in sorted(extras[0].keys() | extras[1].keys()):
        pair = [extra.get(key) for extra in extras]
        if pair[0] != pair[1]:
            found["extra"][key] = pair
    return found


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)


def _distance(old: np.ndarray, new: np.ndarray) -> dict[str, float | None]:
    # Of integers every digit counts.
    wide = np.complex128 if old.dtype.kind == "c" else np.longdouble if old.dtype.kind in "iu" else np.float64
    a, b = old.astype(wide).reshape(-1), new.astype(wide).reshape(-1)
    with np.errstate(all="ignore"):
        length, change = _norm(a), b - a
        return {"most": float(np.abs(change).max()), "relative": _norm(change) / length if length else None}


def _norm(array: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(np.abs(array)))))


def misfits(file: "str | os.PathLike[str]", model: "str | os.PathLike[str]") -> list[str]:
    """What of a file does not fit the model whose values another file holds; nothing, when it fits."""
    own, there = read(file), read(model)
    mine = _told(own, file)
    if not mine["parameters"]:
        raise StateError(f"{file} holds no state")
    slots = set() if there.document is None else slot_names(there.document)
    shapes = {path_of(name): array.shape for name, array in there.arrays.items() if name not in slots and not name.startswith("/")}
    for record in () if there.document is None else map(record_of, there.document["parameters"]):
        shapes |= {path: shape_through(view, record.shape) for path, view, _ in record.places}
    records = list(map(record_of, own.document["parameters"]))
    # As loading does, without the shells that DataParallel and torch.compile put in front.
    plain = plain_names(None, {path for record in records for path in record.paths}, shapes.keys())
    found, known = [], {plain(Path(name)) for name in mine["arrays"]}
    for record in records:
        here = {plain(path) or path: shape_through(view, record.shape) for path, view, _ in record.places}
        known |= here.keys()
        if not here.keys() & shapes.keys():
            found.append(f"{record.path}: not in the model")
        found += [
            f"{path}: shape {list(shape)} in the state, {list(shapes[path])} in the model"
            for path, shape in here.items()
            if path in shapes and tuple(shapes[path]) != tuple(shape)
        ]
    return found + [f"{path}: in the model, without a state" for path in shapes if path not in known]


# Names ----------------------------------------------------------------------------------------------------------------


def rename(file: "str | os.PathLike[str]", out: "str | os.PathLike[str]", names: Mapping[Any, Any]) -> dict[str, str]:
    """Write a file whose parameters and other arrays have other names, as `adapt(rename=…)` takes them. Returns what was renamed.

    **Raises** `PathError` for names that match nothing, or two that become one; `StateError` for a file without a state.
    """
    contents = read(file)
    document = contents.document
    if document is None:
        raise StateError(f"{file} holds no state of this library; its names are changed as it is loaded: load(…, rename=…)")
    entries = document["parameters"]
    slots = {
        slot_name(entry["path"], slot): (entry["path"], slot)
        for entry in entries
        for slot in entry["slots"] or ()
        if slot is not None
    }
    places = {Path(name) for name in contents.arrays if name not in slots and not name.startswith("/")}
    places |= set(paths_of(document))
    change = renamer(names, places)
    taken: dict[Path, Path] = {}
    for path in sorted(places, key=str):
        new = change(path)
        if new is None:
            raise PathError(f"{path} would get no name; leave it out of the file when it is loaded: load(…, rename=…)")
        if taken.setdefault(new, path) != path:
            raise PathError(f"{taken[new]} and {path} would both be called {new}")
    for new, old in taken.items():
        above = next((Path(new[:depth]) for depth in range(len(new)) if Path(new[:depth]) in taken), None)
        if above is not None:
            raise PathError(f"{old} would be called {new}, which lies below {taken[above]}, called {above}, and that is an array")
    new_names = {spelled(old): spelled(new) for new, old in taken.items()}

    def named(text: str) -> str:
        return new_names.get(text, text)

    arrays = {}
    for name, array in contents.arrays.items():
        owner, slot = slots.get(name, (name, None))
        arrays[named(owner) if slot is None else slot_name(named(owner), slot)] = array
    parameters = [
        {
            **entry,
            "path": named(entry["path"]),
            "ties": [[named(alias), steps] for alias, steps in entry["ties"]],
            "masked": sorted(map(named, entry["masked"])),
        }
        for entry in entries
    ]
    lists = {key: sorted(map(named, document[key])) for key in ("excluded", "detached")}
    write(out, arrays, {**document, "parameters": parameters, **lists})
    return {old: new for old, new in new_names.items() if old != new}
