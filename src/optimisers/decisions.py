"""What a step decides before any array changes: scalars, sums over whole arrays, gates, memory."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from optimisers.backends.arrays import namespace_of
from optimisers.backends.base import Batch, columns_of
from optimisers.plan import Part
from optimisers.rules.program import Member
from optimisers.rules.values import is_traced
from optimisers.state import State

__all__ = ["Job", "decide"]


class Job:
    """One part of a plan with the arrays of this step."""

    def __init__(self, part: Part, state: State, arrays: Sequence[Any], gradients: Sequence[Any], in_place: bool) -> None:
        self.part = part
        self.open = True
        # Whether all gates so far let the step pass: True, or what a traced program will tell.
        self.passed: Any = True
        self.length = len(part.program.members)
        self.params: list[Any] = list(part.pick(arrays))
        self.slots: list[tuple[Any, ...]] = list(part.pick(state.slots))
        self.batch = Batch(
            program=part.program,
            paths=part.paths,
            shapes=part.shapes,
            dtype=part.dtype,
            slot_dtypes=part.slot_dtypes,
            library=part.library,
            device=part.device,
            params=self.params,
            grads=list(part.pick(gradients)),
            slots=self.slots,
            live_rows=part.live_rows,
            in_place=in_place,
            kept=part.kept,
            addresses=state.addresses,
            scalars=self._scalars(part, state),
            row=part.row,
        )
        self.pending = [
            at
            for at, member in enumerate(part.program.members)
            if member.measure is not None or member.gate or member.memory or member.apply_tree is not None
        ]

    def _scalars(self, part: Part, state: State) -> list[dict[str, Sequence[Any]]]:
        if part.backend.row_by_row:
            return _scalars_of_rows(part, state)
        counters = [counter for _, counter in part.rows]
        many = len(part.rows) > 1
        step = np.array([state.counters[counter] for counter in counters]) + 1 if many else state.counters[counters[0]] + 1
        scalars = []
        for member, rule in zip(part.program.members, part.rules(state), strict=True):
            values = rule.scalars(step, **state.memory.get(member.name, {}))
            if member.keyed:
                values["key"] = np.array(part.keys)
            scalars.append(columns_of(values, len(counters)))
        return scalars

    @property
    def front(self) -> Member | None:
        """The next member of the chain that waits for a decision."""
        return self.part.program.members[self.pending[0]] if self.pending else None

    def sums(self) -> Sequence[Any]:
        """The front member's sums, one value a parameter."""
        return self.part.backend.sums(self.batch, self.pending[0])


def _scalars_of_rows(part: Part, state: State) -> list[dict[str, Sequence[Any]]]:
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
        scalars.append({**columns, "key": part.keys} if member.keyed else columns)
    return scalars


def decide(jobs: list[Job], state: State) -> Any:
    """Work out, in the order of the chains, all that depends on whole arrays; close the gates. Returns the new memory."""
    memory = state.memory
    while True:
        for job in jobs:
            while job.front is not None and job.front.scope == "leaf":
                at, backend = job.pending.pop(0), job.part.backend
                if not backend.row_by_row:
                    backend.derive(job.batch, at, backend.sums(job.batch, at))
        waiting = [job for job in jobs if job.front is not None]
        if not waiting:
            return memory
        member = _next_for_all(waiting)
        here = [job for job in waiting if job.front and job.front.name == member.name]
        if member.measure is not None:
            totals = [reduce(add, map(_total, parts)) for parts in zip(*(job.sums() for job in here), strict=True)]
            for job in here:
                job.part.backend.derive(job.batch, job.pending[0], totals)
        passed = reduce(_either, [job.passed for job in here])
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


def _either(a: Any, b: Any) -> Any:
    """Whether one of two parts of the tree lets the step pass: `True`, or what a traced program will tell."""
    return True if a is True or b is True else a | b


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


def _over_tree(member: Member, jobs: list[Job], memory: Any) -> dict[str, Any]:
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


def _next_for_all(waiting: list[Job]) -> Member:
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
