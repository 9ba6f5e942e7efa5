"""The command `optimisers`: its subcommands, and how errors and interruptions end it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimisers import __version__
from optimisers.errors import OptimiserError

__all__ = ["main"]

FAILED = 1
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended: 128 plus the number of the signal."""

_EXAMPLES = """\
examples:
  optimisers demo                    train a small language model, in about a minute
  optimisers demo --steps 200        the same, less well and faster
  optimisers demo --seed 1 --out run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    **Arguments:**

    - `argv`: the arguments, without the name of the program; by default those of the process.

    **Returns** 0 when all went well, 1 after an error, 130 after Ctrl-C.

    **Raises** `SystemExit` with code 2 for arguments that cannot be read, as `argparse` does, and with code 0 after `--help`.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OptimiserError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optimisers",
        description="Train nested models: the optimiser's state follows the model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"optimisers {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser


def _fail(message: str) -> int:
    print(f"optimisers: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


# Commands: a function adds the arguments of one, and names the function that runs it ------------------------------------------


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small language model on the text of the Python language reference",
        description=(
            "Train a character-level language model with tied embeddings on the language reference that ships inside CPython: "
            "first the whole model, then, on another part of the text, with its trunk frozen, and then with the trunk thawed layer "
            "by layer. Ctrl-C ends it early, with a report of what was reached. Writes a picture of the losses (losses.png), "
            "generated text (sample.txt) and the figures (metrics.json)."
        ),
    )
    command.add_argument("--steps", type=_at_least(1), default=700, help="optimisation steps in all (default: %(default)s)")
    command.add_argument("--seed", type=_at_least(0), default=0, help="one seed, one result (default: %(default)s)")
    command.add_argument(
        "--out", type=Path, default=Path("optimisers-demo"), help="the folder that is written to (default: ./%(default)s)"
    )
    command.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from optimisers import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("autograd", "matplotlib"):
            raise
        return _fail(f"the demo needs {missing}, which is not installed: pip install 'optimisers[demo]'")
    finished = demo.run(steps=arguments.steps, seed=arguments.seed, out=arguments.out)
    return 0 if finished else INTERRUPTED


_COMMANDS = (_add_demo,)


def _at_least(least: int) -> Any:
    def whole_number(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; give at least {least}")
        return value

    return whole_number
