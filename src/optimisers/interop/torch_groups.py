"""`param_groups` of an optimizer of PyTorch and the rules behind them: what is written to a group goes to its rule, and back."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from optimisers.errors import HyperparameterError, StateError, suggest
from optimisers.model.layout import Layout
from optimisers.model.paths import Path
from optimisers.rules.base import Rule, member_names
from optimisers.state import State

__all__ = [
    "ADD",
    "RESERVED",
    "Groups",
    "follows_schedule",
    "hyperparameters_at",
    "hyperparameters_of",
    "name_of",
    "with_hyperparameters",
]

RESERVED = ("params", "param_names")
"""The entries of a group that tell its parameters."""
ADD = "groups follow from the rules, so none can be added; make a new Optimizer with a mapping from selectors to rules"

_Entry = dict[str, Any]


@dataclass
class Groups:
    """The rules behind `param_groups`, one for each, and which parameter is in which."""

    rules: list[Rule]
    owner: dict[Path, int]
    """The group of each parameter."""
    members: list[list[Any]]
    """The tensors of each group."""
    own: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """Hyperparameters that do not follow the group."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Of each group the hyperparameters that were last read from or written to its entry."""
    moving: set[int] = field(default_factory=set)
    """The groups of which some hyperparameter follows a schedule."""
    _parts: tuple[Layout, list[dict[frozenset[str], set[int]]]] | None = None

    @classmethod
    def of(cls, state: State, tensors: Mapping[Path, Any]) -> "Groups":
        """One group for each rule of a state."""
        groups = cls(list(state.rules), {record.path: record.group for record in state.parameters}, [[] for _ in state.rules])
        taken = set[int]()
        for record in state.parameters:
            for path in record.paths:
                if id(tensors[path]) not in taken:
                    taken.add(id(tensors[path]))
                    groups.members[record.group].append(tensors[path])
        return groups

    def entries(self, state: State, tensors: Mapping[Path, Any]) -> list[_Entry]:
        """The `param_groups` to begin with. Places that are tied by their memory alone have a tensor each."""
        names: dict[int, str] = {}
        for record in state.parameters:
            for path in record.paths:
                names.setdefault(id(tensors[path]), name_of(path))
        entries: list[_Entry] = [
            {"params": list(members), "param_names": [names[id(each)] for each in members]} for members in self.members
        ]
        for at in range(len(entries)):
            entries[at] |= hyperparameters_at(self.rules[at], state.step)
            self.seen.append({})
            self.show(entries, at, state.step)
        return entries

    def show(self, entries: Sequence[_Entry], at: int, step: int) -> None:
        """Write the hyperparameters of a rule, as they are at a step, into its entry."""
        raw = hyperparameters_of(self.rules[at])
        values = _now(raw, step)
        entries[at].update({key: value for key, value in values.items() if _plain(key, entries[at][key]) != value})
        self.seen[at] = values
        (self.moving.add if any(map(follows_schedule, raw.values())) else self.moving.discard)(at)

    def read(self, entries: Sequence[_Entry], state: State) -> State:
        """The state with what was written to the entries.

        **Raises** `StateError` when groups or their parameters are others now, `HyperparameterError` for a value that does not fit;
        both name the group.
        """
        if len(entries) != len(self.seen):
            raise StateError(f"the optimizer has {len(self.seen)} groups, and param_groups now has {len(entries)}; {ADD}")
        written: dict[int, dict[str, Any]] = {}
        for at, (entry, seen, members) in enumerate(zip(entries, self.seen, self.members, strict=True)):
            given = entry.get("params", ())
            if len(given) != len(members) or not all(map(is_, given, members)):
                raise StateError(f'param_groups[{at}]["params"] holds other parameters than before; {ADD}')
            missing = seen.keys() - entry.keys()
            if missing:
                raise HyperparameterError(f"param_groups[{at}] has no {min(missing)} any more; put it back")
            if any(_differs(entry[key], value) for key, value in seen.items()):
                plain = {key: _plain(f"param_groups[{at}]: {key}", entry[key]) for key in seen}
                written[at] = {key: value for key, value in plain.items() if value != seen[key]}
        if not any(written.values()):
            return state
        rules, own = list(self.rules), list(state.rules)
        for at, changes in written.items():
            try:
                rules[at] = with_hyperparameters(self.rules[at], changes)
                for apart, numbers in self._numbers(state)[at].items():
                    left = {key: value for key, value in changes.items() if key not in apart}
                    for number in numbers:
                        same = not apart and state.rules[number] is self.rules[at]
                        own[number] = rules[at] if same else with_hyperparameters(own[number], left)
            except HyperparameterError as error:
                begun = "momentum" in changes and self.seen[at]["momentum"] == 0
                hint = "; begin with a momentum above 0, or keep schedulers from it (cycle_momentum=False)" if begun else ""
                raise HyperparameterError(f"param_groups[{at}]: {error}{hint}") from None
        state = _with_rules(state, own)
        self.rules = rules
        for at, changes in written.items():
            self.seen[at].update(changes)
            if at in self.moving or any(map(follows_schedule, changes.values())):
                self.show(entries, at, state.step)
        return state

    def _numbers(self, state: State) -> "list[dict[frozenset[str], set[int]]]":
        """For each group the numbers of the state's, by the hyperparameters that do not follow the group."""
        if self._parts is None or self._parts[0] is not state.layout:
            parts: list[dict[frozenset[str], set[int]]] = [{} for _ in self.rules]
            for record in state.parameters:
                apart = frozenset(self.own.get(record.path, ()))
                parts[self.owner[record.path]].setdefault(apart, set()).add(record.group)
            self._parts = state.layout, parts
        return self._parts[1]

    def adjusted(self, before: State, after: State) -> None:
        """Follow a change of hyperparameters: one of a whole group is the group's, another one belongs to its parameters alone."""
        rules, own = list(self.rules), {path: dict(values) for path, values in self.own.items()}
        raw = [[hyperparameters_of(rule) for rule in state.rules] for state in (before, after)]
        members: list[list[tuple[Path, Any, Any]]] = [[] for _ in rules]
        for old, new in zip(before.parameters, after.parameters, strict=True):
            members[self.owner[new.path]].append((new.path, raw[0][old.group], raw[1][new.group]))
        for at, group in enumerate(members):
            for key in _keys(rules[at]):
                moved = {path: new[key] for path, old, new in group if old[key] != new[key]}
                first = group[0][2][key]
                if moved and all(new[key] == first for _, _, new in group):
                    rules[at] = with_hyperparameters(rules[at], {key: first})
                    for path, _, _ in group:
                        own.get(path, {}).pop(key, None)
                else:
                    for path, value in moved.items():
                        own.setdefault(path, {})[key] = value
        self.rules, self._parts = rules, None
        self.own = {path: values for path, values in own.items() if values}

    def apart(self, at: int) -> str:
        """Which hyperparameters of a group some of its parameters have for themselves, as the tail of a line."""
        own = [values for path, values in self.own.items() if self.owner[path] == at]
        return f"; {len(own)} of them with their own {', '.join(sorted(set().union(*own)))}" if own else ""

    def reordered(self, order: Sequence[int], rules: Sequence[Rule], own: Mapping[Path, dict[str, Any]]) -> None:
        """Stand in another order, with other rules."""
        self.members = [self.members[at] for at in order]
        self.owner = {path: order.index(at) for path, at in self.owner.items()}
        self.seen, self.moving = [self.seen[at] for at in order], {order.index(at) for at in self.moving}
        self.rules, self.own, self._parts = list(rules), dict(own), None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_parts": None}


def name_of(path: Path) -> str:
    """The name of a place in `state_dict`."""
    return ".".join(map(str, path))


# Hyperparameters by the keys that they have in a group -----------------------------------------------------------------


def _keys(rule: Rule) -> dict[str, tuple[str, str]]:
    """The keys that the hyperparameters of a rule have in a group: for each the member of the chain and the name there."""
    places = [
        (member, name)
        for member, each in zip(member_names(rule.members), rule.members, strict=True)
        for name, value in each.hyperparameters.items()
        if not isinstance(value, Rule)
    ]
    counts = Counter(name for _, name in places)
    rate = None if rule.rate is None else (rule.rate[0], "lr")
    alone = {place for place in places if (counts[place[1]] == 1 or place == rate) and place[1] not in RESERVED}
    return {place[1] if place in alone else ".".join(place): place for place in places}


def hyperparameters_of(rule: Rule) -> dict[str, Any]:
    """The hyperparameters of a rule by key; schedules as they are."""
    members = dict(zip(member_names(rule.members), rule.members, strict=True))
    return {key: members[member].hyperparameters[name] for key, (member, name) in _keys(rule).items()}


def hyperparameters_at(rule: "Rule | Mapping[str, Any]", step: int) -> dict[str, Any]:
    """The hyperparameters of a rule by key, or those that are given, as they are at a step."""
    return _now(hyperparameters_of(rule) if isinstance(rule, Rule) else rule, step)


def with_hyperparameters(rule: Rule, changes: Mapping[str, Any]) -> Rule:
    """A rule with other values of its hyperparameters, by key.

    **Raises** `HyperparameterError` for a key that it does not have, or a value out of range.
    """
    keys, nested = _keys(rule), defaultdict[str, dict[str, Any]](dict)
    for key, value in changes.items():
        if key not in keys:
            raise HyperparameterError(f'{rule!r} has no hyperparameter "{key}"{suggest(key, keys)}')
        member, name = keys[key]
        nested[member][name] = _plain(key, value)
    return rule.adjusted(**nested) if nested else rule


def follows_schedule(value: Any) -> bool:
    """Whether a hyperparameter is a function of the step, or a part of it is."""
    return any(map(follows_schedule, value)) if isinstance(value, tuple) else callable(value)


def _now(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    return {key: _plain(key, _at(value, step)) for key, value in values.items()}


def _at(value: Any, step: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(part, step) for part in value)
    return value(step) if callable(value) else value


def _differs(value: Any, seen: Any) -> bool:
    return not isinstance(value, type(seen)) or bool(value != seen)


def _plain(key: str, value: Any) -> Any:
    """A hyperparameter as Python's numbers: schedulers may write tensors and lists."""
    if isinstance(value, (tuple, list)):
        return tuple([_plain(key, part) for part in value])
    if not hasattr(value, "item"):
        return value
    if getattr(value, "size", None) != 1 and getattr(value, "numel", lambda: 1)() != 1:
        raise HyperparameterError(f"{key} is one number, not an array of shape {tuple(value.shape)}")
    return value.item()


def _with_rules(state: State, rules: Iterable[Rule]) -> State:
    """A state whose rules have other numbers."""
    if any(member.memory for program in state.layout.programs for member in program.members):
        # It is checked whether those that decide for the whole tree are still equal.
        return state.arranged(state.parameters, state.slots, rules=list(rules))
    return state.evolved(rules=tuple(rules))
