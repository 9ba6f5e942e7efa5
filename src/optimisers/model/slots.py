"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from typing import Any

import numpy as np

from optimisers.backends.arrays import namespace_of
from optimisers.backends.choose import backend_for
from optimisers.errors import StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.rules.base import Rule
from optimisers.rules.program import Program

__all__ = ["check_rule", "copied", "zeros_for"]


def check_rule(rule: Rule, parameter: Parameter) -> None:
    """Check that a rule can train a parameter.

    **Raises** `StateError`, naming the path.
    """
    for member in rule.members:
        reason = member.refuses(parameter.shape, parameter.dtype)
        if reason is not None:
            raise StateError(f"{parameter.path}: {type(member).__name__} cannot train it: {reason}")


def zeros_for(parameter: Parameter, program: Program) -> tuple[Any, ...]:
    """Fresh slots."""
    dtypes = slot_dtypes(parameter, program)
    backend = backend_for(parameter.library, program, (parameter.dtype, *dtypes))
    return tuple(
        [
            backend.zeros(
                slot.shape(parameter.shape) if slot.shape else parameter.shape, dtype, parameter.library, parameter.device
            )
            for (_, slot), dtype in zip(program.slots, dtypes, strict=True)
        ]
    )


def copied(array: Any) -> Any:
    """A contiguous copy."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else namespace_of(array).asarray(array, copy=True)
