"""PyTorch's own fused kernels, in the place of ours where they compute the same: one pass over memory, on the GPU too."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, sqrt
from typing import Any

import torch

from optimisers.backends.base import Scalars
from optimisers.rules.adam import Adam, AdamW, AMSGrad
from optimisers.rules.descent import SGD, Momentum, Nesterov
from optimisers.rules.program import Member

__all__ = ["Fused", "fused_kernel"]

Tensors = Sequence[torch.Tensor]
Fused = Callable[[Tensors, Tensors, Sequence[Tensors], Scalars], None]
"""It writes parameters and slots, from gradients, a list for each slot, and the scalars of a step."""

_torch: Any = torch  # whose stubs do not tell of fused kernels
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float64)
_TINY = 5e-324
"""The least number above zero; times a velocity, nothing."""


def fused_kernel(member: Member, dtype: torch.dtype, device: torch.device) -> Fused | None:
    """The kernel of PyTorch that does what a member does, if there is one for the dtype and the device."""
    return _KERNELS.get(member.kernel) if dtype in _DTYPES and device.type in _DEVICES else None


def _adam(params: Tensors, grads: Tensors, slots: Sequence[Tensors], h: Scalars) -> None:
    # Counts and hyperparameters come as the scalars of a step. At an infinite count the kernel's own correction of the bias is 1,
    # and that of the step is put into lr and eps.
    root = sqrt(h.c2)
    rate = h.lr * h.c1 / root
    mu, nu, *peak = slots
    never = torch.full((), inf, device=params[0].device)
    _torch._fused_adamw_(
        params,
        grads,
        mu,
        nu,
        peak[0] if peak else [],
        [never] * len(params),
        lr=rate,
        beta1=1 - h.w1,
        beta2=1 - h.w2,
        weight_decay=vars(h).get("decay", 0.0) / rate if rate else 0.0,
        eps=h.eps / root,
        amsgrad=bool(peak),
        maximize=False,
    )


def _descent(params: Tensors, grads: Tensors, slots: Sequence[Tensors], h: Scalars, *, nesterov: bool = False) -> None:
    _torch._fused_sgd_(
        params,
        grads,
        slots[0] if slots else [],
        weight_decay=vars(h).get("weight_decay", 0.0),
        # It takes a momentum of zero for none at all, and wants no velocity then.
        momentum=(h.momentum or _TINY) if slots else 0.0,
        lr=h.lr,
        dampening=1 - vars(h).get("fresh", 1.0),
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


_KERNELS: Mapping[Any, Fused] = {
    Adam().kernel: _adam,
    AMSGrad().kernel: _adam,
    AdamW().kernel: _adam,
    AdamW(amsgrad=True).kernel: _adam,
    Momentum().kernel: _descent,
    Nesterov().kernel: partial(_descent, nesterov=True),
    SGD().kernel: _descent,
    SGD(momentum=0.9).kernel: _descent,
    SGD(momentum=0.9, nesterov=True).kernel: partial(_descent, nesterov=True),
}
