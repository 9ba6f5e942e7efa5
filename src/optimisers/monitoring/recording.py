"""What was recorded of a training: samples of gradient norm, update ratio and learning rate, as arrays of steps by parameters."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from optimisers.errors import StateError, suggest
from optimisers.monitoring.lines import QUANTITIES, Sample, SampleFile
from optimisers.monitoring.scales import Columns

__all__ = ["Recording"]


class Recording:
    """What a `Monitor` has recorded, in memory; `Recording.read` makes one of a file.

    - `steps`: the numbers of the steps that were sampled, ascending. `wall_times`: when, in seconds since 1970.
    - `paths`: of all parameters that any sample knows, in the order of the model; those that are in the last one no more stand
      behind the one that they followed.
    - `grad_norm`, `update_ratio`, `lr`: floats, steps × parameters; NaN where a parameter took no step, or has no such number.
      `known(name)` tells that from a NaN that was measured.
    - `frozen`: booleans, steps × parameters.
    - `len(recording)`: the number of samples.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"w": np.array([3.0, 4.0]), "x": np.ones(2)}
        >>> state, monitor = op.setup(op.Descent(0.1), model, frozen="x"), op.Monitor(every=1)
        >>> state, model = monitor.update_(state, model, {"w": np.array([6.0, 8.0])})
        >>> monitor.recording
        Recording(1 sample, step 1, 2 parameters)
        >>> monitor.recording.grad_norm, monitor.recording.frozen
        (array([[10., nan]]), array([[False,  True]]))
    """

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples: list[Sample] = []
        self._merged: Any = None
        for sample in samples:
            self.add(sample)

    @classmethod
    def read(cls, file: "str | os.PathLike[str]") -> "Recording":
        """The recording in a file, such as `Monitor(file)` writes.

        A step that does not go on from the one before is that of a run which was resumed from there: what was written of it and of
        later steps before no longer counts. A last line that a killed process has left unfinished is passed over.

        **Raises** `StateError` for any other line that is no sample, with its number; `OSError` as reading does.
        """
        return cls(SampleFile(file).samples())

    def add(self, sample: Sample) -> None:
        """Add a sample. Samples of its step and of later ones go: the run was resumed before them."""
        while self._samples and self._samples[-1].step >= sample.step:
            self._samples.pop()
        if self._samples:
            # What stays the same is kept once.
            last = self._samples[-1]
            same = sample.paths == last.paths and np.array_equal(sample.frozen, last.frozen)
            sample = sample._replace(paths=last.paths, frozen=last.frozen) if same else sample
        self._samples.append(sample)
        self._merged = None

    # Arrays -----------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> np.ndarray:
        return np.array([sample.step for sample in self._samples], np.int64)

    @property
    def wall_times(self) -> np.ndarray:
        return np.array([sample.wall_time for sample in self._samples])

    @property
    def paths(self) -> tuple[str, ...]:
        return self._columns()[0]

    @property
    def grad_norm(self) -> np.ndarray:
        return self.values("grad_norm")

    @property
    def update_ratio(self) -> np.ndarray:
        return self.values("update_ratio")

    @property
    def lr(self) -> np.ndarray:
        return self.values("lr")

    @property
    def frozen(self) -> np.ndarray:
        return self._spread(lambda sample: sample.frozen, False)

    def values(self, name: str) -> np.ndarray:
        """The values of a quantity by its name: `"grad_norm"`, `"update_ratio"` or `"lr"`.

        **Raises** `StateError` for another name.
        """
        row = _row(name)
        return self._spread(lambda sample: np.where(sample.known[row], sample.values[row], np.nan), np.nan)

    def known(self, name: str) -> np.ndarray:
        """Where there is a value of a quantity, be it NaN or infinite: booleans, steps × parameters."""
        row = _row(name)
        return self._spread(lambda sample: sample.known[row], False)

    def _spread(self, part: Any, missing: Any) -> np.ndarray:
        """A part of all samples in one array."""
        paths, places = self._columns()
        found = np.full((len(self), len(paths)), missing)
        for row, sample in zip(found, self._samples, strict=True):
            row[places[sample.paths]] = part(sample)
        return found

    def _columns(self) -> tuple[tuple[str, ...], dict[tuple[str, ...], np.ndarray]]:
        """All paths, and where those of each sample stand among them."""
        if self._merged is None:
            kinds = list(dict.fromkeys(sample.paths for sample in reversed(self._samples)))
            paths = _in_one_order(kinds)
            place = {path: at for at, path in enumerate(paths)}
            self._merged = paths, {kind: np.array([place[path] for path in kind], np.int64) for kind in kinds}
        return self._merged

    # Pictures ---------------------------------------------------------------------------------------------------------

    def plot(self, file: "str | os.PathLike[str]", quantity: str = "update_ratio") -> None:
        """Draw a heat map, parameters by steps, with what was frozen marked.

        **Arguments:**

        - `file`: what ends with `.png` becomes a picture (with Matplotlib: `pip install matplotlib`); what ends with `.html` a page
          that needs nothing else, in which the quantity can be changed and each value be read.
        - `quantity`: `"grad_norm"`, `"update_ratio"` or `"lr"`; on a page, the one that is shown first.

        **Raises** `StateError` for another name or ending, or where nothing is recorded; `ImportError` without Matplotlib;
        `OSError` as writing does. The old file is whole then.
        """
        from optimisers.monitoring.heatmap import draw

        _row(quantity)
        if not self._samples:
            raise StateError("nothing is recorded yet, so there is nothing to draw; take a step that is sampled first")
        draw(self.columns, file, quantity)

    @property
    def columns(self) -> Columns:
        """All of it as it is drawn: a row for each parameter."""
        values, known = ({name: read(name).T for name in QUANTITIES} for read in (self.values, self.known))
        return Columns(self.paths, self.steps, self.frozen.T, values, known)

    # A value ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        count = f"{len(self)} sample{'s' * (len(self) != 1)}"
        if not self._samples:
            return f"Recording({count})"
        first, last = self._samples[0].step, self._samples[-1].step
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"Recording({count}, {steps}, {len(self.paths)} parameter{'s' * (len(self.paths) != 1)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recording):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self._samples, other._samples))

    __hash__ = None  # type: ignore[assignment]  # it grows


def _row(name: str) -> int:
    if name not in QUANTITIES:
        raise StateError(f'a recording has no "{name}"{suggest(name, QUANTITIES)}')
    return QUANTITIES.index(name)


def _same(a: Sample, b: Sample) -> bool:
    facts = [(each.step, each.wall_time, each.paths) for each in (a, b)]
    arrays = [(each.known, each.frozen, np.where(each.known, each.values, 0.0)) for each in (a, b)]
    return facts[0] == facts[1] and all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(*arrays, strict=True))


def _in_one_order(kinds: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All paths of several orders: the first as it is, and each further path behind the one that it follows in its own."""
    after: dict[str | None, list[str]] = {}
    seen = set(kinds[0]) if kinds else set()
    for kind in kinds[1:]:
        for before, path in zip((None, *kind), kind, strict=False):
            if path not in seen:
                seen.add(path)
                after.setdefault(before, []).insert(0, path)
    found: list[str] = []
    waiting = [*reversed([*after.pop(None, []), *(kinds[0] if kinds else ())])]
    while waiting:
        path = waiting.pop()
        found.append(path)
        waiting += reversed(after.pop(path, []))
    return tuple(found)
