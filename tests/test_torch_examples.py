"""The examples for PyTorch do what they show."""

import io
import json
import re
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from optimisers.interop.torch_optim import Optimizer

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 6
PHASES = ["pretrain", "pretrain on", "trunk frozen", "last block thawed", "all thawed"]


def _run(name: str, *arguments: str) -> tuple[Any, str]:
    """What an example returns, and what it prints."""
    main, threads = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"], torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side, and threads that wait for a core cost more than they bring
    try:
        with redirect_stdout(io.StringIO()) as printed:
            return main([*arguments]), printed.getvalue()
    finally:
        torch.set_num_threads(threads)


def _bits(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: each.detach().numpy().tobytes() if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}


def _moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The names of what differs in any bit."""
    first, second = _bits(before), _bits(after)
    assert first.keys() == second.keys()
    return {name for name in first if first[name] != second[name]}


def _below(names: Any, *branches: str) -> set[str]:
    return {name for name in names if name.startswith(branches)}


def _steps(state: Any, branch: str = "") -> set[int]:
    return {leaf.step for leaf in state.leaves() if str(leaf.path).startswith(branch)}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """The parameters when an optimizer was made, and before each time that it thawed some. No file may be written."""
    taken: list[dict[str, torch.Tensor]] = []

    def watched(method: Callable[..., None], after: bool) -> Callable[..., None]:
        def wrapper(self: Optimizer, *arguments: Any, **options: Any) -> None:
            if after:
                method(self, *arguments, **options)
            taken.append({name: each.detach().clone() for name, each in self.module.named_parameters()})
            if not after:
                method(self, *arguments, **options)

        return wrapper

    monkeypatch.setattr(Optimizer, "__init__", watched(Optimizer.__init__, after=True))
    monkeypatch.setattr(Optimizer, "thaw", watched(Optimizer.thaw, after=False))
    monkeypatch.chdir(tmp_path)
    return taken


def test_the_example_in_plain_pytorch_does_what_it_shows() -> None:
    # In one test, since it takes seconds to run and parallel tests would each run it anew.
    run, printed = _run("finetune_torch", "--steps", str(STEPS))
    phases = {phase.name: phase for phase in run}
    assert list(phases) == PHASES
    assert f"steps taken: embed {4 * STEPS}, blocks.0 {2 * STEPS}, blocks.1 {3 * STEPS}\n" in printed
    _what_is_frozen_does_not_move_in_any_bit(phases)
    _what_was_thawed_late_has_taken_fewer_steps(phases)
    _the_tied_head_is_one_parameter(phases)
    _the_rate_follows_the_schedule(phases)
    assert phases["pretrain on"].losses[-1] < 0.9 * phases["pretrain"].losses[0]
    assert phases["all thawed"].losses[-1] < phases["trunk frozen"].losses[0] < phases["pretrain on"].losses[0]

    whole, _ = _run("finetune_torch", "--steps", str(STEPS), "--uninterrupted")
    for one, other in zip(run, whole, strict=True):
        _a_phase_went_alike_in_every_bit(one, other)


def _what_is_frozen_does_not_move_in_any_bit(phases: dict[str, Any]) -> None:
    weights = [phase.weights for phase in phases.values()]
    everything, first, trunk = {*weights[0]}, _below(weights[0], "blocks.0"), _below(weights[0], "blocks")
    assert len(trunk) == 2 * len(first) > 0
    moved = [_moved(before, after) for before, after in pairwise(weights)]
    assert moved == [everything, everything - trunk, everything - first, everything]
    before, after = phases["pretrain on"].optimizer, phases["trunk frozen"].optimizer
    assert {*json.loads(after["document"])["frozen"]} == trunk
    for name in trunk:
        assert "mu" in after["state"][name]
        assert not _moved(before["state"][name], after["state"][name])


def _what_was_thawed_late_has_taken_fewer_steps(phases: dict[str, Any]) -> None:
    halves = {
        "embed": (1, 2, 4, 6, 8),
        "head": (1, 2, 4, 6, 8),
        "norm": (1, 2, 4, 6, 8),
        "blocks.1": (1, 2, 2, 4, 6),
        "blocks.0": (1, 2, 2, 2, 4),
    }
    for branch, counts in halves.items():
        for phase, count in zip(phases.values(), counts, strict=True):
            state = phase.optimizer["state"]
            assert {state[name]["step"] for name in _below(state, branch)} == {STEPS // 2 * count}


def _the_tied_head_is_one_parameter(phases: dict[str, Any]) -> None:
    for phase in phases.values():
        assert phase.weights["head.weight"].data_ptr() == phase.weights["embed.weight"].data_ptr()
        assert json.loads(phase.optimizer["document"])["ties"] == {"embed.weight": ["head.weight"]}
        assert "head.weight" not in phase.optimizer["state"]


def _the_rate_follows_the_schedule(phases: dict[str, Any]) -> None:
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])
    schedule = OneCycleLR(theirs, 5e-3, total_steps=4 * STEPS, pct_start=0.1, cycle_momentum=False)
    for rate in [rate for phase in phases.values() for rate in phase.rates]:
        assert rate == theirs.param_groups[0]["lr"]
        theirs.step()
        schedule.step()
    for group in phases["all thawed"].optimizer["param_groups"]:
        assert group["lr"] == theirs.param_groups[0]["lr"]


def _a_phase_went_alike_in_every_bit(one: Any, other: Any) -> None:
    assert (one.name, one.losses, one.rates) == (other.name, other.losses, other.rates)
    assert not _moved(one.weights, other.weights)
    mine, theirs = one.optimizer, other.optimizer
    assert mine["state"].keys() == theirs["state"].keys()
    for name, entry in mine["state"].items():
        assert not _moved(entry, theirs["state"][name])
    assert all(mine[part] == theirs[part] for part in mine if part != "state")


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_the_example_with_lightning_does_what_it_shows(snapshots: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (model, optimizer), printed = _run("with_lightning", "--steps", str(STEPS))
    at_first, at_thaw = snapshots
    trunk, last = _below(at_first, "trunk"), _below(at_first, "trunk.1")
    assert _moved(at_first, at_thaw) == {*at_first} - trunk == {"embed.weight"}
    assert _moved(at_thaw, dict(model.named_parameters())) == {"embed.weight"} | last
    assert model.head.weight is model.embed.weight
    state = optimizer.op_state
    assert "head.weight" not in {str(path) for path in state}
    counts = [_steps(state, branch) for branch in ("embed", "trunk.1", "trunk.0")]
    assert counts == [{2 * STEPS}, {STEPS}, {0}]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert model.losses[-1] < model.losses[0]
    assert "tied: head.weight" in printed
    assert not [*tmp_path.iterdir()]


def test_the_example_with_transformers_does_what_it_shows(snapshots: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (model, optimizer, losses), printed = _run("with_transformers", "--steps", str(STEPS))
    first, *later = [*snapshots, dict(model.named_parameters())]
    everything, layers, bottom = {*first}, _below(first, "transformer.h"), _below(first, "transformer.h.0")
    assert len(layers) == 2 * len(bottom) > 0
    moved = [_moved(before, after) for before, after in pairwise([first, *later])]
    assert moved == [everything - layers, everything - bottom, everything]
    assert model.lm_head.weight is model.transformer.wte.weight
    state = optimizer.op_state
    assert "lm_head.weight" not in {str(path) for path in state}
    counts = [_steps(state, f"transformer.{branch}") for branch in ("wte", "ln_f", "h.1", "h.0")]
    assert counts == [{3 * STEPS}, {3 * STEPS}, {2 * STEPS}, {STEPS}]
    assert losses[-1] < losses[0]
    assert "tied: lm_head.weight" in printed
    assert not [*tmp_path.iterdir()]


def test_what_the_page_shows_of_the_examples_stands_in_them() -> None:
    page = (EXAMPLES.parent / "docs" / "guides" / "pytorch.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ">>>" not in block]
    examples = {line.strip() for each in EXAMPLES.glob("with_*.py") for line in each.read_text().splitlines()}
    assert len(blocks) == 2
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= examples
