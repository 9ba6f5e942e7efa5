"""The benchmark runs, at tiny sizes, and writes what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import rules

ROOT = Path(__file__).parents[1]
CONTESTANTS = {"NumPy, whole arrays", "PyTorch loop", "PyTorch foreach", "PyTorch fused", "optimisers"}
# Figure by figure, what is aimed at.
TARGETS = {
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
}


def run(*arguments: str, module: str = "benchmarks.step") -> subprocess.CompletedProcess[str]:
    # PyTorch's idle threads would otherwise spin, and take the core that a test beside this one runs on.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_quick_run_measures_every_figure_and_writes_json_and_chart(tmp_path: Path):
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratios of minima" in done.stdout
    assert all(name in done.stdout for name in TARGETS)

    found = json.loads((tmp_path / "step.json").read_text())
    assert found["quick"] is True
    assert set(found["timings"]) == {"a", "b", "c", "d", "e", "frozen", "groups", "rules", "clip", "setup", "memory"}
    for case in "abcde":
        assert set(found["timings"][case]) - {"optimisers without Numba"} == CONTESTANTS
    taken = [timing for section in found["timings"].values() for timing in section.values()]
    assert all(0 < timing["minimum"] <= timing["median"] and timing["samples"] >= 1 and timing["steps"] >= 1 for timing in taken)

    figures = {figure["name"]: figure for figure in found["figures"]}
    assert {name: figures[name]["target"] for name in TARGETS} == TARGETS
    for figure in figures.values():
        assert figure["met"] == (None if figure["target"] is None else figure["value"] <= figure["target"])
    against_fused = figures["(b) AdamW, against PyTorch fused"]["value"]
    timings = found["timings"]["b"]
    assert against_fused == timings["optimisers"]["minimum"] / timings["PyTorch fused"]["minimum"]

    assert max(found["disagreement"].values()) < 1e-3
    assert set(found["disagreement"]) == CONTESTANTS - {"NumPy, whole arrays"} | {"optimisers without Numba"}
    assert found["machine"]["threads"] >= 1
    assert found["machine"]["copy_gb_per_second"] > 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_section_is_refused_by_name():
    done = run("--quick", "--only", "e,f")
    assert done.returncode == 2
    assert "no section f; there are a, b, c, d, e, frozen" in done.stderr


def test_every_rule_is_measured_beside_its_peers():
    done = run("--quick", module="benchmarks.rules")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in rules.cases():
        assert f"{name}: optimisers " in done.stdout


# In JAX, figure by figure, what is aimed at.
JAX_TARGETS = {
    "GPT-2 small, compiled step, against Optax": 1.0,
    "2,000 arrays, first compiled call, against Optax": 0.75,
    "500 arrays, 20 groups against 1: step": 1.15,
    "500 arrays, 20 groups against 1: first call": 1.5,
    "GPT-2 small, 90 % frozen, bytes accessed, against none frozen": 0.15,
    "1,000 arrays, step without jit, against Optax": 0.25,
    "2,000 arrays, first step without jit, against Optax's first compiled call": 0.1,
}


def test_quick_run_in_jax_measures_every_figure_and_writes_json(tmp_path: Path):
    done = run("--quick", "--out", str(tmp_path), module="benchmarks.jax_step")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in JAX_TARGETS)

    found = json.loads((tmp_path / "jax_step.json").read_text())
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert {name: figures[name]["target"] for name in JAX_TARGETS} == JAX_TARGETS
    assert found["quick"] is True
    assert found["disagreement"] < 1e-3
    timings = found["timings"]["step"]
    against_optax = figures["GPT-2 small, compiled step, against Optax"]["value"]
    assert against_optax == timings["optimisers"]["minimum"] / timings["Optax"]["minimum"]
    # What is counted is as true of small models.
    assert figures["GPT-2 small, 90 % frozen, bytes accessed, against none frozen"]["met"]
    assert all(figure["value"] < 1 for figure in found["figures"] if figure["section"] == "memory")


# On modules of PyTorch, figure by figure, what is aimed at.
TORCH_TARGETS = {
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
}


def test_quick_run_on_modules_of_pytorch_measures_every_figure_and_writes_json(tmp_path: Path):
    done = run("--quick", "--out", str(tmp_path), module="benchmarks.torch_step")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in TORCH_TARGETS)

    found = json.loads((tmp_path / "torch_step.json").read_text())
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert {name: figures[name]["target"] for name in TORCH_TARGETS} == TORCH_TARGETS
    assert found["quick"] is True
    assert found["disagreement"] < 1e-3
    timings = found["timings"]["a"]
    against_fused = figures["GPT-2 small, optimisers, against PyTorch fused"]["value"]
    assert against_fused == timings["optimisers"]["minimum"] / timings["PyTorch fused"]["minimum"]
    assert sum(figure["section"] == "rules" for figure in found["figures"]) == 13


def test_quick_run_of_files_measures_every_figure(tmp_path: Path):
    done = run("--quick", "--out", str(tmp_path), module="benchmarks.files")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "files.json").read_text())
    assert [figure["target"] for figure in found["figures"]] == [1.25, 1.25, 1.2, 1.2]
    assert {who for taken in found["timings"].values() for who in taken} == {"optimisers", "safetensors"}
