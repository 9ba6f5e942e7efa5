"""What a step of each rule costs beside PyTorch's own implementation and Optax's: `python -m benchmarks.rules`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from rich.console import Console
from rich.table import Table

import optimisers as op
from benchmarks import machine, timing
from benchmarks.contestants import OURS, Ours, Step
from benchmarks.timing import Effort, Timing, race

RESULTS = Path(__file__).parent / "results" / "rules.json"
DEFAULT, OPTAX = "PyTorch default", "Optax, jitted"
VARIANTS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    "PyTorch foreach": {"foreach": True},
    "PyTorch fused": {"fused": True},
}
NEVER_SLOWER = 1.0
ELEMENTWISE_AGAINST_DEFAULT = 0.25
_SHAPE = (5_000, 6_000)
_MATRICES = (1_024, 1_024)
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


def steps_of(case: Case, shape: tuple[int, int]) -> dict[str, Step]:
    """A step of each contestant, on arrays of its own."""
    rng = np.random.default_rng(0)
    start, grad = (rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02) for _ in range(2))
    steps: dict[str, Step] = {OURS: Ours(case.ours, {"w": start.copy()}, {"w": grad})}
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__)
    parser.add_argument("--only", metavar="RULES", help="comma-separated names (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few samples: shows that it runs, measures nothing")
    options = parser.parse_args(arguments)
    every = cases()
    chosen = list(every) if options.only is None else [name.strip() for name in options.only.split(",")]
    unknown = [name for name in chosen if name not in every]
    if unknown:
        parser.error(f"no rule {', '.join(unknown)}; there are {', '.join(every)}")
    torch.set_num_threads(machine.threads())
    effort = timing.QUICK if options.quick else timing.FULL
    console = Console(width=132)
    described = machine.describe(_SHAPE[0] * _SHAPE[1] if not options.quick else _QUICK[0] * _QUICK[1])
    found: dict[str, dict[str, Timing]] = {}
    for name in chosen:
        found[name] = _raced(every[name], effort, quick=options.quick)
        console.print(f"{name}: " + ", ".join(f"{who} {taken.minimum * 1e3:.2f} ms" for who, taken in found[name].items()))
    console.print(_table(every, found))
    console.print(_sentence(every, found))
    if not options.quick and options.only is None:
        described["versions"] |= {"jax": jax.__version__, "optax": optax.__version__}
        data = {name: {who: asdict(taken) for who, taken in timings.items()} for name, timings in found.items()}
        RESULTS.write_text(json.dumps({"machine": described, "timings": data}, indent=2) + "\n")
        console.print(f"written: {RESULTS}")
    return 0


def _raced(case: Case, effort: Effort, *, quick: bool) -> dict[str, Timing]:
    return race(steps_of(case, _QUICK if quick else case.shape), effort)


def _sentence(every: Mapping[str, Case], found: Mapping[str, Mapping[str, Timing]]) -> str:
    """The range of the ratios, as the README gives it."""
    parts = []
    for against, label in ((DEFAULT, "PyTorch's default"), ("PyTorch fused", "PyTorch's fused kernels"), (OPTAX, "Optax")):
        ratios = {
            name: timings[OURS].minimum / timings[against].minimum
            for name, timings in found.items()
            if against in timings and every[name].elementwise
        }
        if ratios:
            least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
            parts.append(f"{ratios[least]:.2f} ({least}) to {ratios[most]:.2f} ({most}) of {label}")
    return "elementwise rules: " + "; ".join(parts)


def _table(every: Mapping[str, Case], found: Mapping[str, Mapping[str, Timing]]) -> Table:
    """For each rule our time, and its ratio to that of the others."""
    table = Table(
        "rule", "ms", "of PyTorch's best", "of its default", "of Optax", "", title="least time of a step, and ratios of it"
    )
    for column in table.columns[1:5]:
        column.justify = "right"
    for name, timings in found.items():
        mine = timings[OURS].minimum
        theirs = {who: taken.minimum for who, taken in timings.items() if who in VARIANTS}
        best = mine / min(theirs.values()) if theirs else None
        default = mine / theirs[DEFAULT] if theirs else None
        of_optax = mine / timings[OPTAX].minimum if OPTAX in timings else None
        slow = best is not None and best > NEVER_SLOWER
        short = default is not None and every[name].elementwise and default > ELEMENTWISE_AGAINST_DEFAULT
        verdict = ", ".join(["slower than PyTorch's best"] * slow + ["above a quarter of its default"] * short)
        ratios = ["" if each is None else f"{each:.2f}" for each in (best, default, of_optax)]
        table.add_row(name, f"{mine * 1e3:.2f}", *ratios, f"[red]{verdict}[/]" if verdict else "")
    return table


if __name__ == "__main__":
    sys.exit(main())
