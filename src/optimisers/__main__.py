"""`python -m optimisers`: the same as the command `optimisers`."""

import sys

from optimisers.cli import main

if __name__ == "__main__":
    sys.exit(main())
