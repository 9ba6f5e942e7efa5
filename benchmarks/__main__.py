"""All benchmarks, each in a process of its own, and the page of what they found: `python -m benchmarks`."""

import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import page


def main(arguments: Sequence[str]) -> int:
    """Run every suite with these arguments; returns how many have failed."""
    failed, start = [], time.perf_counter()
    for name, title in page.TITLES.items():
        print(f"== {name}: {title}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; run them again, one by one, and then python -m benchmarks.page")
    elif not arguments:
        page.main()
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
