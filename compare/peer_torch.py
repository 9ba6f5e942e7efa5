"""torch.optim: modules, `backward`, `zero_grad`; in the loop that its documentation shows."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

from compare.cases import by_hand
from compare.ours import killed_while_saving
from compare.torch_models import PARALLEL, SCHEDULERS, Linear, Pair, Two


def _step(optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _grad(parameter: Any, value: Any) -> None:
    parameter.grad = torch.tensor(value, dtype=parameter.dtype)


def _file(saved: Any) -> Path:
    file = Path("state.pt")
    torch.save(saved, file)
    return file


# Ties


def t1() -> Any:
    """The two places hold the same `Parameter`."""
    net = Pair()
    _step(torch.optim.SGD(net.parameters(), 0.1), net.loss(3, 7, 10))
    return net.values()


def t1b() -> Any:
    net = Pair()
    _step(torch.optim.SGD(net.parameters(), 0.1), 7 * net.second.weight.sum())
    return {"w": net.first.weight.tolist(), "again": net.second.weight.tolist()}


def t2() -> Any:
    """Two `Parameter`s that see the same memory; under plain descent two steps are one step with the sum."""
    w = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    net = Two(w=w, transpose=w.t())
    g = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    _step(torch.optim.SGD(net.parameters(), 0.1), net.w.sum() + (g * net.transpose).sum())
    return {"w": net.w.tolist(), "transpose": net.transpose.tolist()}


def t3() -> Any:
    """`clip_grad_value_`."""
    net = Pair()
    with torch.no_grad():
        net.first.weight.zero_()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    (8 * net.first.weight[0] + 8 * net.second.weight[0]).backward()
    clip_grad_value_(net.parameters(), 10)
    optimizer.step()
    return {"w": [net.first.weight[0].item()], "again": [net.second.weight[0].item()]}


def t4() -> Any:
    net = Two(a=[1.0], b=[1.0])
    _step(torch.optim.SGD(net.parameters(), 0.1), (net.a + 10 * net.b).sum())
    return {"a": net.a.tolist(), "b": net.b.tolist()}


def t4b() -> Any:
    whole = torch.tensor([0.0, 1, 2, 3, 4, 5])
    net = Two(first=whole[:4], second=whole[2:])
    _step(torch.optim.SGD(net.parameters(), 0.1), net.first.sum() + net.second.sum())
    return {"first": net.first.tolist(), "second": net.second.tolist()}


def t5() -> Any:
    """`b.weight = a.weight`."""
    net = nn.ModuleDict({"a": Linear([1.0]), "b": Linear([1.0])})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net["b"].weight = net["a"].weight
    _step(optimizer, (3 * net["a"].weight + 7 * net["b"].weight).sum())
    return {name: net[name].weight.tolist() for name in ("a", "b")}


def t6() -> Any:
    """It warns of duplicates when it is made."""
    x = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([x, x], 0.1)
    _step(optimizer, x.sum())
    return {"x": x.tolist(), "count": int(optimizer.state[x]["step"])}


def t7() -> Any:
    """`head.weight = embed.weight`."""
    embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embed.weight
    net = nn.ModuleList([embed, head])
    with torch.no_grad():
        embed.weight.zero_()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    (1.5 * embed(torch.tensor(0))[0] + 1.5 * head(torch.tensor([1.0, 0, 0]))[0]).backward()
    norm = clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return {"norm": norm.item(), "table": embed.weight[0, 0].item()}


def t8() -> Any:
    net = Pair()
    net, optimizer = pickle.loads(pickle.dumps((net, torch.optim.SGD(net.parameters(), 0.1))))
    _step(optimizer, net.loss(3, 7, 10))
    return net.values()


def t9() -> Any:
    """`parameters_to_vector`, and the gradients in the same order."""
    net = Pair()
    net.c = nn.Parameter(torch.tensor([3.0]))
    net.loss(3, 7, 1).backward()
    # The module registers c before the layers.
    gradient = torch.cat([net.first.weight.grad, net.c.grad])
    return {"length": len(parameters_to_vector(net.parameters())), "gradient": gradient.tolist()}


# Freezing


def f1() -> Any:
    """`requires_grad_`, `param_groups`."""
    net = Two(x=[1.0, 2.0], y=[3.0, 4.0])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss() -> Any:
        return (torch.tensor([1.0, 10.0]) * net.x).sum() + (torch.tensor([100.0, 1000.0]) * net.y).sum()

    net.y.requires_grad_(False)
    _step(optimizer, loss())
    found = {"x": net.x.tolist(), "y": net.y.tolist()}
    net.y.requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.2
    _step(optimizer, loss())
    return found | {"then x": net.x.tolist(), "then y": net.y.tolist()}


RULES = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
}


def _frozen_later(set_to_none: bool) -> Any:
    found = {}
    for name, made in RULES.items():
        net = Two(p=1.0, other=1.0)
        optimizer = made(net.parameters())
        _step(optimizer, net.p + net.other)
        net.p.requires_grad_(False)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (net.p + net.other).backward()
            optimizer.step()
        found[name] = net.p.item()
    return found


def f2a() -> Any:
    """`requires_grad_(False)`; `zero_grad` takes the gradients away."""
    return _frozen_later(True)


def f2() -> Any:
    """`zero_grad(set_to_none=False)`, as wrappers that keep gradients in one buffer do it."""
    return _frozen_later(False)


def _clipped(y: Any, stale: Any) -> Any:
    net = Two(x=[0.0, 0.0], y=y)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    net.y.requires_grad_(False)
    optimizer.zero_grad()
    ((torch.tensor([3.0, 4.0]) * net.x).sum() + net.y.sum()).backward()
    if stale is not None:
        _grad(net.y, stale)
    clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return {"x": net.x.tolist(), "y": net.y.tolist()}


def f3() -> Any:
    """`requires_grad_(False)`, with a `.grad` of before; `clip_grad_norm_(net.parameters(), 1.0)`."""
    return _clipped([1.0], [float("nan")])


def f4a() -> Any:
    return _clipped([0.0, 0.0], None)


def f4() -> Any:
    """As F3."""
    return _clipped([0.0, 0.0], [0.0, 12.0])


def f5() -> Any:
    net = Two(a=0.0, b=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net.b.requires_grad_(False)
    for at in range(11):
        if at == 10:
            net.b.requires_grad_(True)
        _step(optimizer, net.a + net.b)
    return {"a": net.a.item(), "b": net.b.item(), "mu of a": optimizer.state[net.a]["exp_avg"].item()}


def f6() -> Any:
    net = Two(a=0.0, b=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net.b.requires_grad_(False)
    _step(optimizer, net.a + net.b)
    nbytes = sum(each.nbytes for each in optimizer.state.get(net.b, {}).values())
    net.b.requires_grad_(True)
    _step(optimizer, net.a + net.b)
    return {"bytes": nbytes, "first step": net.b.item()}


def f7() -> Any:
    """`torch.save` of the two `state_dict`s."""
    net = Two(a=0.0, b=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for at in range(3):
        net.b.requires_grad_(at < 2)
        _step(optimizer, net.a + net.b)
    saved = torch.load(_file([net.state_dict(), optimizer.state_dict()]))
    net = Two(a=0.0, b=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    mu, before = optimizer.state[net.b]["exp_avg"].item(), net.b.item()
    _step(optimizer, net.a + net.b)
    return {"mu": mu, "next step": net.b.item() - before}


def f8() -> Any:
    """A hook takes the gradient of these rows away, since parameters freeze as a whole."""
    net = Two(e=[[1.0], [1.0], [1.0]])
    net.e.register_hook(lambda grad: grad * torch.tensor([[1.0], [0.0], [0.0]]))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1)
    for _ in range(3):
        _step(optimizer, 0 * net.e.sum())
    return {"rows": net.e[:, 0].tolist()}


def f9() -> Any:
    net = Pair()
    net.first.requires_grad_(False)
    _step(torch.optim.SGD(net.parameters(), 0.1), net.loss(1, 1, 1))
    return {"a": net.first.weight.tolist(), "b": net.second.weight.tolist()}


def f10() -> Any:
    net = Two(p=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _step(optimizer, net.p)
    for _ in range(20):
        net.p.requires_grad_(False)
        net.p.requires_grad_(True)
    _step(optimizer, net.p)
    return {"p": net.p.item(), "mu": optimizer.state[net.p]["exp_avg"].item()}


# Missing gradients


def m1a() -> Any:
    net = Two(p=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _step(optimizer, net.p)
    _step(optimizer, 0 * net.p)
    return {"mu": optimizer.state[net.p]["exp_avg"].item(), "nu": optimizer.state[net.p]["exp_avg_sq"].item()}


def m1b() -> Any:
    net = Two(p=0.0, q=0.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _step(optimizer, net.p + net.q)
    _step(optimizer, net.q)
    state, before = optimizer.state[net.p], net.p.item()
    found = {"mu": state["exp_avg"].item(), "nu": state["exp_avg_sq"].item()}
    _step(optimizer, net.p + net.q)
    return found | {"next step": net.p.item() - before}


def m2a() -> Any:
    net = nn.ModuleDict({"branch": Linear(1.0), "head": Linear(1.0)})
    _step(torch.optim.SGD(net.parameters(), 0.1), net["head"].weight)
    return {name: net[name].weight.item() for name in ("branch", "head")}


# Rules


def _decayed(clip: bool) -> Any:
    net = Two(x=[1.0, 10.0, 100.0])
    optimizer = torch.optim.SGD(net.parameters(), 1.0, weight_decay=0.1)
    (torch.tensor([1.0, 2.0, 3.0]) * net.x).sum().backward()
    if clip:
        clip_grad_value_(net.parameters(), 2)
    optimizer.step()
    return {"x": net.x.tolist()}


def r1() -> Any:
    """`weight_decay`."""
    return _decayed(False)


def r1b() -> Any:
    """`clip_grad_value_`, `weight_decay`."""
    return _decayed(True)


def r2() -> Any:
    net = Two(p=[1.0, 2.0])
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(3):
        _step(optimizer, (torch.tensor([0.5, -0.25]) * net.p).sum())
    return {"p": net.p.tolist()}


def _gathered(optimizer: Any, losses: Any, n: int) -> None:
    for at, loss in enumerate(losses, start=1):
        (loss / n).backward()
        if at % n == 0:
            optimizer.step()
            optimizer.zero_grad()


def r3() -> Any:
    """The loop of its notes: losses divided by 3, a step every third time."""
    net = Two(x=1.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    _gathered(optimizer, (3 * net.x, 6 * net.x), 3)
    before = net.x.item()
    (0 * net.x / 3).backward()
    optimizer.step()
    return {"before": before, "after": net.x.item()}


def r3b() -> Any:
    """As R3."""
    net = Two(x=1.0, y=2.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.01)
    _gathered(optimizer, (33 * net.x + 0 * net.y, 0 * net.x + 444 * net.y), 2)
    return {"x": net.x.item(), "y": net.y.item()}


def r4() -> Any:
    """As its notes on mixed precision have it: the parameter is float32, and `autocast` computes in bfloat16."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(100):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(1)).sum()
        _step(optimizer, loss)
    return {"p": net.weight.item()}


def r5() -> Any:
    net = Two(p=torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _grad(net.p, [0.0, 1e-8])
    optimizer.step()
    return {"p": net.p.tolist()}


def r6() -> Any:
    """Hyperparameters are keys of `param_groups`."""
    net = Two(x=1.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0]["learning_rat"] = 0.2
    _step(optimizer, net.x)
    return {"x": net.x.item()}


def r6b() -> Any:
    net = Two(x=1.0)
    _step(torch.optim.SGD(net.parameters(), -0.1), net.x)
    return {"x": net.x.item()}


def r7() -> Any:
    net = Two(p=torch.zeros((), dtype=torch.complex64))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(500):
        _step(optimizer, (net.p - (1 + 1j)).abs().square() / 2)
    return {"real": net.p.real.item(), "imaginary": net.p.imag.item()}


def r9() -> Any:
    net = Two(bias=[1.0])
    net.bias.grad = torch.tensor([1.0, 2.0, 3.0])
    torch.optim.SGD(net.parameters(), 0.1).step()
    return {"bias": net.bias.tolist()}


# State and files


def _two(order: str) -> Any:
    return Two(**{f"p{at}": torch.ones(2, 2) for at in order})


def s1() -> Any:
    """`optimizer.state_dict()` knows parameters by their number."""
    net = _two("12")
    optimizer = torch.optim.Adam(net.named_parameters(), 0.1)
    _step(optimizer, net.p1.sum() + 5 * net.p2.sum())
    file = _file(optimizer.state_dict())
    net = _two("21")
    optimizer = torch.optim.Adam(net.named_parameters(), 0.1)
    optimizer.load_state_dict(torch.load(file))
    return {f"mu of {name}": optimizer.state[getattr(net, name)]["exp_avg"][0, 0].item() for name in ("p1", "p2")}


def s1b() -> Any:
    """`torch.distributed.checkpoint.state_dict`: `get_optimizer_state_dict`, `set_optimizer_state_dict`."""
    # Here, since it takes seconds, and every case is a process.
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net = _two("12")
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _step(optimizer, net.p1.sum() + 5 * net.p2.sum())
    file = _file(get_optimizer_state_dict(net, optimizer))
    net = _two("21")
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    set_optimizer_state_dict(net, optimizer, torch.load(file))
    return {f"mu of {name}": optimizer.state[getattr(net, name)]["exp_avg"][0, 0].item() for name in ("p1", "p2")}


def s2() -> Any:
    def made(classes: int) -> Any:
        net = Two(trunk=torch.ones(1), head=torch.ones(classes, 2))
        return net, torch.optim.Adam(net.named_parameters(), 0.1)

    net, optimizer = made(10)
    _step(optimizer, net.trunk.sum() + net.head.sum())
    file = _file(optimizer.state_dict())
    net, optimizer = made(3)
    optimizer.load_state_dict(torch.load(file))
    _step(optimizer, net.trunk.sum() + net.head.sum())
    return {"head": net.head.tolist()}


def s4() -> Any:
    def made() -> Any:
        named = {"step": Linear(0.0), "mu": Linear(0.0), "a.b": Linear(0.0), "a": nn.ModuleDict({"b": Linear(0.0)})}
        net = nn.ModuleDict(named)
        return net, torch.optim.Adam(net.parameters(), 0.1)

    net, optimizer = made()
    loss = net["step"].weight + 2 * net["mu"].weight + 3 * net["a.b"].weight + 4 * net["a"]["b"].weight
    _step(optimizer, loss)
    file = _file(optimizer.state_dict())
    net, optimizer = made()
    optimizer.load_state_dict(torch.load(file))
    places = {"step": net["step"], "mu": net["mu"], "a.b": net["a.b"], "b in a": net["a"]["b"]}
    return {name: optimizer.state[place.weight]["exp_avg"].item() for name, place in places.items()}


def s5() -> Any:
    net = Two(p=torch.arange(8.0).reshape(2, 4).t())
    optimizer = torch.optim.Adam(net.parameters(), 0.0)
    _step(optimizer, net.p.square().sum() / 2)
    saved = torch.load(_file([net.state_dict(), optimizer.state_dict()]))
    net = Two(p=torch.zeros(4, 2))
    optimizer = torch.optim.Adam(net.parameters(), 0.0)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return {"p": net.p.tolist(), "mu": optimizer.state[net.p]["exp_avg"].tolist()}


def s7() -> Any:
    file = _file(Two(p=torch.ones(1000)).state_dict())
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    torch.load(file)
    return {}


def s8() -> Any:
    """`torch.save` writes into the file itself."""
    file = _file(torch.ones(1_000_000))
    killed_while_saving("compare.peer_torch", file)
    return {"p": torch.load(file)[0].item()}


def overwrite(file: str) -> None:
    """Save other values over the file."""
    torch.save(torch.full((1_000_000,), 2.0), file)


@by_hand
def s10() -> Any:
    """The float32 moments are put into the state by hand; `load_state_dict` casts them."""
    net = Two(p=torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _step(optimizer, net.p.sum())
    state = optimizer.state[net.p]
    state |= {name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}
    file = _file(optimizer.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    optimizer.load_state_dict(torch.load(file))
    return {"dtype": str(optimizer.state[net.p]["exp_avg"].dtype).removeprefix("torch.")}


# PyTorch


def p1() -> Any:
    found = {}
    for name, made in SCHEDULERS.items():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
        scheduler = made(optimizer)
        for _ in range(4):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        found[name] = float(optimizer.param_groups[0]["lr"])
    return found


def p2() -> Any:
    net = Linear(1.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net.weight * float("inf")).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    return {"p": net.weight.item(), "count": int(optimizer.state.get(net.weight, {}).get("step", 0))}


def p3() -> Any:
    net = Linear(1.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.weight.sum().backward()
    net.weight.requires_grad_(False)
    optimizer.step()
    return {"p": net.weight.item()}


def p4() -> Any:
    net = Linear(1.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.weight = nn.Parameter(torch.ones(2))
    _step(optimizer, net.weight.sum())
    return {"p": net.weight.tolist()}


def s6() -> Any:
    """`consume_prefix_in_state_dict_if_present` for the model; the optimiser's is by number."""
    net = Linear(1.0)
    wrapped = PARALLEL(net)
    optimizer = torch.optim.Adam(wrapped.parameters(), 0.1)
    _step(optimizer, net.weight.sum())
    saved = torch.load(_file([wrapped.state_dict(), optimizer.state_dict()]))
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved[0], "module.")
    plain = Linear(1.0)
    optimizer = torch.optim.Adam(plain.parameters(), 0.1)
    plain.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return {"weight": plain.weight.item(), "mu": optimizer.state[plain.weight]["exp_avg"].item()}
