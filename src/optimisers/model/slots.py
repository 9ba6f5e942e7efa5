"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, namespace_of, numpy_dtype
from optimisers.backends.base import check_parameter
from optimisers.backends.choose import backend_for
from optimisers.errors import StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.rules.base import Rule
from optimisers.rules.program import Program

__all__ = ["check_rule", "copied", "copied_as", "fresh_slots", "with_started"]


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
    backend = backend_for(parameter.library, program, (parameter.dtype, *dtypes))
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
    check_parameter(parameter.path, parameter.shape, parameter.dtype, parameter.library, array)
    dtypes, made = slot_dtypes(parameter, program), list(slots)
    for at in missing:
        start = program.slots[at][1].start
        assert start is not None
        made[at] = copied_as(start(array), dtypes[at], parameter.library)
    return tuple(made)


def copied(array: Any) -> Any:
    """A contiguous copy."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else namespace_of(array).asarray(array, copy=True)


def copied_as(array: Any, dtype: str, library: str) -> Any:
    """A contiguous copy in another dtype."""
    if library == "numpy":
        return np.array(array, numpy_dtype(dtype), order="C", subok=False)
    made = namespace_of(array)
    return made.asarray(array, copy=True) if dtype_name(array) == dtype else made.astype(array, getattr(made, dtype), copy=True)
