"""What a step on PyTorch's modules costs, on the CPU, beside its own optimisers: `python -m benchmarks.torch_step`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

import optimisers as op
from benchmarks import models
from benchmarks.contestants import Ours, farthest
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import FOREACH, FUSED, OURS, Figure, Outcome, ratio
from benchmarks.models import Sizes, filled, freeze_share, shapes_of
from benchmarks.rules import DEFAULT, VARIANTS, cases
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Timing
from optimisers.backends import torch as torch_lists
from optimisers.interop.torch_optim import Optimizer

__all__ = ["SUITE"]

CLASS = "optimisers, as an optimiser of PyTorch"
FROZEN = 0.9


class _Module(torch.nn.Module):
    """A tree of arrays as parameters, each with its gradient."""

    def __init__(self, start: Any, grads: Any) -> None:
        super().__init__()
        pairs = enumerate(zip(start, grads, strict=True)) if isinstance(start, list) else ((k, (start[k], grads[k])) for k in start)
        for key, (mine, grad) in pairs:
            if isinstance(mine, np.ndarray):
                parameter = torch.nn.Parameter(torch.from_numpy(mine))
                parameter.grad = torch.from_numpy(grad)
                self.register_parameter(str(key), parameter)
            else:
                self.add_module(str(key), _Module(mine, grad))


def _module(shapes: Any) -> torch.nn.Module:
    return _Module(filled(shapes, seed=0, scale=0.02), filled(shapes, seed=1, scale=0.01))


def _adamw(shapes: Any, theirs: Sequence[str], *, reference: bool = False) -> dict[str, Any]:
    """AdamW on modules of these shapes. PyTorch's variants share one; ours share another."""
    module = _module(shapes)
    steps: dict[str, Any] = {}
    shared: Any = None
    for name in theirs:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **VARIANTS[name])
        optimizer.state = shared = optimizer.state if shared is None else shared
        steps[name] = optimizer.step
    mine = _module(shapes)
    steps[OURS] = Ours(op.AdamW(1e-3), mine, reference=reference)
    if not reference:
        steps[CLASS] = Optimizer(mine, op.AdamW(1e-3)).step
    return steps


def disagreement(steps: int = 5) -> float:
    """How far ours, in the compiled pass and on lists, are from PyTorch after some steps, relative to how far those have moved."""
    shapes = shapes_of("a", models.QUICK)
    start, theirs = _numbers(_module(shapes)), _module(shapes)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    ours = [Ours(op.AdamW(1e-3), _module(shapes), reference=reference) for reference in (False, True)]
    for _ in range(steps):
        optimizer.step()
        for each in ours:
            each()
    expected = _numbers(theirs)
    return max(farthest(_numbers(each.model), expected) for each in ours) / farthest(start, expected)


def _numbers(module: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in module.parameters()]


# What is measured -----------------------------------------------------------------------------------------------------


def _contest(case: str, label: Callable[[Sizes], str], targets: Mapping[str, float]) -> Section:
    def section(scale: Scale) -> Outcome:
        steps = _adamw(shapes_of(case, scale.sizes), list(targets))
        timings = scale.race(steps)
        found = [
            Figure(case, f"{label(scale.sizes)}, {who}, against {against}", ratio(timings, who, against), target, who)
            for who in (OURS, CLASS)
            for against, target in targets.items()
        ]
        return Outcome(timings, found, dict.fromkeys(steps, bytes_moved(steps[OURS].state)))

    return section


def _rules(scale: Scale) -> Outcome:
    """Every elementwise rule that `torch.optim` has, on one array."""
    timings: dict[str, Timing] = {}
    found: list[Figure] = []
    moved: dict[str, int] = {}
    for name, case in cases().items():
        if case.torch is None or not case.elementwise:
            continue
        module = _module(shapes_of("d", scale.sizes))
        ours = Ours(case.ours, module)
        theirs = case.torch(module.parameters(), **case.options or {})
        taken = scale.race({OURS: ours, DEFAULT: theirs.step})
        mine = f"{name}, {OURS}"
        timings |= {f"{name}, {who}": each for who, each in taken.items()}
        moved[mine] = bytes_moved(ours.state)
        described = f"{scale.sizes.single:,} elements, {name}, against {DEFAULT}"
        found.append(Figure("rules", described, ratio(taken, OURS, DEFAULT), 0.3, mine))
    return Outcome(timings, found, moved)


def _frozen(scale: Scale) -> Outcome:
    """GPT-2 with 90 % of its elements frozen. Both states share the module."""
    module = _module(shapes_of("a", scale.sizes))
    whole = op.setup(op.AdamW(1e-3), module)
    none, most = "none frozen", "90 % frozen"
    timings = scale.race({none: Ours(None, module, state=whole), most: Ours(None, module, state=freeze_share(whole, FROZEN))})
    moved = {none: bytes_moved(whole), most: round(bytes_moved(whole) * (1 - FROZEN))}
    figure = Figure("frozen", "GPT-2 small, 90 % frozen, against none", ratio(timings, most, none), 0.15, most)
    return Outcome(timings, [figure], moved)


def _lists(scale: Scale) -> Outcome:
    """What runs where nothing is compiled: lists of tensors, as on devices that lack PyTorch's fused kernels, and those kernels."""
    timings: dict[str, Timing] = {}
    found: list[Figure] = []
    moved: dict[str, int] = {}
    for case, label in (("a", _GPT2), ("b", _many(scale.sizes))):
        for how, theirs, target, kernel in (
            ("on lists", FOREACH, 1.15, lambda *given: None),
            ("without Numba", FUSED, None, torch_lists.fused_kernel),
        ):
            with mock.patch.object(torch_lists, "fused_kernel", kernel):
                steps = _adamw(shapes_of(case, scale.sizes), [theirs], reference=True)
                taken = scale.race(steps)
            mine = f"{label}, {how}, {OURS}"
            timings |= {f"{label}, {how}, {who}": each for who, each in taken.items()}
            moved[mine] = bytes_moved(steps[OURS].state)
            found.append(Figure("lists", f"{label}, {how}, against {theirs}", ratio(taken, OURS, theirs), target, mine))
    return Outcome(timings, found, moved)


_GPT2 = "GPT-2 small"


def _many(sizes: Sizes) -> str:
    return f"{sizes.many[0]:,} × {sizes.many[1]}"


SECTIONS: Mapping[str, Section] = {
    "a": _contest("a", lambda sizes: _GPT2, {FUSED: 1.10, DEFAULT: 0.25}),
    "b": _contest("b", _many, {FUSED: 0.8, DEFAULT: 0.3}),
    "rules": _rules,
    "frozen": _frozen,
    "lists": _lists,
}


SUITE = Suite("torch_step", __doc__, SECTIONS, disagreement)

if __name__ == "__main__":
    sys.exit(SUITE.main())
