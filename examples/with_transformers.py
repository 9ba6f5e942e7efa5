"""Fine-tune with the Trainer of Hugging Face: a small GPT-2, untrained, whose layers a callback thaws from the top."""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import optimisers as op
from optimisers.demo.corpus import read
from optimisers.interop.torch_optim import Optimizer

LENGTH, BATCH, LAYERS = 32, 8, 2


class Thaw(TrainerCallback):
    """Thaws the layers, one by one from the top, each after so many steps."""

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self.optimizer, self.every = optimizer, every

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        thawed, rest = divmod(state.global_step, self.every)
        if thawed and not rest:
            self.optimizer.thaw(f"transformer.h.{LAYERS - thawed}")


def main(argv: Sequence[str] | None = None) -> tuple[GPT2LMHeadModel, Optimizer, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of each of the three phases (default: 30)")
    steps = parser.parse_args(argv).steps

    corpus = read()
    rows = torch.from_numpy(corpus.first)[: BATCH * steps * LENGTH].unflatten(0, (-1, LENGTH))
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=32,
        n_head=2,
        n_positions=LENGTH,
        vocab_size=len(corpus.alphabet),
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)  # its head is tied to its embedding
    rule = op.no_decay(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-2)), ndim=1)
    optimizer = Optimizer(model, rule, frozen="transformer.h", sync_requires_grad=True)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants one, though nothing is written to it
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=3 * steps,
                per_device_train_batch_size=BATCH,
                max_grad_norm=0.0,  # the rule clips
                logging_steps=max(1, steps // 3),
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizers=(optimizer, scheduler),
            callbacks=[Thaw(optimizer, every=steps)],
        )
        trainer.train()

    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(optimizer.summary())
    return model, optimizer, losses


if __name__ == "__main__":
    main()
