"""A run that may be interrupted and go on in a new process: `python -m tests.resumed LIBRARY RULE FILE FIRST LAST OUT`."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_ENABLE_X64", "1")

import numpy as np

import optimisers as op
from optimisers.schedules import Cosine, warmup

RULES: dict[str, Any] = {
    "adamw": lambda: op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(warmup(Cosine(0.1, 40), 5)), op.Average(0.9)),
    "noise": lambda: op.Chain(op.AccumGrad(2), op.AddNoise(0.1), op.SGD(0.1, momentum=0.9)),
    "prodigy": lambda: op.Prodigy(1.0),
    "mixed": lambda: {"**.bias": op.Lion(1e-2), "**": op.Chain(op.SkipNonFinite(), op.NAdam(0.05))},
    "muon": lambda: op.Muon(0.05, fallback=op.AdamW(0.05)),
    "rprop": lambda: op.Rprop(0.1),
}


def _made(library: str, array: np.ndarray) -> Any:
    if library == "torch":
        import torch

        return torch.from_numpy(array.copy())
    if library == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    return array.copy()


def main(library: str, rule: str, file: str, first: int, last: int, out: str) -> None:
    """Steps `first` to `last`, from the file where there is one; the file is written at the end, and the weights to `out`."""
    rng = np.random.default_rng(0)
    table = _made(library, rng.normal(size=(5, 3)))
    head = table if library == "jax" else table.T
    model: Any = {"embed": table, "head": {"weight": head, "bias": _made(library, rng.normal(size=5))}}
    state = op.setup(RULES[rule](), model)
    if Path(file).exists():
        state, model, *_ = op.load(file, model)
        assert state is not None
    for at in range(first, last):
        if at == 3:
            state = state.freeze("head.bias").freeze("embed", rows=[1])
        if at == 6:
            state = state.thaw().adjust(lr=0.02)
        rng = np.random.default_rng(at)
        grads = {path: _made(library, rng.normal(size=shape)) for path, shape in {"embed": (5, 3), "head.bias": (5,)}.items()}
        state, model = op.update(state, model, grads)
    op.save(file, state, model)
    with open(out, "wb") as written:
        np.savez(written, embed=model["embed"], weight=model["head"]["weight"], bias=model["head"]["bias"])


if __name__ == "__main__":
    library, rule, file, first, last, out = sys.argv[1:]
    main(library, rule, file, int(first), int(last), out)
