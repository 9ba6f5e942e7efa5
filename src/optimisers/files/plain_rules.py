"""Rules and schedules as plain data, and back. What is code (functions, rules of a user's own) is known by name, never run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from optimisers import schedules
from optimisers.backends.arrays import library_of
from optimisers.errors import StateError
from optimisers.rules.base import Rule
from optimisers.rules.chain import Chain

__all__ = ["plain_value", "rule_as_data", "rule_from_data"]

_SCHEDULES = {name: getattr(schedules, name) for name in schedules.__all__ if isinstance(getattr(schedules, name), type)}


def rule_as_data(rule: Rule, keep: Callable[[Any], str]) -> dict[str, Any]:
    """A rule as plain data. `keep` stores an array (the numbers of an ensemble) and returns a name for it.

    **Raises** `StateError` for a rule whose state no file can hold.
    """
    if rule.members != (rule,):
        return {"chain": [rule_as_data(member, keep) for member in rule.members]}
    if rule.unsaved is not None:
        raise StateError(f"{rule!r} {rule.unsaved}")
    own = {} if type(rule).__module__.startswith("optimisers.") else {"own": True}  # one of the user's, whatever its name
    return {
        "rule": type(rule).__name__,
        **own,
        "with": {name: _as_data(value, keep) for name, value in rule.hyperparameters.items()},
    }


def _as_data(value: Any, keep: Callable[[Any], str]) -> Any:
    if isinstance(value, Rule):
        return rule_as_data(value, keep)
    if type(value) in _SCHEDULES.values():
        return {
            "schedule": type(value).__name__,
            "with": {each.name: _as_data(getattr(value, each.name), keep) for each in fields(value)},
        }
    if isinstance(value, tuple) and type(value) is tuple:
        return [_as_data(part, keep) for part in value]
    if library_of(value) is not None and getattr(value, "shape", ()) != ():
        return {"array": keep(value)}
    value = plain_value(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"code": getattr(value, "__qualname__", None) or type(value).__qualname__}


def plain_value(value: Any) -> Any:
    """An array without axes as a number of Python's; anything else as it is."""
    if isinstance(value, np.generic) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        return value.item()
    return value


def rule_from_data(data: Any, given: Rule | None, array: Callable[[str], Any], where: str) -> Rule:
    """The rule that `rule_as_data` wrote.

    **Arguments:** `given`: a rule like it, to take from what is code; `array`: from the name of an array to it; `where`: the path
    that messages name.

    **Raises** `StateError` for what is code and not given, and for data that is none of a rule.
    """
    if not isinstance(data, Mapping):
        raise StateError(f"{where}: {data!r} is not a rule")
    if "chain" in data:
        theirs: Any = given.members if given is not None else ()
        if given is not None and len(theirs) != len(data["chain"]):
            raise StateError(f"{where}: the file has a chain of {len(data['chain'])}, and {given!r} is given for it")
        return Chain(
            *[
                rule_from_data(each, theirs[at] if given is not None else None, array, where)
                for at, each in enumerate(data["chain"])
            ]
        )
    name, values = data["rule"], data["with"]
    if given is not None and type(given).__name__ != name:
        raise StateError(f"{where}: the file has {name} here, and {given!r} is given for it")
    kind = type(given) if given is not None else _kind(name, data.get("own") is True, where)
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # every rule is a dataclass
    if not isinstance(values, Mapping) or not values.keys() <= known:
        unknown = sorted(values.keys() - known) if isinstance(values, Mapping) else [repr(values)]
        raise StateError(f"{where}: {name} has no hyperparameter {', '.join(unknown)}, which the file names")
    made = {
        key: _from_data(value, getattr(given, key) if given is not None else None, array, f"{where}: {name}.{key}")
        for key, value in values.items()
    }
    if any(getattr(part, "ndim", 0) for value in made.values() for part in _parts(value)):
        return object.__new__(kind).with_values(made)  # the numbers of an ensemble, which no constructor takes
    return kind(**made)


def _from_data(data: Any, given: Any, array: Callable[[str], Any], where: str) -> Any:
    if isinstance(data, list):
        parts = given if isinstance(given, tuple) and len(given) == len(data) else [None] * len(data)
        return tuple([_from_data(each, part, array, where) for each, part in zip(data, parts, strict=True)])
    if not isinstance(data, Mapping):
        return data
    if "rule" in data or "chain" in data:
        return rule_from_data(data, given if isinstance(given, Rule) else None, array, where)
    if "array" in data:
        return array(data["array"])
    if "code" in data:
        if given is None:
            raise StateError(f"{where} is {data['code']}, which is code, and a file holds none; give the rule: load(…, rule=…)")
        return given
    kind = _SCHEDULES.get(str(data.get("schedule")))
    if kind is None:
        raise StateError(f"{where}: the file has a schedule {data.get('schedule')!r}, which this library does not know; update it")
    values = data["with"]
    inner = given if type(given) is kind else None
    return kind(
        **{
            name: _from_data(value, getattr(inner, name, None), array, where)
            for name, value in values.items()
            if isinstance(name, str)
        }
    )


def _kind(name: Any, own: bool, where: str) -> type[Rule]:
    """The class of rules of a name, among those that are there already: the library's, or the user's own."""
    found = [each for each in _below(Rule) if each.__name__ == name and is_dataclass(each)]
    found = [each for each in found if each.__module__.startswith("optimisers.") != own]
    if not found:
        raise StateError(
            f"{where}: the file has a rule {name!r}, which is not there; define or import it first, or give load(…, rule=…)"
        )
    return found[-1]


def _below(kind: type[Rule]) -> Iterator[type[Rule]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
