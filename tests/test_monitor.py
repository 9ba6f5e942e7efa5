"""What a monitor records of a step, on every backend, and that it changes nothing."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import optimisers as op
from optimisers import schedules
from optimisers.monitoring import monitor as monitor_module
from tests.conftest import Backend, all_bits, random_array, trains, wide

Arrays = Mapping[str, np.ndarray]


def expected(before: np.ndarray, after: np.ndarray, grad: np.ndarray) -> tuple[float, float]:
    """The norm of a gradient and the update ratio, in double precision."""
    old, new, grad = wide(before), wide(after), wide(grad)
    return float(np.linalg.norm(grad)), float(np.linalg.norm(new - old) / np.linalg.norm(old))


def column(recording: op.Recording, path: str) -> tuple[float, float, float]:
    """The last gradient norm, update ratio and learning rate of a parameter."""
    at = recording.paths.index(path)
    return recording.grad_norm[-1, at], recording.update_ratio[-1, at], recording.lr[-1, at]


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["update", "update_", "record"])
def test_a_sample_holds_what_a_step_did(setting: tuple[Backend, str], how: str) -> None:
    backend, dtype = setting
    rng = np.random.default_rng(0)
    start = {"w": random_array(rng, (30, 7), dtype), "v": random_array(rng, (5,), dtype), "s": random_array(rng, (), dtype)}
    model: Any = {name: backend.make(array) for name, array in start.items()}
    grads = [{name: random_array(rng, array.shape, dtype) for name, array in start.items()} for _ in range(3)]
    state, monitor = op.setup(op.AdamW(0.1), model), op.Monitor(every=2)
    found: dict[str, tuple[float, float]] = {}
    for at, given in enumerate(grads):
        before = {name: np.array(backend.read(array)) for name, array in model.items()}
        tree = {name: backend.make(array) for name, array in given.items()}
        if how == "record":
            new_state, new_model = op.update(state, model, tree)
            if monitor.due(at):
                monitor.record(state, model, tree, new_state, new_model)
            state, model = new_state, new_model
        else:
            state, model = getattr(monitor, how)(state, model, tree)
        if at == 1:
            found = {name: expected(before[name], np.array(backend.read(model[name])), given[name]) for name in start}
    assert monitor.recording.steps.tolist() == [2]
    for name, numbers in found.items():
        assert column(monitor.recording, name) == pytest.approx((*numbers, 0.1), rel=1e-9)


def test_a_watched_step_is_the_same_bit_for_bit(rule: op.Rule, backend: Backend) -> None:
    dtype = "float32" if "float32" in backend.dtypes else backend.dtypes[0]
    if not trains(rule, (4, 6), dtype) or not trains(rule, (5,), dtype):
        pytest.skip("the rule does not train such a parameter")
    rng = np.random.default_rng(1)
    start = {"w": random_array(rng, (40, 60), dtype), "v": random_array(rng, (5,), dtype)}
    grads = [{name: random_array(rng, array.shape, dtype) for name, array in start.items()} for _ in range(4)]
    found = []
    for watched in (False, True):
        model: Any = {name: backend.make(array) for name, array in start.items()}
        state, monitor = op.setup(rule, model), op.Monitor(every=1)
        for given in grads:
            tree = {name: backend.make(array) for name, array in given.items()}
            state, model = (monitor.update_ if watched else op.update_)(state, model, tree)
        found.append(all_bits(backend, state, model))
        assert not watched or len(monitor.recording) == state.step
    assert found[0] == found[1]


def test_a_tied_parameter_counts_once_with_its_summed_gradient(backend: Backend) -> None:
    array = backend.array([[3.0, 0.0], [0.0, 4.0]])
    model = {"a": array, "b": array}
    grads = {"a": backend.array([[1.0, 0.0], [0.0, 0.0]]), "b": backend.array([[2.0, 4.0], [0.0, 0.0]])}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=1)
    monitor.update_(state, model, grads)
    assert monitor.recording.paths == ("a",)
    assert column(monitor.recording, "a") == pytest.approx((5.0, 0.1, 0.1))


def test_a_masked_occurrence_is_not_in_the_gradient(backend: Backend) -> None:
    array = backend.array([3.0, 4.0])
    model = {"a": array, "b": array}
    state, monitor = op.setup(op.Descent(0.1), model).mask("b"), op.Monitor(every=1)
    monitor.update_(state, model, {"a": backend.array([6.0, 8.0]), "b": backend.array([np.nan, 0.0])})
    assert column(monitor.recording, "a") == pytest.approx((10.0, 0.2, 0.1))


def test_frozen_rows_are_in_no_norm(backend: Backend) -> None:
    model = {"w": backend.array([[np.inf, np.inf], [3.0, 4.0], [0.0, 0.0]])}
    state, monitor = op.setup(op.Descent(0.5), model).freeze("w", rows=[0]), op.Monitor(every=1)
    monitor.update_(state, model, {"w": backend.array([[np.nan, 1.0], [6.0, 8.0], [0.0, 0.0]])})
    assert column(monitor.recording, "w") == pytest.approx((10.0, 1.0, 0.5))
    assert not monitor.recording.frozen.any()


def test_what_takes_no_step_has_no_values(backend: Backend) -> None:
    model = {"frozen": backend.array([1.0]), "missing": backend.array([1.0]), "zero": backend.array([0.0])}
    state, monitor = op.setup(op.Descent(0.5), model, frozen="frozen"), op.Monitor(every=1)
    monitor.update_(state, model, {"frozen": backend.array([np.nan]), "missing": None, "zero": backend.array([2.0])})
    recording = monitor.recording
    assert recording.paths == ("frozen", "missing", "zero")
    assert recording.frozen.tolist() == [[True, False, False]]
    assert recording.known("grad_norm").tolist() == recording.known("lr").tolist() == [[False, False, True]]
    # Of zero there is no ratio.
    assert not recording.known("update_ratio").any()
    assert column(recording, "zero")[0] == 2.0


def test_nan_and_infinity_are_recorded(backend: Backend) -> None:
    model = {"nan": backend.array([1.0]), "inf": backend.array([1.0])}
    state, monitor = op.setup(op.Descent(0.5), model), op.Monitor(every=1)
    monitor.update_(state, model, {"nan": backend.array([np.nan]), "inf": backend.array([np.inf])})
    assert np.isnan(column(monitor.recording, "nan")[:2]).all()
    assert column(monitor.recording, "inf")[:2] == (np.inf, np.inf)
    assert monitor.recording.known("grad_norm").all()


def test_a_step_too_small_for_its_parameter_is_none(numpy_backend: Backend) -> None:
    model = {"w": numpy_backend.array([1.0, 1.0])}
    state, monitor = op.setup(op.Descent(1e-30), model), op.Monitor(every=1)
    monitor.update_(state, model, {"w": numpy_backend.array([1.0, 1.0])})
    assert monitor.recording.update_ratio[0, 0] == 0.0


def test_the_parameter_that_is_measured_is_the_one_in_the_model(half_backend: Backend) -> None:
    model = {"w": half_backend.array([1.0, 2.0], "bfloat16")}
    state, monitor = op.setup(op.Chain(op.MixedPrecision(), op.Descent(1e-3)), model), op.Monitor(every=1)
    state, model = monitor.update_(state, model, {"w": half_backend.array([1.0, 1.0], "bfloat16")})
    # The master moves; its rounded copy does not.
    assert column(monitor.recording, "w") == (pytest.approx(2**0.5), 0.0, 1e-3)


@pytest.mark.parametrize("sharing", [False, True])
def test_gradients_that_are_the_parameters_are_measured_before_the_step(backend: Backend, sharing: bool) -> None:
    model = {"w": backend.array([3.0, 4.0])}
    grads = model if sharing else {"w": backend.array([3.0, 4.0])}
    monitor = op.Monitor(every=1)
    monitor.update_(op.setup(op.Descent(0.1), model), model, grads)
    assert column(monitor.recording, "w") == pytest.approx((5.0, 0.1, 0.1))


def test_strided_and_read_only_arrays_are_measured(numpy_backend: Backend) -> None:
    base = np.arange(1.0, 13.0).reshape(3, 4)
    fixed = np.array([3.0, 4.0])
    fixed.setflags(write=False)
    model = {"t": base.T[::2], "fixed": fixed}
    before = {name: array.copy() for name, array in model.items()}
    grads = {"t": np.ones((2, 3)), "fixed": np.ones(2)}
    monitor = op.Monitor(every=1)
    _, model = monitor.update_(op.setup(op.Adam(0.1), model), model, grads)
    for name in model:
        assert column(monitor.recording, name)[:2] == pytest.approx(expected(before[name], model[name], grads[name]))


# When -----------------------------------------------------------------------------------------------------------------


def test_samples_are_at_multiples_of_every_also_after_a_resumption() -> None:
    model: Any = {"w": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=3)
    for _ in range(4):
        state, model = monitor.update_(state, model, {"w": np.ones(2)})
    resumed = op.Monitor(every=3)
    for _ in range(6):
        state, model = resumed.update_(state, model, {"w": np.ones(2)})
    assert monitor.recording.steps.tolist() == [3]
    assert resumed.recording.steps.tolist() == [6, 9]


def test_other_steps_are_plain_steps(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was read")

    for name in ("Watch", "probe_of", "holding", "gradient_squares", "step_squares", "rates_of", "open_with", "gather"):
        monkeypatch.setattr(monitor_module, name, never)
    model = {"w": backend.array([1.0, 2.0])}
    state, monitor = op.setup(op.Adam(), model), op.Monitor(every=100)
    with mock.patch.object(monitor_module, "take_step", wraps=monitor_module.take_step) as step:
        for _ in range(5):
            state, model = monitor.update_(state, model, {"w": backend.array([1.0, 2.0])})
    assert [call.kwargs for call in step.call_args_list] == [{"in_place": True}] * 5


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_step_in_one_pass_copies_nothing(library: str) -> None:
    import torch

    make = np.ones if library == "numpy" else torch.ones
    model: Any = {"w": make(1000), "v": make(3)}
    state, monitor = op.setup(op.AdamW(), model), op.Monitor(every=1)
    state, model = monitor.update_(state, model, {"w": make(1000), "v": make(3)})
    assert monitor._probe is not None
    assert monitor._probe.slots == (None, None)


def test_copies_are_kept_from_sample_to_sample_and_are_of_live_parameters_alone() -> None:
    model: Any = [np.ones(1000), np.ones(1000)]
    with op.reference_only():
        state, monitor = op.setup(op.AdamW(), model, frozen="1"), op.Monitor(every=1)
        state, model = monitor.update_(state, model, [np.ones(1000), None])
        assert monitor._probe is not None
        (kept,) = monitor._probe.slots[0] or (np.empty(0),)
        state, model = monitor.update_(state, model, [np.ones(1000), None])
    assert kept.shape == (1000,)
    assert monitor._probe.slots[1] is None
    assert (monitor._probe.slots[0] or (None,))[0] is kept


def test_no_step_is_no_sample(backend: Backend) -> None:
    model = {"w": backend.array([3.0, 4.0])}
    state, monitor = op.setup(op.Chain(op.AccumGrad(2), op.Descent(0.1)), model), op.Monitor(every=1)
    for size in (1.0, 2.0, 3.0, 4.0):
        state, model = monitor.update_(state, model, {"w": backend.array([size, 0.0])})
    assert monitor.recording.steps.tolist() == [1, 2]
    # The gradient is that of the call that fired; the step is by the mean.
    assert monitor.recording.grad_norm.ravel().tolist() == [2.0, 4.0]
    assert monitor.recording.update_ratio[0, 0] == pytest.approx(0.1 * 1.5 / 5)
    state, monitor = op.setup(op.Chain(op.SkipNonFinite(), op.Descent(0.1)), model), op.Monitor(every=1)
    state, model = monitor.update_(state, model, {"w": backend.array([np.nan, 0.0])})
    assert (state.step, len(monitor.recording)) == (0, 0)


def test_a_step_that_fails_leaves_the_recording_as_it_was(tmp_path: Path) -> None:
    model = {"w": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(tmp_path / "run.jsonl", every=1)
    state, model = monitor.update_(state, model, {"w": np.ones(2)})
    content = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(op.errors.ShapeError, match="w: the gradient"):
        monitor.update_(state, model, {"w": np.ones(3)})
    assert (len(monitor.recording), (tmp_path / "run.jsonl").read_bytes()) == (1, content)
    assert model["w"].tolist() == [0.9, 0.9]
    monitor.update_(state, model, {"w": np.ones(2)})
    assert len(monitor.recording) == 2


def test_parameters_come_and_go_and_freeze() -> None:
    model: Any = {"a": np.ones(2), "b": np.ones(2), "d": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=1)
    state, model = monitor.update_(state, model, model)
    model = {"a": model["a"], "c": np.ones(2), "d": model["d"]}
    state, _ = op.adapt(state, model, rule=op.Descent(0.1))
    state, model = monitor.update_(state.freeze("d"), model, {"a": np.ones(2), "c": np.ones(2)})
    assert monitor.recording.paths == ("a", "b", "c", "d")
    assert monitor.recording.known("grad_norm").tolist() == [[True, True, False, True], [True, False, True, False]]
    assert monitor.recording.frozen.tolist() == [[False] * 4, [False, False, False, True]]


# Learning rates -------------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_that_of_the_step() -> None:
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(schedules.Linear(0.0, 1.0, 10)))
    model: Any = [np.ones(2), np.ones(2)]
    state, monitor = op.setup({"0": rule, "1": op.Descent(0.5)}, model), op.Monitor(every=1)
    for _ in range(3):
        state, model = monitor.update_(state, model, [np.ones(2), np.ones(2)])
    assert monitor.recording.lr.tolist() == [[0.0, 0.5], [0.1, 0.5], [0.2, 0.5]]


def test_a_rule_without_a_learning_rate_has_none() -> None:
    model = {"w": np.ones(2)}
    monitor = op.Monitor(every=1)
    monitor.update_(op.setup(op.Chain(), model), model, {"w": np.ones(2)})
    assert not monitor.recording.known("lr").any()


# JAX ------------------------------------------------------------------------------------------------------------------


def test_compiled_steps_are_recorded_outside() -> None:
    import jax
    import jax.numpy as jnp

    model: Any = {"w": jnp.array([3.0, 4.0])}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=2)
    step = jax.jit(op.update)
    for at in range(4):
        assert monitor.due(state) == monitor.due(at) == (at in (1, 3))
        new_state, new_model = step(state, model, model)
        if monitor.due(at):
            monitor.record(state, model, model, new_state, new_model)
        state, model = new_state, new_model
    assert monitor.recording.steps.tolist() == [2, 4]
    assert monitor.recording.grad_norm.ravel() == pytest.approx([4.5, 3.645])
    assert monitor.recording.update_ratio.ravel() == pytest.approx([0.1, 0.1])


def test_inside_a_compiled_step_is_an_error_with_the_remedy() -> None:
    import jax
    import jax.numpy as jnp

    model = {"w": jnp.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=1)
    with pytest.raises(op.errors.StateError, match=r"monitor\.record\("):
        jax.jit(monitor.update)(state, model, model)
    with pytest.raises(op.errors.StateError, match=r"monitor\.record"):
        jax.jit(lambda given: monitor.update(state, given, given))(model)


def test_donated_arrays_are_an_error_with_the_remedy() -> None:
    import jax
    import jax.numpy as jnp

    model = {"w": jnp.ones(2)}
    state, monitor = op.setup(op.Adam(0.1), model), op.Monitor(every=1)
    grads = {"w": jnp.ones(2)}
    new_state, new_model = jax.jit(op.update, donate_argnums=1)(state, model, grads)
    with pytest.raises(op.errors.StateError, match="donate_argnums"):
        monitor.record(state, model, grads, new_state, new_model)
    newer = jax.jit(op.update, donate_argnums=0)(new_state, new_model, grads)
    with pytest.raises(op.errors.StateError, match="donate_argnums"):
        monitor.record(new_state, new_model, grads, *newer)
    assert len(monitor.recording) == 0


def test_norms_are_over_the_whole_mesh() -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("x",))
    rng = np.random.default_rng(2)
    start, grad = rng.normal(size=(16, 4)), rng.normal(size=(16, 4))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    model: Any = {"w": jax.device_put(start, spread)}
    grads = {"w": jax.device_put(grad, spread)}
    state, monitor = op.setup(op.Adam(0.1), model), op.Monitor(every=1)
    new_state, new_model = jax.jit(op.update)(state, model, grads)
    monitor.record(state, model, grads, new_state, new_model)
    assert column(monitor.recording, "w")[:2] == pytest.approx(expected(start, np.asarray(new_model["w"]), grad))


def test_record_tells_states_of_other_models_apart() -> None:
    states = [op.setup(op.Adam(), {name: np.ones(2)}) for name in ("a", "b")]
    with pytest.raises(op.errors.StateError, match="different models"):
        op.Monitor().record(states[0], {"a": np.ones(2)}, {"a": np.ones(2)}, states[1], {"b": np.ones(2)})


def test_record_of_no_step_records_nothing() -> None:
    model = {"w": np.ones(2)}
    state, monitor = op.setup(op.Chain(op.AccumGrad(2), op.Descent(0.1)), model), op.Monitor()
    new_state, new_model = op.update(state, model, model)
    monitor.record(state, model, model, new_state, new_model)
    assert len(monitor.recording) == 0
    monitor.record(new_state, new_model, model, *op.update(new_state, new_model, model))
    assert monitor.recording.steps.tolist() == [1]


# PyTorch --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_of_pytorch_is_recorded(closure: bool) -> None:
    import torch

    from optimisers.interop.torch_optim import Optimizer

    torch.manual_seed(0)
    first = torch.nn.Linear(3, 4)
    module = torch.nn.Sequential(first, torch.nn.Linear(4, 1))
    found = 0.0, 0.0
    optimizer, monitor = Optimizer(module, op.AdamW(0.1), frozen="0.bias"), op.Monitor(every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    handle = monitor.attach(optimizer)

    def backward() -> Any:
        optimizer.zero_grad()
        loss = module(torch.ones(5, 3)).square().mean()
        loss.backward()
        return loss

    for at in range(4):
        weight = first.weight.detach().numpy().copy()
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        if at == 1:
            found = expected(weight, first.weight.detach().numpy(), np.asarray(first.weight.grad))
        scheduler.step()
    recording = monitor.recording
    assert recording.steps.tolist() == [2, 4]
    assert (recording.grad_norm[0, 0], recording.update_ratio[0, 0]) == pytest.approx(found)
    assert recording.lr[:, 0].tolist() == [0.05, 0.0125]
    assert recording.frozen.tolist() == [[False, True, False, False]] * 2
    handle.remove()
    for _ in range(2):
        optimizer.step(backward)
    assert len(recording) == 2


def test_attach_takes_no_other_optimizer() -> None:
    import torch

    with pytest.raises(op.errors.ModelError, match="not SGD"):
        op.Monitor().attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))


def test_gradients_left_behind_are_measured() -> None:
    import torch

    module = torch.nn.Linear(2, 1, bias=False)
    state, monitor = op.setup(op.Descent(0.1), module), op.Monitor(every=1)
    module(torch.tensor([[3.0, 4.0]])).sum().backward()
    monitor.update_(state, module)
    assert monitor.recording.grad_norm[0, 0] == pytest.approx(5.0)


# Writers --------------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_what_was_recorded(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model: Any = {"w": np.array([3.0, 4.0]), "v": np.ones(2), "frozen": np.ones(2), "head": np.ones(2)}
    rule = {"w|v|frozen": op.Descent(0.1), "**": op.Descent(0.5)}
    state = op.setup(lambda record: rule["**"] if record.name == "head" else rule["w|v|frozen"], model, frozen="frozen")
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = op.Monitor(every=2, writer=writer)
        for _ in range(4):
            state, model = monitor.update_(
                state, model, {"w": np.array([0.6, 0.8]), "v": np.array([np.nan, 0.0]), "head": np.ones(2)}
            )
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = {"grad_norm/w", "grad_norm/v", "grad_norm/head", "update_ratio/w", "update_ratio/v", "update_ratio/head"}
    # A rate goes once, under the first of those that share it.
    first, second = (str(next(iter(state))), "head")
    assert {*events.Tags()["scalars"]} == tags | {f"lr/{first}", f"lr/{second}"}
    shown = [(each.step, each.value) for each in events.Scalars("update_ratio/w")]
    at = monitor.recording.paths.index("w")
    assert shown == [
        (step, pytest.approx(ratio)) for step, ratio in zip([2, 4], monitor.recording.update_ratio[:, at], strict=True)
    ]
    assert np.isnan(events.Scalars("grad_norm/v")[0].value)


class Scalars(list[Any]):
    """A writer of the user's own."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.append((tag, value, step))


def test_any_writer_of_scalars_serves() -> None:
    writer = Scalars()
    model = np.array([3.0, 4.0])
    op.Monitor(every=1, writer=writer).update_(op.setup(op.Descent(0.1), model), model, np.array([6.0, 8.0]))
    assert writer == [("grad_norm/model", 10.0, 1), ("update_ratio/model", pytest.approx(0.2), 1), ("lr/model", 0.1, 1)]


@dataclass(frozen=True)
class Tabled:
    """A schedule that cannot be hashed."""

    rates: np.ndarray

    def __call__(self, step: Any) -> Any:
        return float(self.rates[step])


@pytest.mark.parametrize("rate", [0.1, Tabled(np.array([0.1, 0.1]))])
def test_a_rate_that_rules_share_is_written_once(rate: Any) -> None:
    writer = Scalars()
    model = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}
    state = op.setup({"a": op.Adam(rate), "b": op.Chain(op.ClipNorm(1.0), op.AdamW(rate)), "c": op.Descent(0.5)}, model)
    op.Monitor(every=1, writer=writer).update_(state, model, model)
    assert [(tag, value) for tag, value, _ in writer if tag.startswith("lr/")] == [("lr/a", 0.1), ("lr/c", 0.5)]


@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("I/O operation on closed file")])
def test_a_writer_that_fails_does_not_lose_the_step(error: Exception) -> None:
    writer = mock.Mock()
    writer.add_scalar.side_effect = error
    model: Any = {"w": np.ones(2)}
    monitor = op.Monitor(every=1, writer=writer)
    with pytest.warns(op.errors.OptimiserWarning, match="step 1"):
        state, model = monitor.update_(op.setup(op.Descent(0.5), model), model, {"w": np.ones(2)})
    assert (state.step, model["w"].tolist(), len(monitor.recording)) == (1, [0.5, 0.5], 1)


def test_a_schedule_that_cannot_be_hashed_reaches_a_writer() -> None:
    scalars, model = Scalars(), {"w": np.ones(2), "v": np.ones(2)}
    state = op.setup(op.Descent(Tabled(np.array([0.5, 0.25]))), model)
    state, _ = op.Monitor(every=1, writer=scalars).update_(state, model, {"w": np.ones(2), "v": np.ones(2)})
    assert state.step == 1


def test_a_file_that_cannot_be_opened_any_more_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model: Any = {"w": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(folder / "run.jsonl", every=1)
    state, model = monitor.update_(state, model, {"w": np.ones(2)})
    (folder / "run.jsonl").unlink()
    folder.rmdir()
    for _ in range(3):
        with pytest.warns(op.errors.OptimiserWarning, match="cannot be written"):
            state, model = monitor.update_(state, model, {"w": np.ones(2)})
    folder.mkdir()
    state, model = monitor.update_(state, model, {"w": np.ones(2)})
    assert state.step == 5
    assert op.Recording.read(folder / "run.jsonl").steps.tolist() == [2, 3, 4, 5]


# Itself ---------------------------------------------------------------------------------------------------------------


def test_a_monitor_can_be_pickled_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    model: Any = {"w": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(file, every=1, writer=Scalars())
    state, model = monitor.update_(state, model, {"w": np.ones(2)})
    monitor, state, model = pickle.loads(pickle.dumps((monitor, state, model)))
    state, model = monitor.update_(state, model, {"w": np.ones(2)})
    assert monitor.writer is None
    assert monitor.recording.steps.tolist() == [1, 2]
    assert op.Recording.read(file) == monitor.recording


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_is_a_whole_number_of_steps(every: Any) -> None:
    with pytest.raises(op.errors.StateError, match="every"):
        op.Monitor(every=every)


def test_a_writer_has_to_write_scalars() -> None:
    with pytest.raises(op.errors.StateError, match="add_scalar"):
        op.Monitor(writer=object())


def test_arguments_in_the_wrong_order_are_told() -> None:
    model = {"w": np.ones(2)}
    with pytest.raises(op.errors.ModelError, match="State"):
        op.Monitor().update_(model, op.setup(op.Adam(), model), model)  # type: ignore[arg-type]


def test_a_monitor_is_attached_to_an_optimizer_once() -> None:
    import torch

    from optimisers.interop.torch_optim import Optimizer

    optimizer, monitor = Optimizer(torch.nn.Linear(2, 2), op.Adam()), op.Monitor(every=1)
    handle = monitor.attach(optimizer)
    with pytest.raises(op.errors.StateError, match="attached to this optimizer already"):
        monitor.attach(optimizer)
    handle.remove()
    monitor.attach(optimizer)
    handle.remove()
    with pytest.raises(op.errors.StateError, match="attached to this optimizer already"):
        monitor.attach(optimizer)
    optimizer.module.weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert monitor.recording.steps.tolist() == [1]
