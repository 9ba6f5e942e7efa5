"""All benchmarks, each in a process of its own, and the page of what they found: `python -m benchmarks`."""

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import page


def main(arguments: Sequence[str]) -> int:
    """Run every suite with these arguments; returns how many have failed."""
    failed = []
    for name, title in page.TITLES.items():
        print(f"== {name}: {title}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; run them again, one by one, and then python -m benchmarks.page")
    elif not arguments:
        page.main()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
