"""Every elementwise rule of the library, found by its public names, and the bytes it moves."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

import optimisers as op
from optimisers.rules.program import program_of

__all__ = ["CHAIN", "YARDSTICK", "bytes_moved", "elementwise"]

YARDSTICK = "AdamW"
CHAIN = "Chain(ClipGrad, WeightDecay, Adam)"

# A part whose defaults would let only some calls step.
_ARGUMENTS: dict[str, dict[str, Any]] = {"AccumGrad": {"n": 1}}


@op.rule
class SignMomentum(op.Rule):
    """The rule of `docs/guides/writing-a-rule.md`, as a user wrote it."""

    lr: op.Hyper = 1e-3
    beta: op.Hyper = 0.9

    slots = {"mu": op.LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr, "w": 1 - self.beta}

    def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any) -> Any:
        mu = mu + h.w * (g - mu)
        return h.lr * xp.sign(mu), mu


def elementwise() -> dict[str, op.Rule]:
    """Rules that speak of one element and nothing else, by name; a part without a learning rate stands before Adam in a chain."""
    rules: dict[str, op.Rule] = {YARDSTICK: op.AdamW(), CHAIN: op.Chain(op.ClipGrad(), op.WeightDecay(), op.Adam())}
    rules["a user's SignMomentum"] = SignMomentum()
    for name in op.__all__:
        kind = getattr(op, name)
        if isinstance(kind, type) and issubclass(kind, op.Rule) and kind not in (op.Rule, op.Chain):
            made = kind(**_ARGUMENTS.get(name, {}))
            if all(member.elementwise and member.measure is None for member in program_of(made).members):
                rules |= _variants(name, made)
    return rules


def _variants(name: str, made: op.Rule) -> Iterator[tuple[str, op.Rule]]:
    """The rule, and what becomes of it with momentum where it starts without."""
    if "lr" not in made.hyperparameters:
        yield f"Chain({name}, Adam)", op.Chain(made, op.Adam()) if made.rank == 0 else op.Chain(op.Adam(), made)
        return
    yield name, made
    if made.hyperparameters.get("momentum") == 0:
        yield f"{name} with momentum", made_with(made, momentum=0.9)
        if "nesterov" in made.hyperparameters:
            yield f"{name} with nesterov", made_with(made, momentum=0.9, nesterov=True)


def made_with(made: op.Rule, **options: Any) -> op.Rule:
    """The rule with other options, static ones included."""
    return dataclasses.replace(made, **options)  # type: ignore[type-var]  # every rule is a dataclass


def bytes_moved(state: op.State) -> int:
    """The bytes that a step reads and writes at the least: gradient and parameter and slots in, parameter and slots out."""
    total = 0
    for leaf in state.leaves():
        parameter = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        total += 3 * parameter + 2 * leaf.nbytes
    return total
