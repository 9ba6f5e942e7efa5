"""A rule as the backends run it: its members in order, without their numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from optimisers.rules.base import Rule, Slot, member_names, static

__all__ = ["Member", "Program", "program_of"]


@dataclass(frozen=True)
class Member:
    """One rule of a program: its functions, its slots and its static options, but none of its numbers."""

    name: str
    kernel: Callable[..., Any] | None
    apply: Callable[..., Any] | None
    apply_tree: Callable[..., Any] | None
    measure: Callable[..., Any] | None
    measured: Callable[..., Any] | None
    remember: Callable[..., Any] | None
    load: Callable[..., Any] | None
    store: Callable[..., Any] | None
    keyed: bool
    scope: str | None
    sums: int
    gate: bool
    slots: tuple[tuple[str, Slot], ...]
    memory: tuple[tuple[str, float], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def elementwise(self) -> bool:
        """Whether it speaks of one element, and of nothing but what is in the arrays."""
        return not (self.apply or self.apply_tree or self.load or self.store)

    @classmethod
    def of(cls, rule: Rule, name: str) -> "Member":
        return cls(
            name=name,
            kernel=rule.kernel,
            apply=rule.apply,
            apply_tree=rule.apply_tree,
            measure=rule.measure,
            measured=rule.measured,
            remember=rule.remember,
            load=rule.load,
            store=rule.store,
            keyed=rule.keyed,
            scope=rule.scope,
            sums=rule.sums,
            gate=rule.gate,
            slots=tuple(rule.slots.items()),
            memory=tuple(rule.memory.items()),
            options=tuple((name, value if name in rule.options else static(value)) for name, value in rule.hyperparameters.items()),
        )


@dataclass(frozen=True)
class Program:
    """The members of a rule. Two rules that differ only in numbers have equal programs."""

    members: tuple[Member, ...]

    @cached_property
    def slots(self) -> tuple[tuple[str, Slot], ...]:
        """Every slot with its name: a name that two members share carries the name of its member."""
        plain = [name for member in self.members for name, _ in member.slots]
        return tuple(
            (name if plain.count(name) == 1 else f"{member.name}.{name}", slot)
            for member in self.members
            for name, slot in member.slots
        )

    @cached_property
    def started(self) -> tuple[int, ...]:
        """Which of all slots start as something other than zeros."""
        return tuple(at for at, (_, slot) in enumerate(self.slots) if slot.start)

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """Where the slots of each member stand among all slots."""
        spans, at = [], 0
        for member in self.members:
            spans.append(slice(at, at + len(member.slots)))
            at += len(member.slots)
        return tuple(spans)

    @cached_property
    def elementwise(self) -> bool:
        """Whether every member speaks of one element, and of nothing but what is in the arrays."""
        return all(member.elementwise for member in self.members)

    def head(self, length: int) -> "Program":
        """The first members alone."""
        return Program(self.members[:length])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.members)


def program_of(rule: Rule) -> Program:
    """The program of a rule."""
    members = rule.members
    return _intern(tuple(map(Member.of, members, member_names(members))))


@lru_cache(maxsize=1024)
def _intern(members: tuple[Member, ...]) -> Program:
    return Program(members)
