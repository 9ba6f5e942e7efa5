"""Distributed tensors of PyTorch (`DTensor`): steps run on each process's own part, and sums are added up over the mesh."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from optimisers.backends.base import Batch
from optimisers.backends.rows import Runs
from optimisers.backends.spread import Spread

__all__ = ["local_batch", "reduced"]


def local_batch(batch: Batch) -> None:
    """Put this process's parts in the place of distributed tensors."""
    spread = batch.device
    if "parts" not in batch.kept:
        parts = [_part(shape, spread) for shape in batch.shapes]
        rows = [_rows(rows, *part) for rows, part in zip(batch.live_rows, parts, strict=True)]
        batch.kept["parts"] = [shape for shape, _ in parts], rows
    batch.shapes, batch.live_rows = batch.kept["parts"]
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
