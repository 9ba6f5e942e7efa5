"""The state of an optimizer of PyTorch as a dict by name: `state_dict`, and what `load_state_dict` reads."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch

from optimisers.backends.arrays import device_of
from optimisers.errors import HyperparameterError, StateError, listed
from optimisers.interop.torch_groups import (
    RESERVED,
    Groups,
    follows_schedule,
    hyperparameters_at,
    hyperparameters_of,
    name_of,
    with_hyperparameters,
)
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.ties import SAME, View, rows_through, shape_through
from optimisers.rules.base import Rule
from optimisers.slots import slot_dtypes
from optimisers.state import State

__all__ = ["Loaded", "written"]

_VERSION = 1


def written(state: State, groups: Groups, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of a state and of its groups.

    What need not have the same entries in another run is one text, since checkpointers read only entries that they know of before.
    """
    records = [(name_of(record.path), record) for record in state.parameters]
    groups_out = []
    for at, (entry, rule) in enumerate(zip(entries, groups.rules, strict=True)):
        names = [name for name, record in records if groups.owner[record.path] == at]
        rest = {key: value for key, value in entry.items() if key not in RESERVED}
        moving = [key for key, value in hyperparameters_of(rule).items() if follows_schedule(value)]
        groups_out.append({**rest, "params": names, "rule": _form(rule), "schedules": moving})
    document = {
        "frozen": [name for name, record in records if record.frozen],
        "frozen_rows": {name: record.frozen_rows for name, record in records if record.frozen_rows},
        "masked": [name_of(path) for _, record in records for path in sorted(record.masked, key=str)],
        "ties": {name: [name_of(alias.path) for alias in record.aliases] for name, record in records if record.aliases},
        "own": {name_of(path): hyperparameters_at(values, state.step) for path, values in groups.own.items()},
    }
    return {
        "version": _VERSION,
        "state": {name: {**leaf.slots, "step": leaf.step} for (name, _), leaf in zip(records, state.leaves(), strict=True)},
        "param_groups": groups_out,
        "document": json.dumps(document),
        "step": state.step,
        "memory": {name: dict(values) for name, values in state.memory.items()},
    }


def _form(rule: Rule) -> str:
    names = [type(member).__name__ for member in rule.members]
    return names[0] if rule.members == (rule,) else f"Chain({', '.join(names)})"


class Loaded:
    """A state dict read for a state and its groups. It raises before anything has changed.

    `state` is the new state; `order` tells for each group of the file the group here, `rules`, `rest` and `own` what it has now.
    """

    def __init__(self, old: State, groups: Groups, tensors: Mapping[Path, torch.Tensor], given: Mapping[str, Any]) -> None:
        self._old = old
        self._groups = groups
        self._tensors = tensors
        self._given = given
        self._paths = {name_of(path): path for path in tensors}
        self._document = _checked(given)
        self._check_names()
        self.order = self._find_order()
        self.rules, self.rest = self._read_groups()
        _report({word: list(self._misfits(word)) for word in ("missing", "unexpected", "reshaped")})
        self.own = {self._record(name).path: self._read_own(name) for name in self._document["own"]}
        self.state = self._read_state()

    def _record(self, name: str) -> Parameter:
        return self._old.parameters[self._old.layout.index[self._paths[name]]]

    def _check_names(self) -> None:
        """Check that the names and the ties are those of the module."""
        saved = {name: {name, *self._document["ties"].get(name, ())} for name in self._given["state"]}
        names, here = set().union(*saved.values()), {*self._paths}
        _report({"missing": sorted(here - names), "unexpected": sorted(names - here)})
        for name, tied in saved.items():
            places = set(map(name_of, self._record(name).paths))
            if tied != places:
                texts = [" and ".join(sorted(some)) if len(some) > 1 else f"{name} alone" for some in (tied, places)]
                raise StateError(f"the state dict has {texts[0]} as one parameter, the module has {texts[1]}; make them alike")

    def _misfits(self, word: str) -> Iterator[str]:
        """The slots that are missing, unexpected or of another shape or dtype."""
        for name, entry in self._given["state"].items():
            record, view = self._record(name), self._view(name)
            program = self._old.layout.programs[record.group]
            slots, given = dict(program.slots), {key: value for key, value in entry.items() if key != "step"}
            dtypes = dict(zip(slots, slot_dtypes(record, program), strict=True))
            shape = shape_through(view, record.shape)
            if word == "missing" and (given or entry["step"]):
                yield from (f"{name}.{slot}" for slot, kind in slots.items() if slot not in given and not kind.start)
            if word == "unexpected":
                yield from (f"{name}.{slot}" for slot in given if slot not in slots)
            for slot in [name for name in slots if name in given] if word == "reshaped" else ():
                shaped = slots[slot].shape
                wanted, found = tuple(shaped(shape) if shaped else shape), tuple(given[slot].shape)
                kind = str(given[slot].dtype).rpartition(".")[2]
                if (found, kind) != (wanted, dtypes[slot]):
                    yield f"{name}.{slot} is {kind}{list(found)}, here {dtypes[slot]}{list(wanted)}"

    def _view(self, name: str) -> View:
        """How the name that a parameter has in the file is seen from the one that it has here."""
        return self._record(name).view_at(self._paths[name])

    def _find_order(self) -> list[int]:
        """For each group of the file the group here."""
        owner = self._groups.owner
        here = defaultdict[int, set[Path]](set)
        for path, at in owner.items():
            here[at].add(path)
        order = []
        for at, group in enumerate(self._given["param_groups"]):
            members = {self._record(name).path for name in group["params"]}
            match = next((number for number, paths in here.items() if paths == members), None)
            if match is None:
                name = group["params"][0]
                raise StateError(
                    f"group {at} of the state dict, with {name}, has {len(members)} parameters, and here {name} is in a group of "
                    f"{len(here[owner[self._record(name).path]])}; give the optimizer the rules that the other had"
                )
            order.append(match)
        if sorted(order) != list(range(len(here))):
            raise StateError(f"the state dict has {len(order)} groups, and the optimizer has {len(here)}")
        return order

    def _read_groups(self) -> tuple[list[Rule], list[dict[str, Any]]]:
        """The rules of the groups, in the order of the file, and what else there is in them."""
        rules, rests = [], []
        for at, group in zip(self.order, self._given["param_groups"], strict=True):
            rule = self._groups.rules[at]
            if group["rule"] != _form(rule):
                raise StateError(f"the state dict is of {group['rule']}, and {group['params'][0]} has {_form(rule)} here")
            old = hyperparameters_of(rule)
            values = {
                key: group[key] for key in old if key in group and not (key in group["schedules"] and follows_schedule(old[key]))
            }
            rules.append(_taking(rule, values, group["params"][0]))
            known = {*old, *RESERVED, "rule", "schedules"}
            rests.append({key: value for key, value in group.items() if key not in known})
        return rules, rests

    def _read_own(self, name: str) -> dict[str, Any]:
        """The hyperparameters of a parameter that do not follow its group; schedules are those that it has here."""
        old = self._groups.own.get(self._record(name).path, {})
        return {key: old[key] if follows_schedule(old.get(key)) else value for key, value in self._document["own"][name].items()}

    def _read_state(self) -> State:
        old, given = self._old, self._given
        names = {self._record(name).path: name for name in given["state"]}
        frozen, masked = set(self._document["frozen"]), {self._paths[name] for name in self._document["masked"]}
        rules: list[Rule] = []
        kinds: list[tuple[int, dict[str, Any]]] = []
        parameters, slots, counters = [], [], []
        for record in old.parameters:
            name = names[record.path]
            kind = self.order.index(self._groups.owner[record.path]), self.own.get(record.path, {})
            if kind not in kinds:
                kinds.append(kind)
                rules.append(_taking(self.rules[kind[0]], kind[1], name))
            view = self._view(name)
            parameters.append(
                record._replace(
                    group=kinds.index(kind),
                    counter=len(counters),
                    frozen=name in frozen,
                    frozen_rows=self._rows(name, record, view),
                    masked=frozenset(masked & {*record.paths}),
                    device=device_of(self._tensors[record.path], "torch"),
                )
            )
            counters.append(given["state"][name]["step"])
            slots.append(self._slots(name, record, view))
        memory = self._memory()
        return old.arranged(parameters, slots, rules=rules, counters=counters, memory=memory, step=given["step"])

    def _rows(self, name: str, record: Parameter, view: View) -> tuple[tuple[int, int], ...]:
        rows = tuple([(start, stop) for start, stop in self._document["frozen_rows"].get(name, ())])
        if rows and not (rows_through(view) and rows[-1][1] <= record.shape[0]):
            raise StateError(f"{name}: rows of it are frozen, and they are no rows of {record.path} here; thaw them before saving")
        return rows

    def _memory(self) -> Mapping[str, Mapping[str, Any]]:
        """What rules keep for the whole tree: for the members that there are here, under the names that those have."""
        given, old = self._given["memory"], self._old.memory
        for name, values in old.items():
            if name not in given or values.keys() != given[name].keys():
                _damaged(f"memory of {name}", f"{', '.join(values)}", given.get(name))
        if given.keys() - old.keys():
            raise StateError(f"the state dict has the memory of {min(given.keys() - old.keys())}, which no rule here is called")
        return given

    def _slots(self, name: str, record: Parameter, view: View) -> tuple[Any, ...] | None:
        """Copies of the slots of a parameter, where it lies and as it is seen here."""
        kinds, entry = self._old.layout.programs[record.group].slots, self._given["state"][name]
        if not any(slot in entry for slot, _ in kinds):
            return None if kinds else ()
        if view != SAME and any(kind.shape for _, kind in kinds):
            raise StateError(
                f"{name} is {record.path} here, seen {view}, and its slots cannot be turned; register it in the same order"
            )
        device = self._tensors[record.path].device
        return tuple(
            [view.undo(entry[slot].detach()).to(device, copy=True).contiguous() if slot in entry else None for slot, _ in kinds]
        )


def _taking(rule: Rule, changes: Mapping[str, Any], name: str) -> Rule:
    """A rule with the hyperparameters of a state dict."""
    try:
        return with_hyperparameters(rule, changes)
    except HyperparameterError as error:
        raise StateError(f"the state dict does not fit the rule of {name}: {error}") from None


# Checks ---------------------------------------------------------------------------------------------------------------


def _checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that a state dict is one of ours, and that all of its parts are what they have to be. Returns its document.

    **Raises** `StateError`, naming the part.
    """
    parts = ("version", "state", "param_groups", "document", "step", "memory")
    missing = sorted(set(parts) - given.keys())
    if missing:
        hint = ""
        if "version" in missing and "param_groups" in given:
            hint = (
                "; torch.optim's own goes by position: give it to from_torch (optimisers.interop.torch_import), and what that "
                "returns to Optimizer(module, state)"
            )
        raise StateError(f"this is no state dict of this class: it lacks {', '.join(missing)}{hint}")
    if not _is_count(given["version"]):
        _damaged("version", "a number", given["version"])
    if given["version"] > _VERSION:
        raise StateError(f"the state dict is of version {given['version']}, and this library reads {_VERSION}; update it")
    _check_count("step", given["step"])
    state = given["state"]
    _check_mapping("state", state)
    for name, entry in state.items():
        _check_mapping(f"state of {name!r}", entry)
        _check_count(f"step of {name!r}", entry.get("step"))
        for slot, value in entry.items():
            if slot != "step" and not isinstance(value, torch.Tensor):
                _damaged(f"{slot} of {name!r}", "a tensor", value)
    _check_mapping("memory", given["memory"])
    for name, values in given["memory"].items():
        _check_mapping(f"memory of {name!r}", values)
    _check_groups(given["param_groups"], state)
    document = _parsed(given["document"])
    for part in ("frozen_rows", "ties", "own"):
        _check_mapping(part, document[part])
    aliases = {alias for some in document["ties"].values() for alias in _names_in("ties", some)}
    for part in ("frozen", "frozen_rows", "ties", "own"):
        names = document[part]
        _check_known(part, list(names) if isinstance(names, Mapping) else _names_in(part, names), state)
    _check_known("masked", _names_in("masked", document["masked"]), {*state, *aliases})
    for name, values in document["own"].items():
        _check_mapping(f"own of {name!r}", values)
    for name, runs in document["frozen_rows"].items():
        _check_runs(name, runs)
    return document


def _parsed(text: Any) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        _damaged("document", "a text in JSON", text)
    _check_mapping("document", document)
    for part in ("frozen", "frozen_rows", "masked", "ties", "own"):
        if part not in document:
            _damaged("document", f'a mapping with "{part}"', document)
    return document


def _check_groups(groups: Any, state: Mapping[str, Any]) -> None:
    if not _is_list(groups):
        _damaged("param_groups", "a list", groups)
    for at, group in enumerate(groups):
        _check_mapping(f"param_groups[{at}]", group)
        for key in ("params", "schedules"):
            _names_in(f"{key} of param_groups[{at}]", group.get(key))
        if not group["params"]:
            _damaged(f"params of param_groups[{at}]", "a list of names", group["params"])
        if not isinstance(group.get("rule"), str):
            _damaged(f"rule of param_groups[{at}]", "a name", group.get("rule"))
        _check_known(f"param_groups[{at}]", group["params"], state)


def _check_runs(name: str, runs: Any) -> None:
    """Check ranges of rows: ascending, apart, none of them empty."""
    fine = _is_list(runs) and all(_is_list(run) and len(run) == 2 and all(map(_is_count, run)) for run in runs)
    edges = [edge for run in runs for edge in run] if fine else []
    if not fine or any(a >= b for a, b in pairwise(edges)):
        _damaged(f"frozen_rows of {name!r}", "ascending ranges of rows", runs)


def _check_known(part: str, names: Iterable[Any], known: Iterable[str]) -> None:
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise StateError(f"the state dict is damaged: {part} names {unknown[0]!r}, of which it has no state")


def _check_mapping(part: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _damaged(part, "a mapping from names", value)


def _check_count(part: str, value: Any) -> None:
    if not _is_count(value):
        _damaged(part, "a whole number from 0", value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _names_in(part: str, value: Any) -> Sequence[str]:
    if not _is_list(value) or not all(isinstance(each, str) for each in value):
        _damaged(part, "a list of names", value)
    return value


def _damaged(part: str, wanted: str, found: Any) -> NoReturn:
    shown = repr(found) if len(repr(found)) < 40 else f"a {type(found).__name__}"
    raise StateError(f"the state dict is damaged: its {part} is {shown}, and should be {wanted}")


def _report(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise `StateError` for what does not fit, if anything."""
    if any(problems.values()):
        raise StateError(f"the state dict does not fit the module; {listed(problems)}")
