"""The benchmarks run, at tiny sizes, and write what they promise."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.charts
import benchmarks.page
from benchmarks.suite import Suite

ROOT = Path(__file__).parents[1]
SUITES = list(benchmarks.page.TITLES)
# Suite by suite and figure by figure, what is aimed at.
TARGETS: dict[str, dict[str, float | None]] = {
    "step": {
        "(a) AdamW, against PyTorch fused": 1.10,
        "(a) AdamW, against NumPy, whole arrays": 1 / 15,
        "(b) AdamW, against PyTorch fused": 0.4,
        "(c) AdamW, against PyTorch fused": 0.4,
        "(d) AdamW, against PyTorch fused": 1.10,
        "(d) without Numba, against NumPy, whole arrays": 0.6,
        "(e) AdamW, against PyTorch fused": 0.7,
        "(a) 90 % of the elements frozen, against none": 0.15,
        "(b) 100 groups of hyperparameters, against 1": 1.15,
        "(d) Chain(ClipGrad, WeightDecay, Adam), a byte, against AdamW": 1.25,
        "(d) SGD with momentum, a byte, against AdamW": 1.25,
        "(d) Chain(SignDecay, Adam), a byte, against AdamW": 1.25,
        "(a) ClipGlobalNorm + AdamW, against AdamW": 1.35,
        "setup of 1,000 parameters, against 100 parameters": 12.0,
        "(a) memory of update_ beyond model and state, share of the model (allocated)": 0.05,
    },
    "torch_step": {
        "GPT-2 small, optimisers, against PyTorch fused": 1.10,
        "GPT-2 small, optimisers, against PyTorch default": 0.25,
        "GPT-2 small, optimisers, as an optimiser of PyTorch, against PyTorch fused": 1.10,
        "40 × 256, optimisers, against PyTorch fused": 0.8,
        "40 × 256, optimisers, against PyTorch default": 0.3,
        "50,000 elements, AdamW, against PyTorch default": 0.3,
        "50,000 elements, RMSProp, centred, momentum, against PyTorch default": 0.3,
        "GPT-2 small, 90 % frozen, against none": 0.15,
        "GPT-2 small, on lists, against PyTorch foreach": 1.15,
        "40 × 256, on lists, against PyTorch foreach": 1.15,
    },
    "jax_step": {
        "GPT-2 small, compiled step, against Optax": 1.0,
        "2,000 arrays, first compiled call, against Optax": 0.75,
        "500 arrays, 20 groups against 1: step": 1.15,
        "500 arrays, 20 groups against 1: first call": 1.5,
        "GPT-2 small, 90 % frozen, bytes accessed, against none frozen": 0.15,
        "1,000 arrays, step without jit, against Optax": 0.25,
        "2,000 arrays, first step without jit, against Optax's first compiled call": 0.1,
    },
    "rules": {
        "AdamW, against PyTorch's best": 1.0,
        "AdamW, against PyTorch default": 0.25,
        "RMSProp, centred, momentum, against PyTorch default": 0.25,
        "LAMB, against Optax, jitted": None,
        "Adafactor, against PyTorch default": None,
    },
    "growth": {},
    "files": {
        "save, against save_file and fsync": 1.25,
        "load, checksums verified, against load_file": 1.25,
        "memory of save, share of the bytes": 1.2,
        "memory of load, share of the bytes": 1.2,
    },
    "monitor": {
        "GPT-2 small, sampled, in memory, against update_": 0.05,
        "many small arrays, recorded, against compiled update": 0.05,
        "a transformer, sampled, in a file, against training step": 0.05,
    },
    "package": {"import, beyond NumPy's, seconds": 0.35, "wheel, kB": 200},
}
# Whose time no memory has to wait for, or that are not of a step.
UNBOUND = {"setup", "memory", "groups", "first", "eager", "training", "import"}


def run(*arguments: str, module: str) -> subprocess.CompletedProcess[str]:
    # PyTorch's idle threads would otherwise spin, and take the core that a test beside this one runs on.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("name", SUITES)
def test_a_quick_run_measures_every_figure_and_writes_it(name: str, tmp_path: Path):
    done = run("--quick", "--out", str(tmp_path), module=f"benchmarks.{name}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}.json"]
    suite: Suite = importlib.import_module(f"benchmarks.{name}").SUITE
    assert found["quick"] is True
    assert (found["disagreement"] is None) == (suite.disagreement is None)
    assert suite.disagreement is None or found["disagreement"] < 1e-3
    assert found["machine"]["threads"] >= 1
    assert found["machine"]["copy_gb_per_second"] > 0
    assert found["machine"]["memory_gb_per_second"] > 0
    assert list(found["timings"]) == list(suite.sections)
    for section, timings in found["timings"].items():
        for timing in timings.values():
            assert 0 < timing["minimum"] <= timing["median"]
            assert timing["samples"] >= 1
            assert timing["steps"] >= 1
        assert name == "files" or section in UNBOUND or not timings or any(each["bytes"] for each in timings.values()), section

    assert len({(figure["section"], figure["name"]) for figure in found["figures"]}) == len(found["figures"])
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert {each: figures[each]["target"] for each in TARGETS[name]} == TARGETS[name]
    for figure in figures.values():
        assert figure["met"] == (None if figure["target"] is None else figure["value"] <= figure["target"])
        timings = found["timings"][figure["section"]]
        assert figure["of"] is None or figure["of"] in timings
        against = figure["name"].rpartition("against ")[2]
        if name in ("step", "rules") and figure["of"] is not None and against in timings and "a byte" not in figure["name"]:
            assert figure["value"] == timings[figure["of"]]["minimum"] / timings[against]["minimum"]


def test_a_figure_is_the_ratio_of_the_least_times():
    found = json.loads((benchmarks.page.RESULTS / "step.json").read_text())
    figures, timings = {each["name"]: each for each in found["figures"]}, found["timings"]
    assert figures["(b) AdamW, against PyTorch fused"]["value"] == (
        timings["b"]["optimisers"]["minimum"] / timings["b"]["PyTorch fused"]["minimum"]
    )
    assert set(timings["a"]) == {"NumPy, whole arrays", "PyTorch loop", "PyTorch foreach", "PyTorch fused", "optimisers"}
    # GPT-2 small, float32: the parameter is read and written, the gradient read, two moments read and written.
    assert timings["a"]["optimisers"]["bytes"] == 7 * 4 * 124_439_808


def test_what_is_counted_is_as_true_of_small_models(tmp_path: Path):
    done = run("--quick", "--only", "frozen", "memory", "--out", str(tmp_path), module="benchmarks.jax_step")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {each["section"]: each for each in json.loads((tmp_path / "jax_step.json").read_text())["figures"]}
    assert figures["frozen"]["met"]
    assert figures["memory"]["value"] < 1


def test_unknown_section_is_refused_by_name():
    done = run("--quick", "--only", "e", "f", module="benchmarks.step")
    assert done.returncode == 2
    assert "no section f; there are a, b, c, d, e, frozen" in done.stderr


def test_the_page_and_the_readme_are_what_the_results_say():
    results = benchmarks.page.read()
    assert list(results) == SUITES
    assert not any(result["quick"] for result in results.values())
    assert benchmarks.page.PAGE.read_text(encoding="utf-8") == benchmarks.page.page(results)
    readme = benchmarks.page.README.read_text(encoding="utf-8")
    assert readme == benchmarks.page.readme(readme, results)
    for name, result in results.items():
        assert benchmarks.charts.digest(result) in (benchmarks.page.CHARTS / f"{name}.svg").read_text(encoding="utf-8"), name


def test_a_figure_that_is_missed_is_said_to_be():
    machine = json.loads((benchmarks.page.RESULTS / "step.json").read_text())["machine"] | {
        "copy_gb_per_second": 1.0,
        "memory_gb_per_second": 2.0,
    }
    timing = {"minimum": 1.0, "median": 1.0, "samples": 1, "steps": 1, "bytes": 4_000_000_000}
    figure = {"section": "a", "name": "slow", "value": 2.0, "target": 1.0, "met": False, "of": "optimisers"}
    result = {"machine": machine, "timings": {"a": {"optimisers": timing}}, "figures": [figure]}
    text = benchmarks.page.page({"step": result})
    assert "| slow | 2.00 | 1.00 | **missed** | 1,000 | 2,000 |" in text
    assert "which copies 1.0 GB/s and sweeps 2.0 GB/s" in text


@pytest.mark.parametrize("part", [["--quick"], ["--only", "package"]])
def test_a_part_does_not_take_the_place_of_what_is_kept(part: list[str], capsys: pytest.CaptureFixture[str]):
    suite = importlib.import_module("benchmarks.package").SUITE
    with pytest.raises(SystemExit):
        suite.main([*part, "--out", str(ROOT / "benchmarks" / "results")])
    assert "name another folder" in capsys.readouterr().err
