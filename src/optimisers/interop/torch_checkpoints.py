"""Checkpoints that other tools of PyTorch have written: read with `weights_only=True`, and their optimizers taken over."""

import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

import torch

from optimisers.errors import StateError
from optimisers.interop.torch_import import from_torch
from optimisers.interop.torch_kinds import check_dict
from optimisers.state import State

__all__ = ["from_checkpoint", "optimizer_in", "read_checkpoint", "trainer_names"]

OPTIMIZER = "optimizer.pt"
"""The file of the optimizer in a folder of the Trainer of Transformers."""


def from_checkpoint(
    file: "str | os.PathLike[str]",
    module: Any,
    *,
    kind: "str | type | None" = None,
    names: Sequence[str] | None = None,
    which: int | None = None,
    step: int | None = None,
) -> State:
    """Take over the optimizer in a checkpoint of Lightning, of the Trainer of Transformers, or of `torch.save`.

    The values of the module are not read: load them as ever, before or after. Nothing in the file is executed.

    **Arguments:**

    - `file`: a checkpoint of Lightning (`.ckpt`); a folder of the Trainer (`checkpoint-500`), or the `optimizer.pt` in it; or a
      file with the state dict of an optimizer.
    - `module`: the model that it trains: the `LightningModule`, or the model of Transformers.
    - `kind`, `names`, `step`: as in `from_torch`. The Trainer's file holds no names, and its groups stand in an order of its own,
      which `trainer_names(module)` tells; it is used where `names` is left out, and the groups are those of a Trainer. The step is
      by default the one in the checkpoint.
    - `which`: the number of the optimizer, where a checkpoint of Lightning has several.

    **Returns** the state that goes on where the optimizer stood.

    **Raises** `StateError` for a file that is damaged, holds no optimizer, or more than plain data and tensors; `OSError` for one
    that cannot be read; and as `from_torch` does.

    Example:
        >>> import pathlib, tempfile, torch, optimisers as op
        >>> from optimisers.interop.torch_checkpoints import from_checkpoint
        >>> module = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        >>> module(torch.ones(3)).sum().backward()
        >>> optimizer.step()
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "optimizer.pt"
        >>> torch.save(optimizer.state_dict(), file)
        >>> from_checkpoint(file, module)
        State(step=1, 2 parameters, AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01))
    """
    place = _optimizer_file(file)
    optimizer, taken = optimizer_in(read_checkpoint(place), place, which)
    if names is None and File(place).name == OPTIMIZER and _like_trainers(optimizer["param_groups"], module):
        names = trainer_names(module)
    return from_torch(optimizer, module, kind=kind, names=names, step=taken if step is None else step)


def trainer_names(module: Any) -> list[str]:
    """The names of the parameters in the order in which the Trainer of Transformers gives them to its optimizer: those that decay,
    then the biases and norms, which do not.

    **Raises** `ModuleNotFoundError` where Transformers is not installed.
    """
    decaying, others = _trainer_groups(module)
    return decaying + others


def _trainer_groups(module: Any) -> tuple[list[str], list[str]]:
    from transformers import Trainer

    decaying = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]  # it looks at the module alone
    training = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [name for name in training if name in decaying], [name for name in training if name not in decaying]


def _like_trainers(groups: Any, module: Any) -> bool:
    """Whether groups without names are those that the Trainer makes for a module: one that decays and one that does not."""
    if len(groups) != 2 or any("param_names" in group for group in groups):
        return False
    sizes = [len(names) for names in _trainer_groups(module)]
    alike = all(groups[0].get(key) == groups[1].get(key) for key in groups[0] if key not in ("params", "weight_decay"))
    return alike and groups[1].get("weight_decay") == 0.0 and [len(group["params"]) for group in groups] == sizes


def optimizer_in(found: Any, file: "str | os.PathLike[str]", which: int | None = None) -> tuple[Mapping[str, Any], int | None]:
    """The state dict of the optimizer in what was read of a file, and the step that the run had reached, where that is known.

    **Raises** `StateError` where there is none.
    """
    if not isinstance(found, Mapping):
        raise StateError(f"{file} holds a {type(found).__name__}, and no state dict of an optimizer")
    nested = [key for key in ("optimizer", "optimizer_state_dict") if isinstance(found.get(key), Mapping)]
    if nested and {"state", "param_groups"} <= found[nested[0]].keys():
        found = found[nested[0]]
    if {"state", "param_groups"} <= found.keys():
        check_dict(found)
        if which is not None:
            raise StateError(f"{file} holds one optimizer; leave which out")
        return found, _step_of_trainer(file)
    several = found.get("optimizer_states")
    if not isinstance(several, Sequence) or isinstance(several, str) or not several:
        inside = ", ".join(map(repr, list(found)[:5])) or "nothing"
        raise StateError(f"{file} holds no optimizer; in it there is {inside}")
    if which is None and len(several) > 1:
        raise StateError(f"{file} holds {len(several)} optimizers; say which, by its number")
    which = which or 0
    if not 0 <= which < len(several):
        raise StateError(f"{file} holds {len(several)} optimizer{'s' * (len(several) != 1)}, and number {which} is none of them")
    check_dict(several[which])
    # With several optimizers, the count is that of their steps together.
    return several[which], found.get("global_step") if len(several) == 1 else None


def read_checkpoint(file: "str | os.PathLike[str]") -> Any:
    """What is in a file of `torch.save`: plain data and tensors, mapped into memory where the file allows it.

    **Raises** `StateError` for a file that is damaged, or holds anything else; `OSError` for one that cannot be read.
    """
    with open(file, "rb"):  # what cannot be read at all is an OSError
        pass
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{file} holds more than plain data and tensors, or is damaged, and nothing of it is executed here; load it yourself, "
            f"and give the state dict of its optimizer to from_torch: {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:  # torch raises errors of many kinds for damaged files
        raise StateError(f"{file} is no file of torch.save, or is damaged ({type(error).__name__}: {error})") from error


def _optimizer_file(file: "str | os.PathLike[str]") -> "str | os.PathLike[str]":
    if not File(file).is_dir():
        return file
    if not (File(file) / OPTIMIZER).exists():
        raise StateError(f"{file} holds no {OPTIMIZER}, as a folder of the Trainer does")
    return File(file) / OPTIMIZER


def _step_of_trainer(file: "str | os.PathLike[str]") -> int | None:
    try:
        step = json.loads((File(file).parent / "trainer_state.json").read_text("utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
