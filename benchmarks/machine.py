"""The machine that is measured on, and how fast it moves memory."""

import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

__all__ = ["available", "describe", "spelled", "threads"]

_PACKAGES = ("numpy", "numba", "torch", "optimisers")


def threads() -> int:
    """The number of threads that compiled loops run on; PyTorch is given as many."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def describe(elements: int, packages: Iterable[str] = ()) -> dict[str, Any]:
    """Processor, cores, versions, how idle it is, and how fast its memory moves so many float32."""
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
        "copy_gb_per_second": round(_copy(elements) / 1e9, 1),
        "memory_gb_per_second": round(_sweep(elements) / 1e9, 1),
    }


def spelled(found: Mapping[str, Any]) -> str:
    """The machine in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['cpu']}, {found['threads']} threads ({found['simd']}), {found['memory_gib']} GiB, which copies "
        f"{found['copy_gb_per_second']} GB/s and sweeps {found['memory_gb_per_second']} GB/s; {found['system']}, "
        f"Python {found['python']}, {versions}"
    )


def available() -> int:
    """The bytes of memory that a program can have; where the system does not tell, those that are free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


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


def _copy(elements: int) -> float:
    """Bytes read and written a second by a plain copy."""
    return _bandwidth(np.copyto, _arrays(2, elements), 2)


def _sweep(elements: int) -> float:
    """Bytes read and written a second by a loop that moves what a step of AdamW does, seven streams, and hardly computes."""
    first = _arrays(4, 1)
    _streams(*first)
    return _bandwidth(_streams, _arrays(4, elements), 7)


@numba.njit(nogil=True)
def _streams(a: Any, b: Any, c: Any, d: Any) -> None:
    for at in range(a.size):
        value = d[at]
        a[at] += value
        b[at] += value
        c[at] += value


def _arrays(count: int, elements: int) -> list[np.ndarray]:
    return [np.ones(elements, np.float32) for _ in range(count)]


def _bandwidth(work: Callable[..., object], arrays: Sequence[np.ndarray], streams: int, repeats: int = 20) -> float:
    """Bytes a second that go through some streams of memory, on all threads at once."""
    edges = np.linspace(0, arrays[0].size, 16 * threads() + 1).astype(int)
    parts = [[array[low:high] for array in arrays] for low, high in pairwise(edges)]

    def share(first: int) -> None:
        for part in parts[first :: threads()]:
            work(*part)

    best = float("inf")
    for _ in range(repeats):
        workers = [threading.Thread(target=share, args=(first,)) for first in range(threads())]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - start)
    return streams * arrays[0].nbytes / best
