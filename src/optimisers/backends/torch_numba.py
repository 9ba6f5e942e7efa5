"""PyTorch tensors on the CPU in one fused pass: the compiled loops that serve NumPy, on the memory of the tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from optimisers.backends import numba
from optimisers.backends import torch as lists
from optimisers.backends.array_api import derive
from optimisers.backends.base import Batch
from optimisers.backends.numba import watch
from optimisers.backends.shards import reduced
from optimisers.backends.torch import finish, reached, zeros

__all__ = ["derive", "prepare", "reached", "row_by_row", "run", "sums", "watch", "zeros"]

row_by_row = False


def prepare(batch: Batch) -> None:
    """Check the tensors, find or make contiguous ones to work on, and note where they lie."""
    lists.prepare(batch)
    prepared = batch.prepared
    dtype = getattr(torch, batch.dtype)
    if any(grad.dtype != dtype for grad in prepared.grads):
        prepared = prepared._replace(grads=[grad.to(dtype) for grad in prepared.grads])
    addresses = np.empty((2 + len(batch.slot_dtypes), len(batch.params)), np.int64)
    addresses[0], addresses[1] = _addresses(prepared.params), _addresses(prepared.grads)
    # Those of the slots are not kept between steps: a tensor can be given other memory and stay the same object.
    for at, column in enumerate(zip(*prepared.slots, strict=True)):
        addresses[2 + at] = _addresses(column)
    # Tensors that are made of others have no memory of their own.
    empty = np.array([0 in shape for shape in batch.shapes])
    if addresses[:, ~empty].all():
        batch.prepared = prepared._replace(addresses=addresses)


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


def sums(batch: Batch, member: int) -> Sequence[np.ndarray]:
    """The sums of one member's measure, in float64."""
    found = None if batch.prepared.addresses is None else numba.sums_in_one_pass(batch, member)
    return lists.sums(batch, member) if found is None else reduced(found, batch)


def run(batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the first members in one pass."""
    if not step and not any(member.slots for member in batch.program.members[:length]):
        return batch.prepared.given
    if batch.prepared.addresses is None or not numba.run_in_one_pass(batch, length, step=step):
        return lists.run(batch, length, step=step)
    if batch.watched is not None:
        batch.watched = reduced(batch.watched, batch)
    return finish(batch, step=step)
