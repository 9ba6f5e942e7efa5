"""Fine-tune a PyTorch transformer with a tied embedding: pretrain it, by way of a checkpoint, then thaw it from the top."""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import optimisers as op
from optimisers.demo.corpus import read
from optimisers.interop.torch_optim import Optimizer

WIDTH, HEADS, BLOCKS, SEQUENCES, LENGTH = 64, 4, 2, 16, 32


class Transformer(nn.Module):
    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, alphabet)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight  # this is all it takes to tie them

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)
        return self.head(self.norm(x))


class Phase(NamedTuple):
    name: str
    losses: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


class Training:
    """All that a checkpoint has to hold."""

    def __init__(self, alphabet: int, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(alphabet)
        rule = op.no_decay(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(5e-3, betas=(0.9, 0.99))), ndim=1)
        self.optimizer = Optimizer(self.model, rule, sync_requires_grad=True)  # what is frozen gets no gradients either
        self.scheduler = OneCycleLR(self.optimizer, 5e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False)
        self.random = torch.Generator().manual_seed(seed)

    def save(self, path: Path) -> None:
        parts = {name: part.state_dict() for name, part in vars(self).items() if name != "random"}
        torch.save({**parts, "random": self.random.get_state()}, path)

    def load(self, path: Path) -> "Training":
        for name, part in torch.load(path, weights_only=True).items():
            self.random.set_state(part) if name == "random" else getattr(self, name).load_state_dict(part)
        return self

    def step(self, text: torch.Tensor) -> float:
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=self.random)
        rows = text[starts + torch.arange(LENGTH + 1)]
        loss = cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def main(argv: Sequence[str] | None = None) -> list[Phase]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each of the four phases (default: 100)")
    parser.add_argument("--uninterrupted", action="store_true", help="pretrain without the checkpoint; gives the same numbers")
    options = parser.parse_args(argv)
    steps, corpus, phases = options.steps, read(), []
    first, second = torch.from_numpy(corpus.first), torch.from_numpy(corpus.second)

    def train(name: str, training: Training, text: torch.Tensor, steps: int) -> None:
        losses, rates = [], []
        for _ in range(steps):
            rates.extend(training.scheduler.get_last_lr()[:1])
            losses.append(training.step(text))
        # Both hold the tensors themselves, which the next step writes into.
        phases.append(Phase(name, losses, rates, *copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))))
        print(f"{name}: loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}, rate {rates[0]:.1e} -> {rates[-1]:.1e}")
        branches = {"embed": "embed.weight"} | {f"blocks.{at}": f"blocks.{at}.linear1.weight" for at in range(BLOCKS)}
        counts = phases[-1].optimizer["state"]
        print("  steps taken:", ", ".join(f"{branch} {counts[path]['step']}" for branch, path in branches.items()))

    training = Training(len(corpus.alphabet), 4 * steps, seed=0)
    train("pretrain", training, first, steps // 2)
    if not options.uninterrupted:
        with tempfile.TemporaryDirectory() as folder:
            training.save(Path(folder) / "checkpoint.pt")
            training = Training(len(corpus.alphabet), 4 * steps, seed=1).load(Path(folder) / "checkpoint.pt")  # all of it is new
    train("pretrain on", training, first, steps - steps // 2)

    training.optimizer.freeze("blocks")
    train("trunk frozen", training, second, steps)
    training.optimizer.thaw(f"blocks.{BLOCKS - 1}")
    train("last block thawed", training, second, steps)
    training.optimizer.thaw("blocks")
    train("all thawed", training, second, steps)
    print(training.optimizer.summary())
    return phases


if __name__ == "__main__":
    main()
