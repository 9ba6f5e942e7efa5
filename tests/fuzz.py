"""Coverage-guided fuzzing, with atheris: `python -m tests.fuzz TARGET [-max_total_time=60] [-runs=100000] [CORPUS]`.

A target gets bytes and may raise errors of the library alone; whatever else comes out stops the run.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import atheris as _atheris
import numpy as np

atheris: Any = _atheris  # which tells type checkers nothing of its names

with atheris.instrument_imports(include=["optimisers"]):
    import optimisers as op
    from optimisers.cli import main
    from optimisers.errors import OptimiserError, PathError
    from optimisers.files import tensors
    from optimisers.files.document import described
    from optimisers.model.paths import Path
    from optimisers.model.renaming import renamer

_FOLDER = File(tempfile.mkdtemp())
_MODEL = {"encoder": [{"weight": np.ones((3, 2)), "bias": np.ones(2)}], "head": np.ones(2), 'a."b"': {0: np.ones(1)}}
_STATE = op.setup(op.Chain(op.ClipNorm(1.0), op.AdamW(1e-3)), _MODEL).freeze("encoder.0.weight", rows=[0])
_DOCUMENT, _ARRAYS = described(_STATE, {"epoch": 1})


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def path(data: bytes) -> None:
    """A spelling that can be read is read as it is spelled."""
    try:
        found = Path(_text(data))
    except PathError:
        return
    assert Path(str(found)) == found


def selector(data: bytes) -> None:
    """A selector finds something or is an error; what it freezes, it thaws."""
    text = _text(data)
    with contextlib.suppress(OptimiserError):
        assert _STATE.freeze(text).thaw(text) is not None
    with contextlib.suppress(OptimiserError):
        _ = _STATE[text]


def names(data: bytes) -> None:
    """Names change into names."""
    old, _, new = _text(data).partition("=")
    with contextlib.suppress(OptimiserError):
        change = renamer({old: new}, list(_STATE.layout.index))
        assert all(each is None or isinstance(each, Path) for each in map(change, _STATE.layout.index))


def file(data: bytes) -> None:
    """Bytes that are no file of this library are an error."""
    where = _FOLDER / "bytes"
    where.write_bytes(data)
    with contextlib.suppress(OptimiserError):
        op.load(where)


def document(data: bytes) -> None:
    """A document with one value exchanged, at a place that the bytes choose, is an error or describes a state."""
    provider = atheris.FuzzedDataProvider(data)
    changed = json.loads(json.dumps({**_DOCUMENT, "values": False}))
    node, key = changed, provider.PickValueInList(list(changed))
    while isinstance(node[key], (dict, list)) and node[key] and provider.ConsumeBool():
        node = node[key]
        key = provider.PickValueInList(list(node) if isinstance(node, dict) else list(range(len(node))))
    options = [None, True, provider.ConsumeInt(8), provider.ConsumeFloat(), provider.ConsumeUnicode(20), [], {}]
    node[key] = provider.PickValueInList(options)
    where = _FOLDER / "document"
    tensors.write(where, _ARRAYS, changed)
    with contextlib.suppress(OptimiserError):
        op.load(where)
    _run("show", str(where))


def command(data: bytes) -> None:
    """The command line ends with an exit code, and never with a traceback."""
    provider = atheris.FuzzedDataProvider(data)
    verb = provider.PickValueInList(["show", "diff", "rename", "check", "convert"])
    there = _FOLDER / "state.safetensors"
    if not there.exists():
        op.save(there, _STATE, _MODEL)
    words = ["--json", "--map", "--regex", "--model", "--only", str(there), str(_FOLDER / "out.safetensors")]
    some = [provider.PickValueInList([*words, provider.ConsumeUnicodeNoSurrogates(20)]) for _ in range(5)]
    # Nothing outside the folder is read or written.
    _run(verb, *(each if each in words else "x" + each.replace("/", "").replace("\0", "") for each in some))


def _run(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(_FOLDER):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    assert code in (0, 1, 2), code


TARGETS: dict[str, Callable[[bytes], None]] = {each.__name__: each for each in (path, selector, names, file, document, command)}

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
