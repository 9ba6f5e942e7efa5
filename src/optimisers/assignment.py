"""Who gets which rule: one for all, a mapping from selectors, or a function of the parameter's record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

from optimisers.errors import HyperparameterError, StateError, where
from optimisers.model.layout import Parameter
from optimisers.model.select import Selector, as_selector, check_names, matching
from optimisers.rules.base import Rule
from optimisers.rules.values import FROM_OPTAX, is_of_optax

__all__ = ["RuleFor", "RuleOf", "assign", "check_kind", "check_selectors", "chooser"]

RuleFor: TypeAlias = Rule | Mapping[Any, Rule] | Callable[[Parameter], Rule]
"""What tells parameters their rules. In a mapping the first selector that matches counts."""


@dataclass(frozen=True)
class RuleOf:
    """A function from a parameter's record to its rule, and what is to be checked once all records are known."""

    choose: Callable[[Parameter], Rule]
    check: Callable[[Sequence[Parameter]], None]
    text: str

    def __repr__(self) -> str:
        return self.text

    def __call__(self, record: Parameter) -> Rule:
        """The rule of a parameter."""
        return self.choose(record)


def check_kind(rule: Any, caller: str) -> None:
    """Check that something can tell parameters their rules.

    **Raises** `HyperparameterError`.
    """
    order = "; the rule comes first, then the model" if caller in ("setup", "layerwise") else ""
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise HyperparameterError(f"{caller} takes a rule, not the class {rule.__name__}; call it: {rule.__name__}()")
    for key, each in rule.items() if isinstance(rule, Mapping) else ():
        if not isinstance(each, Rule):
            shown = repr(each) if len(repr(each)) < 40 else f"a {type(each).__name__}"
            raise HyperparameterError(f"{key!r}: {shown} is not a rule{order}")
    if type(rule).__module__.startswith("torch.optim") or getattr(rule, "__module__", "").startswith("torch.optim"):
        name = getattr(rule, "__name__", type(rule).__name__)
        raise HyperparameterError(
            f"{caller} takes a rule, and this is PyTorch's own {name}; take one of optimisers, or go on with the state of an "
            "optimizer that is running: from_torch, in optimisers.interop.torch_import"
        )
    if isinstance(rule, type):
        raise HyperparameterError(f"{caller} takes a rule, and {rule.__name__} is a class of something else")
    if is_of_optax(rule):
        raise HyperparameterError(f"{caller} takes a rule, and this is a transformation of Optax; {FROM_OPTAX}")
    if not isinstance(rule, (Rule, Mapping)) and not callable(rule):
        raise HyperparameterError(f"{caller} takes a rule, a mapping of rules or a function, not {type(rule).__name__}{order}")


def check_selectors(rule: RuleFor, records: Sequence[Parameter]) -> None:
    """Check that every selector is the first to match something.

    **Raises** `PathError` for one that matches nothing, `StateError` for one that others always come before.
    """
    if isinstance(rule, RuleOf):
        rule.check(records)
    if isinstance(rule, Mapping) and records:
        selectors = _Selectors(rule)
        used = {selectors.first(occurrence) for record in records for occurrence in record.occurrences}
        for key in rule:
            check_names(records, selectors.of[key])
            if key not in used:
                matching(records, key)
                raise StateError(f"the selector {key!r} is never reached: selectors before it match all its parameters; move it up")


def chooser(rule: RuleFor) -> Callable[[Parameter], Rule]:
    """The function from a record to the rule that trains the parameter: where a rule knows a better one for it, that.

    It raises `StateError` when no selector matches, or two that disagree match two paths of one parameter; `HyperparameterError`
    for what is no rule.
    """
    selectors = _Selectors(rule) if isinstance(rule, Mapping) else None

    def choose(record: Parameter) -> Rule:
        given: Any = rule
        if selectors is not None:
            given = selectors.rule_of(record)
        elif not isinstance(rule, Rule):
            given = rule(record)  # type: ignore[operator]  # a mapping has selectors
        if not isinstance(given, Rule):
            raise HyperparameterError(f"{where(record.path)}: {given!r} is not a rule")
        return given.rule_for(record.shape, record.dtype)

    return choose


def assign(rule: RuleFor, records: Sequence[Parameter]) -> tuple[list[Rule], list[int]]:
    """The rules of some parameters, and for each of them the number of its own.

    **Raises** what `chooser` and `check_selectors` raise.
    """
    choose = chooser(rule)
    numbers: dict[Any, int] = {}
    rules: list[Rule] = []
    own: list[int] = []
    for record in records:
        trains = choose(record)
        if numbers.setdefault(trains.key, len(rules)) == len(rules):
            rules.append(trains)
        own.append(numbers[trains.key])
    check_selectors(rule, records)
    if not records and isinstance(rule, (Rule, Mapping)):
        rules = [rule] if isinstance(rule, Rule) else list(rule.values())[:1]
    return rules, own


class _Selectors:
    """The selectors of a mapping, in its order. Branches are looked up, so that thousands of them take no longer than a few."""

    def __init__(self, rules: Mapping[Any, Rule]) -> None:
        self.rules = rules
        self.of: dict[Any, Selector] = {key: as_selector(key) for key in rules}
        self._branches: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._others: list[tuple[int, Any, Selector]] = []
        for at, (key, selector) in enumerate(self.of.items()):
            if selector.branch is None:
                self._others.append((at, key, selector))
            else:
                self._branches.setdefault(selector.branch, (at, key))

    def first(self, occurrence: Parameter) -> Any:
        """The key of the first selector that an occurrence matches, or `None`."""
        path = occurrence.path
        above = [self._branches[path[:depth]] for depth in range(len(path) + 1) if path[:depth] in self._branches]
        at, found = min(above, key=itemgetter(0), default=(len(self.of), None))
        return next((key for other, key, selector in self._others if other < at and selector.selects(occurrence)), found)

    def rule_of(self, record: Parameter) -> Rule:
        """The rule that a parameter gets.

        **Raises** `StateError` when no selector matches it, or two that disagree match two of its paths.
        """
        claims = [(key, each.path) for each in record.occurrences if (key := self.first(each)) is not None]
        if not claims:
            raise StateError(
                f'{where(record.path)}: no selector of the rules matches it; add one, such as "**", that catches the rest'
            )
        (first, here), *others = claims
        for key, path in others:
            if self.rules[key] != self.rules[first]:
                raise StateError(
                    f"{here} and {path} are one parameter, but {first!r} gives it {self.rules[first]!r} and "
                    f"{key!r} gives it {self.rules[key]!r}; let one selector match both, first in the mapping: "
                    f'select.path("{here}") | select.path("{path}")'
                )
        return self.rules[first]
