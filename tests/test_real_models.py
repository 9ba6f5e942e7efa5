"""Models of other libraries that change while they train: a vocabulary resized, a head swapped, a layer put in."""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from transformers import GPT2Config, GPT2LMHeadModel

import optimisers as op
from optimisers.errors import ModelError, ShapeError, StateError
from optimisers.interop.torch_optim import Optimizer
from tests.conftest import leaf

# transformers: a vocabulary that is resized ---------------------------------------------------------------------------

WORDS, GROWN, SHRUNK = 11, 14, 9
EMBED, HEAD, FROZEN = "transformer.wte.weight", "lm_head.weight", "transformer.h.0"
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-8, 0.1


def _gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 6, "vocab_size": WORDS}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, tie_word_embeddings=True)).double()


def _resize(model: Any, words: int) -> None:
    torch.manual_seed(1)  # new rows are random, and the same in every model
    model.resize_token_embeddings(words, mean_resizing=False)


def _backward(model: Any, words: int) -> float:
    tokens = torch.arange(12).reshape(2, 6) * 5 % words
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def _rule() -> Any:
    return op.no_decay(op.AdamW(LR, betas=BETAS, eps=EPS, weight_decay=DECAY), ndim=1)


class Functional:
    """A GPT-2 that `update_` trains."""

    def __init__(self) -> None:
        self.model = _gpt2()
        self.state = op.setup(_rule(), self.model)

    def step(self) -> None:
        self.state, self.model = op.update_(self.state, self.model)

    def freeze(self, selector: str) -> None:
        self.state = self.state.freeze(selector)

    def thaw(self, selector: str) -> None:
        self.state = self.state.thaw(selector)

    def set_lr(self, lr: float) -> None:
        self.state = self.state.adjust(lr=lr)

    def go_on_from(self, state: op.State) -> None:
        self.state = state


class Wrapped:
    """The same with the optimizer for PyTorch's own loops."""

    def __init__(self) -> None:
        self.model = _gpt2()
        self.optimizer = Optimizer(self.model, _rule())

    @property
    def state(self) -> op.State:
        return self.optimizer.op_state

    def step(self) -> None:
        self.optimizer.step()

    def freeze(self, selector: str) -> None:
        self.optimizer.freeze(selector)

    def thaw(self, selector: str) -> None:
        self.optimizer.thaw(selector)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def go_on_from(self, state: op.State) -> None:
        self.optimizer = Optimizer(self.model, state)


class ByHand:
    """The same with AdamW as the paper writes it, in NumPy, and a resize that copies rows."""

    def __init__(self) -> None:
        self.model, self.lr = _gpt2(), LR
        self.frozen: tuple[str, ...] = ()
        sizes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.mu, self.nu = ({name: np.zeros(size) for name, size in sizes.items()} for _ in range(2))
        self.count = dict.fromkeys(sizes, 0)

    def step(self) -> None:
        first, second = BETAS
        for name, parameter in self.model.named_parameters():
            if name.startswith(self.frozen):
                continue
            p, g = parameter.detach().numpy(), parameter.grad.numpy()
            self.count[name] += 1
            self.mu[name] = first * self.mu[name] + (1 - first) * g
            self.nu[name] = second * self.nu[name] + (1 - second) * g**2
            mean, square = self.mu[name] / (1 - first ** self.count[name]), self.nu[name] / (1 - second ** self.count[name])
            p *= 1 - self.lr * DECAY * (p.ndim > 1)
            p -= self.lr * mean / (np.sqrt(square) + EPS)

    def resize(self, words: int) -> None:
        _resize(self.model, words)
        for moments in (self.mu, self.nu):
            moments[EMBED] = np.concatenate([moments[EMBED], np.zeros((GROWN - WORDS, 8))])[:words]


@pytest.fixture(params=[Functional, Wrapped], ids=["update_", "Optimizer"])
def trained(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A GPT-2 after three steps, of which the learning rate was halved before the last; then a block froze, and one more step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side, and threads that wait for a core cost more than they bring
    one = request.param()
    for at in range(4):
        if at == 2:
            one.set_lr(LR / 2)
        if at == 3:
            one.freeze(FROZEN)
        _backward(one.model, SHRUNK)
        one.step()
    yield one
    torch.set_num_threads(threads)


def _trained_by_hand() -> ByHand:
    one = ByHand()
    for at in range(4):
        one.lr, one.frozen = LR if at < 2 else LR / 2, (FROZEN,) if at == 3 else ()
        _backward(one.model, SHRUNK)
        one.step()
    return one


def _all_bits(state: op.State) -> dict[str, Any]:
    return {
        str(each.path): (each.step, {name: slot.numpy().tobytes() for name, slot in each.slots.items()}) for each in state.leaves()
    }


def _values(model: Any) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def _assert_as_by_hand(one: Any, reference: ByHand) -> None:
    expected = dict(reference.model.named_parameters())
    assert {str(path) for path in one.state} == expected.keys()
    for name, parameter in one.model.named_parameters():
        found = leaf(one.state, name)
        assert found.step == reference.count[name]
        # What is zero but for rounding, such as the gradient of a key's bias, Adam makes larger: hence an absolute tolerance.
        np.testing.assert_allclose(parameter.detach(), expected[name].detach(), rtol=1e-9, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(found.slots["mu"], reference.mu[name], rtol=1e-9, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(found.slots["nu"], reference.nu[name], rtol=1e-9, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(("words", "policy"), [(GROWN, "pad"), (SHRUNK, "truncate")])
def test_a_resized_vocabulary_of_transformers_trains_on_as_by_hand(trained: Any, words: int, policy: str) -> None:
    reference = _trained_by_hand()
    _assert_as_by_hand(trained, reference)
    before = _all_bits(trained.state)

    _resize(trained.model, words)
    reference.resize(words)
    state, report = op.adapt(trained.state, trained.model, resize=policy)
    assert str(report).splitlines() == ["27 kept, 1 resized", f"  resized  {EMBED}  [{WORDS}, 8] -> [{words}, 8]"]
    after, rest = _all_bits(state), min(words, WORDS) * 8 * 8
    assert {name: each for name, each in after.items() if name != EMBED} == {k: v for k, v in before.items() if k != EMBED}
    assert after[EMBED][0] == before[EMBED][0] == 4
    for slot in ("mu", "nu"):
        assert after[EMBED][1][slot] == before[EMBED][1][slot][:rest] + bytes(words * 64 - rest)

    trained.go_on_from(state)
    asleep = {name: each for name, each in _values(trained.model).items() if name.startswith(FROZEN)}
    losses = []
    for at in range(6):
        if at == 3:
            assert {name: _values(trained.model)[name] for name in asleep} == asleep
            assert {name: _all_bits(trained.state)[name] for name in asleep} == {name: before[name] for name in asleep}
            trained.thaw(FROZEN)
            reference.frozen = ()
        losses.append(_backward(trained.model, words))
        _backward(reference.model, words)
        trained.step()
        reference.step()
        _assert_as_by_hand(trained, reference)
        assert trained.model.lm_head.weight is trained.model.transformer.wte.weight
    assert losses[-1] < losses[0]
    assert [str(path) for path in leaf(trained.state, EMBED).ties] == [HEAD]
    assert (leaf(trained.state, HEAD).step, leaf(trained.state, f"{FROZEN}.ln_1.weight").step, trained.state.step) == (10, 6, 10)
    assert {each.rule.hyperparameters["lr"] for each in trained.state.leaves()} == {LR / 2}


@pytest.mark.parametrize(("words", "policy", "strict"), [(GROWN, "pad", False), (GROWN, "keep", True), (SHRUNK, "truncate", False)])
def test_a_file_from_before_a_resize_loads_as_adapt_would(
    trained: Any, words: int, policy: str, strict: bool, tmp_path: Path
) -> None:
    file = tmp_path / "run.safetensors"
    op.save(file, trained.state, trained.model)
    other = _gpt2()
    _resize(other, words)
    with pytest.raises(StateError, match=rf"{EMBED} \(shape \[11, 8\] -> \[{words}, 8\]\)"):
        op.load(file, other)
    loaded = op.load(file, other, strict=strict, resize=policy)
    _resize(trained.model, words)
    state, report = op.adapt(trained.state, trained.model, resize=policy)
    for name in ("kept", "resized", "fresh", "dropped", "tied", "untied"):
        assert getattr(loaded.report, name) == getattr(report, name)
    assert loaded.model is other
    assert other.lm_head.weight is other.transformer.wte.weight
    assert _values(other) == _values(trained.model)
    assert _all_bits(loaded.state) == _all_bits(state)

    resumed = copy.copy(trained)
    resumed.model = other
    for one, start in ((trained, state), (resumed, loaded.state)):
        one.go_on_from(start)
        for _ in range(2):
            _backward(one.model, words)
            one.step()
    assert _values(other) == _values(trained.model)
    assert _all_bits(resumed.state) == _all_bits(trained.state)


@pytest.mark.parametrize("words", [GROWN, SHRUNK])
@pytest.mark.parametrize("stale", [True, False], ids=["old gradients", "new gradients"])
def test_a_resized_vocabulary_that_was_not_adapted_is_an_error_and_nothing_moves(trained: Any, words: int, stale: bool) -> None:
    # The module keeps the Parameter and gives it other data, so that its identity tells nothing.
    same = trained.model.transformer.wte.weight
    _resize(trained.model, words)
    assert trained.model.transformer.wte.weight is same
    if not stale:
        _backward(trained.model, words)
    before, moments = _values(trained.model), _all_bits(trained.state)
    message = rf"{EMBED}: the state was made for shape \(11, 8\), but the model holds \({words}, 8\)"
    with pytest.raises(ModelError, match=message):
        trained.step()
    assert (_values(trained.model), _all_bits(trained.state)) == (before, moments)
    assert trained.state.step == 4


def test_the_error_of_a_resized_vocabulary_asks_for_adapt(trained: Any) -> None:
    _resize(trained.model, GROWN)
    with pytest.raises(ModelError, match="adapt"):
        trained.step()


def test_a_gradient_from_before_a_resize_is_an_error(trained: Any) -> None:
    _resize(trained.model, GROWN)
    trained.go_on_from(op.adapt(trained.state, trained.model, resize="pad")[0])
    before = _values(trained.model)
    with pytest.raises(ShapeError, match=rf"{EMBED}: the gradient has shape \(11, 8\), the parameter \(14, 8\)"):
        trained.step()
    assert _values(trained.model) == before


# Equinox: a head that is swapped --------------------------------------------------------------------------------------

FEATURES = jnp.asarray(np.random.default_rng(0).normal(size=(24, 5)))


class Classifier(eqx.Module):
    """A trunk and a head."""

    trunk: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, classes: int, key: Any) -> None:
        first, second, head = jax.random.split(key, 3)
        self.trunk = [eqx.nn.Linear(5, 8, key=first), eqx.nn.Linear(8, 8, key=second)]
        self.head = eqx.nn.Linear(8, classes, key=head)

    def __call__(self, x: Any) -> Any:
        for layer in self.trunk:
            x = jnp.tanh(layer(x))
        return self.head(x)


def _loss(model: Classifier) -> Any:
    scores = jax.vmap(model)(FEATURES)
    labels = jnp.arange(24) * 7 % scores.shape[1]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


class Uninterrupted:
    """Optax's Adam on some parameters, given by path, which hears nothing of what happens to the others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {path: jnp.array(value) for path, value in values.items()}
        self.adam = optax.adam(LR)
        self.memory: Any = self.adam.init(self.values)

    def step(self, grads: Mapping[str, Any]) -> None:
        updates: Any
        updates, self.memory = self.adam.update({path: grads[path] for path in self.values}, self.memory)
        self.values = {path: value + updates[path] for path, value in self.values.items()}

    def assert_as(self, state: op.State, model: Any, rename: Mapping[str, str] | None = None) -> None:
        """Check values, moments and counts; the paths may have other names by now."""
        moments = self.memory[0]
        found = op.trainables(model)
        for path, value in self.values.items():
            new = (rename or {}).get(path, path)
            own = leaf(state, new)
            np.testing.assert_allclose(found[new], value, rtol=1e-12, atol=1e-12, err_msg=new)
            np.testing.assert_allclose(own.slots["mu"], moments.mu[path], rtol=1e-12, atol=1e-12, err_msg=new)
            np.testing.assert_allclose(own.slots["nu"], moments.nu[path], rtol=1e-12, atol=1e-12, err_msg=new)
            assert int(own.step) == int(moments.count)


def _jax_bits(state: op.State) -> dict[str, Any]:
    return {
        str(each.path): (int(each.step), {name: np.asarray(slot).tobytes() for name, slot in each.slots.items()})
        for each in state.leaves()
    }


@pytest.mark.parametrize("jit", [eqx.filter_jit, jax.jit], ids=["filter_jit", "jit"])
def test_a_swapped_head_of_equinox_starts_afresh_while_the_trunk_goes_on(jit: Callable[..., Any]) -> None:
    model: Any = Classifier(4, jax.random.key(0))
    state: Any = op.setup(op.Adam(LR), model)
    reference = Uninterrupted({path: array for path, array in op.trainables(model).items() if str(path).startswith("trunk")})
    traces = 0

    @jit
    def step(before: op.State, model: Classifier) -> Any:
        nonlocal traces
        traces += 1
        value, grads = op.value_and_grad(_loss, before)(model)
        return *op.update(before, model, grads), value, grads

    def train(steps: int) -> tuple[list[float], Any]:
        nonlocal state, model
        losses, grads = [], {}
        for _ in range(steps):
            state, model, value, grads = step(state, model)
            reference.step(grads)
            reference.assert_as(state, model)
            losses.append(float(value))
        return losses, grads

    losses, _ = train(10)
    assert losses[-1] < losses[0]
    assert traces == 1

    before, trunk = _jax_bits(state), op.trainables(model)
    model = eqx.tree_at(lambda model: model.head, model, eqx.nn.Linear(8, 3, key=jax.random.key(1)))
    with pytest.raises(ModelError, match=r"head\.weight: the state was made for shape \(4, 8\), but the model holds \(3, 8\)"):
        op.update(state, model, {})
    state, report = op.adapt(state, model)
    assert str(report).splitlines() == [
        "4 kept, 2 fresh",
        "  fresh  head.weight  shape [4, 8] -> [3, 8]",
        "  fresh  head.bias    shape [4] -> [3]",
    ]
    assert list(map(str, report.kept)) == [path for path in before if path.startswith("trunk")]
    after = _jax_bits(state)
    assert {path: after[path] for path in map(str, report.kept)} == {path: before[path] for path in map(str, report.kept)}
    assert all(op.trainables(model)[path] is trunk[path] for path in map(str, report.kept))
    for path in ("head.weight", "head.bias"):
        assert leaf(state, path).step == 0
        assert not any(np.asarray(slot).any() for slot in leaf(state, path).slots.values())

    fresh = op.trainables(model)
    first, grads = train(1)
    for path in ("head.weight", "head.bias"):
        moved = op.trainables(model)[path] - fresh[path]
        assert (grads[path] != 0).all()
        np.testing.assert_allclose(moved, -LR * grads[path] / (abs(grads[path]) + 1e-8), rtol=1e-9)
        np.testing.assert_allclose(moved, -LR * np.sign(grads[path]), rtol=1e-4)
    assert {path: count for path, (count, _) in _jax_bits(state).items()} == {
        path: 11 if path.startswith("trunk") else 1 for path in before
    }
    losses, _ = train(30)
    assert losses[-1] < 0.9 * first[0]
    assert traces == 2
    assert int(state.step) == 41


# Flax NNX: a layer that is put in -------------------------------------------------------------------------------------


class Residual(nnx.Module):
    """Layers that each add something: one whose kernel is zero changes nothing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs, param_dtype=jnp.float64) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(jnp.tanh(x))
        return x


def _nnx_loss(model: Any) -> Any:
    return ((model(FEATURES) - FEATURES[:, ::-1]) ** 2).mean()


def test_a_layer_is_put_into_the_middle_of_a_model_of_nnx() -> None:
    model = Residual(nnx.Rngs(0))
    state = op.setup(op.Adam(LR), model)
    reference = Uninterrupted({str(path): array[...] for path, array in op.trainables(model).items()})
    traces = 0

    @nnx.jit
    def step(before: op.State, model: Residual) -> tuple[op.State, Any, Any]:
        nonlocal traces
        traces += 1
        value, grads = op.value_and_grad(_nnx_loss, before)(model)
        after, new = op.update(before, model, grads)
        nnx.update(model, nnx.state(new))
        return after, value, grads

    def train(steps: int, names: Mapping[str, str]) -> list[float]:
        nonlocal state
        losses = []
        for _ in range(steps):
            state, value, grads = step(state, model)
            reference.step({path: grads[names[path]] for path in names})
            reference.assert_as(state, model, names)
            losses.append(float(value))
        return losses

    losses = train(5, {path: path for path in reference.values})
    before, last = _jax_bits(state), _nnx_loss(model)
    model.layers.insert(1, nnx.Linear(5, 5, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(1), param_dtype=jnp.float64))
    np.testing.assert_allclose(_nnx_loss(model), last, rtol=1e-12)
    with pytest.raises(ModelError, match=r'a parameter at "layers\.3\.bias" that the state does not know'):
        op.update(state, model, {})

    state, report = op.adapt(state, model, rename={"layers.1": "layers.2", "layers.2": "layers.3"})
    moved = {"layers.1.bias": "layers.2.bias", "layers.1.kernel": "layers.2.kernel"}
    moved |= {"layers.2.bias": "layers.3.bias", "layers.2.kernel": "layers.3.kernel"}
    assert {str(old): str(new) for old, new in report.renamed.items()} == moved
    assert {str(path): reason for path, reason in report.fresh.items()} == {"layers.1.bias": "new", "layers.1.kernel": "new"}
    names = {path: moved.get(path, path) for path in before}
    assert {path: _jax_bits(state)[new] for path, new in names.items()} == before

    later = train(20, names)
    assert later[0] == pytest.approx(float(last), rel=1e-12)
    assert later[-1] < later[0] < losses[0]
    counts = {path: count for path, (count, _) in _jax_bits(state).items()}
    assert counts == {path: 20 if path.startswith("layers.1.") else 25 for path in counts}
    assert traces == 2
