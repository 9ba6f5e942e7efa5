"""Checkpoints of other tools, taken over and written: of Lightning, of the Trainer of Transformers, of `torch.save`."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import optimisers as op
from optimisers.cli import main
from optimisers.errors import StateError
from optimisers.files.tensors import read
from optimisers.interop.convert import convert
from optimisers.interop.torch_checkpoints import from_checkpoint, optimizer_in, read_checkpoint, trainer_names
from tests.conftest import leaf


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))


def _gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _same(module: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert dict(module.named_parameters()).keys() == dict(other.named_parameters()).keys()
    for (name, a), b in zip(module.named_parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=rtol, atol=atol, err_msg=name)


def _going_on(state: op.State, module: Any, other: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check that a state goes on as an optimizer of PyTorch does."""
    for seed in range(100, 103):
        _gradients(module, seed)
        _gradients(other, seed)
        state, module = op.update_(state, module)
        optimizer.step()
    _same(module, other)


# Lightning ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A checkpoint that Lightning has written, the module and the optimizer."""
    import warnings

    import lightning.pytorch as lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

    module = Lit()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=4)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, **quiet)
        trainer.fit(module, data)
        file = tmp_path_factory.mktemp("lightning") / "last.ckpt"
        trainer.save_checkpoint(file)
    return file, module, trainer.optimizers[0]


def test_a_checkpoint_of_lightning_goes_on(lightning_run: tuple[Path, Any, Any]) -> None:
    file, module, optimizer = lightning_run
    mine = copy.deepcopy(module)
    state = from_checkpoint(file, mine)
    assert (state.step, {leaf.step for leaf in state.leaves()}) == (6, {6})
    other = copy.deepcopy(module)
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _going_on(state, mine, other, theirs)


def test_a_checkpoint_of_lightning_is_converted_and_loads_into_the_module(
    lightning_run: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    file, module, _ = lightning_run
    names = [name for name, _ in module.named_parameters()]
    # Its buffers are arrays too, so the names of the parameters are needed.
    with pytest.raises(StateError, match=r"the state dict has 6 parameters, and the module 8.*names"):
        convert(file, tmp_path / "run.safetensors")
    assert not [*tmp_path.iterdir()]
    said = convert(file, tmp_path / "run.safetensors", names=names)
    assert said.startswith("State(step=6, 6 parameters")
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    state, fresh, *_ = op.load(tmp_path / "run.safetensors", fresh)
    assert state == from_checkpoint(file, module)
    _same(fresh, module, rtol=0, atol=0)
    assert torch.equal(fresh.net[1].running_mean, module.net[1].running_mean)


# The Trainer of Transformers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a checkpoint of the Trainer, its model and its optimizer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=16, vocab_size=11, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    model = GPT2LMHeadModel(config)
    rows = torch.randint(0, 11, (24, 8))
    folder = tmp_path_factory.mktemp("trainer")
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            disable_tqdm=True,
            report_to="none",
            save_steps=3,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    assert trainer.optimizer is not None
    return folder / "checkpoint-3", model, trainer.optimizer


@pytest.mark.parametrize("inside", ["", "optimizer.pt"])
def test_a_folder_of_the_trainer_goes_on(trainer_run: tuple[Path, Any, Any], inside: str) -> None:
    folder, model, optimizer = trainer_run
    mine, other = copy.deepcopy(model), copy.deepcopy(model)
    state = from_checkpoint(folder / inside, mine)
    assert state.step == 3
    assert {leaf.step for leaf in state.leaves()} == {3}
    assert mine.lm_head.weight is mine.transformer.wte.weight
    decays = {str(leaf.path): leaf.rule.hyperparameters["weight_decay"] for leaf in state.leaves()}
    assert (decays["transformer.wte.weight"], decays["transformer.h.0.ln_1.weight"]) == (0.1, 0.0)
    named = dict(other.named_parameters())
    groups = [[named[name] for name in trainer_names(other) if (decays[name] > 0) is decaying] for decaying in (True, False)]
    theirs = torch.optim.AdamW([{"params": group} for group in groups])
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _going_on(state, mine, other, theirs)


def test_a_folder_of_the_trainer_is_converted(trainer_run: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, model, _ = trainer_run
    assert main(["convert", str(folder), str(tmp_path / "run.safetensors")]) == 0
    fresh = copy.deepcopy(model)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    state, fresh, *_ = op.load(tmp_path / "run.safetensors", fresh)
    assert state == from_checkpoint(folder, model)
    _same(fresh, model, rtol=0, atol=0)
    assert list(leaf(state, "transformer.wte.weight").ties) == [op.Path("lm_head.weight")]
    # And its values alone, for Transformers.
    assert main(["convert", "--only", "model", str(tmp_path / "run.safetensors"), str(tmp_path / "model.safetensors")]) == 0
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    again = type(model).from_pretrained(tmp_path, local_files_only=True)
    _same(again, model, rtol=0, atol=0)
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")


# Files of torch.save --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "made"),
    [
        (op.AdamW(0.01, weight_decay=0.1), lambda params: torch.optim.AdamW(params)),
        (op.SGD(0.01, momentum=0.9), lambda params: torch.optim.SGD(params, lr=1.0)),
    ],
    ids=["AdamW", "SGD"],
)
def test_a_state_becomes_an_optimizer_of_pytorch_and_comes_back(
    rule: op.Rule, made: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    module = _net()
    state = op.setup(rule, module)
    for seed in range(3):
        _gradients(module, seed)
        state, module = op.update_(state, module)
    file, out = tmp_path / "run.safetensors", tmp_path / "optimizer.pth"
    op.save(file, state, module)
    convert(file, out)
    other = copy.deepcopy(module)
    kept = torch.load(out, weights_only=True)
    optimizer = made(other.parameters())
    assert [name for group in kept["param_groups"] for name in group["param_names"]] == [
        name for name, _ in other.named_parameters()
    ]
    optimizer.load_state_dict(kept)
    convert(file, tmp_path / "values.pt", only="model")
    values = torch.load(tmp_path / "values.pt", weights_only=True)
    assert values.keys() == module.state_dict().keys()
    other.load_state_dict(values)
    convert(out, tmp_path / "back.safetensors", model=tmp_path / "values.pt")
    back, mine, *_ = op.load(tmp_path / "back.safetensors", copy.deepcopy(module))
    # Of momentum, PyTorch keeps no count.
    assert {leaf.step for leaf in back.leaves()} == {1 if isinstance(rule, op.SGD) else 3}
    for each in state.leaves():
        for name, slot in each.slots.items():
            assert torch.equal(leaf(back, str(each.path)).slots[name], slot)
    _going_on(back, mine, other, optimizer)


def test_ties_are_written_once_for_all_tools_and_at_each_place_for_pytorch(tmp_path: Path) -> None:
    w = np.arange(6.0).reshape(3, 2)
    model = {"embed": w, "head": w, "turned": w.T, "n": np.arange(3), "b": np.ones(2)}
    op.save(tmp_path / "run.safetensors", op.setup(op.Adam(), model), model)
    convert(tmp_path / "run.safetensors", tmp_path / "model.safetensors", only="model")
    assert sorted(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["b", "embed", "n", "turned"]
    convert(tmp_path / "run.safetensors", tmp_path / "model.pt", only="model")
    values = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sorted(values) == ["b", "embed", "head", "n", "turned"]
    assert values["turned"].tolist() == w.T.tolist()
    assert values["head"].data_ptr() == values["embed"].data_ptr()
    convert(tmp_path / "model.pt", tmp_path / "again.safetensors")
    assert read(tmp_path / "again.safetensors").document is None
    fresh = np.zeros((3, 2))
    tied = {"embed": fresh, "head": fresh, "turned": fresh.T, "n": np.zeros(3, int), "b": np.zeros(2)}
    again = op.load(tmp_path / "again.safetensors", tied).model
    assert (again["n"].tolist(), again["head"].tolist()) == ([0, 1, 2], w.tolist())


def test_what_else_a_run_kept_goes_along(tmp_path: Path) -> None:
    model = {"w": np.ones(2)}
    op.save(tmp_path / "a.safetensors", op.setup(op.Adam(), model), model, extra={"epoch": 3})
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors", only="state")
    assert [op.load(tmp_path / f"{name}.safetensors").extra for name in "bc"] == [{"epoch": 3}] * 2
    assert op.load(tmp_path / "c.safetensors").model is None


class _Trap:
    """What runs a command where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    torch.save({"state_dict": {}, "optimizer_states": [_Trap(trap)]}, tmp_path / "a.ckpt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(_Trap(trap)))
    for name in ("a.ckpt", "b.pt"):
        with pytest.raises(StateError, match=r"(?s)more than plain data and tensors, or is damaged, and nothing of it is executed"):
            read_checkpoint(tmp_path / name)
        with pytest.raises(StateError, match="nothing of it is executed"):
            from_checkpoint(tmp_path / name, _net())
    assert not trap.exists()


def test_damaged_checkpoints_are_errors(tmp_path: Path) -> None:
    module = _net()
    optimizer = torch.optim.AdamW(module.parameters())
    _gradients(module, 0)
    optimizer.step()
    file = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), file)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in range(300):
        damaged = bytearray(whole)
        if at % 2:
            damaged = damaged[: rng.integers(len(whole))]
        else:
            start = int(rng.integers(len(whole)))
            damaged[start : start + 8] = rng.bytes(8)
        file.write_bytes(damaged)
        try:
            from_checkpoint(file, module)
        except op.errors.OptimiserError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([1, 2], "holds a list, and no state dict"),
        ({"epoch": 1, "lr": 2}, "holds no optimizer; in it there is 'epoch', 'lr'"),
        ({"optimizer_states": []}, "holds no optimizer"),
        ({"optimizer_states": [{"state": {}, "param_groups": []}] * 2}, "holds 2 optimizers, and number 2 is none of them"),
    ],
)
def test_files_without_an_optimizer_are_errors(held: Any, message: str, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "a.pt")
    with pytest.raises(StateError, match=message):
        optimizer_in(read_checkpoint(tmp_path / "a.pt"), tmp_path / "a.pt", which=2)


def test_what_cannot_be_converted_is_an_error_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = _net()
    optimizer = torch.optim.AdamW(module.parameters())
    _gradients(module, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    safetensors.torch.save_file(dict(module.named_parameters()), tmp_path / "model.safetensors")
    op.save(tmp_path / "lion.safetensors", op.setup(op.AdaBelief(), module), module)
    op.save(tmp_path / "alone.safetensors", op.setup(op.Adam(), module))
    before = sorted(tmp_path.iterdir())

    def fails(*arguments: str) -> str:
        assert main(["convert", *(each if each.startswith("-") else str(tmp_path / each) for each in arguments)]) == 2
        return capsys.readouterr().err

    lacks = "no values of its model under 'state_dict' or 'model' or 'model_state_dict'; give a file with them, too (--model)"
    assert lacks in fails("optimizer.pt", "a.safetensors")
    assert "does not tell their order" in fails("optimizer.pt", "a.safetensors", "--model", "model.safetensors")
    assert "the ending of a name tells" in fails("lion.safetensors", "a.txt")
    assert "no optimiser of PyTorch steps as" in fails("lion.safetensors", "a.pt")
    assert "the file has none" in fails("alone.safetensors", "a.pt")
    assert "holds no values of a model" in fails("alone.safetensors", "a.pt", "--only=model")
    assert "holds no state" in fails("model.safetensors", "a.pt", "--only=state")
    assert "No such file" in fails("nowhere.pt", "a.safetensors")
    assert "No such file" in fails("optimizer.pt", "a.safetensors", "--names", "nowhere")
    (tmp_path / "folder").mkdir()
    assert "holds no optimizer.pt" in _error(lambda: from_checkpoint(tmp_path / "folder", module))
    (tmp_path / "folder").rmdir()
    assert sorted(tmp_path.iterdir()) == before
    names = tmp_path / "names"
    names.write_text("\n".join(name for name, _ in module.named_parameters()))
    arguments = ["optimizer.pt", "a.safetensors", "--model", "model.safetensors", "--names", "names"]
    assert main(["convert", *(each if each.startswith("-") else str(tmp_path / each) for each in arguments)]) == 0
    state = op.load(tmp_path / "a.safetensors", module, strict=False).state
    assert {leaf.step for leaf in state.leaves()} == {1}


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises(StateError) as raised:
        call()
    return str(raised.value)


# What must never land at the wrong place ------------------------------------------------------------------------------


class _Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mid, self.head = (nn.Linear(3, 3, bias=False) for _ in range(3))


def test_groups_that_no_trainer_makes_are_not_read_in_its_order(tmp_path: Path) -> None:
    module = _Three()
    groups = [
        {"params": module.head.parameters(), "lr": 1.0},
        {"params": [module.body.weight, module.mid.weight], "lr": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups)
    _gradients(module, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(StateError, match="2 groups and no names"):
        from_checkpoint(tmp_path / "optimizer.pt", module)
    state = from_checkpoint(tmp_path / "optimizer.pt", module, names=["head.weight", "body.weight", "mid.weight"])
    for name, parameter in module.named_parameters():
        assert torch.equal(leaf(state, name).slots["mu"], optimizer.state[parameter]["exp_avg"])


def test_the_order_of_a_file_of_values_is_not_taken_for_that_of_an_optimizer(tmp_path: Path) -> None:
    module = _Three()
    optimizer = torch.optim.AdamW(module.parameters())
    _gradients(module, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    torch.save(dict(reversed(module.state_dict().items())), tmp_path / "model.pt")
    with pytest.raises(StateError, match=r"model\.pt does not tell their order"):
        convert(tmp_path / "o.pt", tmp_path / "a.safetensors", model=tmp_path / "model.pt")


def test_several_optimizers_are_not_taken_for_one(tmp_path: Path) -> None:
    module = _Three()
    both = [torch.optim.SGD([each.weight], lr=rate, momentum=0.9) for each, rate in ((module.body, 0.1), (module.head, 0.2))]
    states = [each.state_dict() for each in both]
    torch.save({"state_dict": module.state_dict(), "optimizer_states": states, "global_step": 4}, tmp_path / "a.ckpt")
    with pytest.raises(StateError, match="holds 2 optimizers; say which, by its number"):
        convert(tmp_path / "a.ckpt", tmp_path / "a.safetensors")
    convert(tmp_path / "a.ckpt", tmp_path / "a.safetensors", names=["head.weight"], which=1)
    state = op.load(tmp_path / "a.safetensors").state
    assert [str(path) for path in state] == ["head.weight"]
    assert leaf(state, "head.weight").rule.hyperparameters["lr"] == 0.2


def test_ties_of_a_checkpoint_hold(tmp_path: Path) -> None:
    module = _Three()
    module.head.weight = module.body.weight
    optimizer = torch.optim.AdamW(module.parameters())
    _gradients(module, 0)
    optimizer.step()
    held = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    torch.save(held, tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "a.safetensors")
    state = op.load(tmp_path / "a.safetensors", module).state
    assert {str(each.path): [str(path) for path in each.ties] for each in state.leaves()} == {
        "body.weight": ["head.weight"],
        "mid.weight": [],
    }
    assert torch.equal(leaf(state, "mid.weight").slots["mu"], optimizer.state[module.mid.weight]["exp_avg"])
    # There and back again.
    convert(tmp_path / "a.safetensors", tmp_path / "o.pt")
    convert(tmp_path / "o.pt", tmp_path / "b.safetensors", model=tmp_path / "a.safetensors")
    assert op.load(tmp_path / "b.safetensors", module).state == state


def test_what_pytorch_does_not_keep_is_said(tmp_path: Path) -> None:
    module = _Three()
    state = op.setup(op.SGD(op.schedules.Linear(0.1, 0.0, 10), momentum=0.9), module).freeze("mid")
    _gradients(module, 0)
    state, module = op.update_(state, module)
    op.save(tmp_path / "a.safetensors", state, module, extra={"epoch": 1})
    said = convert(tmp_path / "a.safetensors", tmp_path / "o.pt")
    assert said.endswith("; without what is frozen, schedules (their values of now), counts of steps, what else the run kept")


def test_what_is_no_state_dict_is_an_error(tmp_path: Path) -> None:
    module = _Three()
    optimizer = torch.optim.AdamW(module.parameters())
    _gradients(module, 0)
    optimizer.step()
    good = optimizer.state_dict()
    renamed = {str(key): each for key, each in good["state"].items()}
    for changes, message in (
        ({"state": renamed}, "has a state for '0', which is in none of its groups"),
        ({"state": []}, "this is no state dict"),
        ({"state": {**good["state"], 0: 3}}, "this is no state dict"),
        ({"param_groups": None}, "this is no state dict"),
        ({"param_groups": ["x"]}, "this is no state dict"),
        ({"param_groups": [{"lr": 1.0}]}, "this is no state dict"),
        ({"param_groups": [{**good["param_groups"][0], "param_names": [1, 2, 3]}]}, "param_names of the state dict are no texts"),
        ({"state": {**good["state"], 0: {**good["state"][0], "step": "x"}}}, "count of steps is 'x'"),
        ({"state": {**good["state"], 0: {**good["state"][0], "step": float("nan")}}}, "count of steps is nan"),
        ({"state": {**good["state"], 0: {**good["state"][0], "step": torch.ones(2)}}}, "count of steps is"),
        ({"state": {**good["state"], 0: {**good["state"][0], "exp_avg": 3}}}, "its state has no exp_avg"),
        ({"param_groups": [{**good["param_groups"][0], "lr": torch.ones(2)}]}, "a tensor of shape"),
    ):
        torch.save({**good, **changes}, tmp_path / "o.pt")
        with pytest.raises(op.errors.OptimiserError, match=message):
            from_checkpoint(tmp_path / "o.pt", module)
    for step in (-1, 1.5, "x", True):
        with pytest.raises(StateError, match="a count of steps is a whole number"):
            from_checkpoint(tmp_path / "o.pt", module, step=step)  # type: ignore[arg-type]


def test_code_in_a_folder_of_the_trainer_is_not_run(trainer_run: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(trainer_run[0], folder)
    trap = tmp_path / "sprung"
    (folder / "evil.py").write_text(f"open({str(trap)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StateError, match="is no folder of the Trainer, or its model asks for code of its own"):
        convert(folder, tmp_path / "a.safetensors")
    assert not trap.exists()


def test_names_that_safetensors_keeps_for_itself_and_those_that_are_no_text_are_errors(tmp_path: Path) -> None:
    for held, message in (({"__metadata__": torch.ones(1)}, "safetensors keeps for itself"), ({1: torch.ones(1)}, "no text")):
        torch.save(held, tmp_path / "a.pt")
        with pytest.raises(StateError, match=message):
            convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_names_of_other_tools_are_kept_as_they_are(tmp_path: Path) -> None:
    values = {name: torch.ones(1) for name in ("a..b", ".c", "c. d", "plain.0.weight")}
    torch.save(values, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=True).keys() == values.keys()


def test_where_no_file_can_be_written_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match=r"there is no such folder: .*nowhere'"):
        convert(tmp_path / "a.pt", tmp_path / "nowhere" / "a.safetensors")
    (tmp_path / "there.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match=r"there\.safetensors"):
        convert(tmp_path / "a.pt", tmp_path / "there.safetensors")


@pytest.mark.parametrize(
    "held",
    [
        {"state": {}, "param_groups": 3},
        {"state": {}, "param_groups": [{"params": [[0]]}]},
        {"state_dict": 3, "optimizer_states": [{"state": {}, "param_groups": [{"params": [0]}]}]},
        {"optimizer_states": [3]},
        {"optimizer_states": "three"},
    ],
)
def test_state_dicts_of_another_form_are_errors(held: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "optimizer.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(op.errors.OptimiserError):
        convert(tmp_path / "optimizer.pt", tmp_path / "out.safetensors", model=tmp_path / "m.pt", names=["w"])
    with pytest.raises(op.errors.OptimiserError):
        from_checkpoint(tmp_path / "optimizer.pt", nn.Linear(1, 1))
    with pytest.raises(op.errors.OptimiserError):
        convert(tmp_path / "optimizer.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_arguments_that_would_be_passed_over_are_errors(tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(module.parameters())
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    torch.save(module.state_dict(), tmp_path / "m.pt")
    with pytest.raises(StateError, match="holds one optimizer; leave which out"):
        from_checkpoint(tmp_path / "o.pt", module, which=5)
    for given in ({"kind": "Adam"}, {"names": ["weight"]}, {"model": tmp_path / "o.pt"}, {"which": 0}):
        with pytest.raises(StateError, match="holds values of a model alone"):
            convert(tmp_path / "m.pt", tmp_path / "out.safetensors", **given)  # type: ignore[arg-type]


def test_names_with_slashes_go_through(tmp_path: Path) -> None:
    values = {"a/b": torch.ones(2), "c": torch.zeros(2)}
    params = [nn.Parameter(each.clone()) for each in values.values()]
    optimizer = torch.optim.Adam(params)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    torch.save(values, tmp_path / "m.pt")
    for out in ("out.safetensors", "out.pt"):
        convert(tmp_path / "o.pt", tmp_path / out, model=tmp_path / "m.pt", names=list(values), kind="Adam")
    assert [str(path) for path in op.load(tmp_path / "out.safetensors").state] == ['"a/b"', "c"]
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)["state"]) == 2


def test_a_schedule_inside_of_a_pair_is_said_to_be_lost(tmp_path: Path) -> None:
    model = {"w": np.ones(2)}
    state = op.setup(op.Adam(betas=(op.schedules.Linear(0.9, 0.8, 10), 0.999)), model)
    op.save(tmp_path / "run.safetensors", state, model)
    assert "schedules" in convert(tmp_path / "run.safetensors", tmp_path / "o.pt")


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_checkpoint_holds_its_model_under_the_names_that_programs_use(key: str, tmp_path: Path) -> None:
    module = _Three()
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    _gradients(module, 0)
    optimizer.step()
    held = {key: module.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(held, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    state, again, *_ = op.load(tmp_path / "a.safetensors", _Three())
    for name, parameter in module.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter)
        assert torch.equal(leaf(state, name).slots["mu"], optimizer.state[parameter]["exp_avg"])
