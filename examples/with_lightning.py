"""Fine-tune in Lightning: a tied embedding, a trunk that starts frozen, and a callback that thaws its last layer at an epoch."""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import optimisers as op
from optimisers.demo.corpus import read
from optimisers.interop.torch_optim import Optimizer

WIDTH, CONTEXT, BATCH = 32, 8, 32


class Language(lightning.LightningModule):
    """The next character, from those before it."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, WIDTH)
        self.trunk = nn.ModuleList([nn.Linear(CONTEXT * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, alphabet, bias=False)
        self.head.weight = self.embed.weight
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-2))
        optimizer = Optimizer(self, rule, frozen="trunk", sync_requires_grad=True)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(-2)
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0][:, :-1]), batch[0][:, -1])
        self.losses.append(loss.item())
        return loss


class Thaw(lightning.Callback):
    """Thaws what a selector selects, at the beginning of an epoch."""

    def __init__(self, selector: str, epoch: int) -> None:
        self.selector, self.epoch = selector, epoch

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        if trainer.current_epoch == self.epoch and isinstance(optimizer, Optimizer):
            optimizer.thaw(self.selector)


def main(argv: Sequence[str] | None = None) -> tuple[Language, Optimizer]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of each of the two epochs (default: 50)")
    steps = parser.parse_args(argv).steps

    corpus = read()
    rows = torch.from_numpy(corpus.first)[: BATCH * steps + CONTEXT].unfold(0, CONTEXT + 1, 1)
    torch.manual_seed(0)
    model = Language(len(corpus.alphabet))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[Thaw("trunk.1", epoch=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(rows), BATCH, shuffle=True))

    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, Optimizer)
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}")
    print(optimizer.op_state)
    return model, optimizer


if __name__ == "__main__":
    main()
