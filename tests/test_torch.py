"""Modules of PyTorch: paths, ties, gradients left behind, memory formats, and what may go wrong."""

import contextlib
import copy
import functools
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
    module.get_parameter("1.weight").data = module.get_parameter("0.weight").data
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
    with pytest.raises(ModelError, match=r"\w+: the state was made on cpu, but the model is on meta; call adapt"):
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


# Modules that hold more than their tree -----------------------------------------------------------------------------


def _plus_bias(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + module.bias


class _Reaching(nn.Module):
    """It reaches its layers and weights by other ways than its children."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4))
        self.layers = [self.a, self.b[0]]
        self.first = self.a.forward
        self.again = functools.partial(self.penalty, 2.0)
        self.weights = {"a": self.a.weight}
        self.a.register_forward_hook(_plus_bias)

    def penalty(self, factor: float) -> torch.Tensor:
        return factor * self.b.get_parameter("0.bias").sum() + self.weights["a"].sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.first(x) + self.again()


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("wrap", [lambda module: module, _compiled, _compiled_in_place, nn.DataParallel], ids=["", "c", "ci", "dp"])
def test_gradients_and_new_modules_are_right_however_a_module_reaches_its_weights(wrap: Any) -> None:
    torch.manual_seed(0)
    plain = _Reaching()
    module = wrap(plain)
    x, loss = torch.ones(3, 4), lambda module, x: module(x).square().mean()
    state = op.setup(op.SGD(0.1), module)
    value, grads = op.value_and_grad(loss, state)(module, x)
    plain(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
        assert type(parameter) is nn.Parameter
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    _, new = op.update(state, module, grads)
    assert all(map(torch.equal, before, plain.parameters()))
    state, module = op.update_(state, module, grads)
    torch.testing.assert_close(new(x), module(x))
    assert loss(new, x) < value


def test_a_loss_that_closes_over_its_module_has_gradients() -> None:
    module = nn.Linear(3, 2)
    state = op.setup(op.SGD(0.1), module)
    _, grads = op.value_and_grad(lambda _: module(torch.ones(3)).sum(), state)(module)
    assert list(grads) == ["weight", "bias"]


def test_masks_stop_gradients_of_a_shared_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1] = module[0]
    state = op.setup(op.SGD(0.1), module).mask("1.weight")
    x, weight = torch.ones(3, 4), module.get_parameter("0.weight")
    _, grads = op.value_and_grad(lambda module: module(x).sum(), state)(module)
    own = weight.detach().requires_grad_()
    torch.testing.assert_close(grads["0.weight"], torch.autograd.grad((x @ own.T @ weight.detach().T).sum(), own)[0])
    assert module[0] is module[1]
    assert module.get_parameter("0.weight") is weight
    module(x).sum().backward()
    with pytest.raises(GradientError, match=r"1\.weight is masked and 0\.weight is not, but both are one Parameter"):
        op.update_(state, module)


def test_a_module_has_its_own_parameters_again_when_the_loss_fails() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1] = module[0]
    before = list(module.named_parameters())

    def fail(module: nn.Module) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        op.value_and_grad(fail, op.setup(op.SGD(0.1), module).mask("1.weight"))(module)
    assert all(
        name == old and each is parameter for (name, each), (old, parameter) in zip(module.named_parameters(), before, strict=True)
    )


def test_what_asks_for_no_gradient_gets_none_from_value_and_grad() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    _, grads = op.value_and_grad(lambda module: module(torch.ones(2)).sum(), op.setup(op.SGD(0.1), module))(module)
    assert list(grads) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda module: module[0](torch.ones(2)).sum(), "does not depend on any live parameter"),
        (lambda module: module(torch.ones(2)).sum().item(), r"the loss is a float, not a tensor; return it without \.item"),
    ],
)
def test_a_loss_that_reaches_nothing_is_an_error(loss: Any, message: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(GradientError, match=message):
        op.value_and_grad(loss, op.setup(op.SGD(0.1), module).freeze("0"))(module)


def test_a_place_that_was_untied_has_a_parameter_of_its_own() -> None:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    module[1].weight = module[0].weight
    state = op.setup(op.SGD(0.1), module).untie("1.weight")
    for _ in range(2):
        module.zero_grad()
        module(torch.arange(3)).square().sum().backward()
        state, module = op.update_(state, module)
    assert type(module[1].weight) is nn.Parameter
    assert [each.step for each in state.leaves()] == [2, 2]
    assert not torch.equal(module.get_parameter("0.weight"), module.get_parameter("1.weight"))


def test_a_pure_step_makes_a_proper_module_of_a_transposed_tie() -> None:
    module: Any = nn.Module()
    module.a = nn.Parameter(torch.ones(2, 3))
    module.b = nn.Parameter(module.a.detach().t())
    state, new = op.update(op.setup(op.SGD(0.1), module), module, {"a": torch.ones(2, 3)})
    assert len(state) == 1
    assert type(new.b) is nn.Parameter
    assert new.b.data_ptr() == new.a.data_ptr()
    again: Any = copy.deepcopy(new)
    assert torch.equal(again.b, again.a.T)


class _Marked(nn.Parameter):
    pass


def test_a_pure_step_keeps_the_kind_and_the_attributes_of_parameters() -> None:
    module: Any = nn.Module()
    module.w = _Marked(torch.ones(2))
    vars(module.w)["mark"] = "mine"
    _, new = op.update(op.setup(op.SGD(0.1), module), module, {"w": torch.ones(2)})
    assert (type(new.w), new.w.mark) == (_Marked, "mine")


def test_a_pure_step_leaves_registries_of_the_old_module_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module(torch.ones(3, 2)).sum().backward()
    _, new = op.update(op.setup(op.SGD(0.1), module), module)
    new.double()
    new[0].register_forward_hook(lambda *_: pytest.fail("a hook of the other module"))
    module(torch.ones(3, 2))
    assert module[0].running_mean.dtype == torch.float32


class DataParallel(nn.Module):
    """One of the user's own, which is no shell."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.weight = nn.Parameter(torch.ones(2))


class _Replicas(nn.DataParallel):
    pass


def test_shells_are_those_of_torch() -> None:
    assert [str(path) for path in op.setup(op.SGD(), DataParallel())] == ["weight", "module.weight"]
    assert [str(path) for path in op.setup(op.SGD(), _Replicas(nn.Linear(2, 2)))] == ["weight", "bias"]


# Tensors of other kinds -------------------------------------------------------------------------------------------------


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1 + 1j]))

    def forward(self) -> torch.Tensor:
        return (self.w.conj() - 3j).abs().square().sum()


@pytest.mark.parametrize("numba", [True, False], ids=["one pass", "lists"])
def test_gradients_that_show_others_conjugated_are_taken_as_they_show(numba: bool) -> None:
    module = _Complex()
    state = op.setup(op.SGD(0.1), module)
    with contextlib.nullcontext() if numba else op.reference_only():
        for _ in range(50):
            module.zero_grad()
            module().backward()
            assert module.w.grad is not None
            assert module.w.grad.is_conj()
            state, module = op.update_(state, module)
        assert abs(module.w.item() + 3j) < 1e-3
        for step in (op.update, op.update_):
            model = {"a": torch.zeros(2), "b": torch.ones(3)}
            library: Any = torch
            grads = {"a": library._neg_view(torch.tensor([1.0, 2.0])), "b": library._efficientzerotensor(3)}
            _, model = step(op.setup(op.SGD(1.0), model), model, grads)
            assert (model["a"].tolist(), model["b"].tolist()) == ([1.0, 2.0], [1.0, 1.0, 1.0])


def test_slots_may_get_other_memory_between_steps() -> None:
    model = {"a": torch.zeros(1000)}
    state = op.setup(op.Momentum(1.0, momentum=0.5), model)
    for _ in range(3):
        state, model = op.update_(state, model, {"a": torch.ones(1000)})
        leaf(state, "a").slots["velocity"].share_memory_()
    assert model["a"].unique().tolist() == [-(1 + 1.5 + 1.75)]


def test_columns_of_one_array_are_parameters_of_their_own() -> None:
    whole = torch.ones(4, 6)
    a, b = whole.chunk(2, dim=1)
    state, _ = op.update_(
        op.setup(op.SGD(1.0), {"a": a, "b": b}), {"a": a, "b": b}, {"a": torch.ones(4, 3), "b": torch.zeros(4, 3)}
    )
    assert len(state) == 2
    assert whole.sum(0).tolist() == [0.0, 0.0, 0.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_of_a_module_that_asks_for_no_gradient_is_none(frozen: bool) -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    state = op.setup(op.Adam(), module, frozen="**" if frozen else None)
    state, same = op.update_(state, module)
    assert same is module
    assert [each.step for each in state.leaves()] == [0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(3), '"weight" has no shape as yet, since its module is lazy; run the module once'),
        (lambda: {"a": torch.eye(2).to_sparse()}, '"a" is a sparse_coo tensor, and only dense ones train'),
        (lambda: {"a": torch.eye(2).to_sparse_csr()}, '"a" is a sparse_csr tensor'),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, '"a" is a nested tensor'),
        (lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()}, '"a" shows the memory of another tensor conjugated'),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_train_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        op.setup(op.Adam(), make())


def test_making_a_state_inside_a_transformation_is_an_error() -> None:
    with pytest.raises(ModelError, match=r'"w" is a tensor of a torch\.func transformation'):
        torch.func.vmap(lambda w: op.setup(op.Adam(), {"w": w}))(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_gradient_in_sparse_rows_is_an_error() -> None:
    model = {"a": torch.ones(2, 2)}
    with pytest.raises(GradientError, match="a: the gradient is sparse"):
        op.update(op.setup(op.Adam(), model), model, {"a": torch.eye(2).to_sparse_csr()})


def test_an_embedding_that_was_resized_is_named_before_its_gradient() -> None:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    module[1].weight = module[0].weight
    state = op.setup(op.SGD(0.1), module)
    module[0].weight = module[1].weight = nn.Parameter(torch.ones(7, 3))
    module(torch.arange(3)).sum().backward()
    with pytest.raises(ModelError, match=r"0\.weight: the state was made for shape \(5, 3\), but the model holds \(7, 3\)"):
        op.update_(state, module)


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
        op.SGD(0.01, momentum=lambda step: 0.9 * (step % 2)),
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
    rtol, atol = (1e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-6)
    for name, each in theirs.items():
        torch.testing.assert_close(mine[name], each, rtol=rtol, atol=atol)
        for slot, value in leaf(expected, name).slots.items():
            torch.testing.assert_close(leaf(plain, name).slots[slot], value, rtol=rtol, atol=1e-6)
    assert {leaf(plain, name).step for name in mine} == {3, 4}
