"""Modules and schedulers of PyTorch that the cases train with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

__all__ = ["PARALLEL", "SCHEDULERS", "Linear", "Pair", "Two"]

SCHEDULERS: Mapping[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}
PARALLEL = nn.DataParallel


class Linear(nn.Module):
    """One parameter, `weight`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))


class Two(nn.Module):
    """Parameters by name."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.as_tensor(value)))


class Pair(nn.Module):
    """One parameter at two places, and another, `c`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear([1.0, 2.0])
        self.second = Linear([1.0, 2.0])
        self.second.weight = self.first.weight
        self.c = nn.Parameter(torch.tensor([1.0, 2.0]))

    def loss(self, first: float, second: float, c: float) -> torch.Tensor:
        """Linear, with these gradients."""
        return first * self.first.weight.sum() + second * self.second.weight.sum() + c * self.c.sum()

    def values(self) -> dict[str, Any]:
        """What stands where."""
        return {"w": self.first.weight.tolist(), "again": self.second.weight.tolist(), "c": self.c.tolist()}
