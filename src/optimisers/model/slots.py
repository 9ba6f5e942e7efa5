"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from typing import Any

import numpy as np

from optimisers.backends.arrays import namespace_of, numpy_dtype
from optimisers.backends.base import check_parameter
from optimisers.backends.choose import backend_for
from optimisers.errors import StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.rules.base import Rule
from optimisers.rules.program import Program

__all__ = ["check_rule", "copied", "copied_as", "fresh_slots", "with_copies"]


def check_rule(rule: Rule, parameter: Parameter) -> None:
    """Check that a rule can train a parameter.

    **Raises** `StateError`, naming the path.
    """
    for member in rule.members:
        reason = member.refuses(parameter.shape, parameter.dtype)
        if reason is not None:
            raise StateError(f"{parameter.path}: {type(member).__name__} cannot train it: {reason}")


def fresh_slots(parameter: Parameter, program: Program) -> tuple[Any, ...]:
    """Fresh slots; `None` for one that starts as a copy of the parameter."""
    dtypes = slot_dtypes(parameter, program)
    backend = backend_for(parameter.library, program, (parameter.dtype, *dtypes))
    return tuple(
        [
            None
            if slot.copy
            else backend.zeros(
                slot.shape(parameter.shape) if slot.shape else parameter.shape, dtype, parameter.library, parameter.device
            )
            for (_, slot), dtype in zip(program.slots, dtypes, strict=True)
        ]
    )


def with_copies(slots: tuple[Any, ...], array: Any, parameter: Parameter, program: Program) -> tuple[Any, ...]:
    """The slots, those that start as a copy of the parameter made where they are missing."""
    dtypes = slot_dtypes(parameter, program)
    missing = [at for at in program.copies if slots[at] is None]
    if missing:
        check_parameter(parameter.path, parameter.shape, parameter.dtype, parameter.library, array)
    made = {at: copied_as(array, dtypes[at]) for at in missing}
    return tuple([made.get(at, slot) for at, slot in enumerate(slots)]) if made else slots


def copied(array: Any) -> Any:
    """A contiguous copy."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else namespace_of(array).asarray(array, copy=True)


def copied_as(array: Any, dtype: str) -> Any:
    """A contiguous copy in another dtype."""
    if isinstance(array, np.ndarray):
        return np.array(array, numpy_dtype(dtype), order="C", subok=False)
    library = namespace_of(array)
    return library.astype(array, getattr(library, dtype), copy=True)
