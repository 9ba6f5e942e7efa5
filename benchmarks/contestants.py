"""Who takes a step: AdamW as people write it in NumPy, PyTorch's three, and ours."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

import optimisers as op
from benchmarks.figures import FOREACH, FUSED, LOOP, NAIVE, OURS, REFERENCE
from benchmarks.models import arrays_of, filled
from benchmarks.timing import Step

__all__ = ["Ours", "adamw", "disagreement", "farthest", "torch_variants"]

_TORCH: dict[str, Any] = {
    LOOP: {"foreach": False, "fused": False},
    FOREACH: {"foreach": True, "fused": False},
    FUSED: {"fused": True},
}


class Naive:
    """AdamW in whole-array expressions, as it is commonly written."""

    def __init__(self, model: Any, grads: Any) -> None:
        self.params = dict(arrays_of(model))
        self.grads = dict(arrays_of(grads))
        self.mean = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.square = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.t = 0

    def __call__(self, lr: float = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, decay: float = 0.01) -> None:
        self.t += 1
        for name, p in self.params.items():
            g = self.grads[name]
            self.mean[name] = b1 * self.mean[name] + (1 - b1) * g
            self.square[name] = b2 * self.square[name] + (1 - b2) * g**2
            mean = self.mean[name] / (1 - b1**self.t)
            square = self.square[name] / (1 - b2**self.t)
            p -= lr * (mean / (np.sqrt(square) + eps) + decay * p)


class Ours:
    """`update_` with any rule, from a state or for a fresh one; without Numba where `reference` says so.

    A module of PyTorch comes without `grads`: it has its own.
    """

    def __init__(self, rule: Any, model: Any, *grads: Any, state: op.State | None = None, reference: bool = False) -> None:
        self.state = op.setup(rule, model) if state is None else state
        self.model = model
        self.grads = grads
        self.reference = reference

    def __call__(self) -> None:
        if self.reference:
            with op.reference_only():
                self._step()
        else:
            self._step()

    def _step(self) -> None:
        self.state, self.model = op.update_(self.state, self.model, *self.grads)


def torch_variants(model: Any, grads: Any, names: Iterable[str] = tuple(_TORCH)) -> dict[str, Step]:
    """PyTorch's AdamW in its variants. They take turns on one set of tensors, which spares memory and changes no timing."""
    params = []
    for (_, array), (_, grad) in zip(arrays_of(model), arrays_of(grads), strict=True):
        param = torch.nn.Parameter(torch.tensor(array))
        param.grad = torch.from_numpy(grad)
        params.append(param)
    steps: dict[str, Step] = {}
    shared: Any = None
    for name in names:
        optimizer = torch.optim.AdamW(params, lr=1e-3, **_TORCH[name])
        if shared is None:
            shared = optimizer.state
        optimizer.state = shared
        steps[name] = optimizer.step
    return steps


def adamw(shapes: Any, *, reference: bool = False) -> dict[str, Any]:
    """All contestants with AdamW on arrays of these shapes. They share the gradients and nothing else."""
    grads = filled(shapes, seed=1, scale=0.01)
    steps: dict[str, Any] = {NAIVE: Naive(filled(shapes, seed=0, scale=0.02), grads)}
    steps |= torch_variants(filled(shapes, seed=0, scale=0.02), grads)
    steps[OURS] = Ours(op.AdamW(1e-3), filled(shapes, seed=0, scale=0.02), grads)
    if reference:
        steps[REFERENCE] = Ours(op.AdamW(1e-3), filled(shapes, seed=0, scale=0.02), grads, reference=True)
    return steps


def disagreement(shapes: Any, steps: int = 5) -> float:
    """How far the contestants' parameters are from the naive ones after some steps, relative to how far those have moved."""
    start, grads = filled(shapes, seed=0, scale=0.02), filled(shapes, seed=1, scale=0.01)
    naive = Naive(filled(shapes, seed=0, scale=0.02), grads)
    outcomes: list[Sequence[np.ndarray]] = []
    for name in _TORCH:
        step: Any = torch_variants(start, grads, [name])[name]
        for _ in range(steps):
            step()
        outcomes.append([param.detach().numpy() for param in step.__self__.param_groups[0]["params"]])
    for reference in (False, True):
        ours = Ours(op.AdamW(1e-3), filled(shapes, seed=0, scale=0.02), grads, reference=reference)
        for _ in range(steps):
            ours()
        outcomes.append([array for _, array in arrays_of(ours.model)])
    for _ in range(steps):
        naive()
    expected = list(naive.params.values())
    moved = farthest([array for _, array in arrays_of(start)], expected)
    return max(farthest(arrays, expected) for arrays in outcomes) / moved


def farthest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest difference between two lists of arrays."""
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))
