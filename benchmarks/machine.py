"""The machine that is measured on, and how fast it moves memory."""

import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

__all__ = ["describe", "spelled", "threads"]

_PACKAGES = ("numpy", "numba", "torch", "optimisers")


def threads() -> int:
    """The number of threads that compiled loops run on; PyTorch is given as many."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def describe(copied: int, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Processor, cores, versions, how idle it is, and the bandwidth of a plain copy of so many float32."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in (*_PACKAGES, *packages)},
        "simd": torch.backends.cpu.get_cpu_capability(),
        "idle_before": idle(),
        "copy_gb_per_second": round(_copy_bandwidth(copied) / 1e9, 1),
    }


def spelled(found: Mapping[str, Any]) -> str:
    """The machine in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['cpu']}, {found['threads']} threads ({found['simd']}), {found['memory_gib']} GiB, which copies "
        f"{found['copy_gb_per_second']} GB/s; {found['system']}, Python {found['python']}, {versions}"
    )


def idle(seconds: float = 1.0) -> float | None:
    """The share of all cores that nobody has used for a moment; `None` on systems that do not tell."""
    try:
        before = _ticks()
        time.sleep(seconds)
        after = _ticks()
    except OSError:
        return None
    return round((after[0] - before[0]) / max(1, after[1] - before[1]), 3)


def _ticks() -> tuple[int, int]:
    """The idle time of all cores since the start, and their whole time."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _copy_bandwidth(elements: int, repeats: int = 7) -> float:
    """Bytes read and written a second by copies on all threads at once."""
    source, target = np.ones(elements, np.float32), np.empty(elements, np.float32)
    edges = np.linspace(0, elements, threads() + 1).astype(int)
    best = float("inf")
    for _ in range(repeats):
        workers = [threading.Thread(target=np.copyto, args=(target[low:high], source[low:high])) for low, high in pairwise(edges)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best
