"""The way of a step: open the model, gather gradients, run each batch in its backend, put the arrays back."""

from collections.abc import Callable, Sequence
from typing import Any

from optimisers.backends.arrays import WRITABLE
from optimisers.backends.base import check_parameter
from optimisers.backends.conversion import copied
from optimisers.backends.overlap import untangle
from optimisers.decisions import Job, decide
from optimisers.errors import TieError
from optimisers.gradients import gather
from optimisers.model.reading import Opened, open_with
from optimisers.model.ties import same_memory
from optimisers.model.torch_nodes import standing_as
from optimisers.plan import counted, plan_for
from optimisers.rules.values import is_traced
from optimisers.state import State, check_state, check_unspent

__all__ = ["step", "update", "update_"]


def update(state: State, model: Any, grads: Any = None) -> tuple[State, Any]:
    """Take one step. Neither argument changes.

    **Arguments:**

    - `state`: from `setup`.
    - `model`: the model it was made for.
    - `grads`: a tree like the model, in which `None` may stand for any leaf or branch; or a mapping from paths to arrays. A
      missing gradient means no step for that parameter: its moments and its count stay. Zero is a gradient like any other. For a
      tied parameter, the gradients of its occurrences are added.

    **Returns** the new state and the new model. What did not move is shared with the old ones.

    **Raises** `ModelError` for a model that is not the state's, `GradientError`, `ShapeError` or `DtypeError` for gradients that do
    not fit, `TieError` when tied places hold different values; each names the path, and nothing has changed.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.array([1.0, 2.0])}
        >>> state = op.setup(op.Descent(0.1), model)
        >>> state, model = op.update(state, model, {"w": np.array([1.0, 10.0])})
        >>> model["w"], state.step
        (array([0.9, 1. ]), 1)
    """
    return step(state, model, grads, in_place=False)


def update_(state: State, model: Any, grads: Any = None) -> tuple[State, Any]:
    """Take one step, writing into the arrays of the state and the model where they can be written. Use what it returns.

    Arguments, results and errors are those of `update`; the numbers are the same, bit for bit. An array that cannot be written
    (read-only, or immutable by nature) is replaced in the model that is returned.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.array([1.0, 2.0])}
        >>> state = op.setup(op.Descent(0.1), model)
        >>> state, same = op.update_(state, model, {"w": np.array([1.0, 10.0])})
        >>> same is model, model["w"]
        (True, array([0.9, 1. ]))
    """
    return step(state, model, grads, in_place=True)


def step(state: State, model: Any, grads: Any, *, in_place: bool, watch: Callable[..., None] | None = None) -> tuple[State, Any]:
    """Take one step; `watch(jobs, arrays, gradients)` is called when all is decided and nothing is written."""
    check_state(state, "update")
    check_unspent(state)
    view = open_with(state.layout, model)
    gradients = gather(grads, state.layout, view)
    plan = plan_for(state.layout, gradients)
    if view.aliases:
        view.check_ties()
    arrays, changed = _apart(state, view)
    for at in plan.waiting:
        record = state.parameters[at]
        check_parameter(record.path, record.shape, record.dtype, record.library, arrays[at], record.device)
    missing = [at for part in plan.parts for at in part.members if state.slots[at] is None]
    given, state = state, state.with_started(arrays, [*plan.starting, *missing])
    jobs = [Job(part, state, arrays, gradients, in_place) for part in plan.parts]
    for job in jobs:
        job.part.backend.prepare(job.batch)
    if in_place:
        untangle([job.batch for job in jobs])
    memory = decide(jobs, state)
    if watch is not None:
        watch(jobs, arrays, gradients)
    # What is interrupted from here on has written some of it.
    given.spent = in_place
    slots, wrote = state.slots, []
    for job in jobs:
        params, new_slots = job.part.backend.run(job.batch, job.length, step=job.open)
        if params is not job.params:
            changed |= {at: new for at, old, new in zip(job.part.members, job.params, params, strict=True) if new is not old}
        wrote.append(in_place and _written(job, new_slots))
        if new_slots is not job.slots:
            slots = _replaced(slots, job.part.members, new_slots)
    layout, counters, count = counted(state, plan, [job.open and job.passed for job in jobs])
    addresses = state.addresses if slots is state.slots else None
    # What is left of the old state is its counts, which no longer go with its slots.
    given.spent = any(wrote)
    # What is static in a traced step stays, or it would be compiled twice.
    detached = frozenset(path for path in state.detached if is_traced(arrays[layout.index[path]]))
    new_state = State(layout, state.rules, counters, count, slots, memory, detached, addresses)
    # An alias of its own is put back into line even where the parameter was written in place.
    if in_place and view.aliases:
        changed |= {
            at: arrays[at]
            for at, place, view_ in view.aliases
            if at not in changed and gradients[at] is not None and not same_memory(arrays[at], view.leaves[place], view_)
        }
    return new_state, view.put(changed) if changed else model


def _apart(state: State, view: Opened) -> tuple[Sequence[Any], dict[int, Any]]:
    """The array of each parameter. Places that were untied since the last step get one of their own.

    **Raises** `TieError` when two parameters hold one array, which would then be updated twice.
    """
    arrays = view.arrays
    places = [state.layout.index[path] for path in state.detached]
    changed = {at: standing_as(copied(arrays[at]), arrays[at]) for at in places}
    if changed:
        arrays = [changed.get(at, array) for at, array in enumerate(arrays)]
    if len(set(map(id, arrays))) < len(arrays):
        seen: dict[int, Any] = {}
        for parameter, array in zip(state.parameters, arrays, strict=True):
            other = seen.setdefault(id(array), parameter.path)
            if other != parameter.path:
                raise TieError(
                    f"{other} and {parameter.path} hold the same array now, but were two parameters when the state was made; "
                    f'call state.tie("{parameter.path}", "{other}"), or copy one of them'
                )
    return arrays, changed


def _written(job: Job, new: Sequence[Any]) -> bool:
    """Whether slots were written in place: they go in and come out again, and are not just handed through at a closed gate."""
    if job.part.library not in WRITABLE or not any(member.slots for member in job.part.program.members[: job.length]):
        return False
    return any(a is b for own, others in zip(job.slots, new, strict=True) for a, b in zip(own, others, strict=True))


def _replaced(slots: tuple[Any, ...], members: Sequence[int], new: Sequence[Any]) -> tuple[Any, ...]:
    changed = list(slots)
    for at, each in zip(members, new, strict=True):
        changed[at] = each
    return tuple(changed)
