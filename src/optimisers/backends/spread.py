"""Where the parts of a distributed tensor of PyTorch (`DTensor`) lie, and tensors that lie like others."""

import sys
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Spread", "beside", "moved", "placed", "spread_of", "whole", "zeros"]


class Spread(NamedTuple):
    """Where the parts of a distributed tensor lie."""

    mesh: Any
    placements: tuple[Any, ...]

    def __str__(self) -> str:
        kinds = ", ".join(map(str, self.placements))
        return f"a mesh of {self.mesh.size()} ({self.mesh.device_type}; {kinds})"

    @property
    def type(self) -> str:
        """The type of the devices: `"cpu"`, `"cuda"`."""
        return self.mesh.device_type


def spread_of(tensor: Any) -> Spread | None:
    """Where the parts of a tensor lie; `None` for one that is not distributed."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return Spread(tensor.device_mesh, tuple(tensor.placements))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, spread: Spread) -> Any:
    """A distributed tensor of zeros."""
    from torch.distributed.tensor import zeros

    return zeros(*shape, dtype=dtype, device_mesh=spread.mesh, placements=spread.placements)


def beside(values: np.ndarray, like: Any) -> torch.Tensor:
    """A tensor of these values on the device of another one; replicated, where that is distributed."""
    spread = spread_of(like)
    if spread is None:
        return torch.asarray(values, device=like.device)
    from torch.distributed.tensor import DTensor, Replicate

    local = torch.asarray(values, device=like.to_local().device)
    return DTensor.from_local(local, spread.mesh, [Replicate()] * spread.mesh.ndim, run_check=False)


def moved(tensor: torch.Tensor, place: Any) -> torch.Tensor:
    """A tensor, of which all processes have the whole, on a device or spread over a mesh."""
    if not isinstance(place, Spread):
        return tensor.to(place)
    from torch.distributed.tensor import distribute_tensor

    if spread_of(tensor) is not None:
        return tensor.redistribute(place.mesh, place.placements)  # type: ignore[attr-defined]  # a DTensor
    return distribute_tensor(tensor.to(place.type), place.mesh, place.placements)


def placed(tensor: Any, like: Any) -> Any:
    """A tensor, spread as another one is."""
    spread = spread_of(like)
    if spread is None or tuple(tensor.placements) == spread.placements:
        return tensor
    return tensor.redistribute(spread.mesh, spread.placements)


def whole(local: torch.Tensor, like: Any) -> Any:
    """A distributed tensor like another one, of this process's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
