"""`python -m optimisers`: the same as the command `optimisers`."""

import sys

from optimisers.cli import main

sys.exit(main())
