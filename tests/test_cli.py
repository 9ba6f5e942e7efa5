"""The command line: help, errors, exit codes, and the program as a shell starts it."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import optimisers as op
from optimisers import cli, demo
from optimisers.cli import main
from optimisers.files import inspect


def exits(*arguments: str) -> int:
    """The code with which the parser ends the program."""
    with pytest.raises(SystemExit) as raised:
        main(list(arguments))
    assert isinstance(raised.value.code, int)
    return raised.value.code


@pytest.fixture
def demonstrated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the demonstration, which does not take place, was called with."""
    called: dict[str, Any] = {}

    def run(**arguments: Any) -> bool:
        called.update(arguments)
        return True

    monkeypatch.setattr(demo, "run", run)
    return called


def raising(error: BaseException) -> Any:
    def run(**arguments: Any) -> bool:
        raise error

    return run


def test_help_has_examples(capsys: pytest.CaptureFixture[str]):
    assert exits("--help") == 0
    shown = capsys.readouterr().out
    assert "optimisers demo --steps 200" in shown
    assert "train a small language model" in shown


def test_help_of_the_demonstration_names_its_options_and_defaults(capsys: pytest.CaptureFixture[str]):
    assert exits("demo", "--help") == 0
    shown = capsys.readouterr().out
    for option in ("--steps", "--seed", "--out", "./optimisers-demo", "default: 0"):
        assert option in shown


def test_version_is_that_of_the_library(capsys: pytest.CaptureFixture[str]):
    assert exits("--version") == 0
    assert capsys.readouterr().out.strip() == f"optimisers {op.__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["demo", "--steps", "0"], "0 is too small; give at least 1"),
        (["demo", "--steps", "many"], "'many' is not a whole number"),
        (["demo", "--steps", "1.5"], "'1.5' is not a whole number"),
        (["demo", "--seed", "-1"], "-1 is too small; give at least 0"),
        (["demo", "--speed", "1"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_refused_with_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert exits(*arguments) == 2
    assert message in capsys.readouterr().err


def test_demonstration_gets_its_options(demonstrated: dict[str, Any]):
    assert main(["demo", "--steps", "7", "--seed", "3", "--out", "there"]) == 0
    assert demonstrated == {"steps": 7, "seed": 3, "out": Path("there"), "resume": False}


def test_demonstration_has_defaults(demonstrated: dict[str, Any]):
    assert main(["demo"]) == 0
    assert demonstrated == {"steps": None, "seed": None, "out": Path("optimisers-demo"), "resume": False}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals")
def test_demonstration_that_was_killed_is_resumed_in_a_new_process(tmp_path: Path):
    command = [sys.executable, "-u", "-m", "optimisers", "demo"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    pipes: Any = {"stdout": subprocess.PIPE, "text": True, "encoding": "utf-8", "env": environment}
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    with subprocess.Popen([*command, "--steps", "40", "--out", str(folder)], **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 24/40" in line:
                process.kill()
    assert {file.name for file in folder.iterdir()} >= {"run.safetensors"}
    assert not (folder / "metrics.json").exists()
    for arguments in (["--resume", "--out", str(folder)], ["--steps", "40", "--out", str(whole)]):
        subprocess.run([*command, *arguments], check=True, **pipes)
    losses = [json.loads((each / "metrics.json").read_text("utf-8"))["train_losses"] for each in (folder, whole)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40


@pytest.mark.parametrize("package", ["autograd", "matplotlib"])
def test_missing_extra_is_named_in_one_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in [name for name in sys.modules if name.startswith("optimisers.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(op, "demo")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"optimisers: the demo needs {package}, which is not installed: pip install 'optimisers[demo]'\n"
    assert captured.out == ""


def test_missing_module_that_is_no_extra_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("optimisers.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(op, "demo")
    monkeypatch.setitem(sys.modules, "optimisers.demo.training", None)
    with pytest.raises(ModuleNotFoundError, match=r"optimisers\.demo\.training"):
        main(["demo"])


def test_error_of_the_library_is_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "run", raising(op.errors.PathError('no parameter matches\n "x"')))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == 'optimisers: no parameter matches "x"\n'


def test_folder_that_cannot_be_made_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--steps", "1", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"optimisers: {tmp_path / 'file'}: File exists\n"


def test_error_of_the_system_without_a_file_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "run", raising(OSError("the disk is full")))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "optimisers: the disk is full\n"


def test_fault_of_the_program_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "run", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_unfinished_demonstration_and_ctrl_c_outside_of_it_give_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "run", lambda **arguments: False)
    assert main(["demo"]) == cli.INTERRUPTED == 130
    monkeypatch.setattr(demo, "run", raising(KeyboardInterrupt()))
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_package_runs_as_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["optimisers", "--version"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("optimisers", run_name="__main__")
    assert raised.value.code == 0
    assert op.__version__ in capsys.readouterr().out


def test_help_imports_neither_autograd_nor_matplotlib():
    code = (
        "import sys\n"
        "from optimisers.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('autograd', 'matplotlib', 'rich.progress')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_program_ended_by_ctrl_c_reports_writes_and_shows_no_traceback(tmp_path: Path):
    command = [sys.executable, "-u", "-m", "optimisers", "demo", "--steps", "300", "--out", str(tmp_path)]
    # Threads that spin while they wait for one another get nowhere on a busy machine.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen(command, env=environment, **pipes) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if "step  15/300" in line:
                program.send_signal(signal.SIGINT)
                break
        out, err = program.communicate(timeout=100)
    assert program.returncode == 130
    assert err == ""
    assert "Interrupted after" in out
    assert {file.name for file in tmp_path.iterdir()} == {"losses.png", "sample.txt", "metrics.json", "run.safetensors"}


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A run, and the same run a step later, with its trunk thawed."""
    model: Any = {"embed": np.ones((4, 3)), "trunk": [{"w": np.ones((2, 2))}], "n": np.arange(3)}
    model["head"] = model["embed"].T
    state = op.setup(op.AdamW(lambda step: 1e-3), model).freeze("trunk").freeze("embed", rows=[0])
    state, model = op.update(state, model, {"embed": np.ones((4, 3))})
    names = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    op.save(names[0], state, model)
    state, model = op.update(state.thaw("trunk"), model, {"embed": np.ones((4, 3)), "trunk.0.w": np.ones((2, 2))})
    op.save(names[1], state, model)
    return names


def test_show_tells_what_is_in_a_file(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", files[0]]) == 0
    shown = capsys.readouterr().out
    for text in (
        "4 × 3",
        "1 of 4 rows frozen, tied: head",
        "A = AdamW(lr=files.<locals>.<lambda>",
        "no parameter",
        "step 1; 256 B of state",
    ):
        assert text in shown
    assert "\x1b" not in shown
    assert main(["show", files[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    embed, trunk = found["parameters"]
    assert (embed["path"], embed["step"], embed["ties"], embed["frozen_rows"], embed["bytes"]) == (
        "embed",
        1,
        ["head"],
        [[0, 1]],
        192,
    )
    assert (trunk["frozen"], trunk["slots"]) == (True, ["mu", "nu"])
    assert found["totals"] == {"parameters": 2, "elements": 16, "frozen": 1, "state bytes": 256, "bytes": 408}


def test_show_reads_files_of_other_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    assert main(["show", str(tmp_path / "m.safetensors")]) == 0
    assert "12 B in all" in capsys.readouterr().out


def test_diff_tells_what_moved_and_by_how_much(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *files]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "moved     trunk.0.w/mu  by 0.1 at most, from zero" in lines
    assert "changed   trunk.0.w  step 0 -> 1  frozen True -> False" in lines
    assert main(["diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == ""
    assert main(["diff", *files, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["changed"]["embed"] == {"step": [1, 2]}
    assert found["moved"]["embed/mu"]["most"] == pytest.approx(0.09)


def test_diff_tells_what_came_and_went(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"embed": np.ones((5, 3), np.float32), "more": np.ones(1)}
    op.save(tmp_path / "c.safetensors", op.setup(op.SGD(0.1), model), model)
    assert main(["diff", files[0], str(tmp_path / "c.safetensors")]) == 1
    lines = capsys.readouterr().out.splitlines()
    cast = "cast      embed  float64 -> float32"
    for line in ("added     more", "gone      embed/mu", "gone      n", "reshaped  embed  [4, 3] -> [5, 3]", cast):
        assert line in lines


def test_rename_writes_other_names_and_the_state_goes_on(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "c.safetensors")
    assert main(["rename", files[0], out, "--map", "trunk=blocks.first", "--regex", r"^(embed|head)$=io.\1"]) == 0
    assert "trunk.0.w -> blocks.first.0.w" in capsys.readouterr().out.splitlines()
    rule = op.AdamW(lambda step: 1e-3)
    old, new = (op.load(file, rule=rule).state for file in (files[0], out))
    assert [str(path) for path in new] == ["io.embed", "blocks.first.0.w"]
    assert {str(path) for path in new["io.embed"].ties} == {"io.head"}
    assert new["io.embed"].frozen_rows == old["embed"].frozen_rows
    np.testing.assert_array_equal(new["blocks.first.0.w"].slots["mu"], old["trunk.0.w"].slots["mu"])
    assert main(["rename", files[0], out, "--map", "trnk=blocks"]) == 2
    assert 'did you mean "trunk"?' in capsys.readouterr().err
    assert main(["rename", files[0], out, "--map", "embed=head"]) == 2
    assert "embed and head would both be called head" in capsys.readouterr().err
    assert main(["rename", files[0], out, "--map", "trunk=a", "--map", "trunk=b"]) == 2
    assert "--map trunk is given twice" in capsys.readouterr().err
    assert main(["rename", files[0], out]) == 2
    assert exits("rename", files[0], out, "--map", "embed") == 2
    assert main(["rename", files[0], out, "--regex", "([=x"]) == 2
    assert "'([' is no regular expression" in capsys.readouterr().err


def test_diff_tells_what_else_the_runs_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = op.setup(op.Adam(), {"a": np.ones(1)})
    op.save(tmp_path / "a", state, extra={"epoch": 1, "same": [1]})
    op.save(tmp_path / "b", state, extra={"epoch": 2, "same": [1]})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out == "extra     epoch  1 -> 2\n"


def test_names_in_files_do_not_reach_the_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, value in (("a", 1.0), ("b", 2.0)):
        safetensors.numpy.save_file({"\x1b[31mred\nline": np.array([value])}, tmp_path / name)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert r"\x1b[31mred\nline" in capsys.readouterr().out


def test_diff_counts_every_digit_of_integers(tmp_path: Path):
    for name, value in (("a", 2**60), ("b", 2**60 + 1)):
        safetensors.numpy.save_file({"n": np.array([value, 0])}, tmp_path / name)
    assert inspect.diff(tmp_path / "a", tmp_path / "b")["moved"]["n"]["most"] == 1


def test_check_compares_a_state_with_a_model(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model.safetensors")
    values = {"embed": np.ones((4, 3)), "trunk.0.w": np.ones((2, 2)), "n": np.arange(3)}
    safetensors.numpy.save_file(values, model)
    assert main(["check", files[0], model]) == 0
    assert capsys.readouterr().out == "it fits\n"
    safetensors.numpy.save_file({"embed": np.ones((5, 3)), "more": np.ones(2)}, model)
    assert main(["check", files[0], model]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "embed: shape [4, 3] in the state, [5, 3] in the model",
        "trunk.0.w: not in the model",
        "more: in the model, without a state",
    ]
    assert main(["check", model, files[0]]) == 2
    assert "holds no state" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "diff", "rename", "check"])
def test_a_file_that_is_damaged_or_missing_is_an_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nothing")
    more = {"show": [], "diff": [str(bad)], "rename": [str(bad), "--map", "a=b"], "check": [str(bad)]}[command]
    assert main([command, str(bad), *more]) == 2
    assert "is no safetensors file, or is damaged" in capsys.readouterr().err
    assert main([command, str(tmp_path / "none"), *more]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("--print-completion", shell) == 0
    assert "rename" in capsys.readouterr().out


def test_what_does_not_train_is_renamed_as_well(tmp_path: Path) -> None:
    model = {"a": {"w": np.ones(1), "v": np.ones(1)}}
    op.save(tmp_path / "old", op.setup(op.Adam(), model, trainable="a.w"))
    assert main(["rename", str(tmp_path / "old"), str(tmp_path / "new"), "--map", "a=b"]) == 0
    state = op.load(tmp_path / "new", {"b": model["a"]}).state
    assert [str(path) for path in state] == ["b.w"]
    assert state.layout.excluded == {op.Path("b.v")}


def test_no_parameter_is_renamed_to_below_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"a": np.ones(1), "b": np.ones(1)}
    op.save(tmp_path / "run", op.setup(op.Adam(), model), model)
    before = (tmp_path / "run").read_bytes()
    assert main(["rename", str(tmp_path / "run"), str(tmp_path / "run"), "--map", "a=b.x"]) == 2
    assert "a would be called b.x, which lies below b, called b, and that is an array" in capsys.readouterr().err
    assert (tmp_path / "run").read_bytes() == before
