"""What the package itself costs: the time of its import, and the size of its wheel: `python -m benchmarks.package`."""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.figures import Figure, Outcome
from benchmarks.suite import Scale, Section, Suite
from benchmarks.timing import Timing

__all__ = ["SUITE"]

IMPORT, WHEEL = 0.35, 200
_ROOT = Path(__file__).parents[1]
_IMPORT = "import time, numpy; start = time.perf_counter(); import optimisers; print(time.perf_counter() - start)"


def _import(scale: Scale) -> Outcome:
    """`import optimisers` after `import numpy`, each time in a process of its own; the first compiles, as an installation does."""
    settings = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(scale.folder)}
    taken = [float(_output("-c", _IMPORT, **settings)) for _ in range(3 if scale.quick else 12)][1:]
    timing = Timing(min(taken), statistics.median(taken), len(taken), 1)
    return Outcome({"import": timing}, [Figure("import", "import, beyond NumPy's, seconds", timing.median, IMPORT)])


def _wheel(scale: Scale) -> Outcome:
    """The bytes of the wheel, as `pip` would download it."""
    _output("-m", "hatchling", "build", "--target", "wheel", "--directory", str(scale.folder))
    (wheel,) = scale.folder.glob("*.whl")
    return Outcome(figures=[Figure("wheel", "wheel, kB", wheel.stat().st_size / 1e3, WHEEL)])


def _output(*arguments: str, **settings: str) -> str:
    command, environment = [sys.executable, *arguments], {**os.environ, **settings}
    return subprocess.run(command, cwd=_ROOT, env=environment, check=True, capture_output=True, text=True).stdout


SECTIONS: Mapping[str, Section] = {"import": _import, "wheel": _wheel}
SUITE = Suite("package", __doc__, SECTIONS)

if __name__ == "__main__":
    sys.exit(SUITE.main())
