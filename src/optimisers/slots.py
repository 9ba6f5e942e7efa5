"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from functools import lru_cache
from typing import Any

from optimisers.backends.arrays import slot_dtype
from optimisers.backends.base import check_parameter
from optimisers.backends.choose import backend_for
from optimisers.backends.conversion import copied_as
from optimisers.backends.trial import try_rule
from optimisers.errors import ShapeError, StateError, where
from optimisers.model.layout import Parameter
from optimisers.rules.base import Rule, Slot
from optimisers.rules.program import Program

__all__ = [
    "carried",
    "check_rule",
    "fresh_slots",
    "slot_dtypes",
    "with_started",
]


def check_rule(rule: Rule, parameter: Parameter) -> None:
    """Check that a rule can train a parameter.

    **Raises** `StateError`, naming the path; `HyperparameterError` for a rule that cannot train any.
    """
    for member in rule.members:
        try_rule(member)
        reason = member.refuses(parameter.shape, parameter.dtype)
        if reason is not None:
            raise StateError(f"{where(parameter.path)}: {type(member).__name__} cannot train it: {reason}")


def fresh_slots(parameter: Parameter, program: Program) -> tuple[Any, ...]:
    """Fresh slots; `None` for one whose start hangs on the parameter's values."""
    dtypes = slot_dtypes(parameter, program)
    backend = backend_for(parameter.library, program, (parameter.dtype, *dtypes), parameter.device)
    return tuple(
        [
            None
            if slot.start
            else backend.zeros(
                slot.shape(parameter.shape) if slot.shape else parameter.shape, dtype, parameter.library, parameter.device
            )
            for (_, slot), dtype in zip(program.slots, dtypes, strict=True)
        ]
    )


def with_started(slots: tuple[Any, ...], array: Any, parameter: Parameter, program: Program) -> tuple[Any, ...]:
    """The slots, those that start as a function of the parameter made where they are missing."""
    missing = [at for at in program.started if slots[at] is None]
    if not missing:
        return slots
    check_parameter(parameter.path, parameter.shape, parameter.dtype, parameter.library, array, parameter.device)
    dtypes, made = slot_dtypes(parameter, program), list(slots)
    owners = [member for member in program.members for _ in member.slots]
    for at in missing:
        name, kind = program.slots[at]
        assert kind.start is not None
        started = kind.start(array)
        shape = kind.shape(parameter.shape) if kind.shape else parameter.shape
        found = getattr(started, "shape", None)
        # A rule that acts on whole arrays knows what it makes of them.
        if found is None or (tuple(found) != tuple(shape) and (kind.shape or owners[at].kernel)):
            what = f"shape {list(found)}" if found is not None else repr(started)
            raise ShapeError(f"{where(parameter.path)}: the slot {name} starts as {what}; give it an array of shape {list(shape)}")
        made[at] = copied_as(started, dtypes[at], parameter.library)
    return tuple(made)


def carried(old: Program, slots: tuple[Any, ...] | None, new: Program) -> list[Any]:
    """For each slot of a new program the one of the old that goes on in it, or `None`.

    That is the slot of the same name and kind in the same member; else in a member that the new program lacks.
    """
    if new is old and slots is not None:
        return list(slots)
    left = dict(zip(_places(old), slots or (), strict=False))
    stay = {member.name for member in new.members}
    found = []
    for member, name, kind in _places(new):
        place = (member, name, kind)
        if place not in left:
            place = next((each for each in left if each[1:] == (name, kind) and each[0] not in stay), place)
        found.append(left.pop(place, None))
    return found


def _places(program: Program) -> list[tuple[str, str, Slot]]:
    return [(member.name, name, kind) for member in program.members for name, kind in member.slots]


def slot_dtypes(parameter: Parameter, program: Program) -> tuple[str, ...]:
    """The dtypes of the slots that a program keeps for a parameter."""
    return _slot_dtypes(parameter.dtype, parameter.state_dtype, program)


@lru_cache(maxsize=1024)
def _slot_dtypes(dtype: str, wish: str | None, program: Program) -> tuple[str, ...]:
    return tuple(slot.dtype or slot_dtype(dtype, slot.real, None if slot.wide else wish) for _, slot in program.slots)
