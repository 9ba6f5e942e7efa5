"""Optimisers of PyTorch, taken over in mid-training and given back."""

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

import optimisers as op
from optimisers import errors
from optimisers.interop.torch_export import to_state_dict, to_torch
from optimisers.interop.torch_import import from_torch
from tests.conftest import leaf

Make = Callable[[Any], optim.Optimizer]

SAME_BITS: dict[str, Make] = {
    "SGD": lambda params: optim.SGD(params, lr=0.01),
    "SGD, decay": lambda params: optim.SGD(params, lr=0.01, weight_decay=0.1),
    "SGD, momentum": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
    "SGD, dampening": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD, nesterov": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adamax": lambda params: optim.Adamax(params, lr=0.01, weight_decay=0.1),
    "Rprop": lambda params: optim.Rprop(params, lr=0.01),
}
LAST_BITS: dict[str, Make] = {
    "Adam": lambda params: optim.Adam(params, lr=0.01),
    "Adam, decay": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, decoupled": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "AdamW, fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, amsgrad": lambda params: optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True),
    "AdamW, tensors": lambda params: optim.AdamW(params, lr=torch.tensor(0.0078125), foreach=False),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01, alpha=0.9),
    "RMSprop, momentum": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "RMSprop, centred": lambda params: optim.RMSprop(params, lr=0.01, centered=True),
    "RMSprop, centred, momentum": lambda params: optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.1),
    "RAdam": lambda params: optim.RAdam(params, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam": lambda params: optim.NAdam(params, lr=0.01, weight_decay=0.1),
    "Lion": lambda params: Lion(params, lr=0.01, weight_decay=0.1),
}
KINDS = {**SAME_BITS, **LAST_BITS}
ROUNDINGS = 128
"""How many roundings the numbers may be apart after five steps, relative to the largest parameter."""


class Lion(optim.Optimizer):
    """Lion as its packages have it: one slot, no count."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, **more: Any
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(mean.clone().mul_(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                    mean.mul_(second).add_(p.grad, alpha=1 - second)


def _module(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def _gradients(module: nn.Module, step: int, besides: Iterable[str] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in module.named_parameters():
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        p.grad = None if name in besides else grad


def _train(module: nn.Module, optimizer: optim.Optimizer, steps: Iterable[int], besides: Iterable[str] = ()) -> None:
    for step in steps:
        _gradients(module, step, besides)
        optimizer.step()


def _go_on(state: op.State, module: nn.Module, steps: Iterable[int]) -> op.State:
    for step in steps:
        _gradients(module, step)
        state, module = op.update_(state, module)
    return state


def _apart(a: nn.Module, b: nn.Module) -> float:
    """How far two modules are apart, in roundings of their largest parameter."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    largest = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / largest / torch.finfo(pairs[0][0].dtype).eps


def _allowed(name: str, dtype: torch.dtype) -> float:
    # PyTorch keeps the product of NAdam's momenta in float32, and works out steps from a tensor's learning rate in its dtype.
    rough = dtype is torch.float64 and name in ("NAdam", "AdamW, tensors")
    return 0 if name in SAME_BITS else 2.0**30 if rough else ROUNDINGS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", KINDS)
def test_training_goes_on_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    theirs = _module(dtype)
    optimizer = KINDS[name](theirs.parameters())
    _train(theirs, optimizer, range(5))
    ours = copy.deepcopy(theirs)
    kind = name.split(",")[0] if name != "Adam, decoupled" else None
    state = from_torch(optimizer.state_dict(), ours, kind=kind)
    # The dict and the optimiser tell the same.
    live = from_torch(optimizer, theirs)
    assert live == state
    state = _go_on(state, ours, range(5, 10))
    _train(theirs, optimizer, range(5, 10))
    assert _apart(ours, theirs) <= _allowed(name, dtype)
    assert all(p.dtype is dtype for p in ours.parameters())
    # What was taken over before is a copy.
    assert leaf(live, "0.weight").step == leaf(state, "0.weight").step - 5


@pytest.mark.parametrize("name", KINDS)
def test_there_and_back_again(name: str) -> None:
    module = _module()
    optimizer = KINDS[name](module.parameters())
    _train(module, optimizer, range(5))
    state = from_torch(optimizer, module)
    back = to_torch(state, module, Lion if name == "Lion" else None)
    assert type(back) is type(optimizer) or name == "Adam, decoupled"
    assert from_torch(back, module) == state
    other = _module()
    other.load_state_dict(module.state_dict())
    cls: Any = type(back)
    fresh = cls(list(other.named_parameters()))
    fresh.load_state_dict(to_state_dict(state, module))
    _train(module, optimizer, range(5, 8))
    _train(other, fresh, range(5, 8))
    assert _apart(other, module) <= (2.0**30 if name in ("NAdam", "AdamW, tensors") else ROUNDINGS)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("named", [True, False], ids=["by names", "by given names"])
def test_a_dict_from_disk_finds_its_parameters_by_name_in_whatever_order(named: bool) -> None:
    module = _module()
    shuffled = list(reversed(list(module.named_parameters())))
    optimizer = optim.AdamW(shuffled if named else [p for _, p in shuffled])
    _train(module, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = from_torch(torch.load(file, weights_only=True), module, names=None if named else [name for name, _ in shuffled])
    assert state == from_torch(optimizer, module)
    assert torch.equal(leaf(state, "2.bias").slots["mu"], optimizer.state[module.get_parameter("2.bias")]["exp_avg"])


@pytest.mark.parametrize("shell", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}"])
def test_names_with_the_shell_of_a_wrapper_are_found(shell: str) -> None:
    module = _module()
    optimizer = optim.SGD([(shell.format(name), p) for name, p in module.named_parameters()], momentum=0.9)
    _train(module, optimizer, range(2))
    assert from_torch(optimizer.state_dict(), module) == from_torch(optimizer, module)


def test_each_group_keeps_its_hyperparameters_in_one_program() -> None:
    module = _module()
    decays = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim < 2]
    optimizer = optim.Adam([{"params": decays, "weight_decay": 0.1}, {"params": rest, "lr": 0.5}], lr=0.01)
    _train(module, optimizer, range(3))
    ours = copy.deepcopy(module)
    state = from_torch(optimizer, module)
    assert leaf(state, "0.weight").rule == op.Chain(op.WeightDecay(0.1), op.Adam(0.01))
    assert leaf(state, "0.bias").rule == op.Chain(op.WeightDecay(0.0), op.Adam(0.5))
    assert len(set(state.layout.programs)) == 1
    _go_on(state, ours, range(3, 6))
    _train(module, optimizer, range(3, 6))
    assert _apart(ours, module) <= ROUNDINGS
    back = to_torch(from_torch(optimizer, module), module)
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in back.param_groups] == [
        (0.01, 0.1, 2),
        (0.5, 0.0, 4),
    ]


def test_a_late_parameter_has_its_own_count_and_one_that_never_stepped_none() -> None:
    module = _module()
    module.get_parameter("2.bias").requires_grad_(False)
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    _train(module, optimizer, range(4), besides=["0.weight", "0.bias", "2.bias"])
    _train(module, optimizer, range(4, 6), besides=["0.bias", "2.bias"])
    ours = copy.deepcopy(module)
    state = from_torch(optimizer, module)
    assert [leaf(state, name).step for name in ("0.weight", "0.bias", "1.weight", "2.bias")] == [2, 0, 6, 0]
    assert state.step == 6
    assert not leaf(state, "0.bias").slots
    module.get_parameter("2.bias").requires_grad_(True)
    ours.get_parameter("2.bias").requires_grad_(True)
    state = _go_on(state, ours, range(6, 9))
    _train(module, optimizer, range(6, 9))
    assert _apart(ours, module) <= ROUNDINGS
    back = to_torch(state, ours)
    assert {name: int(back.state[p]["step"]) for name, p in ours.named_parameters()} == {
        "0.weight": 5,
        "0.bias": 3,
        "1.weight": 9,
        "1.bias": 9,
        "2.weight": 9,
        "2.bias": 3,
    }


def test_a_parameter_that_was_frozen_keeps_its_moments() -> None:
    module = _module()
    optimizer = optim.Adam(module.parameters(), lr=0.01)
    _train(module, optimizer, range(3))
    module.get_parameter("0.weight").requires_grad_(False)
    state = from_torch(optimizer, module)
    before = module.get_parameter("0.weight").clone()
    state = _go_on(state, module, [3])  # with a gradient that was left behind
    assert torch.equal(module.get_parameter("0.weight"), before)
    assert leaf(state, "0.weight").step == 3
    assert leaf(state, "0.weight").slots.keys() == {"mu", "nu"}


def test_parameters_that_the_optimiser_lacks_are_none_of_the_states_business() -> None:
    module = _module()
    head: Any = module.get_submodule("2")
    optimizer = optim.SGD(head.parameters(), lr=0.1)
    state = from_torch(optimizer, module)
    assert [str(path) for path in state] == ["2.weight", "2.bias"]
    before = module.get_parameter("0.weight").clone()
    _go_on(state, module, [0])
    assert torch.equal(module.get_parameter("0.weight"), before)


def test_a_dict_of_the_parameters_that_ask_for_a_gradient() -> None:
    module = _module()
    module.get_submodule("0").requires_grad_(False)
    optimizer = optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    _train(module, optimizer, range(2))
    state = from_torch(optimizer.state_dict(), module)
    assert state == from_torch(optimizer, module)
    assert [str(path) for path in state] == ["1.weight", "1.bias", "2.weight", "2.bias"]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_parameter_is_one() -> None:
    module = _Tied()
    optimizer = optim.AdamW(module.parameters())
    _train(module, optimizer, range(3))
    state = from_torch(optimizer.state_dict(), module)
    assert {str(alias): view for alias, view in leaf(state, "embed.weight").ties.items()} == {"head.weight": "same"}
    assert len(to_torch(state, module).param_groups[0]["params"]) == 1
    assert to_state_dict(state, module)["param_groups"][0]["param_names"] == ["embed.weight"]


def test_counts_that_pytorch_does_not_keep_may_be_told() -> None:
    module = _module()
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    _train(module, optimizer, range(5))
    state = from_torch(optimizer, module, step=5)
    assert (state.step, leaf(state, "0.bias").step) == (5, 5)
    assert from_torch(optimizer, module).step == 1


def test_half_precision_moments_become_float32_and_go_back_as_they_were() -> None:
    module = _module(torch.bfloat16)
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    _train(module, optimizer, range(3))
    state = from_torch(optimizer, module)
    assert leaf(state, "0.weight").slots["nu"].dtype is torch.float32
    own = to_torch(state, module).state[module.get_parameter("0.weight")]
    assert torch.equal(own["exp_avg_sq"], optimizer.state[module.get_parameter("0.weight")]["exp_avg_sq"])


def test_slots_lie_in_memory_as_their_parameter() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optim.AdamW(module.parameters())
    _train(module, optimizer, range(2))
    assert leaf(from_torch(optimizer, module), "weight").slots["mu"].stride() == module.weight.stride()


def test_a_rule_of_this_library_becomes_an_optimiser() -> None:
    module = _module()
    for rule, kind, options in (
        (op.Descent(0.1), optim.SGD, {"lr": 0.1, "momentum": 0}),
        (op.Nesterov(0.1, 0.8), optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
        (op.AMSGrad(0.1), optim.Adam, {"amsgrad": True, "weight_decay": 0}),
        (op.AdamW(lambda step: 0.1 / (1 + step)), optim.AdamW, {"lr": 0.025}),
    ):
        state = _go_on(op.setup(rule, module), module, range(3))
        back = to_torch(state, module, fused=True) if kind is optim.AdamW else to_torch(state, module)
        assert type(back) is kind
        assert {name: back.param_groups[0][name] for name in options} == pytest.approx(options)
        _train(module, back, [3])


# Errors ---------------------------------------------------------------------------------------------------------------


def _trained(make: Make = KINDS["AdamW"]) -> tuple[nn.Module, optim.Optimizer]:
    module = _module()
    optimizer = make(module.parameters())
    _train(module, optimizer, [0])
    return module, optimizer


def test_what_is_no_known_optimiser_is_refused() -> None:
    module, optimizer = _trained()
    with pytest.raises(errors.HyperparameterError, match=r"does not know how torch\.optim\.asgd\.ASGD steps"):
        from_torch(optim.ASGD(module.parameters()), module)
    own = type("Mine", (optim.AdamW,), {"step": lambda self, closure=None: None})(module.parameters())
    with pytest.raises(errors.HyperparameterError, match="say which with kind="):
        from_torch(own, module)
    assert len(from_torch(own, module, kind="AdamW")) == 6
    with pytest.raises(errors.HyperparameterError, match='no rule steps as "Adagrd"; did you mean "Adagrad"'):
        from_torch(optimizer, module, kind="Adagrd")
    with pytest.raises(errors.ModelError, match="not dict; it has 'optimizer'"):
        from_torch({"optimizer": optimizer.state_dict()}, module)
    with pytest.raises(errors.HyperparameterError, match="are those of no optimiser"):
        from_torch(optim.ASGD(module.parameters()).state_dict(), module)
    with pytest.raises(errors.HyperparameterError, match="minimise the negative loss"):
        from_torch(optim.AdamW(module.parameters(), maximize=True), module)
    with pytest.raises(errors.HyperparameterError, match=r"a Lion with cautious_factor=0\.5"):
        from_torch(Lion(module.parameters(), cautious_factor=0.5), module)


def test_an_old_dict_does_not_tell_adam_from_adamw() -> None:
    module, optimizer = _trained()
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        del group["decoupled_weight_decay"]
    with pytest.raises(errors.HyperparameterError, match='say which with kind="Adam" or kind="AdamW"'):
        from_torch(old, module)
    assert from_torch(old, module, kind=optim.AdamW) == from_torch(optimizer, module)


def test_what_does_not_match_the_module_is_named() -> None:
    module, optimizer = _trained()
    saved = optimizer.state_dict()
    with pytest.raises(errors.StateError, match=r"has 6 parameters, and the module 2; give the names"):
        from_torch(saved, nn.Linear(6, 5))
    with pytest.raises(errors.ShapeError, match=r"^0\.weight: exp_avg has shape \(5, 6\), the parameter \(4, 6\)"):
        from_torch(saved, nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with pytest.raises(
        errors.StateError, match=r"a parameter that the module does not hold: number 0 of group 0, of shape \(5, 6\)"
    ):
        from_torch(optimizer, _module())
    with pytest.raises(errors.StateError, match="6 parameters, but 1 names"):
        from_torch(saved, module, names=["0.weight"])
    with pytest.raises(errors.PathError, match=r'a parameter "0\.weigth", the module has none there; did you mean "0\.weight"'):
        from_torch(saved, module, names=["0.weigth", *_names(module)[1:]])
    with pytest.raises(errors.StateError, match=r"0\.bias stands in the optimiser twice"):
        from_torch(saved, module, names=["0.bias", *_names(module)[1:]])
    with pytest.raises(errors.StateError, match="names are for a state dict"):
        from_torch(optimizer, module, names=_names(module))
    two = optim.AdamW([{"params": list(module.parameters())[:2]}, {"params": list(module.parameters())[2:]}])
    with pytest.raises(errors.StateError, match="2 groups and no names"):
        from_torch(two.state_dict(), module)


def test_a_state_that_lacks_something_is_named() -> None:
    module, optimizer = _trained()
    own = optimizer.state[module.get_parameter("0.bias")]
    del own["exp_avg_sq"]
    with pytest.raises(errors.StateError, match=r"^0\.bias: the optimiser has stepped, but its state has no exp_avg_sq"):
        from_torch(optimizer, module)
    own["step"] = torch.tensor(0.5)
    with pytest.raises(errors.StateError, match=r"^0\.bias: the optimiser's count of steps is 0\.5"):
        from_torch(optimizer, module)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["lr"]
    with pytest.raises(errors.HyperparameterError, match="has no lr"):
        from_torch(saved, module)


def test_two_parameters_in_one_memory_are_refused() -> None:
    module = _Tied()
    module.head.weight = nn.Parameter(module.embed.weight.detach())
    with pytest.raises(errors.StateError, match=r"head\.weight and embed\.weight lie in the same memory"):
        from_torch(optim.SGD(module.parameters()), module)


def test_moments_of_complex_parameters_are_refused() -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    for make, refused in ((KINDS["AdamW"], True), (KINDS["SGD, momentum"], False)):
        optimizer = make(module.parameters())
        module["w"].grad = torch.ones(3, dtype=torch.complex64)
        optimizer.step()
        if refused:
            with pytest.raises(errors.StateError, match="squares of the real and the imaginary part"):
                from_torch(optimizer, module)
            state = from_torch(optim.AdamW(module.parameters()), module)
            state, _ = op.update_(state, module)
            with pytest.raises(errors.StateError, match=r"^w: for complex"):
                to_torch(state, module)
        else:
            state = from_torch(optimizer, module)
            assert torch.equal(to_torch(state, module).state[module["w"]]["momentum_buffer"], leaf(state, "w").slots["velocity"])


def test_what_pytorch_cannot_express_is_refused() -> None:
    module = _module()
    for rule in (
        op.LAMB(),
        op.Chain(op.ClipNorm(1.0), op.AdamW()),
        op.Chain(op.WeightDecay(0.1), op.AdamW()),
        op.AdamW(cautious=True),
        op.Chain(op.WeightDecay(0.1), op.SGD(0.1, weight_decay=0.1)),
        op.Chain(),
    ):
        with pytest.raises(errors.HyperparameterError, match="no optimiser of PyTorch steps as"):
            to_torch(op.setup(rule, module), module)
    with pytest.raises(errors.HyperparameterError, match=r"torch\.optim has no Lion"):
        to_torch(op.setup(op.Lion(), module), module)
    with pytest.raises(errors.StateError, match="are Adam and SGD in PyTorch"):
        to_torch(op.setup({"0": op.Adam(), "**": op.SGD()}, module), module)
    state = op.setup(op.Adam(), module)
    with pytest.raises(errors.StateError, match=r"^0\.weight is frozen, which PyTorch tells by requires_grad"):
        to_torch(state.freeze("0.weight"), module)
    with pytest.raises(errors.StateError, match=r"^0\.weight has frozen rows"):
        to_torch(state.freeze("0.weight", rows=slice(2)), module)
    with pytest.raises(errors.StateError, match=r"^0\.weight has masked places"):
        to_torch(state.mask("0.weight"), module)
    tied = _Tied()
    with pytest.raises(errors.StateError, match=r"head\.weight was untied"):
        to_torch(op.setup(op.Adam(), tied).untie("head.weight"), tied)
    module.get_parameter("0.weight").requires_grad_(False)
    assert len(to_torch(state.freeze("0.weight"), module).param_groups[0]["params"]) == 6


def test_a_spent_state_is_not_given_to_pytorch() -> None:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    old = op.setup(op.Adam(), module)
    op.update_(old, module)
    for ask in (to_torch, to_state_dict):
        with pytest.raises(errors.StateError, match="update_ has written"):
            ask(old, module)
    with pytest.raises(errors.StateError, match="names of parameters are texts"):
        from_torch(torch.optim.Adam(module.parameters()).state_dict(), module, names=[0, 1], kind="Adam")  # type: ignore[list-item]


def test_a_chain_with_a_schedule_is_given_to_pytorch_or_refused_with_a_remedy() -> None:
    module = nn.Linear(2, 2)
    state = op.setup(op.Chain(op.WeightDecay(0.1), op.Adam(op.schedules.Linear(0.5, 0.0, 10))), module)
    group = to_torch(state, module).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(op.schedules.Linear(0.5, 0.0, 10))), module)
    with pytest.raises(errors.HyperparameterError, match=r"no optimiser of PyTorch steps as Chain\(ClipGlobalNorm.*state\.replace"):
        to_torch(state, module)
