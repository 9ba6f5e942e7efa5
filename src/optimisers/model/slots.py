"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, namespace_of, numpy_dtype
from optimisers.backends.base import check_parameter
from optimisers.backends.choose import backend_for
from optimisers.errors import StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.rules.base import Rule, Slot
from optimisers.rules.program import Program

__all__ = ["carried", "check_rule", "copied", "copied_as", "fresh_slots", "with_started"]


def check_rule(rule: Rule, parameter: Parameter) -> None:
    """Check that a rule can train a parameter.

    **Raises** `StateError`, naming the path.
    """
    for member in rule.members:
        reason = member.refuses(parameter.shape, parameter.dtype)
        if reason is not None:
            raise StateError(f"{parameter.path}: {type(member).__name__} cannot train it: {reason}")


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
    for at in missing:
        start = program.slots[at][1].start
        assert start is not None
        made[at] = copied_as(start(array), dtypes[at], parameter.library)
    return tuple(made)


def carried(old: Program, slots: tuple[Any, ...] | None, new: Program) -> list[Any]:
    """For each slot of a new program the one of the old that goes on in it, or `None`.

    That is the slot of the same name and kind in the same member; else in a member that the new program lacks.
    """
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


def copied(array: Any) -> Any:
    """A contiguous copy."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")
    return namespace_of(array).asarray(array.detach() if hasattr(array, "detach") else array, copy=True)


def copied_as(array: Any, dtype: str, library: str) -> Any:
    """A contiguous copy in another dtype."""
    if library == "numpy":
        return np.array(array, numpy_dtype(dtype), order="C", subok=False)
    array = array.detach() if library == "torch" else array
    made = namespace_of(array)
    return made.asarray(array, copy=True) if dtype_name(array) == dtype else made.astype(array, getattr(made, dtype), copy=True)
