"""The examples do what they show."""

import io
import runpy
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 4
PHASES = ["pretrain", "trunk frozen", "last block thawed", "all thawed", "new head"]


@contextmanager
def _quick_compilation() -> Iterator[None]:
    """A few steps take less time than the optimisations of XLA would."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with jax.enable_x64(False):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("name", ["finetune_equinox", "finetune_nnx"])
def test_an_example_of_fine_tuning_does_what_it_shows(name: str) -> None:
    # In one test, since it takes seconds to run and parallel tests would each run it anew.
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    with _quick_compilation(), redirect_stdout(io.StringIO()) as printed:
        phases = {phase.name: phase for phase in main(["--steps", str(STEPS)])}
    _each_phase_compiles_once_and_says_so(phases, printed.getvalue())
    _the_loss_goes_down(phases)
    _what_is_frozen_does_not_move_in_any_bit(phases)
    _what_was_thawed_late_has_taken_fewer_steps(phases)
    _the_tied_head_is_one_parameter_until_it_is_untied(phases)


def test_the_example_of_sharding_does_what_it_shows(tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLES / "sharded.py"))["main"]
    with redirect_stdout(io.StringIO()) as printed:
        found = main(["--steps", "20", "--directory", str(tmp_path)])
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert "8 devices" in printed.getvalue()
    assert (int(found["state"]["layers.0.weight"].step), int(found["state"]["head"].step)) == (10, 20)
    assert len(found["state"]["head"].slots["mu"].sharding.device_set) == 8
    assert (tmp_path / "halfway").is_dir()


def _bits(phase: Any, path: str) -> bytes:
    return np.asarray(phase.weights[path]).tobytes()


def _moved(before: Any, after: Any) -> set[str]:
    """The parameters that differ in any bit."""
    return {path for path in map(str, before.state) if _bits(before, path) != _bits(after, path)}


def _slots(phase: Any, path: str) -> dict[str, bytes]:
    return {name: np.asarray(slot).tobytes() for name, slot in phase.state[path].slots.items()}


def _paths(phase: Any, branch: str) -> set[str]:
    return {path for path in map(str, phase.state) if path.startswith(branch)}


def _steps(phase: Any, branch: str) -> set[int]:
    return {int(phase.state[path].step) for path in _paths(phase, branch)}


def _each_phase_compiles_once_and_says_so(phases: dict[str, Any], printed: str) -> None:
    assert list(phases) == PHASES
    assert [phase.traces for phase in phases.values()] == [1] * len(PHASES)
    assert printed.count("compilations: 1\n") == len(PHASES)
    assert f"steps taken: embed {5 * STEPS}, kinds {STEPS}, blocks.0 {3 * STEPS}, blocks.1 {4 * STEPS}\n" in printed


def _the_loss_goes_down(phases: dict[str, Any]) -> None:
    for name in ("pretrain", "new head"):
        assert phases[name].losses[-1] < 0.9 * phases[name].losses[0]
    assert phases["all thawed"].losses[-1] < phases["trunk frozen"].losses[0] < phases["pretrain"].losses[1]


def _what_is_frozen_does_not_move_in_any_bit(phases: dict[str, Any]) -> None:
    frozen, thawed = phases["trunk frozen"], phases["last block thawed"]
    everything = _paths(frozen, "")
    assert _moved(phases["pretrain"], frozen) == everything - _paths(frozen, "blocks") - _paths(frozen, "kinds")
    assert _moved(frozen, thawed) == everything - _paths(frozen, "blocks.0") - _paths(frozen, "kinds")
    assert _moved(thawed, phases["all thawed"]) == everything - _paths(frozen, "kinds")
    for path in _paths(frozen, "blocks"):
        assert _slots(phases["pretrain"], path) == _slots(frozen, path)
        assert frozen.state[path].slots


def _what_was_thawed_late_has_taken_fewer_steps(phases: dict[str, Any]) -> None:
    taken = {branch: [_steps(phase, branch) for phase in phases.values()] for branch in ("embed", "blocks.1", "blocks.0", "kinds")}
    assert taken == {
        branch: [{STEPS * count} for count in counts]
        for branch, counts in {
            "embed": (1, 2, 3, 4, 5),
            "blocks.1": (1, 1, 2, 3, 4),
            "blocks.0": (1, 1, 1, 2, 3),
            "kinds": (0, 0, 0, 0, 1),
        }.items()
    }


def _the_tied_head_is_one_parameter_until_it_is_untied(phases: dict[str, Any]) -> None:
    *tied, last = phases.values()
    for phase in tied:
        # Compiled functions return an array of its own for every place of an Equinox model; NNX has one variable.
        assert "head" not in phase.weights or _bits(phase, "head") == _bits(phase, "embed")
        assert {str(path): view for path, view in phase.state["embed"].ties.items()} == {"head": "same"}
    assert not last.state["embed"].ties
    assert last.state["head"].frozen
    # It stays what it was when it was untied, its moments too, while the embedding goes on.
    before = phases["all thawed"]
    assert _bits(last, "head") == _bits(before, "embed")
    assert _slots(last, "head") == _slots(before, "embed") != _slots(last, "embed")
    assert _steps(last, "head") == {4 * STEPS}
    assert _moved(before, last) == _paths(before, "")
