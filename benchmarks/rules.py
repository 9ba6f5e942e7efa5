"""What a step of each rule costs beside PyTorch's own implementation and Optax's: `python -m benchmarks.rules`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import optimisers as op
from benchmarks.contestants import Ours
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import FOREACH, FUSED, OURS, Figure, Outcome, ratio
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Step

__all__ = ["DEFAULT", "OPTAX", "SUITE", "VARIANTS", "Case", "cases"]

DEFAULT, OPTAX = "PyTorch default", "Optax, jitted"
VARIANTS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    FOREACH: {"foreach": True},
    FUSED: {"fused": True},
}
NEVER_SLOWER = 1.0
ELEMENTWISE_AGAINST_DEFAULT = 0.25
_SHAPE = (5_000, 6_000)
_MATRICES = (512, 512)
_QUICK = (64, 96)


@dataclass(frozen=True)
class Case:
    """A rule, and the same in the other libraries where they have it."""

    ours: op.Rule
    torch: Callable[..., Any] | None = None
    options: Mapping[str, Any] | None = None
    optax: Any = None
    shape: tuple[int, int] = _SHAPE

    @property
    def elementwise(self) -> bool:
        """Whether each element is updated from itself alone."""
        return all(member.kernel is not None and member.measure is None for member in self.ours.members)


def cases() -> dict[str, Case]:
    """All rules with a counterpart."""
    t = torch.optim
    return {
        "SGD": Case(op.SGD(1e-3), t.SGD, {}, optax.sgd(1e-3)),
        "SGD, momentum": Case(op.SGD(1e-3, momentum=0.9), t.SGD, {"momentum": 0.9}, optax.sgd(1e-3, momentum=0.9)),
        "Adam": Case(op.Adam(), t.Adam, {}, optax.adam(1e-3)),
        "AdamW": Case(op.AdamW(), t.AdamW, {}, optax.adamw(1e-3)),
        "AMSGrad": Case(op.AMSGrad(), t.Adam, {"amsgrad": True}, optax.amsgrad(1e-3)),
        "AdaMax": Case(op.AdaMax(), t.Adamax, {}, optax.adamax(1e-3)),
        "NAdam": Case(op.NAdam(), t.NAdam, {}, optax.nadam(1e-3)),
        "RAdam": Case(op.RAdam(), t.RAdam, {}, optax.radam(1e-3)),
        "RMSProp": Case(op.RMSProp(), t.RMSprop, {}, optax.rmsprop(1e-3)),
        "RMSProp, centred, momentum": Case(
            op.RMSProp(momentum=0.9, centered=True),
            t.RMSprop,
            {"momentum": 0.9, "centered": True},
            optax.rmsprop(1e-3, momentum=0.9, centered=True),
        ),
        "AdaGrad": Case(op.AdaGrad(), t.Adagrad, {}, optax.adagrad(1e-3)),
        "AdaDelta": Case(op.AdaDelta(), t.Adadelta, {}, optax.adadelta(1e-3)),
        "Rprop": Case(op.Rprop(), t.Rprop, {}, optax.rprop(1e-3)),
        "Adafactor": Case(op.Adafactor(), t.Adafactor, {}, optax.adafactor(1e-3)),
        "Muon": Case(op.Muon(), t.Muon, {}, optax.contrib.muon(1e-3), shape=_MATRICES),
        "Lion": Case(op.Lion(), optax=optax.lion(1e-4)),
        "AdaBelief": Case(op.AdaBelief(), optax=optax.adabelief(1e-3)),
        "Adan": Case(op.Adan(), optax=optax.adan(1e-3)),
        "OAdam": Case(op.OAdam(), optax=optax.optimistic_adam_v2(1e-3)),
        "LAMB": Case(op.LAMB(), optax=optax.lamb(1e-3)),
        "LARS": Case(op.LARS(), optax=optax.lars(1e-3)),
        "Prodigy": Case(op.Prodigy(), optax=optax.contrib.prodigy(1.0)),
        "ScheduleFree": Case(op.ScheduleFree(), optax=optax.contrib.schedule_free_adamw(2.5e-3)),
    }


def steps_of(case: Case, shape: tuple[int, int]) -> dict[str, Any]:
    """A step of each contestant, on arrays of its own."""
    rng = np.random.default_rng(0)
    start, grad = (rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02) for _ in range(2))
    steps: dict[str, Any] = {OURS: Ours(case.ours, {"w": start.copy()}, {"w": grad})}
    steps |= _torch(case, start, grad)
    if case.optax is not None:
        steps[OPTAX] = _Jitted(case.optax, start, grad)
    return steps


def _torch(case: Case, start: np.ndarray, grad: np.ndarray) -> Iterator[tuple[str, Step]]:
    """PyTorch's variants of a rule, those that it has."""
    for name, variant in VARIANTS.items() if case.torch is not None else ():
        param = torch.nn.Parameter(torch.tensor(start))
        param.grad = torch.from_numpy(grad)
        assert case.torch is not None
        try:
            optimizer = case.torch([param], **case.options or {}, **variant)
        except (TypeError, RuntimeError):
            continue
        yield name, optimizer.step


class _Jitted:
    """A compiled step of Optax that gives its arrays back."""

    def __init__(self, transformation: Any, start: np.ndarray, grad: np.ndarray) -> None:
        self.params, self.grad = jnp.array(start), jnp.array(grad)
        # Some states hold the parameters themselves, which cannot be given back twice.
        self.state = jax.tree.map(jnp.copy, transformation.init(self.params))

        def step(params: Any, state: Any, grad: Any) -> Any:
            updates, state = transformation.update(grad, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> None:
        self.params, self.state = jax.block_until_ready(self.step(self.params, self.state, self.grad))


def _section(name: str) -> Section:
    def section(scale: Scale) -> Outcome:
        case = cases()[name]
        steps = steps_of(case, _QUICK if scale.quick else case.shape)
        timings = scale.race(steps)
        theirs = [each for each in VARIANTS if each in timings]
        figures = []
        if theirs:
            best = min(theirs, key=lambda each: timings[each].minimum)
            figures.append(Figure(name, f"{name}, against PyTorch's best", ratio(timings, OURS, best), NEVER_SLOWER, OURS))
            target = ELEMENTWISE_AGAINST_DEFAULT if case.elementwise else None
            figures.append(Figure(name, f"{name}, against {DEFAULT}", ratio(timings, OURS, DEFAULT), target, OURS))
        if OPTAX in timings:
            figures.append(Figure(name, f"{name}, against {OPTAX}", ratio(timings, OURS, OPTAX), None, OURS))
        return Outcome(timings, figures, {OURS: bytes_moved(steps[OURS].state)})

    return section


SECTIONS: Mapping[str, Section] = {name: _section(name) for name in cases()}
SUITE = Suite("rules", __doc__, SECTIONS, packages=("jax", "optax"))

if __name__ == "__main__":
    sys.exit(SUITE.main())
