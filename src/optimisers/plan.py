"""What a step does, worked out once: all that depends on the layout and on which gradients are there."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any
from zlib import crc32

import numpy as np

from optimisers.backends.arrays import namespace_of
from optimisers.backends.choose import backend_for, reference_only_is_set
from optimisers.model.layout import Layout
from optimisers.model.reading import picker
from optimisers.rules.base import Rule
from optimisers.rules.numbers import stack
from optimisers.slots import slot_dtypes
from optimisers.state import State

__all__ = ["Part", "Plan", "counted", "plan_for"]

_PLANS = 16


class Part:
    """Parameters that run together: same backend, program, dtypes and device."""

    def __init__(self, layout: Layout, members: list[int]) -> None:
        records = [layout.parameters[at] for at in members]
        first = records[0]
        self.members = members
        self.pick = picker(tuple(members))
        self.program = layout.programs[first.group]
        self.dtype, self.library, self.device = first.dtype, first.library, first.device
        self.slot_dtypes = slot_dtypes(first, self.program)
        self.backend = backend_for(first.library, self.program, (first.dtype, *self.slot_dtypes), first.device)
        self.paths = [record.path for record in records]
        self.shapes = [record.shape for record in records]
        self.live_rows = [record.live_rows for record in records]
        keyed = any(member.keyed for member in self.program.members)
        self.keys = [crc32(str(path).encode()) >> 1 for path in self.paths] if keyed else []
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


class Plan:
    """The parts of a step, and what becomes of the counters."""

    def __init__(self, layout: Layout, present: bytes) -> None:
        batches: dict[Any, list[int]] = {}
        for at, record in enumerate(layout.parameters):
            if present[at]:
                program = layout.programs[record.group]
                key = (record.library, record.device, program, record.dtype, slot_dtypes(record, program))
                batches.setdefault(key, []).append(at)
        self.parts = [Part(layout, members) for members in batches.values()]
        self.waiting = [at for at, record in enumerate(layout.parameters) if not (present[at] or record.frozen)]
        self.starting = [at for part in self.parts if part.program.started for at in part.members]
        self.next: dict[Any, tuple[Layout, list[tuple[int, int]]]] = {}


def plan_for(layout: Layout, gradients: Sequence[Any]) -> Plan:
    """The plan for the parameters that have a gradient; a few are kept with the layout."""
    present = bytes([gradient is not None for gradient in gradients])
    key = (present, reference_only_is_set())
    plans: dict[Any, Plan] = layout.cache.setdefault("plans", {})
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _PLANS:
            plans.clear()
        plan = plans[key] = Plan(layout, present)
    return plan


def counted(state: State, plan: Plan, opened: Sequence[Any]) -> tuple[Layout, tuple[Any, ...], Any]:
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
