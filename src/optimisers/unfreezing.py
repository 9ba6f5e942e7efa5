"""Gradual unfreezing: which part of a model wakes at which step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimisers.by_parameter import depths_of
from optimisers.errors import StateError
from optimisers.model.layout import Parameter
from optimisers.model.reading import parameters_of
from optimisers.model.select import Selectable, matching
from optimisers.rules.values import is_traced
from optimisers.state import State, check_state

__all__ = ["Unfreezing"]


@dataclass(frozen=True)
class Unfreezing:
    """A plan by which a model thaws part by part: `state = plan(state)`, before each step.

    What is not due yet is frozen, what is due is live; parameters in no group are left alone. The plan looks at nothing but
    `state.step`, so a run that is resumed goes on with it. Calls between two changes cost next to nothing.

    **Arguments:**

    - `groups`: selectors, in the order in which they thaw. A parameter that several select belongs to the first of them.
    - `at`: the steps at which they thaw, one for each group; or a number n, for 0, n, 2n, …

    **Raises** `StateError` for steps that do not fit, and when called, where nothing would be live; `PathError` for a group that is
    not in the state.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"layers": [np.ones(2), np.ones(2)], "head": np.ones(2)}
        >>> state, plan = op.setup(op.Adam(), model), op.Unfreezing(["head", "layers.1", "layers.0"], at=10)
        >>> for step in range(12):
        ...     state = plan(state)
        ...     state, model = op.update(state, model, model)
        >>> {str(leaf.path): leaf.step for leaf in state.leaves()}
        {'head': 12, 'layers.0': 0, 'layers.1': 2}

    Source: Howard and Ruder (2018).
    """

    groups: tuple[Any, ...]
    at: tuple[int, ...]

    def __init__(self, groups: "Sequence[Selectable]", at: "int | Sequence[int]") -> None:
        steps: Any = at
        listed = isinstance(groups, Sequence) and not isinstance(groups, str)
        if listed and _is_step(at) and at:
            steps = range(0, len(groups) * steps, steps)
        fits = listed and isinstance(steps, Sequence) and len(groups) == len(steps) and all(map(_is_step, steps))
        if not listed:
            raise StateError(f"Unfreezing takes a list of groups, not {groups!r}")
        if not fits or list(steps) != sorted(steps):
            raise StateError(f"Unfreezing takes groups, and a number of steps or for each group its step, ascending; not at={at!r}")
        object.__setattr__(self, "groups", tuple(groups))
        object.__setattr__(self, "at", tuple(steps))

    @classmethod
    def by_depth(
        cls, model: Any, at: "int | Sequence[int]", *, depth: Callable[[Parameter], int | None] | None = None
    ) -> "Unfreezing":
        """The plan that thaws a model from the top down, layer by layer; depths are those of `layerwise`.

        Together with `layerwise` this is discriminative fine-tuning.

        **Raises** `StateError` for a model in which no depth can be told, or a depth that is no whole number.
        """
        records = [record for record, _ in parameters_of(model)]
        found = {record.path: at for record, at in zip(records, depths_of(records, depth), strict=True)}
        known = sorted({each for each in found.values() if each is not None}, reverse=True)
        levels = [None, *known] if None in found.values() else known
        return cls([[tuple(path) for path, each in found.items() if each == level] for level in levels], at)

    def __call__(self, state: State) -> State:
        """The state with what is due live, and what is not due frozen. Itself where that is so already."""
        check_state(state, "Unfreezing")
        if is_traced(state.step):
            raise StateError("a plan freezes and thaws by the number of the step, which jit does not know; call it outside of jit")
        if getattr(state.step, "shape", ()) != ():
            raise StateError("the state of an ensemble has several steps; a plan goes by one")
        due = sum(step <= int(state.step) for step in self.at)
        cache = state.layout.cache
        plan, known, changes = cache.get("unfreezing", (None, None, None))
        # By identity: functions that look alike select different parameters.
        if plan is not self or known != due:
            changes = self._changes(state, due)
            if due < len(self.at) and not any(not changes.get(at, record.frozen) for at, record in enumerate(state.parameters)):
                raise StateError(
                    f"at step {int(state.step)} this plan leaves nothing live, so no step would be counted and nothing ever thaw; "
                    "let its first group thaw at 0"
                )
            cache["unfreezing"] = self, due, changes
        return state.with_frozen(changes) if changes else state

    def _changes(self, state: State, due: int) -> dict[int, bool]:
        """The parameters that are to be frozen or thawed, by their numbers."""
        owner: dict[int, int] = {}
        for group, wish in enumerate(self.groups):
            for at in matching(state.parameters, wish):
                owner.setdefault(at, group)
        return {at: group >= due for at, group in owner.items() if state.parameters[at].frozen != (group >= due)}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
