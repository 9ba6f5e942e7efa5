"""This library in PyTorch's own loops: modules, schedulers, `GradScaler`, files of wrapped models."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import optimisers as op
from compare.ours import *  # noqa: F403
from compare.ours import FILE, Arrays
from compare.torch_models import PARALLEL, SCHEDULERS, Linear
from optimisers.interop.torch_optim import Optimizer


def p1(array: Arrays) -> Any:
    found = {}
    for name, made in SCHEDULERS.items():
        optimizer = Optimizer(nn.Linear(1, 1), op.SGD(0.1, momentum=0.9))
        scheduler = made(optimizer)
        for _ in range(4):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        found[name] = float(optimizer.param_groups[0]["lr"])
    return found


def p2(array: Arrays) -> Any:
    net = Linear(1.0)
    optimizer = Optimizer(net, op.Adam(0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net.weight * float("inf")).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    return {"p": net.weight.item(), "count": int(optimizer.op_state["weight"].step)}


def p3(array: Arrays) -> Any:
    net = Linear(1.0)
    optimizer = Optimizer(net, op.Descent(0.1))
    net.weight.sum().backward()
    net.weight.requires_grad_(False)
    optimizer.step()
    return {"p": net.weight.item()}


def p4(array: Arrays) -> Any:
    net = Linear(1.0)
    optimizer = Optimizer(net, op.Descent(0.1))
    net.weight = nn.Parameter(torch.ones(2))
    net.weight.sum().backward()
    optimizer.step()
    return {"p": net.weight.tolist()}


def s6(array: Arrays) -> Any:
    net = Linear(1.0)
    wrapped = PARALLEL(net)
    state = op.setup(op.Adam(0.1), wrapped)
    net.weight.sum().backward()
    state, _ = op.update_(state, wrapped)
    file = Path(FILE)
    op.save(file, state, wrapped)
    plain = Linear(1.0)
    state, *_ = op.load(file, plain)
    return {"weight": plain.weight.item(), "mu": array.read(state["weight"].slots["mu"])}
