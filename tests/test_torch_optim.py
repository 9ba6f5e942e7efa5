"""The optimizer for PyTorch's loops: torch.optim's numbers, its schedulers and scalers, files by name, and what freezes."""

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import optimisers as op
from optimisers.errors import HyperparameterError, ModelError, PathError, StateError
from optimisers.interop.torch_import import from_torch
from optimisers.interop.torch_optim import Optimizer
from optimisers.schedules import Linear
from tests.conftest import RULES, leaf, trains


class Language(nn.Module):
    """An embedding that is the head, too, and a normalisation with buffers."""

    def __init__(self, *, head_first: bool = False, tied: bool = True) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(3, 5)
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.trunk = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        if not head_first:
            self.head = nn.Linear(3, 5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.norm(self.embed(x))))


def _language(**options: Any) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


_X, _Y = torch.tensor([0, 1, 2, 3, 4, 1]), torch.tensor([1, 2, 3, 4, 0, 2])


def _backward(model: nn.Module, at: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(at)
    if isinstance(model, nn.Sequential):
        x = torch.randn(6, 4, generator=generator)
        loss = (model(x) - torch.randn(6, 2, generator=generator)).square().mean()
    else:
        order = torch.randperm(6, generator=generator)[:4]
        loss = nn.functional.cross_entropy(model(_X[order]), _Y[order])
    loss.backward()
    return loss.detach()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    for at in range(first, first + steps):
        optimizer.zero_grad()
        _backward(model, at)
        optimizer.step()


def _steps(optimizer: Optimizer) -> dict[str, int]:
    return {str(path): leaf(optimizer.op_state, path).step for path in optimizer.op_state}


def _assert_same(model: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    theirs = dict(other.named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.allclose(tensor, theirs[name], rtol=tolerance, atol=tolerance), name


# Numbers --------------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Callable[[], op.Rule], Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": (lambda: op.AdamW(1e-2, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
    "amsgrad": (lambda: op.AdamW(1e-2, amsgrad=True), lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True)),
    "SGD": (lambda: op.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        lambda: op.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "RMSProp": (lambda: op.RMSProp(1e-2), lambda p: torch.optim.RMSprop(p, 1e-2)),
    "NAdam": (lambda: op.NAdam(1e-2), lambda p: torch.optim.NAdam(p, 1e-2)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("make", [_net, _language], ids=["plain", "tied"])
def test_the_numbers_are_those_of_torch(name: str, make: Callable[[], nn.Module]) -> None:
    rule, theirs = PAIRS[name]
    mine, other = make(), make()
    _train(mine, Optimizer(mine, rule()), 8)
    _train(other, theirs(other.parameters()), 8)
    _assert_same(mine, other)


def test_a_closure_is_evaluated_with_gradients_on_and_its_loss_returned() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Descent(0.1))
    before = _backward(copy.deepcopy(model))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return _backward(model)

    with torch.no_grad():
        assert optimizer.step(closure) == before
    assert _backward(model) < before


def test_accumulated_gradients_are_one_step() -> None:
    model, other = _net(), _net()
    optimizer, theirs = Optimizer(model, op.Adam(1e-2)), torch.optim.Adam(other.parameters(), 1e-2)
    for each in (model, other):
        _backward(each, 0)
        _backward(each, 1)
    optimizer.step()
    theirs.step()
    _assert_same(model, other)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_missing_gradient_is_no_step() -> None:
    model = _net()
    optimizer = Optimizer(model, op.AdamW(0.1))
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.op_state.step == 0


def test_a_compiled_and_a_wrapped_module_train_under_the_plain_names() -> None:
    plain, bare = _language(), _language()
    expected = [str(path) for path in op.setup(op.Adam(), plain)]
    optimizer = Optimizer(nn.DataParallel(_language()), op.Adam(0.1))
    assert [str(path) for path in optimizer.op_state] == expected
    module = torch.compile(bare, backend="eager")
    assert isinstance(module, nn.Module)
    optimizer = Optimizer(module, op.AdamW(1e-2))
    _train(module, optimizer, 3)
    assert [str(path) for path in optimizer.op_state] == expected
    other = Optimizer(plain, op.AdamW(1e-2))
    _train(plain, other, 3)
    _assert_same(bare, plain)
    other.load_state_dict(optimizer.state_dict())
    assert other.op_state == optimizer.op_state


def test_a_module_under_distributed_data_parallelism_trains_under_the_plain_names() -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped, plain = nn.parallel.DistributedDataParallel(_net()), _net()
        optimizer, other = Optimizer(wrapped, op.AdamW(1e-2)), Optimizer(plain, op.AdamW(1e-2))
        for _ in range(3):
            for each, own in ((wrapped, optimizer), (plain, other)):
                own.zero_grad()
                each(torch.ones(2, 4)).square().mean().backward()
                own.step()
        _assert_same(plain, wrapped.module)
        other.load_state_dict(optimizer.state_dict())
        assert other.op_state == optimizer.op_state
    finally:
        distributed.destroy_process_group()


def test_a_loop_can_be_compiled_around_a_step() -> None:
    model, other = _net(), _net()
    optimizer, plain = Optimizer(model, op.AdamW(1e-2)), Optimizer(other, op.AdamW(1e-2))

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step(torch.ones(2, 4))
        plain.zero_grad()
        other(torch.ones(2, 4)).square().mean().backward()
        plain.step()
    _assert_same(model, other)


# Groups ---------------------------------------------------------------------------------------------------------------


def _decaying() -> dict[str, op.Rule]:
    return {"**.bias": op.AdamW(1e-2, weight_decay=0.0), "**": op.AdamW(1e-2, weight_decay=0.1)}


def test_there_is_one_group_for_each_rule() -> None:
    optimizer = Optimizer(_net(), _decaying())
    first, second = optimizer.param_groups
    assert first["param_names"] == ["0.weight", "2.weight"]
    assert second["param_names"] == ["0.bias", "2.bias"]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert {"lr", "betas", "eps"} <= first.keys()
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert [p.shape for p in first["params"]] == [(8, 4), (2, 8)]


def test_what_is_written_to_a_group_holds_from_the_next_step_on() -> None:
    model, other = _net(), _net()
    optimizer = Optimizer(model, op.AdamW(1e-2))
    theirs = torch.optim.AdamW(other.parameters(), 1e-2)
    for at in range(6):
        for each in (optimizer, theirs):
            group = each.param_groups[0]
            group["lr"] = torch.tensor(0.02) if at == 2 else group["lr"] * 0.5
            group["betas"] = [0.5, 0.9] if at > 3 else group["betas"]
            group["weight_decay"] = 0.01 * at
        _train(model, optimizer, 1, first=at)
        _train(other, theirs, 1, first=at)
    _assert_same(model, other)
    assert optimizer.op_state.rules[0].hyperparameters["betas"] == (0.5, 0.9)


def test_a_value_out_of_range_is_an_error_that_names_the_group_and_changes_nothing() -> None:
    model = _net()
    optimizer = Optimizer(model, _decaying())
    _backward(model)
    before = [p.clone() for p in model.parameters()]
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(HyperparameterError, match=r"param_groups\[1\].*lr must lie in"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.1
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert optimizer.op_state.step == 1


def test_members_of_a_chain_show_by_name() -> None:
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.WeightDecay(0.2), op.AdamW(1e-2), op.Descent(0.5))
    optimizer = Optimizer(_net(), rule)
    group = optimizer.param_groups[0]
    shown = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    assert (shown["lr"], shown["adamw.lr"]) == (0.5, 1e-2)
    assert (shown["weightdecay.weight_decay"], shown["adamw.weight_decay"], shown["max_norm"]) == (0.2, 0.01, 1.0)
    group["lr"], group["max_norm"], group["adamw.weight_decay"] = 0.25, 2.0, 0.3
    assert optimizer.op_state.rules == (
        op.Chain(op.ClipGlobalNorm(2.0), op.WeightDecay(0.2), op.AdamW(1e-2, weight_decay=0.3), op.Descent(0.25)),
    )


def test_what_decides_for_the_whole_tree_is_written_for_all_groups_or_not_at_all() -> None:
    model = _net()
    rules = {
        "**.bias": op.Chain(op.AccumGrad(2), op.Descent(0.1)),
        "**": op.Chain(op.AccumGrad(2), op.Descent(0.2)),
    }
    optimizer = Optimizer(model, rules)
    optimizer.param_groups[0]["n"] = 3
    with pytest.raises(StateError, match="decide for the whole tree"):
        optimizer.step()
    optimizer.param_groups[1]["n"] = 3
    _train(model, optimizer, 3)
    assert optimizer.op_state.step == 1


def test_a_schedule_of_the_rule_shows_its_value_and_may_be_overwritten() -> None:
    model = _net()
    optimizer = Optimizer(model, op.SGD(Linear(1.0, 0.0, 4), momentum=0.9))
    seen = []
    for at in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        _train(model, optimizer, 1, first=at)
    assert seen == [1.0, 0.75, 0.5]
    optimizer.param_groups[0]["lr"] = 0.125
    _train(model, optimizer, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.op_state.rules[0].hyperparameters["lr"]) == (0.125, 0.125)
    optimizer.param_groups[0]["lr"] = Linear(1.0, 0.0, 8)
    _train(model, optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 1 - 5 / 8


def test_what_is_adjusted_for_a_part_of_a_group_no_longer_follows_it() -> None:
    model = _net()
    optimizer = Optimizer(model, op.AdamW(1e-2))
    optimizer.adjust("**.bias", weight_decay=0.0, lr=0.5)
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["lr"]) == (0.01, 1e-2)
    optimizer.param_groups[0].update(lr=0.1, weight_decay=0.2, eps=1e-6)
    _train(model, optimizer, 1)
    rules = {path: leaf(optimizer.op_state, path).rule for path in ("0.weight", "0.bias")}
    assert rules == {
        "0.weight": op.AdamW(0.1, weight_decay=0.2, eps=1e-6),
        "0.bias": op.AdamW(0.5, weight_decay=0.0, eps=1e-6),
    }
    optimizer.adjust(lr=0.25)
    optimizer.param_groups[0]["lr"] = 0.75
    assert {leaf(optimizer.op_state, path).rule.hyperparameters["lr"] for path in rules} == {0.75}
    assert leaf(optimizer.op_state, "0.bias").rule.hyperparameters["weight_decay"] == 0.0


def test_adjust_of_a_group_shows_and_keeps_what_schedulers_left() -> None:
    optimizer = Optimizer(_net(), op.AdamW(1e-2))
    lr_scheduler.StepLR(optimizer, 2)
    optimizer.adjust(lr=0.5, weight_decay=0.1)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (0.5, 0.1, 1e-2)
    with pytest.raises(HyperparameterError, match='"lr"'):
        optimizer.adjust(rl=1.0)


def test_no_group_can_be_added() -> None:
    optimizer = Optimizer(_net(), op.Adam())
    with pytest.raises(StateError, match="a mapping from selectors to rules"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.param_groups.append(dict(optimizer.param_groups[0]))
    with pytest.raises(StateError, match="has 1 groups, and param_groups now has 2"):
        optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    assert repr(optimizer).startswith("Optimizer(State(step=0")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda group: group.update(params=group["params"][:1]), StateError),
        (lambda group: group["params"].append(nn.Parameter(torch.ones(1))), StateError),
        (lambda group: group["params"].reverse(), StateError),
        (lambda group: group.pop("lr"), HyperparameterError),
        (lambda group: group.update(lr=torch.ones(2)), HyperparameterError),
    ],
)
def test_what_is_done_to_a_group_beside_its_values_is_an_error(change: Callable[[Any], None], error: type[Exception]) -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam())
    _backward(model)
    before = [p.clone() for p in model.parameters()]
    change(optimizer.param_groups[0])
    with pytest.raises(error, match=r"param_groups\[0\]"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


# Schedulers -----------------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=14),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


def _scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> Iterator[list[float]]:
    for at in steps:
        optimizer.zero_grad()
        loss = _backward(model, at)
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        yield [group["lr"] for group in optimizer.param_groups]


def _theirs(model: nn.Sequential, kind: str) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups = [{"params": [p for name, p in named.items() if end in name]} for end in ("weight", "bias")]
    if kind == "SGD":
        return torch.optim.SGD(groups, 1e-2, momentum=0.9)
    return torch.optim.AdamW([{**groups[0], "weight_decay": 0.1}, {**groups[1], "weight_decay": 0.0}], 1e-2)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_schedulers_do_what_they_do_to_torch_also_after_a_thaw(name: str, kind: str) -> None:
    model, other = _net(), _net()
    rules: Any = _decaying() if kind == "AdamW" else {"**.bias": op.Momentum(1e-2), "**": op.SGD(1e-2, momentum=0.9)}
    optimizer, theirs = Optimizer(model, rules), _theirs(other, kind)
    mine, its = SCHEDULERS[name](optimizer), SCHEDULERS[name](theirs)
    for at in range(12):
        # torch.optim has no step for a parameter without gradient, and that is what frozen means here.
        if at == 3:
            optimizer.freeze("0")
            other[0].requires_grad_(False)
        if at == 7:
            optimizer.thaw("0")
            other[0].requires_grad_(True)
        rates = [next(_scheduled(*each, range(at, at + 1))) for each in ((model, optimizer, mine), (other, theirs, its))]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    assert _steps(optimizer)["0.weight"] == 8
    _assert_same(model, other)
    assert len(optimizer.param_groups) == 2


def test_one_cycle_turns_the_momentum_of_adam() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(1e-2))
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    list(_scheduled(model, optimizer, scheduler, range(3)))
    group = optimizer.param_groups[0]
    assert group["betas"][0] == pytest.approx(0.85, abs=0.01)
    assert optimizer.op_state.rules[0].hyperparameters["betas"] == group["betas"]
    optimizer.freeze("0")
    optimizer.thaw()
    assert {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"} <= optimizer.param_groups[0].keys()


def test_a_step_that_the_scaler_skips_leaves_counts_and_parameters() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = _net()
    theirs = torch.optim.Adam(other.parameters(), 1e-2)
    before: list[torch.Tensor] = []
    for at in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(3, 4)).float().square().mean()
        scaler.scale(loss).backward()
        if at == 2:
            before = [p.clone() for p in model.parameters()]
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if at == 2:
            assert all(map(torch.equal, before, model.parameters()))
            assert set(_steps(optimizer).values()) == {2}
            continue
        with torch.autocast("cpu", torch.bfloat16):
            loss = other(torch.ones(3, 4)).float().square().mean()
        loss.backward()
        theirs.step()
    assert set(_steps(optimizer).values()) == {3}
    _assert_same(model, other, 1e-4)


# Freezing -------------------------------------------------------------------------------------------------------------


def test_frozen_parameters_do_not_move_and_wake_with_their_moments() -> None:
    model = _language()
    optimizer = Optimizer(model, op.AdamW(1e-2))
    _train(model, optimizer, 2)
    optimizer.freeze("trunk")
    before = {name: p.clone() for name, p in model.named_parameters()}
    mu = leaf(optimizer.op_state, "trunk.0.weight").slots["mu"].clone()
    _train(model, optimizer, 3)
    assert all(torch.equal(p, before[name]) == name.startswith("trunk") for name, p in model.named_parameters())
    assert torch.equal(mu, leaf(optimizer.op_state, "trunk.0.weight").slots["mu"])
    optimizer.thaw("trunk.2")
    _train(model, optimizer, 1)
    steps = _steps(optimizer)
    assert (steps["trunk.0.weight"], steps["trunk.2.weight"], steps["embed.weight"]) == (2, 3, 6)
    with pytest.raises(PathError, match="did you mean"):
        optimizer.freeze("trnk")


def test_frozen_rows_stay() -> None:
    model = _language()
    optimizer = Optimizer(model, op.AdamW(1e-2, weight_decay=0.1))
    optimizer.freeze("head.weight", rows=slice(1, 3))
    before = model.embed.weight.clone()
    _train(model, optimizer, 2)
    assert torch.equal(before[1:3], model.embed.weight[1:3])
    assert not torch.equal(before[0], model.embed.weight[0])
    optimizer.thaw("embed", rows=[1])
    assert leaf(optimizer.op_state, "embed.weight").frozen_rows == ((2, 3),)


def test_a_plan_that_returns_the_state_of_another_model_is_refused_and_changes_nothing() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam())
    before = optimizer.op_state
    model.append(nn.Linear(5, 2))
    with pytest.raises(StateError, match=r"the state that came out is of other parameters or rules; make a new optimizer of it"):
        optimizer.follow(lambda state: op.adapt(state, model)[0])
    assert optimizer.op_state is before
    with pytest.raises(StateError, match="is of other parameters or rules"):
        optimizer.follow(lambda state: state.adjust(lr=5.0))
    with pytest.raises(ModelError, match="what follows a plan takes a State"):
        optimizer.follow(lambda state: None)  # type: ignore[arg-type, return-value]
    assert optimizer.op_state is before
    later = Optimizer(model, op.adapt(before, model)[0])
    assert len(later.op_state) == len(before) + 2


def test_requires_grad_follows_where_that_is_asked_for() -> None:
    model = _language()
    optimizer = Optimizer(model, op.Adam(), frozen="trunk", sync_requires_grad=True)
    _backward(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        "trunk.0.weight",
        "trunk.0.bias",
        "trunk.2.weight",
        "trunk.2.bias",
    }
    optimizer.freeze("head.weight")
    assert (model.embed.weight.requires_grad, model.embed.weight.grad) == (False, None)
    optimizer.thaw()
    assert all(p.requires_grad for p in model.parameters())
    plain = _language()
    Optimizer(plain, op.Adam(), frozen="trunk").freeze("embed")
    assert all(p.requires_grad for p in plain.parameters())


def test_a_stale_gradient_of_what_asks_for_none_is_ignored() -> None:
    model = _net()
    optimizer = Optimizer(model, op.SGD(0.1, momentum=0.9))
    _train(model, optimizer, 1)
    first = next(model.parameters())
    model[0].requires_grad_(False)
    before = first.detach().clone()
    assert first.grad is not None
    optimizer.step()
    assert torch.equal(before, first)
    assert _steps(optimizer) == {"0.weight": 1, "0.bias": 1, "2.weight": 2, "2.bias": 2}


def test_buffers_are_no_parameters() -> None:
    model = _language()
    optimizer = Optimizer(model, op.AdamW(0.1))
    model.eval()
    before = [b.clone() for b in model.buffers()]
    _train(model, optimizer, 2)
    assert all(map(torch.equal, before, model.buffers()))
    assert not any("running" in str(path) for path in optimizer.op_state)


def test_a_tied_weight_stands_once_in_its_group_and_takes_one_step() -> None:
    model = _language()
    optimizer = Optimizer(model, op.Adam(0.1))
    (group,) = optimizer.param_groups
    assert sum(p is model.embed.weight for p in group["params"]) == 1
    _train(model, optimizer, 1)
    assert leaf(optimizer.op_state, "head.weight").step == 1
    assert model.head.weight is model.embed.weight


def _in_one_memory() -> Language:
    """Two Parameter objects, the memory of one."""
    model = _language(tied=False)
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    return model


def test_two_parameter_objects_in_one_memory_are_one_parameter() -> None:
    model, other = _in_one_memory(), _language()
    optimizer = Optimizer(model, op.AdamW(1e-2))
    _train(model, optimizer, 4)
    theirs = Optimizer(other, op.AdamW(1e-2))
    _train(other, theirs, 4)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    _assert_same(other, model)
    optimizer.zero_grad()
    assert model.head.weight.grad is None
    # A copy has them in two places.
    model, optimizer = copy.deepcopy((model, optimizer))
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
    _train(model, optimizer, 2, first=4)
    _train(other, theirs, 2, first=4)
    assert torch.equal(model.head.weight, model.embed.weight)
    _assert_same(other, model)


def test_a_masked_occurrence_does_not_contribute() -> None:
    model = _in_one_memory()
    optimizer = Optimizer(model, op.Descent(0.1))
    optimizer.mask("head.weight")
    _backward(model)
    before, grad = model.embed.weight.clone(), model.embed.weight.grad
    assert grad is not None
    optimizer.step()
    assert torch.allclose(model.embed.weight, before - 0.1 * grad)
    optimizer.unmask()
    assert not leaf(optimizer.op_state, "embed.weight").masked


def test_a_mask_that_could_do_nothing_is_an_error() -> None:
    optimizer = Optimizer(_language(), op.Descent(0.1))
    with pytest.raises(StateError, match=r"head\.weight and embed\.weight are one Parameter"):
        optimizer.mask("head.weight")
    assert not leaf(optimizer.op_state, "embed.weight").masked
    optimizer.mask(["head.weight", "embed"])


# Changed modules ------------------------------------------------------------------------------------------------------


def _resized(model: Language) -> None:
    model.embed.weight = nn.Parameter(torch.ones(7, 3))


def _same_size(model: Language) -> None:
    model.trunk[0].bias = nn.Parameter(torch.ones(3))


def _new_child(model: Language) -> None:
    del model.trunk[2]
    model.trunk.append(nn.Linear(3, 3))


def _gone(model: Language) -> None:
    model.norm = nn.BatchNorm1d(3, affine=False)


def _more(model: Language) -> None:
    model.extra = nn.Linear(2, 2)


def _converted(model: Language) -> None:
    model.to(torch.float64)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (_resized, "embed.weight"),
        (_same_size, "trunk.0.bias"),
        (_new_child, "trunk.2.weight"),
        (_gone, "norm.weight"),
        (_more, "extra.weight"),
        (_converted, "embed.weight"),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_changed_module_is_an_error_that_names_the_place(change: Callable[[Any], None], path: str, trained: bool) -> None:
    model = _language()
    optimizer = Optimizer(model, op.Adam(0.1))
    if trained:
        _train(model, optimizer, 1)
    change(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match=rf"{path}.*changed (model|module)"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_child_that_is_wrapped_afterwards_is_the_same_module() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(0.1))
    _train(model, optimizer, 1)
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    _train(model, optimizer, 1)
    assert optimizer.op_state.step == 2


def test_other_models_are_refused() -> None:
    with pytest.raises(ModelError, match=r"takes a torch\.nn\.Module, not list"):
        Optimizer(list(_net().parameters()), op.Adam())  # type: ignore[arg-type]
    with pytest.raises(StateError, match="no parameters"):
        Optimizer(nn.ReLU(), op.Adam())


# Files ----------------------------------------------------------------------------------------------------------------


def _through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_goes_on_where_it_was_saved() -> None:
    model = _language()

    def made(model: nn.Module) -> tuple[Optimizer, Any]:
        optimizer = Optimizer(model, _decaying())
        return optimizer, lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=20)

    optimizer, scheduler = made(model)
    list(_scheduled(model, optimizer, scheduler, range(3)))
    optimizer.freeze("trunk.0")
    optimizer.freeze("embed.weight", rows=[0, 3])
    optimizer.adjust("norm", eps=1e-5)
    list(_scheduled(model, optimizer, scheduler, range(3, 5)))
    files = [_through_a_file(each.state_dict()) for each in (model, optimizer, scheduler)]
    other = _language()
    second, later = made(other)
    for each, file in zip((other, second, later), files, strict=True):
        each.load_state_dict(file)
    assert second.op_state == optimizer.op_state
    assert [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    for each in (optimizer, second):
        each.thaw("trunk.0")
    rates = [list(_scheduled(*each, range(5, 9))) for each in ((model, optimizer, scheduler), (other, second, later))]
    assert rates[0] == rates[1]
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert second.op_state == optimizer.op_state
    assert leaf(second.op_state, "norm.weight").rule.hyperparameters["eps"] == 1e-5


class _Two(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2, 2)))


def test_a_state_is_loaded_by_name_in_any_order() -> None:
    first, second = _Two("p1", "p2"), _Two("p2", "p1")
    rules: Any = {"p1": op.Adam(0.1), "p2": op.Adam(0.2)}
    optimizer, other = Optimizer(first, rules), Optimizer(second, rules)
    first.p1.grad, first.p2.grad = torch.full((2, 2), 1.0), torch.full((2, 2), 5.0)
    optimizer.step()
    other.load_state_dict(_through_a_file(optimizer.state_dict()))
    state = other.op_state
    assert leaf(state, "p1").slots["mu"].unique().tolist() == pytest.approx([0.1])
    assert leaf(state, "p2").slots["mu"].unique().tolist() == pytest.approx([0.5])
    # A scheduler goes by position.
    assert [(group["param_names"], group["lr"]) for group in other.param_groups] == [(["p1"], 0.1), (["p2"], 0.2)]
    assert other.param_groups[0]["params"] == [second.p1]
    other.param_groups[1]["lr"] = 0.4
    assert leaf(other.op_state, "p2").rule.hyperparameters["lr"] == 0.4


def test_a_tie_is_loaded_under_its_other_name_and_turned() -> None:
    model, turned = nn.Module(), nn.Module()
    model.embed, turned.embed = (nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    model.head = nn.Parameter(model.embed.detach().T)
    del turned.embed
    turned.head = nn.Parameter(torch.arange(6.0).reshape(2, 3).T.contiguous())
    turned.embed = nn.Parameter(turned.head.detach().T)
    optimizer, other = (Optimizer(each, op.Adam(0.1)) for each in (model, turned))
    assert [str(path) for each in (optimizer, other) for path in each.op_state] == ["embed", "head"]
    model.embed.grad = torch.arange(6.0).reshape(2, 3)
    optimizer.step()
    other.load_state_dict(_through_a_file(optimizer.state_dict()))
    assert torch.equal(leaf(other.op_state, "head").slots["mu"], leaf(optimizer.op_state, "embed").slots["mu"].T)
    optimizer.freeze("embed", rows=[0])
    with pytest.raises(StateError, match="embed: rows of it are frozen, and they are no rows of head here"):
        other.load_state_dict(optimizer.state_dict())


def test_the_slots_that_are_loaded_are_copies() -> None:
    model = _net()
    optimizer, other = Optimizer(model, op.Adam(0.1)), Optimizer(_net(), op.Adam(0.1))
    _train(model, optimizer, 1)
    given = optimizer.state_dict()
    other.load_state_dict(given)
    mine, its = (leaf(each.op_state, "0.weight").slots["mu"] for each in (optimizer, other))
    assert given["state"]["0.weight"]["mu"] is mine
    mine.zero_()
    assert its.any()


def _errors() -> dict[str, tuple[Callable[[], nn.Module], Any, str]]:
    def net(size: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, size))

    longer = lambda: nn.Sequential(*_net(), nn.Linear(2, 2))  # noqa: E731
    return {
        "missing": (longer, op.Adam(), r"missing: 3\.bias, 3\.weight$"),
        "unexpected": (lambda: nn.Sequential(nn.Linear(4, 8)), op.Adam(), r"unexpected: 2\.bias, 2\.weight$"),
        "reshaped": (net(3), op.Adam(), r"reshaped: 2\.weight\.mu is float32\[2, 8\], here float32\[3, 8\], .*2\.bias\.nu"),
        "dtype": (lambda: _net().double(), op.Adam(), r"0\.weight\.mu is float32\[8, 4\], here float64"),
        "rule": (_net, op.AdamW(), "the state dict is of Adam, and 0.weight has AdamW here"),
        "groups": (_net, {"**.bias": op.Adam(1.0), "**": op.Adam()}, "group 0 of the state dict, with 0.weight, has 4 parameters"),
    }


@pytest.mark.parametrize("name", _errors())
def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing(name: str) -> None:
    make, rule, message = _errors()[name]
    source = Optimizer(_net(), op.Adam(0.5))
    _train(source.module, source, 1)
    target = Optimizer(make(), rule)
    before, groups = copy.deepcopy(target.op_state), [dict(group) for group in target.param_groups]
    with pytest.raises(StateError, match=message):
        target.load_state_dict(source.state_dict())
    assert target.op_state == before
    assert [{**group, "params": 0} for group in target.param_groups] == [{**group, "params": 0} for group in groups]


_FINE = {"lr half"}


def _damage() -> dict[str, Callable[[Any], None]]:
    def at(change: Callable[[Any, Any], None], *keys: Any) -> Callable[[Any], None]:
        def changed(given: Any) -> None:
            document = json.loads(given["document"])
            inside = {**given, **document} if keys[0] in document else given
            for key in keys[:-1]:
                inside = inside[key]
            change(inside, keys[-1])
            if keys[0] in document:
                document = {
                    key: inside[key] if len(keys) == 1 else document[key] for key in document if key in inside or len(keys) > 1
                }
                given["document"] = json.dumps(document, default=lambda tensor: tensor.tolist())

        return changed

    def put(value: Any, *keys: Any) -> Callable[[Any], None]:
        return at(
            lambda inside, key: inside.update({key: value}) if isinstance(inside, dict) else inside.__setitem__(key, value), *keys
        )

    def drop(*keys: Any) -> Callable[[Any], None]:
        return at(lambda inside, key: inside.__delitem__(key), *keys)

    values = {
        "none": None,
        "text": "x",
        "minus": -1,
        "half": 1.5,
        "nan": float("nan"),
        "list": [1],
        "dict": {"x": 1},
        "tensor": torch.ones(2),
    }
    places = {
        "version": ("version",),
        "state": ("state",),
        "entry": ("state", "0.weight"),
        "count": ("state", "0.weight", "step"),
        "slot": ("state", "0.weight", "velocity"),
        "groups": ("param_groups",),
        "group": ("param_groups", 0),
        "params": ("param_groups", 0, "params"),
        "name": ("param_groups", 0, "params", 0),
        "rule": ("param_groups", 0, "rule"),
        "schedules": ("param_groups", 0, "schedules"),
        "lr": ("param_groups", 0, "lr"),
        "frozen": ("frozen",),
        "frozen rows": ("frozen_rows",),
        "rows": ("frozen_rows", "2.weight"),
        "masked": ("masked",),
        "ties": ("ties",),
        "own": ("own",),
        "document": ("document",),
        "step": ("step",),
        "memory": ("memory",),
    }
    found = {f"{place} {kind}": put(value, *keys) for place, keys in places.items() for kind, value in values.items()}
    kept = ("name", "lr", "rows")
    found |= {f"{place} gone": drop(*keys) for place, keys in places.items() if place not in kept}
    found["frozen unknown"] = put(["wieght"], "frozen")
    found["masked unknown"] = put(["wieght"], "masked")
    found["own unknown"] = put({"wieght": {}}, "own")
    found["own of no hyperparameter"] = put({"0.weight": {"rl": 1.0}}, "own")
    found["ties unknown"] = put({"wieght": ["0.weight"]}, "ties")
    found["params empty"] = put([], "param_groups", 0, "params")
    found["rows backwards"] = put({"2.weight": [[2, 1]]}, "frozen_rows")
    found["rows beyond"] = put({"2.weight": [[0, 99]]}, "frozen_rows")
    found["memory unknown"] = put({"adam": {"x": 1.0}}, "memory")
    return {name: change for name, change in found.items() if name not in _FINE}


@pytest.mark.parametrize("name", _damage())
def test_a_damaged_state_dict_is_an_error_and_changes_nothing(name: str) -> None:
    model = _net()
    optimizer = Optimizer(model, op.SGD(0.1, momentum=0.9))
    optimizer.freeze("2.weight", rows=[0])
    _train(model, optimizer, 1)
    given = _through_a_file(optimizer.state_dict())
    _damage()[name](given)
    before, groups = copy.deepcopy(optimizer.op_state), [{**group, "params": 0} for group in optimizer.param_groups]
    with pytest.raises(StateError, match=r"the state dict|it lacks|rows of it are frozen"):
        optimizer.load_state_dict(given)
    assert optimizer.op_state == before
    assert [{**group, "params": 0} for group in optimizer.param_groups] == groups


def test_a_broken_tie_is_an_error() -> None:
    source, target = Optimizer(_language(), op.Adam()), Optimizer(_language(tied=False), op.Adam())
    with pytest.raises(StateError, match=r"embed\.weight and head\.weight as one parameter, the module has embed\.weight alone"):
        target.load_state_dict(source.state_dict())
    with pytest.raises(StateError, match="make them alike"):
        source.load_state_dict(target.state_dict())


def test_a_state_dict_of_torch_is_an_error() -> None:
    model = _net()
    with pytest.raises(StateError, match="goes by position"):
        Optimizer(model, op.Adam()).load_state_dict(torch.optim.Adam(model.parameters()).state_dict())


@pytest.mark.parametrize("name", RULES)
def test_the_state_of_every_rule_is_plain(name: str) -> None:
    rule = RULES[name]
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, 3)), "b": nn.Parameter(torch.ones(2))})
    if not all(trains(rule, tuple(p.shape), "float32") for p in model.values()):
        del model["b"]
    optimizer, other = Optimizer(model, rule), Optimizer(copy.deepcopy(model), rule)
    for at in range(2):
        for p in model.values():
            p.grad = torch.full_like(p, 0.1 * (at + 1))
        optimizer.step()
    other.load_state_dict(_through_a_file(optimizer.state_dict()))
    assert other.op_state == optimizer.op_state


def test_schedules_are_code_and_go_on_after_loading() -> None:
    model, rule = _net(), op.Adam(Linear(1.0, 0.0, 10))
    optimizer = Optimizer(model, rule)
    _train(model, optimizer, 2)
    saved = _through_a_file(optimizer.state_dict())
    other = Optimizer(_net(), rule)
    other.load_state_dict(saved)
    assert other.op_state == optimizer.op_state
    assert other.param_groups[0]["lr"] == 0.8
    optimizer.param_groups[0]["lr"] = 0.125
    other.load_state_dict(optimizer.state_dict())
    assert other.op_state.rules == (op.Adam(0.125),)


def test_an_optimizer_goes_on_from_a_state() -> None:
    model, other = _net(), _net()
    theirs, again = (
        torch.optim.AdamW([{"params": each[0].parameters(), "lr": 0.1}, {"params": each[2].parameters()}], 0.01)
        for each in (model, other)
    )
    _train(model, theirs, 3)
    _train(other, again, 3)
    optimizer = Optimizer(model, from_torch(theirs, model))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    _train(model, optimizer, 3, first=3)
    _train(other, again, 3, first=3)
    _assert_same(model, other)
    state = optimizer.op_state.freeze("0")
    asleep = Optimizer(model, state, sync_requires_grad=True)
    assert not model.get_parameter("0.weight").requires_grad
    asleep.thaw()
    assert model.get_parameter("0.weight").requires_grad


def test_a_state_that_cannot_go_on_is_refused() -> None:
    model = _language()
    state = op.setup(op.Adam(), model)
    with pytest.raises(StateError, match="a state itself tells what is frozen"):
        Optimizer(model, state, frozen="trunk")
    with pytest.raises(StateError, match=r"head\.weight was untied"):
        Optimizer(model, state.untie("head.weight"))
    with pytest.raises(ModelError, match="the state has a parameter at"):
        Optimizer(_net(), state)
    _backward(model)
    op.update_(state, model)
    with pytest.raises(StateError, match="update_ has written into the slots of this state"):
        Optimizer(model, state)


def test_slots_are_freed_and_started_afresh_on_request() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(0.1))
    _train(model, optimizer, 2)
    optimizer.reset("0.weight")
    assert (leaf(optimizer.op_state, "0.weight").step, leaf(optimizer.op_state, "0.bias").step) == (0, 2)
    optimizer.freeze("2")
    optimizer.drop("2")
    assert not leaf(optimizer.op_state, "2.weight").slots
    optimizer.allocate()
    assert all(each.slots for each in optimizer.op_state.leaves())
    with pytest.raises(StateError, match=r"0\.weight is live"):
        optimizer.drop("0")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_takes_the_optimizer_itself(tmp_path: Any) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    rules = _decaying()
    model = _net()
    optimizer = Optimizer(model, rules, frozen="0")
    _train(model, optimizer, 2)
    optimizer.thaw("0.weight")
    _train(model, optimizer, 1)
    optimizer.freeze("0")
    optimizer.freeze("2.weight", rows=[0])
    optimizer.adjust("2.bias", lr=0.5)
    optimizer.allocate()
    save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    other = Optimizer(_net(), rules, frozen="0")
    before = copy.deepcopy(other.op_state)
    with pytest.raises(StateError, match=r"missing: 0\.weight\.mu, 0\.weight\.nu"):
        load({"optimizer": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.op_state.parameters == before.parameters
    other.allocate()
    load({"optimizer": other}, checkpoint_id=tmp_path, no_dist=True)
    state = optimizer.op_state
    for mine, theirs in zip(other.op_state.leaves(), state.leaves(), strict=True):
        for what in ("step", "frozen", "frozen_rows", "rule"):
            assert getattr(mine, what) == getattr(theirs, what)
        assert all(torch.equal(mine.slots[name], slot) for name, slot in theirs.slots.items())


# Copies ---------------------------------------------------------------------------------------------------------------


def _both_go_on(model: nn.Module, optimizer: Optimizer, twin: nn.Module, second: Optimizer) -> None:
    assert second.op_state == optimizer.op_state
    before = [p.clone() for p in model.parameters()]
    _train(twin, second, 2, first=5)
    assert all(map(torch.equal, before, model.parameters()))
    _train(model, optimizer, 2, first=5)
    assert all(map(torch.equal, twin.parameters(), model.parameters()))
    assert second.op_state == optimizer.op_state


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_a_copy_of_module_and_optimizer_belongs_together(how: Callable[[Any], Any]) -> None:
    model = _language()
    optimizer = Optimizer(model, _decaying(), frozen="trunk.0")
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    list(_scheduled(model, optimizer, scheduler, range(3)))
    optimizer.adjust("norm", lr=0.125)
    twin, second = how((model, optimizer))
    assert second.module is twin
    assert second.param_groups[0]["params"][0] is twin.embed.weight
    assert twin.head.weight is twin.embed.weight
    assert second.param_groups[0]["initial_lr"] == 1e-2
    _both_go_on(model, optimizer, twin, second)
    alone = how(optimizer)
    assert alone.module is not model
    _both_go_on(model, optimizer, alone.module, alone)


# PyTorch's interface --------------------------------------------------------------------------------------------------


def test_hooks_are_called() -> None:
    model = _net()
    optimizer, called = Optimizer(model, op.Adam()), []
    handle = optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: called.append("before"))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append(f"after {optimizer.op_state.step}"))
    optimizer.register_state_dict_post_hook(lambda optimizer, found: {**found, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: called.append(given.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("loaded"))
    _train(model, optimizer, 1)
    handle.remove()
    _train(model, optimizer, 1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert called == ["before", "after 1", "after 2", 1, "loaded"]
    assert saved["more"] == 1


def test_a_step_has_a_name_in_a_profile() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _train(model, optimizer, 1)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Optimizer.step", "Optimizer.zero_grad#Optimizer.zero_grad"} <= names


def test_the_state_can_be_looked_at_by_tensor_but_not_put() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(0.1))
    _train(model, optimizer, 2)
    own = optimizer.state[model[0].weight]
    assert (own["step"], own["mu"] is leaf(optimizer.op_state, "0.weight").slots["mu"]) == (2, True)
    with pytest.raises(StateError, match="op_state"):
        optimizer.state = {model[0].weight: {}}
    entry: Any = own
    with pytest.raises(TypeError):
        entry["mu"] = torch.zeros(8, 4)


def test_an_optimizer_is_shown_with_its_groups() -> None:
    optimizer = Optimizer(_net(), _decaying(), frozen="0")
    assert repr(optimizer).splitlines() == [
        "Optimizer(State(step=0, 4 parameters, 2 frozen, 2 rules)",
        "  0: 2 parameters, AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)",
        "  1: 2 parameters, AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)",
        ")",
    ]
    assert "0.weight" in str(optimizer.summary())


def test_only_what_is_trainable_is_in_a_group() -> None:
    model = _net()
    optimizer = Optimizer(model, op.Adam(0.1), trainable="2")
    assert optimizer.param_groups[0]["param_names"] == ["2.weight", "2.bias"]
    before = [p.clone() for p in model[0].parameters()]
    _train(model, optimizer, 1)
    assert all(map(torch.equal, before, model[0].parameters()))


# Trainers -------------------------------------------------------------------------------------------------------------


def test_accelerate_trains_with_accumulation_and_a_scheduler() -> None:
    import accelerate

    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _net()
        optimizer = make(model)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(24.0).reshape(6, 4) / 24), batch_size=1)
        ready, prepared, batches, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        for (batch,) in batches:
            with accelerator.accumulate(ready):
                accelerator.backward(ready(batch).square().mean())
                accelerator.clip_grad_norm_(ready.parameters(), 0.1)
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
        return model, optimizer

    model, optimizer = run(lambda model: Optimizer(model, op.AdamW(1e-2)))
    other, theirs = run(lambda model: torch.optim.AdamW(model.parameters(), 1e-2))
    assert isinstance(optimizer, Optimizer)
    assert set(_steps(optimizer).values()) == {3}
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 1e-2 / 8
    _assert_same(model, other)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_lightning_trains_thaws_and_resumes() -> None:
    import lightning.pytorch as lightning

    def fitted(make: Callable[[nn.Module], torch.optim.Optimizer], checkpoint: Any = None) -> tuple[Any, Any]:
        class Lit(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = _net()
                self.at = 0

            def configure_optimizers(self) -> Any:
                optimizer = make(self)
                if checkpoint is not None:
                    optimizer.load_state_dict(checkpoint)
                return {"optimizer": optimizer, "lr_scheduler": lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

            def on_train_epoch_start(self) -> None:
                # Through the shell that Lightning puts around the optimizer.
                shell: Any = self.optimizers()
                if isinstance(shell, Optimizer):
                    shell.thaw() if self.current_epoch else shell.freeze("net.0")
                self.net[0].requires_grad_(self.current_epoch > 0)

            def training_step(self, batch: Any, at: int) -> torch.Tensor:
                return self.net(batch[0]).square().mean()

        model = Lit()
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(16.0).reshape(4, 4) / 16), batch_size=2)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.1,
        )
        trainer.fit(model, data)
        return model, trainer.optimizers[0]

    model, optimizer = fitted(lambda model: Optimizer(model, op.AdamW(1e-2)))
    other, theirs = fitted(lambda model: torch.optim.AdamW(model.parameters(), 1e-2))
    assert isinstance(optimizer, Optimizer)
    assert _steps(optimizer) == {"net.0.weight": 2, "net.0.bias": 2, "net.2.weight": 4, "net.2.bias": 4}
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 1e-2 / 4
    _assert_same(model, other)
    _, resumed = fitted(lambda model: Optimizer(model, op.AdamW(1e-2)), _through_a_file(optimizer.state_dict()))
    assert _steps(resumed)["net.2.weight"] == 8


def test_a_scheduler_that_writes_a_momentum_that_is_not_kept_is_told_what_to_do() -> None:
    module = nn.Linear(2, 2)
    optimizer = Optimizer(module, op.SGD(0.1))
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(HyperparameterError, match=r"param_groups\[0\]: .* begin with a momentum above 0, .*cycle_momentum=False"):
        optimizer.step()


@pytest.mark.parametrize("second", [op.SGD(0.1), op.AdamW(0.1)], ids=str)
def test_groups_in_another_order_are_loaded_with_what_schedulers_have_reached(second: op.Rule) -> None:
    rules: Any = {"p1": op.AdamW(0.01), "p2": second}
    optimizer, other = Optimizer(_Two("p1", "p2"), rules), Optimizer(_Two("p2", "p1"), rules)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    optimizer.step()
    other.load_state_dict(_through_a_file(optimizer.state_dict()))
    assert [(group["param_names"], group["lr"]) for group in other.param_groups] == [(["p1"], 0.005), (["p2"], 0.05)]
    assert [leaf(other.op_state, name).rule.hyperparameters["lr"] for name in ("p1", "p2")] == [0.005, 0.05]
    scheduler = lr_scheduler.ExponentialLR(other, 0.5)
    other.step()
    scheduler.step()
    assert [leaf(other.op_state, name).rule.hyperparameters["lr"] for name in ("p1", "p2")] == [0.0025, 0.025]


def test_an_optimizer_is_shown_with_the_rates_that_a_scheduler_wrote() -> None:
    optimizer = Optimizer(_net(), op.SGD(0.1))
    optimizer.param_groups[0]["lr"] = 0.025
    assert "SGD(lr=0.025" in repr(optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    assert "SGD(lr=0.025" in repr(optimizer)
    with pytest.raises(HyperparameterError, match="lr must lie"):
        optimizer.step()


def test_a_scheduler_goes_on_with_the_optimizer_for_a_changed_module() -> None:
    model = _net()
    optimizer = Optimizer(model, op.SGD(0.1))
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    model[2] = nn.Linear(8, 5)
    state, _ = op.adapt(optimizer.op_state, model)
    later = Optimizer(model, state)
    after = lr_scheduler.CosineAnnealingLR(later, 10)
    after.load_state_dict(scheduler.state_dict())
    later.step()
    optimizer.param_groups[0]["lr"] = later.param_groups[0]["lr"]
    for each in (scheduler, after):
        each.step()
    assert later.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
