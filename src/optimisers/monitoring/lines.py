"""Samples as lines of JSON, and the file that they are appended to.

A line is one sample, and stands for itself: no header, and no other line is needed to read it. It is a table laid out by columns,
which is the most compact form that keeps each name once a line, and which `jq` and pandas unfold:

    pandas.read_json("run.jsonl", lines=True).explode(["path", "grad_norm", "update_ratio", "lr", "frozen"])

- `schema`: 1. `step`: the number of the step. `wall_time`: seconds since 1970, as in TensorBoard's events.
- `path`: of all parameters, in the order of the model.
- `grad_norm`, `update_ratio`, `lr`: a number for each of them, with all its digits; `null` where there is none. JSON has no names
  for what is not finite, so these are strings: `"NaN"`, `"Infinity"`, `"-Infinity"`.
- `frozen`: whether each of them was frozen.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from optimisers.errors import OptimiserWarning, StateError

__all__ = ["QUANTITIES", "Sample", "SampleFile", "decoded", "encoded"]

QUANTITIES = ("grad_norm", "update_ratio", "lr")
_START = b'{"schema": 1, "step": '


class Sample(NamedTuple):
    """What was recorded of one step.

    `values` has a row for each of the `QUANTITIES` and a column for each path; `known` tells where there is a number, be it NaN.
    """

    step: int
    wall_time: float
    paths: tuple[str, ...]
    values: np.ndarray
    known: np.ndarray
    frozen: np.ndarray


# One line -------------------------------------------------------------------------------------------------------------


def encoded(sample: Sample) -> bytes:
    """A sample as a line."""
    columns = [_column(values, known) for values, known in zip(sample.values[:2], sample.known[:2], strict=True)]
    columns.append(_few_texts(sample.values[2].tobytes(), sample.known[2].tobytes()))
    middle = "".join(f', "{name}": [{text}]' for name, text in zip(QUANTITIES, columns, strict=True))
    start = f'{sample.step}, "wall_time": {sample.wall_time!r}, "path": {_list(sample.paths)}'
    return _START + f'{start}{middle}, "frozen": {_list(tuple(sample.frozen.tolist()))}}}\n'.encode()


def _column(values: np.ndarray, known: np.ndarray) -> str:
    plain = known & np.isfinite(values)
    if plain.all():
        return _format(None, len(values)) % tuple(values.tolist())
    odd = np.where(plain, 0, np.where(~known, 1, np.where(np.isnan(values), 2, np.where(values > 0, 3, 4)))).astype(np.uint8)
    return _format(odd.tobytes(), len(values)) % tuple(values[plain].tolist())


@lru_cache(maxsize=8)
def _format(odd: bytes | None, count: int) -> str:
    # A format for the whole column: 17 digits tell any float, and are found twice as fast as the fewest that do.
    words = ("%.17g", "null", '"NaN"', '"Infinity"', '"-Infinity"')
    return ", ".join([words[0]] * count if odd is None else [words[each] for each in odd])


@lru_cache(maxsize=8)
def _few_texts(values: bytes, known: bytes) -> str:
    """A column of learning rates: few numbers, which stay for long, as a person would write them."""
    texts: dict[float, str] = {}
    column = []
    for value, there in zip(np.frombuffer(values), np.frombuffer(known, bool), strict=True):
        number = float(value)
        if number not in texts:
            texts[number] = repr(number) if np.isfinite(number) else _column(np.array([number]), np.array([True]))
        column.append(texts[number] if there else "null")
    return ", ".join(column)


@lru_cache(maxsize=16)
def _list(values: tuple[Any, ...]) -> str:
    return json.dumps(values)


def decoded(line: bytes) -> Sample:
    """The sample of a line.

    **Raises** `ValueError` for anything but a line of `encoded`.
    """
    try:
        found = json.loads(line, parse_constant=_refused)
        if not isinstance(found, dict) or "schema" not in found:
            raise ValueError("it is no sample")
        if found["schema"] != 1:
            raise ValueError(f"it has schema {found['schema']!r}, which this version does not know")
        step, paths, frozen = found["step"], tuple(found["path"]), found["frozen"]
        columns = [found[name] for name in QUANTITIES]
        sizes = {len(paths), len(frozen), *map(len, columns)}
        fits = type(step) is int and 0 <= step < 2**62 and len(sizes) == 1 and set(map(type, paths)) <= {str}
        if not fits or not {type(each) for each in frozen} <= {bool}:
            raise ValueError("its columns do not fit")
        known = np.array([[value is not None for value in column] for column in columns])
        values = np.array([np.array(column, np.float64) for column in columns])
        return Sample(step, float(found["wall_time"]), _shared(paths), values, known, np.array(frozen, bool))
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _shared(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The same paths as one object, however many lines hold them."""
    return paths


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# The file -------------------------------------------------------------------------------------------------------------


class SampleFile:
    """A file of samples to append to, by one process. It is opened for each line, so nothing is left open or unwritten."""

    def __init__(self, file: "str | os.PathLike[str]") -> None:
        self.name = os.path.abspath(file)
        self._left = b""
        # Where the last line ends; not known before the file is first looked at.
        self._end: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_end": None}

    def samples(self) -> Iterator[Sample]:
        """All that is in the file. A last line that a killed process has left unfinished is passed over.

        **Raises** `StateError` for any other line that is no sample, with its number.
        """
        with open(self.name, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield decoded(line)
                except ValueError as error:
                    if not line.endswith(b"\n") and _torn(line):
                        continue
                    raise StateError(f"{self.name}, line {number}: cannot be read ({error}); take the line out") from error

    def ready(self) -> None:
        """Make the file where there is none, and end its last line, so that a sample can be appended.

        **Raises** `OSError` where that cannot be, `StateError` for a file of something else.
        """
        # What a sample is still waiting for is told when it is written.
        if self._end is not None or self._left:
            return
        self._find_end()

    def _find_end(self) -> None:
        with open(self.name, "a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            start = _start_of_last(file, end)
            file.seek(start)
            last = file.read(end - start)
            if last and _complete(last):
                file.write(b"\n")
            elif last and _torn(last):
                file.truncate(start)
            elif last:
                raise StateError(f"{self.name}: does not end with a sample; give a file of samples, or a new name")
            self._end = file.seek(0, os.SEEK_END)

    def append(self, sample: Sample) -> None:
        """Append a sample, in one write. Where that fails (a full disk), warn, and write it with the next one."""
        data = self._left + encoded(sample)
        try:
            if self._end is None:
                self._find_end()
            with open(self.name, "ab", buffering=0) as file:
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
                except BaseException:
                    with contextlib.suppress(OSError):
                        file.truncate(self._end)
                    raise
                self._end, self._left = file.tell(), b""
        except OSError as error:
            # The step has been taken: to raise would lose it.
            self._left, self._end = data, None
            warnings.warn(
                f"{self.name}: the sample of step {sample.step} cannot be written ({error}); it is kept for the next time",
                OptimiserWarning,
                stacklevel=2,
            )


def _start_of_last(file: Any, end: int) -> int:
    """Where the last line begins that no newline ends; at the end, if there is none."""
    at = end
    while at > 0:
        low = max(0, at - 65_536)
        file.seek(low)
        newline = file.read(at - low).rfind(b"\n")
        if newline >= 0:
            return low + newline + 1
        at = low
    return 0


def _complete(line: bytes) -> bool:
    try:
        decoded(line)
    except ValueError:
        return False
    return True


def _torn(line: bytes) -> bool:
    """Whether this is the beginning of a sample, or what a power failure leaves of one: zeros."""
    line = line.rstrip(b"\0")
    return line.startswith(_START) or _START.startswith(line)
