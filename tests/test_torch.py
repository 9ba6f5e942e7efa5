"""Modules of PyTorch: paths, ties, gradients left behind, memory formats, and what may go wrong."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import optimisers as op
from optimisers.backends import torch as backend
from optimisers.errors import DtypeError, GradientError, ModelError, OptimiserError, StateError
from tests.conftest import leaf

TOKENS = torch.tensor([[1, 4, 2], [0, 3, 5]])


class Language(nn.Module):
    """A bit of everything: a tie, a shared submodule, buffers, lists and dicts of parameters, a parametrisation, a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.again = self.layers[0]
        self.norm = nn.BatchNorm1d(4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.shifts = nn.ParameterDict({"a.b".replace(".", "_"): nn.Parameter(torch.zeros(4))})
        self.bounded = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_parameter("nothing", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.again(self.layers(self.embed(tokens)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * self.scales[0] * self.scales[1] + self.shifts["a_b"]
        return self.head(self.rnn(self.bounded(x))[0])


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    # In training the norm takes away what a bias adds before it, and the rest is noise.
    return Language().eval()


def _backward(module: nn.Module) -> None:
    module.zero_grad()
    module(TOKENS).square().mean().backward()


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def test_paths_are_those_of_the_state_dict() -> None:
    module = _model()
    state = op.setup(op.AdamW(), module)
    assert sorted(map(str, state)) == sorted(name for name, _ in module.named_parameters())
    assert [str(path) for path in state.parameters[0].paths] == ["embed.weight", "head.weight"]
    assert tuple(map(str, state.parameters[1].paths)) == ("layers.0.weight", "again.weight")
    # Buffers are no parameters: nothing decays them.
    assert not [path for path in map(str, state) if "running" in path]
    before = module.norm.running_mean.clone()
    _backward(module.train())
    _, new = op.update(state, module)
    assert (new.norm.running_mean == module.norm.running_mean).all()
    assert (new.norm.running_mean != before).any()


@pytest.mark.parametrize("rule", [op.AdamW(0.1), op.Chain(op.ClipGlobalNorm(0.1), op.SGD(0.1, momentum=0.9)), op.Adafactor(0.1)])
@pytest.mark.parametrize("numba", [True, False], ids=["one pass", "lists"])
def test_gradients_left_behind_are_read_and_the_module_is_written(rule: op.Rule, numba: bool) -> None:
    def steps(*, in_place: bool) -> tuple[Any, op.State]:
        module: Any = _model()
        state = op.setup(rule, module)
        for _ in range(3):
            _backward(module)
            state, module = (op.update_ if in_place else op.update)(state, module)
        return module, state

    with contextlib.nullcontext() if numba else op.reference_only():
        module, state = steps(in_place=True)
        other, _ = steps(in_place=False)
    right = _model()
    assert int(state.step) == 3
    assert module.head.weight is module.embed.weight
    assert other.head.weight is other.embed.weight
    assert isinstance(other.embed.weight, nn.Parameter)
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert (mine != dict(right.named_parameters())[name]).any()


def test_the_numbers_are_those_of_torch() -> None:
    module, other = _model(), _model()
    state = op.setup(op.AdamW(0.01, weight_decay=0.1), module)
    theirs = torch.optim.AdamW(other.parameters(), 0.01, weight_decay=0.1)
    for _ in range(5):
        _backward(module)
        state, _ = op.update_(state, module)
        _backward(other)
        theirs.step()
    for mine, right in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_a_pure_step_leaves_the_module_and_shares_what_did_not_move() -> None:
    module = _model()
    before = _copies(module)
    state = op.setup(op.AdamW(0.1), module).freeze("rnn")
    _backward(module)
    _, new = op.update(state, module)
    assert all((tensor == before[name]).all() for name, tensor in module.named_parameters())
    assert new is not module
    assert new.rnn.weight_hh_l0 is module.rnn.weight_hh_l0
    assert (new(TOKENS) != module(TOKENS)).any()
    assert new.again is new.layers[0]


def test_value_and_grad_gives_what_backward_leaves() -> None:
    module = _model().eval()
    state = op.setup(op.AdamW(0.1), module).freeze("rnn")
    _, grads = op.value_and_grad(lambda module: module(TOKENS).square().mean(), state)(module)
    _backward(module)
    left = {name: tensor.grad for name, tensor in module.named_parameters() if not name.startswith("rnn")}
    assert sorted(grads) == sorted(left)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, left[name])


def test_what_asks_for_no_gradient_has_no_slots_and_does_not_move() -> None:
    module = _model()
    _backward(module)
    module.embed.weight.requires_grad_(False)
    before = module.embed.weight.detach().clone()
    state = op.setup(op.AdamW(0.1, weight_decay=0.5), module)
    assert not leaf(state, "embed.weight").slots
    # The gradient that an earlier backward has left is stale.
    assert module.embed.weight.grad is not None
    state, _ = op.update_(state, module)
    assert (module.embed.weight == before).all()
    assert not leaf(state, "embed.weight").slots
    module.embed.weight.requires_grad_(True)
    _backward(module)
    state, _ = op.update_(state, module)
    assert sorted(leaf(state, "embed.weight").slots) == ["mu", "nu"]
    assert (leaf(state, "embed.weight").step, leaf(state, "norm.weight").step) == (1, 2)


def test_a_step_without_gradients_is_none() -> None:
    module = _model()
    state = op.setup(op.AdamW(0.1), module)
    before = _copies(module)
    after, _ = op.update_(state, module)
    assert after == state
    assert all((tensor == before[name]).all() for name, tensor in module.named_parameters())


@pytest.mark.parametrize("numba", [True, False], ids=["one pass", "lists"])
def test_tensors_that_are_not_contiguous_are_trained_where_they_lie(numba: bool) -> None:
    def made(memory_format: Any) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=memory_format)  # type: ignore[call-overload]

    strange, plain = made(torch.channels_last), made(torch.contiguous_format)
    # Every second column of a wider matrix, and a transpose.
    wide, turned = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1))
    for module in (strange, plain):
        kept = (lambda tensor: tensor) if module is strange else torch.Tensor.contiguous
        module[2].weight = nn.Parameter(kept(wide.clone()[:, ::2]))
        module.register_parameter("turned", nn.Parameter(kept(turned.clone().t())))
    x = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(2))
    address = strange[0].weight.data_ptr()
    with contextlib.nullcontext() if numba else op.reference_only():
        for module in (strange, plain):
            state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1)), module).freeze("0.bias", rows=[1])
            for _ in range(3):
                module.zero_grad()
                (module(x).square().mean() + module.turned.square().sum()).backward()
                state, _ = op.update_(state, module)
    assert strange[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert strange[0].weight.data_ptr() == address
    assert strange[2].weight.stride() == (8, 2)
    for mine, right in zip(strange.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_a_compiled_module_has_the_state_of_the_module() -> None:
    module = _model()
    state = op.setup(op.AdamW(0.1), module)
    compiled = torch.compile(module, backend="eager")
    _backward(module)
    state, _ = op.update_(state, compiled)
    assert int(state.step) == 1
    assert list(op.setup(op.AdamW(), compiled)) == list(state)


def test_half_precision_under_autocast_keeps_slots_of_float32() -> None:
    module = nn.Linear(4, 3).to(torch.bfloat16)
    state = op.setup(op.Chain(op.MixedPrecision(), op.AdamW(1e-3)), module)
    start = module.weight.detach().clone()
    for _ in range(50):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(torch.ones(2, 4)).sum().backward()
        state, _ = op.update_(state, module)
    assert {slot.dtype for slot in leaf(state, "weight").slots.values()} == {torch.float32}
    assert module.weight.dtype == torch.bfloat16
    torch.testing.assert_close(module.weight.float(), start.float() - 0.05, rtol=0.02, atol=0.01)


def test_writing_in_place_is_noticed_by_autograd() -> None:
    module = nn.Linear(3, 3)
    state = op.setup(op.Descent(0.1), module)
    loss = module(module(torch.ones(1, 3))).sum()
    module.weight.grad = torch.ones(3, 3)
    op.update_(state, module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("numba", [True, False], ids=["one pass", "lists"])
def test_gradients_that_are_other_parameters_are_read_before_those_are_written(numba: bool) -> None:
    def stepped(step: Any) -> Any:
        model = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 5.0])}
        return step(op.setup(op.Descent(1.0), model), model, {"a": model["b"], "b": model["a"]})[1]

    with contextlib.nullcontext() if numba else op.reference_only():
        for new in (stepped(op.update), stepped(op.update_)):
            assert {name: tensor.tolist() for name, tensor in new.items()} == {"a": [-2.0, -3.0], "b": [2.0, 3.0]}


@pytest.mark.parametrize("numba", [True, False], ids=["one pass", "lists"])
def test_gradients_that_lie_in_parameters_of_another_rule_are_read_before_those_are_written(numba: bool) -> None:
    def stepped(step: Any) -> Any:
        rules = {"a": op.Descent(1.0), "b": op.Momentum(1.0), "c": op.Muon(1.0, fallback=op.Descent(1.0))}
        model = {"a": torch.ones(2), "b": torch.arange(6.0), "c": torch.eye(2)}
        grads = {"a": model["b"][1:3], "b": torch.ones(6), "c": model["b"][2:].reshape(2, 2)}
        return step(op.setup(rules, model), model, grads)[1]

    with contextlib.nullcontext() if numba else op.reference_only():
        pure, written = stepped(op.update), stepped(op.update_)
    assert written["a"].tolist() == [0.0, -1.0]
    assert all(torch.equal(pure[name], written[name]) for name in pure)


def test_parameters_that_came_to_lie_in_one_place_are_an_error() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    state = op.setup(op.Descent(0.1), module)
    module[1].weight.data = module[0].weight.data
    for each in module.parameters():
        each.grad = torch.ones(2, 2)
    with pytest.raises(OptimiserError, match=r"0\.weight and 1\.weight lie in the same memory now"):
        op.update_(state, module)


def test_dicts_of_tensors_serve_functional_calls() -> None:
    module = nn.Linear(3, 2)
    params: Any = {name: tensor.detach() for name, tensor in module.named_parameters()}
    state = op.setup(op.AdamW(0.001), params)
    loss = lambda params: torch.func.functional_call(module, params, (torch.ones(4, 3),)).square().mean()  # noqa: E731
    first = loss(params)
    for _ in range(10):
        state, params = op.update(state, params, torch.func.grad(loss)(params))
    assert loss(params) < first


def test_copies_keep_their_ties_and_go_on_alike() -> None:
    module = _model()
    state = op.setup(op.AdamW(0.1), module)
    _backward(module)
    state, _ = op.update_(state, module)
    twin, other = copy.deepcopy((module.state_dict(), state))
    again = _model(1)
    again.load_state_dict(twin)
    assert pickle.loads(pickle.dumps(state)) == other == state
    for each, own in ((module, state), (again, other)):
        _backward(each)
        op.update_(own, each)
    for mine, right in zip(again.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


# What may go wrong ----------------------------------------------------------------------------------------------------


def _resized(module: Any) -> None:
    module.embed.weight = module.head.weight = nn.Parameter(torch.ones(9, 4))


def _to_double(module: Any) -> None:
    module.double()


def _sparse(module: Any) -> None:
    module.embed.weight.grad = torch.eye(7, 4).to_sparse()


def _gone(module: Any) -> None:
    del module.norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_resized, r"embed\.weight: the state was made for shape \(7, 4\), but the model holds \(9, 4\)"),
        (_to_double, r"\w+: the state was made for float32, but the model holds float64"),
        (_sparse, r"embed\.weight: the gradient is sparse; make it dense"),
        (_gone, r'the state has a parameter at "norm\.weight", the model has nothing there'),
    ],
)
def test_a_module_that_changed_is_an_error_and_nothing_moves(change: Any, message: str) -> None:
    module = _model()
    state = op.setup(op.AdamW(0.1), module)
    _backward(module)
    change(module)
    before = _copies(module)
    with pytest.raises(OptimiserError, match=message):
        op.update_(state, module)
    assert all((tensor == before[name]).all() for name, tensor in module.named_parameters())
    assert state.step == 0


def test_what_has_no_values_is_an_error() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ModelError, match='"weight" is on the meta device'):
        op.setup(op.Adam(), module)
    real = nn.Linear(2, 2)
    state = op.setup(op.Adam(), real)
    with pytest.raises(ModelError, match=r"\w+: the state was made on cpu, but the model is on meta; move it back"):
        op.update_(state, module, {"bias": torch.ones(2)})
    with pytest.raises(GradientError, match="weight: the gradient is on meta, the parameter on cpu"):
        op.update_(state, real, {"weight": torch.ones(2, 2, device="meta")})
    with pytest.raises(DtypeError, match="weight: the gradient has dtype int64"):
        op.update_(state, real, {"weight": torch.ones(2, 2, dtype=torch.int64)})


def test_the_state_of_another_module_is_an_error() -> None:
    state = op.setup(op.Adam(), nn.Linear(3, 2))
    with pytest.raises(ModelError, match='a parameter at "weight", the model has nothing there'):
        op.update_(state, nn.Sequential(nn.Linear(3, 2)))
    module = nn.Linear(3, 2)
    _, _ = op.update_(state, module, {"weight": torch.ones(2, 3)})
    with pytest.raises(StateError, match="use the state that it returned"):
        op.update_(state, module, {"weight": torch.ones(2, 3)})


# PyTorch's own kernels ------------------------------------------------------------------------------------------------

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@op.rule
class Constant(op.Rule):
    """A gradient of ones, whatever comes."""

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"one": 1.0}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return h.one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        op.Adam(0.01, betas=(0.0, 0.9)),
        op.AMSGrad(0.01),
        op.AdamW(0.01, weight_decay=0.1),
        op.AdamW(0.0, weight_decay=0.1),
        op.AdamW(0.01, amsgrad=True),
        op.Momentum(0.01, momentum=0.8),
        op.Nesterov(0.01),
        op.SGD(0.01, weight_decay=0.1),
        op.SGD(0.01, momentum=0.9, dampening=0.3, weight_decay=0.1),
        op.SGD(0.01, momentum=0.9, nesterov=True),
        op.Chain(op.ClipGlobalNorm(1.0), op.WeightDecay(0.1), op.AdamW(0.01)),
        op.Chain(op.Momentum(1.0), op.Adam(0.01)),
        op.Chain(Constant(), op.Adam(0.01)),
    ],
    ids=str,
)
def test_kernels_of_torch_take_the_step_that_ours_take(
    rule: op.Rule, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(calls: list[Any] | None) -> tuple[dict[str, torch.Tensor], op.State]:
        torch.manual_seed(0)
        model = {name: torch.randn(shape, device=device).to(dtype) for name, shape in {"a": (5, 3), "b": (7,), "c": (4, 2)}.items()}
        model["a"] = model["a"].t()  # strided
        state = op.setup(rule, model).freeze("c", rows=[1, 2])
        found = backend.fused_kernel
        if calls is None:
            monkeypatch.setattr(backend, "fused_kernel", lambda *given: None)
        else:
            monkeypatch.setattr(backend, "fused_kernel", lambda *given: calls.append(found(*given)) or calls[-1])
        with op.reference_only():
            for step in range(4):
                grads = {name: torch.randn(each.shape, device=device).to(dtype) for name, each in model.items()}
                if step == 2:
                    state = state.adjust("b", lr=0.005)
                if step == 1:
                    del grads["b"]  # the counts part
                state, model = op.update(state, model, grads)
        monkeypatch.undo()
        return model, state

    calls: list[Any] = []
    mine, plain = trained(calls)
    theirs, expected = trained(None)
    assert calls
    assert all(calls)
    limits = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for name, each in theirs.items():
        torch.testing.assert_close(mine[name], each, **limits)
        for slot, value in leaf(expected, name).slots.items():
            torch.testing.assert_close(
                leaf(plain, name).slots[slot], value, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
    assert {leaf(plain, name).step for name in mine} == {3, 4}
