"""Rules in a row: what one returns is the gradient of the next."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

from optimisers.errors import HyperparameterError, suggest
from optimisers.rules.base import Rule, member_names, named
from optimisers.rules.decorator import rule
from optimisers.rules.values import FROM_OPTAX, is_of_optax

__all__ = ["Chain"]


@rule
class Chain(Rule):
    """Rules in a row: what one returns is the gradient of the next, in one pass over memory.

    The empty chain returns the gradient as it is. A chain inside a chain dissolves.

    **Arguments:**

    - `*rules`: the members, in order.

    **Raises** `HyperparameterError` when a member is not a rule.

    Example:
        >>> from optimisers import Adam, Chain, ClipNorm
        >>> Chain(ClipNorm(1.0), Adam(1e-3))
        Chain(ClipNorm(max_norm=1.0), Adam(lr=0.001, betas=(0.9, 0.999), eps=1e-08))
    """

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule) -> None:
        for each in rules:
            if not isinstance(each, Rule):
                hint = {type: "call it", list: "pass its members one by one", tuple: "pass its members one by one"}.get(
                    type(each), ""
                )
                hint = FROM_OPTAX if is_of_optax(each) else hint or ("put the chain into it" if callable(each) else "")
                raise HyperparameterError(f"a chain holds rules, and {each!r} is none" + (f"; {hint}" if hint else ""))
        members = tuple(member for each in rules for member in each.members)
        for before, after in pairwise(members):
            if after.rank < before.rank:
                raise HyperparameterError(
                    f"{type(before).__name__} sees what the whole chain does, so {type(after).__name__} has to stand before it"
                )
        object.__setattr__(self, "rules", members)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"

    @property
    def members(self) -> tuple[Rule, ...]:
        return self.rules

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        """This chain with the rules that its members choose for such a parameter."""
        chosen = [member.rule_for(shape, dtype) for member in self.rules]
        return self if all(new is old for new, old in zip(chosen, self.rules, strict=True)) else type(self)(*chosen)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters of all members; of one that several have, the first member's."""
        merged: dict[str, Any] = {}
        for member in self.rules:
            for name, value in member.hyperparameters.items():
                merged.setdefault(name, value)
        return merged

    def at(self, step: Any) -> Self:
        """This chain with each schedule replaced by its value at a step."""
        return type(self)(*[member.at(step) for member in self.rules])

    def adjusted(self, **changes: Any) -> Self:
        """This chain with a hyperparameter changed in every member that has it; `adam={"lr": 0.1}` speaks to one member."""
        names = member_names(self.rules)
        known = {**self.hyperparameters, **dict.fromkeys(names)}
        for name in changes:
            if name not in known:
                raise HyperparameterError(f'{self!r} has no hyperparameter "{name}"{suggest(name, known)}')
        own = {name: named(name, value) for name, value in changes.items() if name in names and name not in self.hyperparameters}
        # A name may be both: that of the rule Momentum, and of its hyperparameter.
        own |= {name: named(name, value) for name, value in changes.items() if name in names and isinstance(value, Mapping)}
        shared = {name: value for name, value in changes.items() if name not in own}
        members = []
        for name, member in zip(names, self.rules, strict=True):
            for_all = {key: value for key, value in shared.items() if key in member.hyperparameters}
            members.append(member.adjusted(**{**for_all, **own.get(name, {})}))
        return type(self)(*members)
