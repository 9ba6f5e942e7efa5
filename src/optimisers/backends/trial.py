"""Rules tried on two elements, before they meet a model."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from optimisers.backends.array_api import check_shapes, stepped
from optimisers.backends.base import Scalars
from optimisers.backends.namespace import namespace
from optimisers.errors import HyperparameterError, OptimiserError
from optimisers.rules.base import Rule
from optimisers.rules.program import Member

__all__ = ["try_rule"]

_TRIED: WeakKeyDictionary[type[Rule], set[Any]] = WeakKeyDictionary()
"""The kernels of each rule that were tried."""


def try_rule(rule: Rule) -> None:
    """Check the numbers of a rule's first step, what its kernel returns, and that this hangs on the element alone.

    Each kernel is tried once. What stops for other reasons, such as a kernel that takes arrays of another library alone, is not
    judged.

    **Raises** `HyperparameterError`.
    """
    tried = _TRIED.setdefault(type(rule), set())
    if rule.kernel in tried:
        return
    try:
        with np.errstate(all="ignore"):
            _try(rule)
    except OptimiserError:
        raise
    except ValueError as error:
        if "truth value" in str(error):
            raise HyperparameterError(
                f"{type(rule).__name__} asks whether something holds of an element, as `if` does; on whole arrays "
                "there is no one answer: xp.where(condition, x, y) chooses"
            ) from error
    except Exception:  # noqa: BLE001  # whatever a user's code raises, a step will raise as well
        pass
    tried.add(rule.kernel)


def _try(rule: Rule) -> None:
    who = type(rule).__name__
    member = Member.of(rule, who)
    values = rule.at(0).scalars(1, **rule.memory)
    if not isinstance(values, Mapping):
        raise HyperparameterError(f"scalars of {who} returned {values!r}; it returns the numbers of a step by name")
    for name, value in values.items():
        if value is None or isinstance(value, (str, Mapping)) or (isinstance(value, np.ndarray) and value.shape):
            raise HyperparameterError(f'scalars of {who} returned {value!r} for "{name}", which is no number')
    if member.kernel is None or not all(isinstance(value, (bool, int, float, np.number)) for value in values.values()):
        return
    xp = namespace(np)
    h = before = Scalars(**values, **({"key": 0} if member.keyed else {}))
    if member.measured is not None:
        further = member.measured(xp, before, *[1.0] * member.sums)
        if not isinstance(further, Mapping):
            raise HyperparameterError(f"measured of {who} returned {further!r}; it returns further scalars by name")
        h = Scalars(**vars(before), **further)
    arrays = [np.array([0.5, -2.0]), np.array([1.5, 0.25])]
    arrays += [np.array([0.25, 0.75]).astype(slot.dtype or "float64") for _, slot in member.slots]

    def outcome(part: slice) -> list[Any]:
        g, p, *slots = (array[part] for array in arrays)
        step, new = stepped(member, xp, g, p, h, slots)
        found = dict(zip(["the step", *dict(member.slots)], (step, *new), strict=True))
        check_shapes(f"the kernel of {who}", found, [g, *slots])
        return [np.broadcast_to(value, g.shape) for value in (*found.values(), *summed(g, p, slots))]

    def summed(g: Any, p: Any, slots: Sequence[Any]) -> Sequence[Any]:
        if member.measure is None:
            return ()
        returned = member.measure(xp, g, p, before, *slots)
        parts = returned if isinstance(returned, tuple) else (returned,)
        if len(parts) != member.sums:
            raise HyperparameterError(f"measure of {who} returned {len(parts)} values, and it says sums = {member.sums}")
        return parts

    together, first, second = outcome(slice(0, 2)), outcome(slice(0, 1)), outcome(slice(1, 2))
    for both, *alone in zip(together, first, second, strict=True):
        if not np.allclose(both, np.concatenate(alone), rtol=1e-9, atol=0, equal_nan=True):
            raise HyperparameterError(
                f"{who} gives two elements together other values than each alone, and a kernel (and measure) speaks of one "
                "element; for sums over a parameter write measure, for whole arrays apply"
            )
