"""Who is compared, and one case of one of them: `python -W ignore -m compare.contenders CONTENDER CASE` prints what it did."""

import contextlib
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["CONTENDERS", "Contender", "answer", "answer_apart", "has"]

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}
TIMEOUT = 120


@dataclass(frozen=True)
class Contender:
    """A library as it is used in one column."""

    name: str
    modules: tuple[str, ...]
    """Where its cases are; later ones before earlier ones."""
    packages: tuple[str, ...]
    array: str | None = None
    """The array library, for cases that are written for several."""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed here."""
        return [name for name in self.packages if find_spec(name) is None]

    @property
    def versions(self) -> dict[str, str]:
        """Of its packages."""
        return {name: _version(name) for name in self.packages}

    def function(self, case: str) -> Any:
        """What it does in a case, or nothing."""
        for module in reversed(self.modules):
            found = getattr(importlib.import_module(module), case.lower(), None)
            if found is not None:
                return found
        return None


CONTENDERS = {
    each.name: each
    for each in (
        Contender("torch.optim", ("compare.peer_torch",), ("torch",)),
        Contender("Optax", ("compare.peer_optax",), ("optax", "jax")),
        Contender("Optax with masks", ("compare.peer_optax_masks",), ("optax", "jax")),
        Contender("MLX", ("compare.peer_mlx",), ("mlx",)),
        Contender("Keras", ("compare.peer_keras",), ("keras", "jax")),
        Contender("ours, NumPy", ("compare.ours",), ("optimisers", "numpy"), "numpy"),
        Contender("ours, JAX", ("compare.ours", "compare.ours_jax"), ("optimisers", "jax"), "jax"),
        Contender("ours, PyTorch", ("compare.ours", "compare.ours_torch"), ("optimisers", "torch"), "torch"),
    )
}


@cache
def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "?"


def has(contender: Contender, case: str) -> bool:
    """Whether there is anything to run, by the names alone, so that no library is imported."""
    sources = [(ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8") for module in contender.modules]
    return any(re.search(rf"\b{case.lower()}\b", source) for source in sources)


def answer(contender: Contender, case: str) -> dict[str, Any]:
    """What a contender does in a case, in an empty folder: values it found, or its error; nothing where it has no means."""
    function = contender.function(case)
    if function is None:
        return {}
    how = {"by hand": getattr(function, "by_hand", False), "note": inspect.getdoc(function) or ""}
    arguments = []
    if contender.array is not None:
        from compare.ours import Arrays

        arguments = [Arrays(contender.array)]
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found = function(*arguments)
    except Exception as error:  # noqa: BLE001
        return how | {"error": f"{type(error).__name__}: {error}".splitlines()[0], "text": str(error)}
    return {} if found is None else how | {"found": _plain(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def answer_apart(contender: Contender, case: str) -> dict[str, Any]:
    """The same in a process of its own, so that a crash or a hang is an answer."""
    command = [sys.executable, "-W", "ignore", "-m", "compare.contenders", contender.name, case]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {TIMEOUT} seconds", "text": ""}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"error": f"the process ended with {done.returncode}: {last}", "text": done.stderr}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(answer(CONTENDERS[sys.argv[1]], sys.argv[2])))
