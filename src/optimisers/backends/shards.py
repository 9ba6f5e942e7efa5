"""Distributed tensors of PyTorch (`DTensor`): steps run on each process's own part, and sums are added up over the mesh."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from optimisers.backends.base import Batch, Runs

__all__ = ["Spread", "beside", "local_batch", "moved", "placed", "reduced", "spread_of", "whole", "zeros"]


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


def local_batch(batch: Batch) -> None:
    """Put this process's parts in the place of distributed tensors."""
    spread = batch.device
    if "parts" not in batch.plan:
        parts = [_part(shape, spread) for shape in batch.shapes]
        rows = [_rows(rows, *part) for rows, part in zip(batch.live_rows, parts, strict=True)]
        batch.plan["parts"] = [shape for shape, _ in parts], rows
    batch.shapes, batch.live_rows = batch.plan["parts"]
    with torch.no_grad():
        batch.params = [_local(param, spread) for param in batch.params]
        batch.grads = [_local(grad, spread) for grad in batch.grads]
        batch.slots = [tuple([_local(slot, spread) for slot in slots]) for slots in batch.slots]


def _local(tensor: Any, spread: Spread) -> torch.Tensor:
    if tuple(tensor.placements) != spread.placements:
        tensor = tensor.redistribute(spread.mesh, spread.placements)
    return tensor.to_local()


def _part(shape: tuple[int, ...], spread: Spread) -> tuple[tuple[int, ...], int]:
    """The shape of this process's part of a tensor, and its first row."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(shape, spread.mesh, spread.placements)
    return tuple(local), offset[0] if offset else 0


def _rows(rows: Runs | None, shape: tuple[int, ...], first: int) -> Runs | None:
    """The live rows that lie in a part."""
    if rows is None:
        return None
    found = [(max(start - first, 0), min(stop - first, shape[0])) for start, stop in rows]
    return tuple([(start, stop) for start, stop in found if start < stop])


def reduced(totals: Sequence[np.ndarray], batch: Batch) -> Sequence[np.ndarray]:
    """Sums over the parts of all processes. What is replicated counts once."""
    if not isinstance(batch.device, Spread):
        return totals
    mesh, placements = batch.device
    sums = torch.from_numpy(np.stack(totals)).to(torch.device(mesh.device_type))
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            torch.distributed.all_reduce(sums, group=mesh.get_group(dimension))
    return list(sums.cpu().numpy())


def whole(local: torch.Tensor, like: Any) -> Any:
    """A distributed tensor like another one, of this process's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
