"""How long gradients, steps and parameters are: sums over each parameter, by the backends' own mechanism.

Where a step runs in one compiled pass, the pass adds them up on its way. Elsewhere a probe does: a state of two parts that never
step, of which one measures the gradient, and the other keeps the parameter in a slot and measures how far it has moved since.
Either way the norms are those that `ClipNorm` would take: of live rows, in double precision, over the whole mesh where parameters
are spread.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from optimisers.backends.arrays import WRITABLE
from optimisers.decisions import Job
from optimisers.errors import StateError
from optimisers.model.layout import Layout
from optimisers.model.reading import open_with
from optimisers.plan import plan_for
from optimisers.rules.base import LIKE, Rule
from optimisers.rules.chain import Chain
from optimisers.rules.decorator import rule
from optimisers.rules.values import is_traced
from optimisers.state import State, new_state

__all__ = ["Watch", "check_readable", "gradient_squares", "holding", "probe_of", "step_squares"]


def _nothing(xp: Any, h: Any, *sums: Any) -> dict[str, Any]:
    return {}


@rule
class _Gradient(Rule):
    scope = "tree"
    measured = _nothing

    def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return xp.abs2(g)

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return g


@rule
class _Change(Rule):
    slots = {"before": LIKE}
    scope = "tree"
    sums = 2
    measured = _nothing

    def measure(xp: Any, g: Any, p: Any, h: Any, before: Any) -> Any:
        return xp.abs2(p - before), xp.abs2(before)

    def kernel(xp: Any, g: Any, p: Any, h: Any, before: Any) -> Any:
        return g, p


# A probe --------------------------------------------------------------------------------------------------------------


def probe_of(layout: Layout) -> State:
    """The probe for the parameters of a layout, still without their values."""
    if "probe" not in layout.cache:
        records = [record._replace(group=0, counter=0, state_dtype=None) for record in layout.parameters]
        layout.cache["probe"] = new_state(records, [Chain(_Gradient(), _Change())], layout.excluded, idle=range(len(records)))
    return layout.cache["probe"]


def check_readable(arrays: Iterable[Any]) -> None:
    """Check that the numbers in arrays can be read.

    **Raises** `StateError` for those of JAX that are traced, or were given away.
    """
    for array in arrays:
        if is_traced(array):
            raise StateError(
                "inside jax.jit there are no numbers to record; take the step there, return the gradients with it, and outside "
                "call monitor.record(state, model, grads, new_state, new_model)"
            )
        if hasattr(array, "is_deleted") and array.is_deleted():
            raise StateError(
                "the arrays before the step are gone, since they were donated to the compiled step; for the steps that are "
                "recorded, compile it a second time without donate_argnums"
            )


def holding(probe: State, arrays: Sequence[Any], gradients: Sequence[Any], *, copy: bool) -> State:
    """A probe that holds the values of the parameters that have a gradient.

    **Arguments:** `copy`: whether the arrays may be written into before the change is measured. Then they are copied into the slots
    of the probe, which it keeps from sample to sample; arrays that no step writes into are held as they are.
    """
    parts = plan_for(probe.layout, gradients).parts
    for part in parts:
        if part.library == "jax":
            check_readable([*part.pick(arrays), *part.pick(gradients)])
    copied = [part for part in parts if copy and part.library in WRITABLE]
    slots: dict[int, Any] = {at: (arrays[at],) for part in parts if part not in copied for at in part.members}
    probe = probe.with_started(arrays, [at for part in copied for at in part.members])
    for part in copied:
        job = Job(part, probe, arrays, gradients, in_place=True)
        part.backend.prepare(job.batch)
        _, new = part.backend.run(job.batch, job.length, step=False)
        if new is not job.slots:
            slots |= dict(zip(part.members, new, strict=True))
    if all(probe.slots[at] is own for at, own in slots.items()):
        return probe
    return probe.evolved(slots=tuple([slots.get(at, own) for at, own in enumerate(probe.slots)]))


def gradient_squares(probe: State, arrays: Sequence[Any], gradients: Sequence[Any]) -> np.ndarray:
    """For each parameter the sum of the squares of its gradient, in a row; NaN where there is none."""
    return _sums(probe, arrays, gradients, 0)


def step_squares(probe: State, arrays: Sequence[Any], gradients: Sequence[Any]) -> np.ndarray:
    """For each parameter the sums of the squares of its step and of itself before it, from what a probe holds, in two rows.

    **Arguments:** `arrays`: after the step; `gradients`: which of them took it.
    """
    given = [None if gradient is None else array for gradient, array in zip(gradients, arrays, strict=True)]
    return _sums(probe, arrays, given, 1)


def _sums(probe: State, arrays: Sequence[Any], gradients: Sequence[Any], member: int) -> np.ndarray:
    """What a member of the probe measures, for each of its sums a row with a number for each parameter."""
    found = np.full((probe.rules[0].members[member].sums, len(probe)), np.nan)
    for part in plan_for(probe.layout, gradients).parts:
        job = Job(part, probe, arrays, gradients, in_place=True)
        part.backend.prepare(job.batch)
        for row, column in zip(found, _sums_of(job, member), strict=True):
            row[part.members] = column
    return found


def _sums_of(job: Job, member: int) -> Sequence[Any]:
    if job.part.library == "jax":
        from optimisers.backends.jax import sums_together

        return sums_together(job.batch, member)
    return job.part.backend.sums(job.batch, member)


# A step under way -----------------------------------------------------------------------------------------------------


class Watch:
    """Measures a step as it is taken, for `optimisers.update.step`.

    - `stepped`: the parameters that take it, by number; none where a gate is closed.
    - `probe`: the probe, which holds what the step does not add up by itself.
    """

    def __init__(self, probe: State, *, in_place: bool) -> None:
        self.probe = probe
        self.stepped: list[int] = []
        self._in_place = in_place
        self._watched: list[Job] = []
        self._rest: list[Any] | None = None
        self._gradient = np.full((1, len(probe)), np.nan)

    def __call__(self, jobs: Sequence[Job], arrays: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Look at all that is decided, before anything is written."""
        rest: list[Any] = [None] * len(gradients)
        for job in jobs:
            if not job.open:
                continue
            self.stepped += job.part.members
            if job.part.backend.watch(job.batch, job.length):
                self._watched.append(job)
                continue
            for at in job.part.members:
                rest[at] = gradients[at]
        if len(self._watched) < len(jobs):
            self._rest = rest
            self.probe = holding(self.probe, arrays, rest, copy=self._in_place)
            self._gradient = gradient_squares(self.probe, arrays, rest)

    def squares(self, state: State, model: Any) -> np.ndarray:
        """For each parameter the sums of squares of gradient, step, and parameter before it, in three rows.

        **Arguments:** the state and the model after the step.
        """
        found = np.full((3, len(state)), np.nan)
        if self._rest is not None:
            found[:1] = self._gradient
            found[1:] = step_squares(self.probe, open_with(state.layout, model).arrays, self._rest)
        for job in self._watched:
            found[:, job.part.members] = job.batch.watched
        return found
