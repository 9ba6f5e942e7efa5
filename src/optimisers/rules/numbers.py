"""A rule's numbers apart from its form: what is data, and what shapes the computation."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from optimisers.rules.base import Rule, static
from optimisers.rules.values import is_number

__all__ = ["Foreign", "SplitRules", "join", "split", "stack"]


def stack(rules: Sequence[Rule]) -> Rule:
    """One rule that stands for several of the same form: where their numbers differ, a vector of them.

    `scalars` of the result computes for all of them at once.
    """
    first = rules[0]
    if all(each is first for each in rules):
        return first
    columns = {}
    for name, value in first.hyperparameters.items():
        values = [getattr(each, name) for each in rules]
        if isinstance(value, tuple):
            columns[name] = tuple(np.array(part) for part in zip(*values, strict=True))
        else:
            columns[name] = value if static(value) is not None else np.array(values)
    return first.with_values(columns)


def split(rule: Rule) -> tuple[Rule, list[Any]]:
    """A rule without its numbers, which says which functions they go into, and the numbers, in order."""
    if rule.members != (rule,):
        parts = [split(member) for member in rule.members]
        return type(rule)(*(form for form, _ in parts)), [number for _, own in parts for number in own]
    numbers: list[Any] = []

    def taken(name: str, value: Any) -> Any:
        if isinstance(value, Foreign):
            numbers.append(value.value)
        elif _is_data(rule, name, value):
            numbers.append(value)
        else:
            return value
        return _NUMBER

    form = {
        name: tuple([taken(name, part) for part in value]) if isinstance(value, tuple) else taken(name, value)
        for name, value in rule.hyperparameters.items()
    }
    return rule.with_values(form), numbers


def join(form: Rule, numbers: Iterable[Any]) -> Rule:
    """The rule that `split` took apart, with other numbers, or anything else in their place."""
    left = iter(numbers)
    if form.members != (form,):
        return type(form)(*[join(member, left) for member in form.members])

    def given(name: str, value: Any) -> Any:
        if value is not _NUMBER:
            return value
        new = next(left)
        return new if _is_data(form, name, new) else Foreign(new)

    values = {
        name: tuple([given(name, part) for part in value]) if isinstance(value, tuple) else given(name, value)
        for name, value in form.hyperparameters.items()
    }
    return form.with_values(values)


def _is_data(rule: Rule, name: str, value: Any) -> bool:
    """Whether the value of a hyperparameter is a number that may change without another computation."""
    switch = name in rule.switches and isinstance(value, (int, float)) and not value
    return name not in rule.options and is_number(value) and not switch


class SplitRules(NamedTuple):
    """Several rules taken apart."""

    forms: tuple[Rule, ...]
    counts: tuple[int, ...]
    """How many numbers each has."""
    numbers: Sequence[Any]

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> "SplitRules":
        """Take rules apart."""
        parts = [split(rule) for rule in rules]
        return cls(
            tuple([form for form, _ in parts]),
            tuple([len(own) for _, own in parts]),
            [number for _, own in parts for number in own],
        )

    def joined(self) -> tuple[Rule, ...]:
        """The rules, put together again."""
        left = iter(self.numbers)
        return tuple([join(form, islice(left, count)) for form, count in zip(self.forms, self.counts, strict=True)])


class _Number:
    """Stands where a rule has a number."""

    def __repr__(self) -> str:
        return "…"

    def __reduce__(self) -> str:
        return "_NUMBER"


_NUMBER = _Number()


class Foreign:
    """Something in the place of a number, such as the mark of a filter, or where an array is to lie."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)
