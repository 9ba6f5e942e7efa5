"""What a monitor costs that samples every tenth step, beside steps that nobody watches: `python -m benchmarks.monitor`."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

import optimisers as op
from benchmarks.elementwise import bytes_moved
from benchmarks.figures import Figure, Outcome
from benchmarks.models import filled, shapes_of
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Timing
from optimisers.interop.torch_optim import Optimizer

__all__ = ["SUITE"]

EVERY, TARGET = 10, 0.05
PLAIN, MEMORY, FILE = "update_", "sampled, in memory", "sampled, in a file"
COMPILED = "compiled update"
CASES = {"a": "GPT-2 small", "b": "many small arrays"}


class Steps:
    """A training whose steps are plain, or are all sampled."""

    def __init__(self, state: op.State, model: Any, grads: Any) -> None:
        self.state, self.model, self.grads = state, model, grads

    def plain(self) -> None:
        self.state, self.model = op.update_(self.state, self.model, self.grads)

    def sampled(self, monitor: op.Monitor) -> Callable[[], None]:
        def step() -> None:
            self.state, self.model = monitor.update_(self.state, self.model, self.grads)
            # What is kept of each sample is little, but a race takes many.
            monitor.recording = op.Recording()

        return step


def _updates(steps: Steps, file: Path) -> dict[str, Callable[[], None]]:
    """`update_` alone, and with each step sampled."""
    return {PLAIN: steps.plain, MEMORY: steps.sampled(op.Monitor(every=1)), FILE: steps.sampled(op.Monitor(file, every=1))}


def _share(timings: Mapping[str, Timing], name: str, plain: str) -> float:
    """What samples add to a step, on average, when every tenth is one."""
    return (timings[name].minimum / timings[plain].minimum - 1) / EVERY


def _figures(section: str, label: str, timings: Mapping[str, Timing], plain: str) -> list[Figure]:
    names = [name for name in timings if name != plain]
    return [
        Figure(section, f"{label}, {name}, against {plain}", _share(timings, name, plain), TARGET, f"{label}, {plain}")
        for name in names
    ]


# What is measured -----------------------------------------------------------------------------------------------------


def _cases(section: str, make: Callable[[Any], Any], plain: str, contestants: Callable[[Steps, Path], Any]) -> Section:
    """Both models in one array library."""

    def measured(scale: Scale) -> Outcome:
        timings, figures, moved = {}, [], {}
        for case, label in CASES.items():
            shapes = shapes_of(case, scale.sizes)
            model, grads = (jax.tree.map(make, filled(shapes, seed, size)) for seed, size in ((0, 0.02), (1, 0.01)))
            steps = Steps(op.setup(op.AdamW(1e-3), model), model, grads)
            moved[f"{label}, {plain}"] = bytes_moved(steps.state)
            taken = scale.race(contestants(steps, scale.folder / f"{section}-{case}.jsonl"))
            timings |= {f"{label}, {name}": each for name, each in taken.items()}
            figures += _figures(section, label, taken, plain)
        return Outcome(timings, figures, moved)

    return measured


def _compiled(steps: Steps, file: Path) -> dict[str, Callable[[], None]]:
    """A compiled step, and the same recorded outside of it."""
    state, model, grads = steps.state, steps.model, steps.grads
    monitor, update = op.Monitor(every=1), jax.jit(op.update)

    def plain() -> None:
        jax.block_until_ready(update(state, model, grads))

    def recorded() -> None:
        after = update(state, model, grads)
        monitor.record(state, model, grads, *after)
        jax.block_until_ready(after)

    return {COMPILED: plain, "recorded": recorded}


def _training(scale: Scale) -> Outcome:
    """Whole steps of a transformer in PyTorch, forward and backward, with `update_` and with an optimizer that is attached to."""
    width, folder = 16 * (scale.sizes.width // 16 or 1), scale.folder
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2)
    batch = torch.randn(4, 64, width)
    optimizer, monitor = Optimizer(module, op.AdamW(1e-3)), op.Monitor(folder / "training.jsonl", every=1)
    steps = Steps(op.setup(op.AdamW(1e-3), module), module, None)
    sampled = steps.sampled(op.Monitor(folder / "steps.jsonl", every=1))

    def with_gradients(step: Callable[[], object]) -> Callable[[], None]:
        def whole() -> None:
            module.zero_grad()
            module(batch).square().mean().backward()
            step()

        return whole

    def attached() -> None:
        handle = monitor.attach(optimizer)
        optimizer.step()
        handle.remove()
        monitor.recording = op.Recording()

    label, plain, shell = "a transformer", "training step", "training step of an Optimizer"
    taken = scale.race({plain: with_gradients(steps.plain), FILE: with_gradients(sampled)})
    theirs = scale.race({shell: with_gradients(optimizer.step), "attached, in a file": with_gradients(attached)})
    timings = {f"{label}, {name}": each for name, each in (taken | theirs).items()}
    return Outcome(timings, _figures("training", label, taken, plain) + _figures("training", label, theirs, shell))


SECTIONS: Mapping[str, Section] = {
    "numpy": _cases("numpy", lambda array: array, PLAIN, _updates),
    "torch": _cases("torch", torch.from_numpy, PLAIN, _updates),
    "jax": _cases("jax", jnp.asarray, COMPILED, _compiled),
    "training": _training,
}
SUITE = Suite("monitor", __doc__, SECTIONS, packages=("jax",))

if __name__ == "__main__":
    sys.exit(SUITE.main())
