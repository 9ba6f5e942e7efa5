"""All benchmarks, each in a process of its own, and the page of what they found: `python -m benchmarks`."""

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import page


def main(arguments: Sequence[str]) -> int:
    """Run every suite with these arguments; returns how many have failed."""
    failed = 0
    for name in page.TITLES:
        print(f"== {name}: {page.TITLES[name]}", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode != 0
    if not arguments and not failed:
        page.main()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
