"""The way of a step: open the model, gather gradients, run each batch in its backend, put the arrays back."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import add, itemgetter, or_
from typing import Any
from zlib import crc32

import numpy as np

from optimisers.backends.array_api import derive
from optimisers.backends.arrays import memory_of, namespace_of
from optimisers.backends.base import Batch, columns_of
from optimisers.backends.choose import backend_for, reference_only_is_set
from optimisers.errors import StateError, TieError
from optimisers.gradients import gather
from optimisers.model.layout import Layout, slot_dtypes
from optimisers.model.reading import Opened, open_with, picker
from optimisers.model.slots import copied
from optimisers.model.ties import same_memory
from optimisers.rules.base import Rule, is_traced, stack
from optimisers.rules.program import Member
from optimisers.state import State, check_state

__all__ = ["update", "update_"]

_PLANS = 16


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
    return _step(state, model, grads, in_place=False)


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
    return _step(state, model, grads, in_place=True)


def _step(state: State, model: Any, grads: Any, *, in_place: bool) -> tuple[State, Any]:
    check_state(state, "update")
    if state.spent:
        raise StateError("update_ has written into the slots of this state; use the state that it returned")
    view = open_with(state.layout, model)
    gradients = gather(grads, state.layout, view)
    plan = _plan(state.layout, gradients)
    if view.aliases:
        view.check_ties()
    arrays, changed = _apart(state, view)
    given, state = state, state.with_started(arrays, plan.starting)
    jobs = [_Job(part, state, arrays, gradients, in_place) for part in plan.parts]
    for job in jobs:
        job.part.backend.prepare(job.batch)
    if in_place:
        _untangle(jobs)
    memory = _decide(jobs, state)
    slots = state.slots
    for job in jobs:
        params, new_slots = job.part.backend.run(job.batch, job.length, step=job.open)
        if params is not job.batch.params:
            changed |= {at: new for at, old, new in zip(job.part.members, job.batch.params, params, strict=True) if new is not old}
        if new_slots is not job.batch.slots:
            slots = _replaced(slots, job.part.members, new_slots)
    layout, counters, step = _counted(state, plan, [job.open and job.passed for job in jobs])
    addresses = state.addresses if slots is state.slots else None
    # What is left of the old state is its counts, which no longer go with its slots.
    given.spent = in_place and slots is state.slots and any(job.batch.slot_dtypes for job in jobs)
    new_state = State(layout, state.rules, counters, step, slots, memory, addresses=addresses)
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
    changed = {state.layout.index[path]: copied(arrays[state.layout.index[path]]) for path in state.detached}
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


def _untangle(jobs: list["_Job"]) -> None:
    """Copy gradients that lie in the memory of parameters, which are about to be written (the gradient of a·b is b).

    **Raises** `TieError` when two parameters lie in one place.
    """
    jobs = [job for job in jobs if job.batch.library == "numpy"]
    written = {id(param) for job in jobs for param in job.batch.params}
    # Arrays that own their memory share it with no other object.
    if all(
        written.isdisjoint(map(id, job.batch.grads)) and not any(map(_shares, job.batch.params + job.batch.grads)) for job in jobs
    ):
        return
    owners = [(job.batch.paths[at], *_bounds(param)) for job in jobs for at, param in enumerate(job.batch.params)]
    owners = sorted((each for each in owners if each[1] < each[2]), key=itemgetter(1))
    for (path, _, end), (other, start, _) in pairwise(owners):
        if start < end:
            raise TieError(
                f"{path} and {other} lie in the same memory now, but were two parameters when the state was made; copy one"
            )
    starts, ends = [start for _, start, _ in owners], [end for _, _, end in owners]
    for job in jobs:
        grads = [
            grad if grad is param or not _within(_bounds(grad), starts, ends) else grad.copy()
            for param, grad in zip(job.batch.params, job.batch.grads, strict=True)
        ]
        if any(new is not old for new, old in zip(grads, job.batch.grads, strict=True)):
            job.batch.grads = grads
            job.part.backend.prepare(job.batch)


def _shares(array: Any) -> bool:
    return getattr(array, "base", None) is not None


def _bounds(array: Any) -> tuple[int, int]:
    if not array.size or isinstance(array, np.generic):
        return 0, 0
    memory = memory_of(array, "numpy")
    assert memory is not None
    return memory.bounds


def _within(bounds: tuple[int, int], starts: list[int], ends: list[int]) -> bool:
    """Whether an array lies, in part, in one of some ranges of memory, which are ascending and apart."""
    before = bisect_left(starts, bounds[1])
    return before > 0 and ends[before - 1] > bounds[0]


def _replaced(slots: tuple[Any, ...], members: Sequence[int], new: Sequence[Any]) -> tuple[Any, ...]:
    changed = list(slots)
    for at, each in zip(members, new, strict=True):
        changed[at] = each
    return tuple(changed)


# The plan: all that depends on the layout and on which gradients are there, worked out once ---------------------------


class _Part:
    """Parameters that run together: same backend, program, dtypes and device."""

    def __init__(self, layout: Layout, members: list[int]) -> None:
        records = [layout.parameters[at] for at in members]
        first = records[0]
        self.members = members
        self.pick = picker(tuple(members))
        self.program = layout.programs[first.group]
        self.dtype, self.library = first.dtype, first.library
        self.slot_dtypes = slot_dtypes(first, self.program)
        self.backend = backend_for(first.library, self.program, (first.dtype, *self.slot_dtypes))
        self.paths = [record.path for record in records]
        self.shapes = [record.shape for record in records]
        self.live_rows = [record.live_rows for record in records]
        self.kept: dict[Any, Any] = {}
        # A norm of one parameter is a scalar of its own; otherwise parameters with the same rule and count share a row.
        own = any(member.keyed or (member.measure is not None and member.scope == "leaf") for member in self.program.members)
        keys = [(record.group, record.counter, at if own else None) for at, record in zip(members, records, strict=True)]
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.rows = [(group, counter) for group, counter, _ in rows]
        self.row: Any = range(len(keys)) if len(rows) == len(keys) else np.array([rows[key] for key in keys])
        self.stacked: tuple[Any, Any] = (None, None)

    def rules(self, state: State) -> list[Rule]:
        """For each member of the program one rule that stands for all rows, its schedules evaluated."""
        kept, stacked = self.stacked
        if kept is state.rules:
            return stacked
        rules = [state.rules[group].members for group, _ in self.rows]
        columns = [list(column) for column in zip(*rules, strict=True)]
        now = [[rule.at(state.step) for rule in column] for column in columns]
        stacked = [stack(column) for column in now]
        if all(new is old for a, b in zip(now, columns, strict=True) for new, old in zip(a, b, strict=True)):
            self.stacked = (state.rules, stacked)
        return stacked


class _Plan:
    def __init__(self, layout: Layout, present: bytes) -> None:
        batches: dict[Any, list[int]] = {}
        for at, record in enumerate(layout.parameters):
            if present[at]:
                program = layout.programs[record.group]
                key = (record.library, record.device, program, record.dtype, slot_dtypes(record, program))
                batches.setdefault(key, []).append(at)
        self.parts = [_Part(layout, members) for members in batches.values()]
        self.starting = [at for part in self.parts if part.program.started for at in part.members]
        self.next: dict[Any, tuple[Layout, list[tuple[int, int]]]] = {}


def _plan(layout: Layout, gradients: Sequence[Any]) -> _Plan:
    present = bytes([gradient is not None for gradient in gradients])
    key = (present, reference_only_is_set())
    plans: dict[Any, _Plan] = layout.cache.setdefault("plans", {})
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _PLANS:
            plans.clear()
        plan = plans[key] = _Plan(layout, present)
    return plan


def _counted(state: State, plan: _Plan, opened: Sequence[Any]) -> tuple[Layout, tuple[Any, ...], Any]:
    """The layout and the counters after the step, and the state's own count.

    Parameters that stepped and parameters that did not no longer share a counter.

    **Arguments:** `opened`: for each part whether it steps: `True`, `False`, or what a traced program will tell.
    """
    # Who steps: none, all, or as a gate will tell.
    added: list[Any] = [0, 1]
    marks = []
    for each in opened:
        if isinstance(each, bool):
            marks.append(int(each))
            continue
        known = next((mark for mark, value in enumerate(added) if value is each), len(added))
        if known == len(added):
            added.append(each)
        marks.append(known)
    key = tuple(marks)
    if key not in plan.next:
        stepped = {at: mark for part, mark in zip(plan.parts, marks, strict=True) for at in part.members}
        plan.next[key] = _split(state.layout, stepped)
    layout, sources = plan.next[key]
    traced = [added[mark] for mark in sorted({*marks} - {0, 1})]
    any_open = 1 if 1 in marks else reduce(or_, traced) if traced else 0
    counters = tuple([_one_more(state.counters[source], added[mark]) for source, mark in sources])
    return layout, counters, _one_more(state.step, any_open)


def _one_more(count: Any, is_open: Any) -> Any:
    """A count after a step that took place or not."""
    return count + is_open if isinstance(is_open, int) else namespace_of(is_open).where(is_open, count + 1, count)


def _split(layout: Layout, stepped: Mapping[int, int]) -> tuple[Layout, list[tuple[int, int]]]:
    """The layout whose counters tell apart who stepped; and for each new counter the old one, and the mark of what is added."""
    # A counter that all or none of its parameters share keeps its number, and so the layout.
    outcomes = list(dict.fromkeys((record.counter, stepped.get(at, 0)) for at, record in enumerate(layout.parameters)))
    if len(outcomes) == len({counter for counter, _ in outcomes}):
        return layout, sorted(outcomes)
    order = sorted(outcomes)
    number = {outcome: at for at, outcome in enumerate(order)}
    records = [record._replace(counter=number[record.counter, stepped.get(at, 0)]) for at, record in enumerate(layout.parameters)]
    return Layout.of(records, layout.programs, layout.excluded), order


# The step -------------------------------------------------------------------------------------------------------------


class _Job:
    """One part of a plan with the arrays of this step."""

    def __init__(self, part: _Part, state: State, arrays: Sequence[Any], gradients: Sequence[Any], in_place: bool) -> None:
        self.part = part
        self.open = True
        # Whether all gates so far let the step pass: True, or what a traced program will tell.
        self.passed: Any = True
        self.length = len(part.program.members)
        self.batch = Batch(
            program=part.program,
            paths=part.paths,
            shapes=part.shapes,
            dtype=part.dtype,
            slot_dtypes=part.slot_dtypes,
            library=part.library,
            params=list(part.pick(arrays)),
            grads=list(part.pick(gradients)),
            slots=list(part.pick(state.slots)),
            live_rows=part.live_rows,
            in_place=in_place,
            plan=part.kept,
            addresses=state.addresses,
            scalars=self._scalars(part, state),
            row=part.row,
        )
        pending = [
            at
            for at, member in enumerate(part.program.members)
            if member.measure is not None or member.gate or member.memory or member.apply_tree is not None
        ]
        self.pending = pending

    def _scalars(self, part: _Part, state: State) -> list[dict[str, Sequence[Any]]]:
        keys = [crc32(str(path).encode()) >> 1 for path in part.paths]
        if part.library == "jax":
            return _traced_scalars(part, state, keys)
        counters = [counter for _, counter in part.rows]
        many = len(part.rows) > 1
        step = np.array([state.counters[counter] for counter in counters]) + 1 if many else state.counters[counters[0]] + 1
        scalars = []
        for member, rule in zip(part.program.members, part.rules(state), strict=True):
            values = rule.scalars(step, **state.memory.get(member.name, {}))
            if member.keyed:
                values["key"] = np.array(keys)
            scalars.append(columns_of(values, len(counters)))
        return scalars

    @property
    def front(self) -> Member | None:
        """The next member of the chain that waits for a decision."""
        return self.part.program.members[self.pending[0]] if self.pending else None

    def sums(self) -> Sequence[Any]:
        """The front member's sums, one value a parameter."""
        return self.part.backend.sums(self.batch, self.pending[0])


def _traced_scalars(part: _Part, state: State, keys: Sequence[int]) -> list[dict[str, Sequence[Any]]]:
    """The scalars of each row on its own: arrays and tracers are not to be put together only to be taken apart again."""
    made: dict[Any, list[dict[str, Any]]] = {}
    for group, counter in part.rows:
        if (group, counter) not in made:
            rules = [rule.at(state.step) for rule in state.rules[group].members]
            step = state.counters[counter] + 1
            made[group, counter] = [
                rule.scalars(step, **state.memory.get(member.name, {}))
                for member, rule in zip(part.program.members, rules, strict=True)
            ]
    scalars = []
    for at, member in enumerate(part.program.members):
        rows = [made[row][at] for row in part.rows]
        columns: dict[str, Sequence[Any]] = {name: [each[name] for each in rows] for name in rows[0]}
        scalars.append({**columns, "key": keys} if member.keyed else columns)
    return scalars


def _decide(jobs: list[_Job], state: State) -> Any:
    """Work out, in the order of the chains, all that depends on whole arrays; close the gates. Returns the new memory."""
    memory = state.memory
    while True:
        for job in jobs:
            while job.front is not None and job.front.scope == "leaf":
                job.part.backend.decide(job.batch, job.pending.pop(0))
        waiting = [job for job in jobs if job.front is not None]
        if not waiting:
            return memory
        member = _next_for_all(waiting)
        here = [job for job in waiting if job.front is member or (job.front and job.front.name == member.name)]
        if member.measure is not None:
            totals = [reduce(add, map(_total, parts)) for parts in zip(*(job.sums() for job in here), strict=True)]
            for job in here:
                derive(job.batch, job.pending[0], totals)
        passed = here[0].passed
        before = memory.get(member.name, {})
        if member.apply_tree is not None:
            memory = {**memory, member.name: _over_tree(member, here, before)}
        h = here[0].batch.h(here[0].pending[0], 0)
        if member.remember is not None:
            memory = {**memory, member.name: {k: _kept(v, before[k]) for k, v in member.remember(h, **before).items()}}
        if passed is not True and before:
            memory = {**memory, member.name: _chosen(passed, memory[member.name], before)}
        for job in here:
            at = job.pending.pop(0)
            if member.gate and is_traced(h.open):
                job.batch.gates.append((at, h.open))
                job.passed = h.open if job.passed is True else job.passed & h.open
            elif member.gate and not h.open:
                job.open, job.length, job.pending = False, at + 1, []


def _total(part: Any) -> Any:
    """The sum over parameters: a number, or a traced one."""
    return reduce(add, part) if isinstance(part, list) else float(np.sum(part))


def _chosen(condition: Any, new: Any, old: Any) -> Any:
    """The new memory of a rule where a traced condition holds, else the old."""
    if isinstance(new, Mapping):
        return {name: _chosen(condition, new[name], old[name]) for name in new}
    if isinstance(new, tuple) and isinstance(old, tuple):
        return tuple(_chosen(condition, a, b) for a, b in zip(new, old, strict=True))
    return new if new is old else namespace_of(condition).where(condition, new, old)


def _over_tree(member: Member, jobs: list[_Job], memory: Any) -> dict[str, Any]:
    """Call a rule that acts on all parameters at once; its outcome waits in the batches. Returns its new memory."""
    found = [job.part.backend.reached(job.batch, job.pending[0]) for job in jobs]
    reached = {
        path: each for job, arrays in zip(jobs, found, strict=True) for path, each in zip(job.batch.paths, arrays, strict=True)
    }
    grads, params, slots = ({str(path): each[k] for path, each in reached.items()} for k in range(3))
    assert member.apply_tree is not None
    steps, new, memory = member.apply_tree(jobs[0].batch.h(jobs[0].pending[0], 0), grads, params, slots, **memory)
    for job in jobs:
        job.batch.outcomes[job.pending[0]] = [(steps[str(path)], new[str(path)]) for path in job.batch.paths]
    return memory


def _next_for_all(waiting: list[_Job]) -> Member:
    """A member that no chain has yet to reach: what is decided for the whole tree needs all of them."""
    for job in waiting:
        front = job.front
        assert front is not None
        later = {other.part.program.members[at].name for other in waiting for at in other.pending[1:]}
        if front.name not in later:
            return front
    return waiting[0].front  # type: ignore[return-value]


def _kept(new: Any, old: Any) -> Any:
    """What a rule keeps: a plain number, or an array of the very type of the old one, so that nothing is compiled twice."""
    if hasattr(old, "dtype") and hasattr(old, "shape"):
        return namespace_of(old).asarray(new, dtype=old.dtype)
    return new.item() if isinstance(new, (np.ndarray, np.generic)) else new
