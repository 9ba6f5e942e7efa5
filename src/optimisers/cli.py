"""The command `optimisers`: its subcommands, and how errors and interruptions end it."""

import argparse
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from optimisers import __version__
from optimisers.errors import OptimiserError

__all__ = ["main"]

DIFFERENT, FAILED = 1, 2
"""As `diff` ends: what was looked for was found, or something went wrong."""
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended: 128 plus the number of the signal."""

_EXAMPLES = """\
examples:
  optimisers demo                    train a small language model, in about a minute
  optimisers demo --steps 200        the same, less well and faster
  optimisers demo --seed 1 --out run
  optimisers demo --resume --out run go on with it after it was interrupted
  optimisers show run.safetensors    parameters, rules, counts, what is frozen, bytes
  optimisers diff a.safetensors b.safetensors --json
  optimisers convert checkpoint-500 run.safetensors    the state of a Trainer, to go on with
  optimisers rename old.safetensors new.safetensors --map encoder=backbone.encoder
  optimisers check run.safetensors model.safetensors
  optimisers --print-completion bash > ~/.local/share/bash-completion/completions/optimisers
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    **Arguments:**

    - `argv`: the arguments, without the name of the program; by default those of the process.

    **Returns** 0 when all went well, 1 where `diff` or `check` found something, 2 after an error, 130 after Ctrl-C.

    **Raises** `SystemExit` with code 2 for arguments that cannot be read, as `argparse` does, and with code 0 after `--help`.
    """
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # frames of tables, where the terminal lacks them
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever was reading has seen enough; nothing is left to be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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
    shtab.add_argument_to(parser, "--print-completion", help="print the completion of a shell, and exit")
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
            "by layer. Ctrl-C ends it early, with a report of what was reached; --resume goes on. Writes "
            "a picture of the losses (losses.png), generated text (sample.txt), the figures (metrics.json) and the run itself "
            "(run.safetensors)."
        ),
    )
    command.add_argument("--steps", type=_at_least(1), help="optimisation steps in all (default: 700)")
    command.add_argument("--seed", type=_at_least(0), help="one seed, one result (default: 0)")
    command.add_argument(
        "--out", type=Path, default=Path("optimisers-demo"), help="the folder that is written to (default: ./%(default)s)"
    )
    command.add_argument("--resume", action="store_true", help="go on with the run in the folder, with its steps and seed")
    command.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from optimisers import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("autograd", "matplotlib"):
            raise
        return _fail(f"the demo needs {missing}, which is not installed: pip install 'optimisers[demo]'")
    finished = demo.run(steps=arguments.steps, seed=arguments.seed, out=arguments.out, resume=arguments.resume)
    return 0 if finished else INTERRUPTED


def _add_show(commands: Any) -> None:
    command = commands.add_parser("show", help="what is in a file", description="Parameters, rules, counts, ties, bytes of a file.")
    _add_file(command, "file", "a file that optimisers.save or another tool has written")
    _add_json(command)
    command.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    from optimisers.files import inspect

    found = inspect.contents_of(arguments.file)
    return _print(found if arguments.json else inspect.shown(found), arguments.json)


def _add_diff(commands: Any) -> None:
    command = commands.add_parser(
        "diff",
        help="how two files differ",
        description="What was added, is gone, reshaped, cast, moved by how much, or changed. The exit code is 1 where they differ.",
    )
    _add_file(command, "first", "the old file")
    _add_file(command, "second", "the new file")
    _add_json(command)
    command.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    from optimisers.files import inspect

    found = inspect.diff(arguments.first, arguments.second)
    if arguments.json:
        _print(found, plain=True)
    else:
        for word, some in found.items():
            for name in some:
                _say(f"{word:9} {name}{_change(some[name]) if isinstance(some, dict) else ''}")
    return DIFFERENT if any(found.values()) else 0


def _change(value: Any) -> str:
    if isinstance(value, list):
        return f"  {value[0]} -> {value[1]}"
    if "most" in value:
        share = "from zero" if value["relative"] is None else f"{value['relative']:.3g} of its length"
        return f"  by {value['most']:.3g} at most, {share}"
    return "".join(f"  {_rule_change(old, new) if key == 'rule' else f'{key} {old} -> {new}'}" for key, (old, new) in value.items())


def _rule_change(old: str, new: str) -> str:
    """The numbers in which two texts of a rule differ; both of them, where more than numbers is different."""
    words = [re.findall(r"[^,() ]+|[,()]", text) for text in (old, new)]
    apart = [(a.partition("="), b.partition("=")) for a, b in zip(*words, strict=False) if a != b]
    if len(words[0]) != len(words[1]) or not all(a[0] == b[0] and a[1] for a, b in apart):
        return f"rule {old} -> {new}"
    return "  ".join(f"{a[0]} {a[2]} -> {b[2]}" for a, b in apart)


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert",
        help="turn a file into that of another tool",
        description=(
            "Reads a safetensors file; or of PyTorch a checkpoint of Lightning (.ckpt), a folder of the Trainer of Transformers, "
            "or a state dict (.pt). Writes, as the ending of OUT tells, a file of this library (.safetensors; one for all tools "
            "where there is no state), or a state dict of PyTorch (.pt). Nothing in a file is executed."
        ),
    )
    _add_file(command, "file", "the file or folder to read")
    command.add_argument("out", type=Path, help="the file to write")
    command.add_argument("--model", type=Path, help="the values of the model, where the file has an optimizer alone")
    command.add_argument("--only", choices=("model", "state"), help="what to write, the other left out")
    command.add_argument("--kind", help="the class of the optimizer, where a state dict does not tell: AdamW, SGD, …")
    command.add_argument("--which", type=_at_least(0), help="the number of the optimizer, from 0, where there are several")
    command.add_argument("--names", type=Path, help="a file with the names of the optimizer's parameters in its order, one a line")
    _add_json(command)
    command.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    try:
        from optimisers.interop.convert import convert

        names = None if arguments.names is None else arguments.names.read_text("utf-8", errors="surrogateescape").splitlines()
        options = {name: getattr(arguments, name) for name in ("model", "kind", "only", "which")}
        written = convert(arguments.file, arguments.out, names=names, **options)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers"):
            raise
        return _fail(f"this file needs {missing}, which is not installed: pip install {missing}")
    if arguments.json:
        return _print({"out": str(arguments.out), "written": written}, plain=True)
    _say(f"{arguments.out}: {written}")
    return 0


def _add_rename(commands: Any) -> None:
    command = commands.add_parser(
        "rename",
        help="write a file with other names",
        description="Names change all at once; a branch takes what is below it along. Regular expressions are over spelled paths.",
    )
    _add_file(command, "file", "the file to read")
    command.add_argument("out", type=Path, help="the file to write; it may be the same")
    command.add_argument("--map", action="append", default=[], type=_pair, metavar="OLD=NEW", help="a branch, and its new name")
    command.add_argument(
        "--regex", action="append", default=[], type=_pair, metavar="PATTERN=NEW", help="a regular expression, and its replacement"
    )
    _add_json(command)
    command.set_defaults(run=_rename)


def _rename(arguments: argparse.Namespace) -> int:
    from optimisers.files import inspect

    if not arguments.map and not arguments.regex:
        return _fail("say what is to be renamed, with --map OLD=NEW or --regex PATTERN=NEW")
    names: dict[Any, str] = {}
    for old, new in arguments.map:
        if names.setdefault(old, new) != new:
            return _fail(f"--map {old} is given twice, with {names[old]} and with {new}; give it once")
    for pattern, new in arguments.regex:
        try:
            names[re.compile(pattern)] = new
        except re.error as error:
            return _fail(f"{pattern!r} is no regular expression: {error}")
    renamed = inspect.rename(arguments.file, arguments.out, names)
    if arguments.json:
        return _print(renamed, plain=True)
    for old, new in renamed.items():
        _say(f"{old} -> {new}")
    return 0


def _add_check(commands: Any) -> None:
    command = commands.add_parser(
        "check",
        help="whether a state fits a model",
        description="Compares a state with the values in another file, by name and shape. The exit code is 1 for a misfit.",
    )
    _add_file(command, "file", "the file with the state")
    _add_file(command, "model", "a safetensors file with the values of the model")
    _add_json(command)
    command.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from optimisers.files import inspect

    found = inspect.misfits(arguments.file, arguments.model)
    if arguments.json:
        _print(found, plain=True)
    else:
        for line in found or ["it fits"]:
            _say(line)
    return DIFFERENT if found else 0


_COMMANDS = (_add_demo, _add_show, _add_diff, _add_convert, _add_rename, _add_check)


def _add_file(command: argparse.ArgumentParser, name: str, text: str) -> None:
    command.add_argument(name, type=Path, help=text).complete = shtab.FILE  # type: ignore[attr-defined]


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print plain data instead of text")


def _finite(value: Any) -> Any:
    """Plain data without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pair(given: str) -> tuple[str, str]:
    old, sign, new = given.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{given!r} has no = between the old name and the new one")
    return old, new


def _say(line: str) -> None:
    """Print a line. What a terminal would act on, in names that come from files, is spelled out."""
    sys.stdout.write("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) + "\n")


def _print(value: Any, plain: bool) -> int:
    if plain:
        sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")
        return 0
    from rich.console import Console

    # A terminal gets colours and its own width; a pipe gets neither.
    Console().print(value) if sys.stdout.isatty() else sys.stdout.write(str(value) + "\n")
    return 0


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
