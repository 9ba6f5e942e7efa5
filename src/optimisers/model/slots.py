"""Slots: fresh ones for a parameter, copies of old ones, and whether a rule can train the parameter at all."""

from importlib import import_module
from typing import Any

import numpy as np

from optimisers.backends.arrays import dtype_name, library_of, namespace_of, numpy_dtype
from optimisers.backends.base import check_parameter
from optimisers.backends.choose import backend_for
from optimisers.errors import StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.rules.base import Rule, Slot, is_traced
from optimisers.rules.program import Program

__all__ = [
    "carried",
    "check_rule",
    "converted",
    "copied",
    "copied_as",
    "fresh_slots",
    "from_numpy",
    "to_numpy",
    "with_started",
]


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


def converted(array: Any, dtype: str, library: str, device: Any) -> Any:
    """A copy as an array of another library, in another dtype, on a device."""
    if library_of(array) != library:
        array = from_numpy(to_numpy(array), library)
    array = copied_as(array, dtype, library)
    if library == "torch" and device is not None:
        from optimisers.backends import spread

        return spread.moved(array, device)
    if library == "jax" and device is not None and not is_traced(array):
        import jax

        return jax.device_put(array, device)
    return array


def to_numpy(array: Any) -> np.ndarray:
    """An array of any library as one of NumPy's, which may share its memory. Of a distributed one, the whole."""
    if library_of(array) != "torch":
        return np.asarray(array)
    array = array.detach()
    array = (array.full_tensor() if hasattr(array, "full_tensor") else array).cpu().resolve_conj().resolve_neg()
    name = dtype_name(array)
    if name == "bfloat16":  # which PyTorch does not hand to NumPy
        return array.view(namespace_of(array).int16).numpy().view(numpy_dtype(name))
    return array.numpy()


def from_numpy(array: np.ndarray, library: str) -> Any:
    """An array of NumPy's as one of another library, which may share its memory."""
    if library == "torch":
        import torch

        array = np.require(array, requirements=["C", "W"])
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    return array if library == "numpy" else import_module({"jax": "jax.numpy"}.get(library, library)).asarray(array)
