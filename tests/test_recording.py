"""The file of samples: what is in it, what a killed or resumed run leaves, and what cannot be read."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import OptimiserWarning, StateError
from optimisers.monitoring.lines import Sample, decoded, encoded

KEYS = ["schema", "step", "wall_time", "path", "grad_norm", "update_ratio", "lr", "frozen"]

pytestmark = pytest.mark.filterwarnings("ignore:.* holds samples up to step:optimisers.errors.OptimiserWarning")


def sample(step: int, paths: tuple[str, ...] = ("a", "b"), **changes: Any) -> Sample:
    """A sample of some random numbers, the same for the same step."""
    rng = np.random.default_rng(step)
    values = rng.lognormal(size=(3, len(paths)))
    whole = Sample(step, 1.7e9 + step / 3, paths, values, np.ones(values.shape, bool), np.zeros(len(paths), bool))
    return whole._replace(**changes)


def run(file: Path, steps: int, every: int = 1) -> tuple[Any, Any, op.Monitor]:
    """A run of so many steps that is recorded in a file."""
    model: Any = {"w": np.array([3.0, 4.0]), "v": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model, frozen="v"), op.Monitor(file, every=every)
    for _ in range(steps):
        state, model = monitor.update_(state, model, {"w": np.array([0.6, 0.8])})
    return state, model, monitor


def strict(line: bytes) -> Any:
    """A line as a parser reads it that knows only what JSON has."""

    def refused(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refused)


# Lines ----------------------------------------------------------------------------------------------------------------


def test_every_line_stands_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    _, _, monitor = run(file, 3)
    lines = [strict(line) for line in file.read_bytes().splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 3
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {tuple(line["path"]) for line in lines} == {("v", "w")}
    assert lines[0]["grad_norm"] == [None, pytest.approx(1.0)]
    assert lines[0]["lr"] == [None, 0.1]
    assert lines[0]["frozen"] == [True, False]
    assert op.Recording.read(file) == monitor.recording


def test_numbers_come_back_as_they_were() -> None:
    odd = np.array([0.1, 1e-300, 1.7976931348623157e308, 5e-324, 0.0, np.inf, -np.inf, np.nan, 1 / 3, 2.0])
    values = np.array([odd, odd[::-1], odd])
    known = np.ones(values.shape, bool)
    known[1, 3:5] = False
    given = sample(7, tuple("abcdefghij"), values=values, known=known, frozen=np.arange(10) % 3 == 0)
    line = encoded(given)
    strict(line)
    found = decoded(line)
    assert np.array_equal(found.known, known)
    assert np.array_equal(found.values, np.where(known, values, np.nan), equal_nan=True)
    assert np.array_equal(found.frozen, given.frozen)
    assert op.Recording([found]) == op.Recording([given])


def test_names_of_any_kind_come_back() -> None:
    paths = ('a."b.c"', "Ünï 🌲", 'quote " back \\', "line\nbreak", "", "</script>")
    line = encoded(sample(1, paths))
    assert line.count(b"\n") == 1
    assert decoded(line).paths == paths


def test_the_order_of_parameters_is_that_of_the_model() -> None:
    recording = op.Recording([sample(1, ("a", "old", "b")), sample(2, ("first", "a", "b", "new"))])
    assert recording.paths == ("first", "a", "old", "b", "new")
    assert np.isnan(recording.grad_norm[1, 2])
    assert recording.known("lr").tolist() == [[False, True, True, True, False], [True, True, False, True, True]]


def test_what_is_asked_for_under_a_wrong_name_is_told() -> None:
    with pytest.raises(op.errors.StateError, match='did you mean "grad_norm"'):
        op.Recording([sample(1)]).values("grad_nrm")


def test_a_recording_tells_its_size() -> None:
    recording = op.Recording(map(sample, (10, 20, 30)))
    assert len(recording) == 3
    assert repr(recording) == "Recording(3 samples, steps 10 to 30, 2 parameters)"
    assert repr(op.Recording()) == "Recording(0 samples)"
    assert recording.wall_times.tolist() == [1.7e9 + step / 3 for step in (10, 20, 30)]
    assert recording != op.Recording(map(sample, (10, 20)))


# Runs that end and go on ----------------------------------------------------------------------------------------------


def test_a_run_in_a_new_process_goes_on_in_the_same_file(tmp_path: Path) -> None:
    file, kept = tmp_path / "run.jsonl", tmp_path / "kept.safetensors"
    state, model, _ = run(file, 4, every=2)
    op.save(kept, state, model)
    code = f"""
import numpy as np, optimisers as op
monitor = op.Monitor({str(file)!r}, every=2)
assert monitor.recording.steps.tolist() == [2, 4], monitor
found = op.load({str(kept)!r}, {{"w": np.zeros(2), "v": np.zeros(2)}})
state, model = found.state, found.model
for _ in range(4):
    state, model = monitor.update_(state, model, {{"w": np.array([0.6, 0.8])}})
assert op.Recording.read({str(file)!r}) == monitor.recording
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    found = op.Recording.read(file)
    assert found.steps.tolist() == [2, 4, 6, 8]
    *_, whole = run(tmp_path / "whole.jsonl", 8, every=2)
    assert np.array_equal(found.update_ratio, whole.recording.update_ratio, equal_nan=True)
    assert np.array_equal(found.frozen, whole.recording.frozen)


def test_a_run_that_was_resumed_earlier_takes_the_place_of_what_was_later(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 6)
    _, _, monitor = run(file, 3)
    assert op.Recording.read(file).steps.tolist() == [1, 2, 3]
    assert op.Recording.read(file) == monitor.recording
    # What the old run had written is still in the file, for those who look for it.
    assert len(file.read_bytes().splitlines()) == 9


KILLED = """
import sys, numpy as np
import optimisers as op
model = [np.ones(3) for _ in range(300)]
state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(sys.argv[1], every=1)
print("ready", flush=True)
while True:
    state, model = monitor.update_(state, model, model)
"""


def test_a_killed_run_leaves_a_file_that_can_be_read_and_continued(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    for turn in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while file.stat().st_size < 30_000 * (turn + 1):
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        recording = op.Recording.read(file)
        assert recording.steps.tolist() == list(range(1, len(recording) + 1))
        assert len(recording.paths) == 300


@pytest.mark.parametrize("left", [1, 10, 60, -2])
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path: Path, left: int) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 3)
    *lines, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, last[:left]]))
    assert op.Recording.read(file).steps.tolist() == [1, 2]
    _, _, monitor = run(file, 4)
    assert op.Recording.read(file) == monitor.recording
    for line in file.read_bytes().splitlines():
        strict(line)


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 2)
    file.write_bytes(file.read_bytes()[:-1])
    monitor = op.Monitor(file)
    assert monitor.recording.steps.tolist() == [1, 2]
    assert file.read_bytes().endswith(b"}\n")


def test_zeros_after_a_power_failure_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 2)
    file.write_bytes(file.read_bytes() + b'{"schema": 1, "st' + bytes(4096))
    assert op.Recording.read(file).steps.tolist() == [1, 2]
    assert len(op.Monitor(file).recording) == 2


def test_a_full_disk_loses_neither_the_step_nor_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    code = f"""
import resource, signal, warnings, numpy as np, optimisers as op
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = {{"w": np.array([3.0, 4.0])}}
state, monitor = op.setup(op.Descent(0.1), model), op.Monitor({str(file)!r}, every=1)
state, model = monitor.update_(state, model, {{"w": np.array([0.6, 0.8])}})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        state, model = monitor.update_(state, model, {{"w": np.array([0.6, 0.8])}})
assert [type(each.message).__name__ for each in caught] == ["OptimiserWarning"] * 2, caught
assert "step 2" in str(caught[0].message), caught[0]
assert state.step == 3 and len(monitor.recording) == 3
assert op.Recording.read({str(file)!r}).steps.tolist() == [1]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
state, model = monitor.update_(state, model, {{"w": np.array([0.6, 0.8])}})
assert op.Recording.read({str(file)!r}) == monitor.recording
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert op.Recording.read(file).steps.tolist() == [1, 2, 3, 4]


# What cannot be read or written ---------------------------------------------------------------------------------------


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 3)
    lines = file.read_bytes().splitlines(keepends=True)
    for broken in (b"{}\n", b"nonsense\n", lines[1].replace(b'"schema": 1', b'"schema": 2'), lines[1][:40] + b"\n", b"\xff\xfe\n"):
        file.write_bytes(lines[0] + broken + lines[2])
        with pytest.raises(op.errors.StateError, match=r"run\.jsonl, line 2"):
            op.Recording.read(file)
        before = file.read_bytes()
        with pytest.raises(op.errors.StateError, match="line 2"):
            op.Monitor(file)
        assert file.read_bytes() == before


def test_columns_have_to_fit(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 1)
    line = strict(file.read_bytes())
    wrong = {"path": ["w"], "lr": [1.0, [2.0]], "frozen": [0, 1], "step": -1, "grad_norm": ["x", 1.0], "update_ratio": 3}
    for key, value in wrong.items():
        file.write_text(json.dumps({**line, key: value}) + "\n")
        with pytest.raises(op.errors.StateError, match="line 1"):
            op.Recording.read(file)


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    for content in (bytes(range(1, 256)) * 4, b"no newline", b"\n" * 3 + b'{"schema": 2'):
        file.write_bytes(content)
        with pytest.raises(op.errors.StateError):
            op.Monitor(file)
        assert file.read_bytes() == content


def test_random_damage_is_told_or_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 3)
    content, rng = file.read_bytes(), np.random.default_rng(0)
    told = 0
    for _ in range(300):
        damaged = bytearray(content)
        for at in rng.integers(len(content), size=rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        file.write_bytes(damaged)
        try:
            found = op.Recording.read(file)
        except op.errors.StateError:
            told += 1
        else:
            assert found.grad_norm.shape == found.frozen.shape == (len(found), len(found.paths))
    assert told > 100


def test_a_file_that_cannot_be_written_is_told_before_anything_changes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        op.Monitor(tmp_path / "missing" / "run.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        op.Monitor(tmp_path / "file" / "run.jsonl")
    with pytest.raises(IsADirectoryError):
        op.Monitor(tmp_path)


def test_a_pickled_monitor_whose_folder_is_gone_tells_so_before_the_step(tmp_path: Path) -> None:
    import pickle

    folder = tmp_path / "folder"
    folder.mkdir()
    state, model, monitor = run(folder / "run.jsonl", 1)
    monitor = pickle.loads(pickle.dumps(monitor))
    os.remove(folder / "run.jsonl")
    folder.rmdir()
    before = model["w"].copy()
    with pytest.raises(FileNotFoundError):
        monitor.update_(state, model, {"w": np.ones(2)})
    assert np.array_equal(model["w"], before)
    assert len(monitor.recording) == 1


def test_a_path_stays_the_same_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state, model, monitor = run(Path("run.jsonl"), 1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    monitor.update_(state, model, {"w": np.ones(2)})
    assert op.Recording.read(tmp_path / "run.jsonl").steps.tolist() == [1, 2]


def test_a_recording_of_another_model_or_of_an_earlier_run_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run(file, 3)
    before = file.read_bytes()
    model = {"other": np.ones(2)}
    state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(file, every=1)
    with pytest.raises(StateError, match="holds a recording of another model; give a new file"):
        monitor.update_(state, model, model)
    assert file.read_bytes() == before
    with pytest.warns(OptimiserWarning, match="holds samples up to step 3, and this run begins at 0"):
        run(file, 1)
    assert file.read_bytes().startswith(before)
