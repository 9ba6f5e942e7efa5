"""The state of a model that is made of others."""

from collections.abc import Mapping
from typing import Any

from optimisers.backends.conversion import copied
from optimisers.errors import PathError, StateError
from optimisers.leaf import same_value
from optimisers.model.layout import Alias
from optimisers.model.paths import Path
from optimisers.rules.base import Rule
from optimisers.state import State, check_single, check_state, check_step, check_unspent

__all__ = ["compose"]


def compose(states: Mapping[Any, State], *, step: int | None = None) -> State:
    """The state of the model that holds several models under these names, each with its own rule, slots and counts.

    Parameters that two of them share are two parameters here: `adapt` finds their tie, in the model that is made of theirs.

    **Arguments:**

    - `states`: from the name (or path) of each model to its state.
    - `step`: the count that schedules read. By default the greatest of the states'; `schedule.starting_at` begins one anew.

    **Raises** `PathError` for a name that encloses another; `StateError` when rules that decide for the whole tree, such as
    `AccumGrad`, are not equal in all of them, or do not stand alike.

    Example:
        >>> import numpy as np, optimisers as op
        >>> backbone, head = {"w": np.ones(3)}, {"w": np.ones(2)}
        >>> state = op.compose({"backbone": op.setup(op.Adam(), backbone), "head": op.setup(op.SGD(), head)})
        >>> [str(path) for path in state], state["backbone"].rules == op.setup(op.Adam(), backbone).rules
        (['backbone.w', 'head.w'], True)
    """
    if not isinstance(states, Mapping) or not states:
        raise StateError("compose takes a mapping from names to states")
    odd = next((name for name in states if not isinstance(name, (str, int, tuple))), None)
    if odd is not None or None in states:
        raise PathError(f"compose: {odd!r} is no name; give texts, numbers or paths")
    parts = {Path(name): state for name, state in states.items()}
    if len(parts) < len(states):
        raise PathError("two of the names are one path; give each model a name of its own")
    check_step(step, "compose")
    for name, state in parts.items():
        check_state(state, "compose")
        inside = next((other for other in parts if other is not name and other.startswith(name)), None)
        if inside is not None:
            raise PathError(f'"{inside}" lies inside "{name}"; a place can hold one model')
    rules: list[Rule] = []
    counters: list[Any] = []
    parameters, slots, seen = [], [], set[int]()
    for name, state in parts.items():
        check_unspent(state, f"{name}: ")
        check_single(state, f"{name}: ")
        above = (dict,) * len(name)
        for record, own in zip(state.parameters, state.slots, strict=True):
            parameters.append(
                record._replace(
                    path=_below(name, record.path),
                    aliases=tuple(Alias(_below(name, each.path), each.view, above + each.owners) for each in record.aliases),
                    owners=above + record.owners,
                    masked=frozenset(_below(name, path) for path in record.masked),
                    group=len(rules) + record.group,
                    counter=len(counters) + record.counter,
                )
            )
            # The same state under two names has slots of its own under each.
            apart = [copied(slot) if slot is not None and id(slot) in seen else slot for slot in own or ()]
            slots.append(None if own is None else tuple(apart))
            seen |= set(map(id, own or ()))
        rules += state.rules
        counters += state.counters
    memory: dict[str, Mapping[str, Any]] = {}
    for name, state in parts.items():
        for member, values in state.memory.items():
            if not same_value(memory.setdefault(member, values), values):
                raise StateError(
                    f"{name}: {member} decides for the whole tree, and stands otherwise than in the others; take it out of each "
                    "with replace, and put it back after compose: moments and counts stay"
                )
    first = next(iter(parts.values()))
    whole = first.arranged(
        parameters,
        slots,
        rules=rules,
        counters=counters,
        excluded=frozenset(_below(name, path) for name, state in parts.items() for path in state.layout.excluded),
        detached=frozenset(_below(name, path) for name, state in parts.items() for path in state.detached),
        memory=memory,
    )
    return whole.evolved(step=max(state.step for state in parts.values()) if step is None else step)


def _below(name: Path, path: Path) -> Path:
    return Path((*name, *path))
