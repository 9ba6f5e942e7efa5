"""Compiled loops: a program of rules as one function over a table of addresses, and the folder that keeps its machine code.

For each chunk of a parameter, the loop calls the kernels of all members in turn on each element. Its source is generated, kept
under a name that holds a fingerprint of all kernels, and compiled by Numba, which keeps the machine code beside it.
"""

import hashlib
import os
import threading
import types
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import numba
import numpy as np
import platformdirs
from numba import carray  # type: ignore[attr-defined]  # Numba exports it without saying so
from numba.core import types as nb_types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from optimisers.backends import elementwise
from optimisers.backends.arrays import real_dtype
from optimisers.errors import OptimiserWarning
from optimisers.rules.program import Program

__all__ = ["DTYPES", "compile_at_once", "loop", "pointer"]

_CONSTANT_MODULES = frozenset(("math", "cmath", "numpy"))
DTYPES = frozenset(("float32", "float64", "complex64", "complex128"))


@intrinsic
def pointer(typing_context: Any, address: Any = None) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(nb_types.voidptr))

    return nb_types.voidptr(nb_types.int64), generate


def compile_at_once(function: Callable[..., Any], signature: str, **options: Any) -> Callable[..., Any]:
    """Compile at once, and keep the machine code on disk where there is a place to write."""
    try:
        return numba.njit(signature, cache=True, **options)(function)
    except (RuntimeError, ImportError, AttributeError):
        # There is no place to write, or what is kept there speaks of code that has moved.
        return numba.njit(signature, **options)(function)


@lru_cache(maxsize=1024)
def loop(
    program: Program, dtypes: tuple[str, ...], columns: tuple[tuple[str, ...], ...], purpose: str
) -> Callable[..., None] | None:
    """Compile a program, once a process; `None`, with a warning, when a kernel holds what Numba does not know."""
    try:
        return _build(program, dtypes, columns, purpose)
    except NumbaError as error:
        names = ", ".join(member.name for member in program.members)
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        warnings.warn(
            f"Numba cannot compile the kernels of {names} for {dtypes[0]} ({reason}); they run uncompiled, more slowly",
            OptimiserWarning,
            stacklevel=2,
        )
        return None


def _build(program: Program, dtypes: tuple[str, ...], columns: tuple[tuple[str, ...], ...], purpose: str) -> Callable[..., None]:
    source = _source(program, dtypes, columns, purpose)
    kernels = [member.kernel for member in program.members]
    measure = program.members[-1].measure if purpose == "measure" else None
    scope: dict[str, Any] = {dtype: getattr(nb_types, dtype) for dtype in DTYPES}
    scope |= {"__name__": __name__, "xp": elementwise, "carray": carray, "pointer": pointer}
    for at, (kernel, names) in enumerate(zip(kernels, columns, strict=True)):
        scope[f"k{at}"] = numba.njit(_ours(kernel), **elementwise.OPTIONS)
        scope[f"H{at}"] = namedtuple(f"H{at}", names)  # noqa: PYI024  # made at run time, for Numba
    if measure is not None:
        scope["m"] = numba.njit(_ours(measure), **elementwise.OPTIONS)
    marks = [_fingerprint(function) for function in (*kernels, measure) if function is not None]
    # The name is the function's identity to Numba, so each has its own.
    name = f"loop_{_digest(source, marks, columns)}"
    source = source.replace("def run(", f"def {name}(")
    path = None if None in marks else _keep(source, name)
    exec(compile(source, str(path or "<optimisers>"), "exec"), scope)
    sums = ", float64[:, ::1]" if purpose == "measure" else ""
    real = real_dtype(dtypes[0])
    signature = f"void(int64[:, ::1], {real}[:, ::1], int64[:, ::1], int64, int64{sums})"
    if path is None:
        return numba.njit(signature, nogil=True, **elementwise.OPTIONS)(scope[name])
    return compile_at_once(scope[name], signature, nogil=True, **elementwise.OPTIONS)


def _ours(function: Callable[..., Any] | None) -> Callable[..., Any]:
    """A kernel as if it were written here: machine code that is kept on disk must not ask for the module it came from."""
    assert isinstance(function, types.FunctionType)
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    scope = {"__name__": __name__, "__builtins__": function.__globals__.get("__builtins__", __builtins__), **used}
    ours = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    ours.__kwdefaults__ = function.__kwdefaults__
    ours.__module__ = __name__
    return ours


def _source(program: Program, dtypes: tuple[str, ...], columns: tuple[tuple[str, ...], ...], purpose: str) -> str:
    """The source of the loop.

    Arrays are made anew for each chunk, so that the loop over elements runs from zero and vectorises.
    """
    measuring = purpose == "measure"
    slots = [f"s{at}" for at in range(len(dtypes) - 1)]
    arrays = list(zip(["p", "g", *slots], [dtypes[0], *dtypes], strict=True))
    lines = ["def run(addresses, table, chunks, first, last" + (", parts):" if measuring else "):")]
    lines += ["    for c in range(first, last):", "        i, start, n = chunks[c, 0], chunks[c, 1], chunks[c, 2]"]
    for row, (name, dtype) in enumerate(arrays):
        size = np.dtype(dtype).itemsize
        lines.append(f"        {name} = carray(pointer(addresses[{row}, i] + start * {size}), n, {dtype})")
    column = 0
    for at, names in enumerate(columns):
        values = ", ".join(f"table[{column + k}, i]" for k in range(len(names)))
        lines.append(f"        h{at} = H{at}({values})")
        column += len(names)
    parts = [f"t{k}" for k in range(program.members[-1].sums)] if measuring else []
    lines += [f"        {part} = 0.0" for part in parts]
    lines += ["        for j in range(n):", "            d, x = g[j], p[j]"]
    last = len(program.members) - 1
    for at, span in enumerate(program.spans):
        mine = range(span.start, span.stop)
        if measuring and at == last:
            wide = [_wide("d", dtypes[0]), _wide("x", dtypes[0])]
            inputs = ", ".join(["xp", wide[0], wide[1], f"h{at}", *(_wide(f"s{k}[j]", dtypes[k + 1]) for k in mine)])
            lines.append(f"            {', '.join(f'u{k}' for k in range(len(parts)))} = m({inputs})")
            lines += [f"            t{k} += u{k}" for k in range(len(parts))]
            continue
        loads = [_load(f"s{k}[j]", dtypes[k + 1], dtypes[0]) for k in mine]
        outputs = ", ".join(["d", *(f"a{k}" for k in mine)])
        lines.append(f"            {outputs} = k{at}({', '.join(['xp', 'd', 'x', f'h{at}', *loads])})")
    if measuring:
        lines += [f"        parts[{k}, c] = {part}" for k, part in enumerate(parts)]
    else:
        lines += [f"            s{k}[j] = a{k}" for k in range(len(slots))]
    if purpose == "step":
        lines.append("            p[j] = x - d")
    return "\n".join([*lines, ""])


def _wide(value: str, dtype: str) -> str:
    return f"complex128({value})" if dtype.startswith("complex") else f"float64({value})"


def _load(value: str, dtype: str, parameter: str) -> str:
    """A slot's element in the dtype of the arithmetic, complex or real as the slot is."""
    wanted = parameter if dtype.startswith("complex") else real_dtype(parameter)
    return value if dtype == wanted else f"{wanted}({value})"


# The cache on disk ----------------------------------------------------------------------------------------------------


def _digest(source: str, marks: Sequence[str | None], columns: tuple[tuple[str, ...], ...]) -> str:
    scalars = FilePath(elementwise.__file__).read_bytes()
    return hashlib.sha256(repr((source, marks, columns, scalars, numba.__version__)).encode()).hexdigest()[:32]


def _keep(source: str, name: str) -> FilePath | None:
    """Write the source into the cache folder; Numba keeps the machine code beside it. `None` where nothing can be written."""
    folder = FilePath(os.environ.get("OPTIMISERS_CACHE_DIR") or platformdirs.user_cache_dir("optimisers", appauthor=False))
    path = folder / "kernels" / f"{name}.py"
    try:
        if not path.exists() or path.read_text() != source:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
            draft.write_text(source)
            draft.replace(path)
    except OSError:
        return None
    return path


def _fingerprint(function: Callable[..., Any]) -> str | None:
    """All that a kernel's machine code depends on, as text; `None` when that cannot be told."""
    seen: dict[Any, None] = {}
    try:
        return repr(_marks(function, seen))
    except TypeError:
        return None


def _marks(function: Any, seen: dict[Any, None]) -> Any:
    if isinstance(function, (bool, int, float, complex, str, bytes, type(None))):
        return repr(function)
    if isinstance(function, tuple):
        return tuple(_marks(part, seen) for part in function)
    if isinstance(function, types.ModuleType):
        # The attributes of other modules are variables, which may change.
        if function.__name__ not in _CONSTANT_MODULES:
            raise TypeError(f"cannot tell what {function.__name__} holds")
        return function.__name__
    if isinstance(function, types.CodeType):
        return function.co_code, function.co_names, tuple(_marks(constant, seen) for constant in function.co_consts)
    if isinstance(function, types.BuiltinFunctionType):
        return function.__module__, function.__name__
    function = getattr(function, "py_func", function)
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"cannot tell what {function!r} depends on")
    if function in seen:
        return function.__qualname__
    seen[function] = None
    used = [(name, function.__globals__[name]) for name in _names(function.__code__) if name in function.__globals__]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return (
        _marks(function.__code__, seen),
        _marks((function.__defaults__, *(function.__kwdefaults__ or {}).values()), seen),
        [(name, _marks(value, seen)) for name, value in used],
        [_marks(cell, seen) for cell in cells],
    )


def _names(code: types.CodeType) -> list[str]:
    """The names that code looks up, and the code of functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names(each))]
