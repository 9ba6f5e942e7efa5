"""Rules in a row: what one returns is the gradient of the next."""

from typing import Any, Self

from optimisers.errors import HyperparameterError, suggest
from optimisers.rules.base import Rule, rule

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
                raise HyperparameterError(f"a chain holds rules, and {each!r} is none" + (f"; {hint}" if hint else ""))
        object.__setattr__(self, "rules", tuple(member for each in rules for member in each.members))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"

    @property
    def members(self) -> tuple[Rule, ...]:
        return self.rules

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters of all members; of one that several have, the first member's."""
        merged: dict[str, Any] = {}
        for member in self.rules:
            for name, value in member.hyperparameters.items():
                merged.setdefault(name, value)
        return merged

    def adjusted(self, **changes: Any) -> Self:
        """This chain with a hyperparameter changed in every member that has it."""
        for name in changes:
            if not any(name in member.hyperparameters for member in self.rules):
                raise HyperparameterError(f'{self!r} has no hyperparameter "{name}"{suggest(name, self.hyperparameters)}')
        return type(self)(
            *(
                member.adjusted(**{name: value for name, value in changes.items() if name in member.hyperparameters})
                for member in self.rules
            )
        )
