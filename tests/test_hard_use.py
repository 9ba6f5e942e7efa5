"""Hard use: fuzzing, long runs, large and deep models, names in any script, full disks, interruptions."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optimisers as op
from optimisers.cli import main
from optimisers.errors import ModelError
from tests import soak
from tests.conftest import Backend, leaf

ROOT = Path(__file__).parents[1]


# Fuzzing --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="atheris is for Linux")
@pytest.mark.parametrize(
    ("target", "runs"),
    [("path", 8_000), ("selector", 2_000), ("names", 8_000), ("file", 2_000), ("document", 200), ("command", 200)],
)
def test_no_input_gets_another_error_than_the_librarys(target: str, runs: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        target,
        f"-runs={runs}",
        "-seed=1",
        f"-artifact_prefix={tmp_path}/",
        "-rss_limit_mb=0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    taken = re.search(r"Done (\d+) runs", done.stderr)
    assert taken is not None
    assert int(taken[1]) >= runs


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.integers(1, 3), min_size=1, max_size=6), st.text(max_size=8))
def test_names_in_any_script_go_through_everything(sizes: dict[str, int], branch: str) -> None:
    # What no file can hold is an error of its own, tested elsewhere.
    if any(0xD800 <= ord(c) < 0xE000 for c in "".join([*sizes, branch])):
        return
    model: Any = {branch: {name: np.full(size, at + 1.0) for at, (name, size) in enumerate(sizes.items())}}
    state, model = op.update(op.setup(op.Adam(0.1), model), model, model)
    for name, array in model[branch].items():
        path = op.Path((branch, name))
        assert op.Path(str(path)) == path
        assert leaf(state, str(path)).shape == array.shape
        frozen = state.freeze(path)
        assert {each.path for each in frozen.leaves() if each.frozen} == {path}
        assert frozen.thaw(str(path)) == state
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"optimisers-names-{os.getpid()}.safetensors"
    try:
        op.save(file, state, model)
        again, values, *_ = op.load(file, {branch: {name: np.zeros(size) for name, size in sizes.items()}})
        assert again == state
        assert all((values[branch][name] == array).all() for name, array in model[branch].items())
        assert main(["show", "--json", str(file)]) == 0
    finally:
        file.unlink(missing_ok=True)
    assert str(state)
    assert str(op.summary(state))
    assert state._repr_html_()


# Long runs ------------------------------------------------------------------------------------------------------------


def test_a_long_run_with_surgery_agrees_with_plain_arithmetic(backend: Backend) -> None:
    deeds, _ = soak.run({"blocks": 3_000, "torch": 3_000}.get(backend.name, 1_000), backend)
    assert len(deeds) > 10


def test_a_long_run_with_surgery_holds_no_more_and_more_memory() -> None:
    # In a process of its own, so that nobody else's memory is counted.
    done = subprocess.run([sys.executable, "-m", "tests.soak", "6000"], cwd=ROOT, capture_output=True, text=True, check=True)
    changes, memory = done.stdout.splitlines()
    assert all(deed in changes for deed in ("tie", "untie", "rename", "resize", "file", "composed", "drop"))
    tenths = [int(each) for each in re.findall(r"\d+", memory.partition(":")[2])]
    # What is compiled or interned on the way has come by the first half of the run.
    assert tenths[-1] <= 1.02 * tenths[4] + 2


# Large and deep models ------------------------------------------------------------------------------------------------


_LARGE = """
import sys, tempfile
import numpy as np, optimisers as op
rng = np.random.default_rng(0)
model = {f"b{branch}": [np.asarray(each) for each in rng.normal(size=(1_000, 2))] for branch in range(100)}
state = op.setup(op.AdamW(1e-2), model, frozen=[f"b{branch}" for branch in range(50)])
assert len(state) == 100_000
before = model["b60"][7].copy()
for _ in range(2):
    state, model = op.update_(state, model, model)
assert (state["b60.7"].step, state["b10.7"].step) == (2, 0)
np.testing.assert_allclose(model["b60"][7], before - 2e-2 * np.sign(before), atol=1e-3)
state = state.thaw("b10")
model["b10"] = model["b10"][:500]
state, report = op.adapt(state, model)
assert (len(state), len(report.dropped)) == (99_500, 500)
with tempfile.TemporaryDirectory() as folder:
    op.save(f"{folder}/run", state, model)
    assert op.load(f"{folder}/run", model).state == state
print("fine")
"""


def test_a_model_with_a_hundred_thousand_parameters() -> None:
    # In a process of its own: what is remembered of so large a model would slow down all tests after it.
    done = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout, done.stderr) == ("fine\n", "")


@pytest.mark.parametrize("kind", [list, dict])
def test_what_is_ten_thousand_deep_is_an_error(kind: type) -> None:
    model: Any = np.ones(1)
    for _ in range(10_000):
        model = [model] if kind is list else {"a": model}
    with pytest.raises(ModelError, match="nested more than"):
        op.setup(op.Adam(), model)
    state = op.setup(op.Adam(), {"a": np.ones(1)})
    with pytest.raises(op.errors.OptimiserError):
        op.update(state, {"a": np.ones(1)}, {"a": model})
    with pytest.raises(op.errors.OptimiserError):
        op.adapt(state, model)
    with pytest.raises(op.errors.OptimiserError):
        state.freeze(".".join(["a"] * 10_000))


def test_a_model_that_is_nine_hundred_deep_trains(tmp_path: Path) -> None:
    model: Any = np.ones(2)
    for _ in range(900):
        model = {"a": model}
    state, new = op.update(op.setup(op.Adam(), model), model, model)
    op.save(tmp_path / "run", state, new)
    assert op.load(tmp_path / "run", model).state == state


# What goes wrong outside ----------------------------------------------------------------------------------------------

_FULL = """
import os, resource, signal, sys
import numpy as np, optimisers as op
file = sys.argv[1]
model = {"w": np.ones(1_000)}
state = op.setup(op.Adam(), model)
op.save(file, state, model)
old = open(file, "rb").read()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
large = {"w": np.ones(100_000)}
for write in (lambda: op.save(file, op.setup(op.Adam(), large), large), lambda: op.save(file + "2", op.setup(op.Adam(), large))):
    try:
        write()
    except OSError as error:
        print(type(error).__name__, error)
print(open(file, "rb").read() == old, sorted(os.listdir(os.path.dirname(file))))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", _FULL, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *errors, last = done.stdout.splitlines()
    assert len(errors) == 2
    assert all("OSError" in each and "File too large" in each for each in errors)
    assert last == "True ['run']"


def test_every_command_ends_quietly_when_its_reader_goes_away(tmp_path: Path) -> None:
    model = {str(at): np.ones(1) for at in range(5_000)}
    op.save(tmp_path / "run", op.setup(op.Adam(), model), model)
    command = f"{sys.executable} -m optimisers show --json {tmp_path / 'run'} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


_INTERRUPTED = """
import signal, sys, time
import numpy as np, optimisers as op
from optimisers.errors import StateError

rng = np.random.default_rng(0)
# Of two dtypes, so that a step is two batches.
start = {f"w{at}": rng.normal(size=20_000).astype(np.float32 if at % 2 else np.float64) for at in range(8)}
grads = {name: np.ones_like(array) for name, array in start.items()}
rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1))
whole, refused = 0, 0
for attempt in range(int(sys.argv[1])):
    model = {name: array.copy() for name, array in start.items()}
    state = op.setup(rule, model)
    state, model = op.update_(state, model, grads)
    steps = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 3e-3)))
        while True:
            new = op.update_(state, model, grads)
            state, model = new
            steps += 1
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        state, model = op.update_(state, model, grads)
    except StateError:
        refused += 1
        continue
    # The state may go on: then it and the model are those of so many whole steps.
    other = {name: array.copy() for name, array in start.items()}
    expected = op.setup(rule, other)
    for _ in range(state.step):
        expected, other = op.update_(expected, other, grads)
    assert expected == state
    assert all((other[name] == model[name]).all() for name in other)
    whole += 1
print(whole, refused)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="timers")
def test_a_step_that_a_signal_ends_is_whole_or_the_state_refuses_to_go_on(tmp_path: Path) -> None:
    code = "import signal\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n" + _INTERRUPTED
    done = subprocess.run([sys.executable, "-c", code, "300"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, refused = map(int, done.stdout.split())
    assert whole + refused == 300
    assert min(whole, refused) > 0
