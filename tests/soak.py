"""A long training with surgery in between, against plain arithmetic: `python -m tests.soak [STEPS] [BACKEND]`.

Values are compared with those of a few lines of Adam over flat names, and memory has to stay flat.
"""

import gc
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import optimisers as op
from tests.conftest import BACKENDS, Backend

LR, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8
EVERY = 20
"""How many steps there are between two changes of the model or the state."""
MOST, LEAST = 12, 3
"""How many parameters there are."""


class Entry:
    """A parameter as plain arithmetic knows it."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value.copy()
        self.mu, self.nu, self.count = np.zeros_like(value), np.zeros_like(value), 0
        self.frozen = False
        self.rows = np.zeros(len(value), bool)
        self.places: list[str] = []

    def step(self, grad: np.ndarray) -> None:
        """One step of Adam, on the rows that train."""
        if self.frozen or self.rows.all():
            return
        self.count += 1
        live = ~self.rows
        mu = B1 * self.mu + (1 - B1) * grad
        nu = B2 * self.nu + (1 - B2) * grad**2
        step = LR * (mu / (1 - B1**self.count)) / (np.sqrt(nu / (1 - B2**self.count)) + EPS)
        self.mu[live], self.nu[live] = mu[live], nu[live]
        self.value[live] -= step[live]


class Soak:
    """The run: the library's state and model, and beside them the plain entries by place."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self.backend, self.rng = backend, np.random.default_rng(seed)
        self.entries: list[Entry] = []
        self.made = 0
        for _ in range(6):
            self._new()
        self.model = self._model()
        self.state = op.setup(op.Adam(LR, betas=(B1, B2), eps=EPS), self.model)
        self.deeds: dict[str, int] = {}

    def _new(self) -> Entry:
        entry = Entry(self.rng.normal(size=(int(self.rng.integers(2, 6)), 3)))
        entry.places = [self._name()]
        self.entries.append(entry)
        return entry

    def _name(self) -> str:
        self.made += 1
        return f"{'abc'[self.made % 3]}.p{self.made % 1000}"

    def _model(self, kept: dict[str, Any] | None = None, *, empty: bool = False) -> Any:
        """The nested model of the entries; arrays that are there already stay."""
        tree: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            array = next((kept[place] for place in entry.places if kept and place in kept), None)
            if array is None or tuple(array.shape) != entry.value.shape:
                array = self.backend.make(np.zeros_like(entry.value) if empty else entry.value)
            for place in entry.places:
                branch, name = place.split(".")
                tree.setdefault(branch, {})[name] = array
        return tree

    def _arrays(self) -> dict[str, Any]:
        return {f"{branch}.{name}": array for branch, inner in self.model.items() for name, array in inner.items()}

    def _any(self) -> Entry:
        return self.entries[int(self.rng.integers(len(self.entries)))]

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step on random gradients; some are missing, those of ties come in parts."""
        grads = {}
        for entry in self.entries:
            if self.rng.random() < 0.2:
                continue
            parts = self.rng.normal(size=(len(entry.places), *entry.value.shape))
            grads |= {place: self.backend.make(part) for place, part in zip(entry.places, parts, strict=True)}
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            entry.step(total)
        take = op.update_ if self.rng.random() < 0.7 else op.update
        self.state, self.model = take(self.state, self.model, grads)

    def check(self) -> None:
        """Compare every value, moment, count and flag."""
        arrays = self._arrays()
        assert {str(path) for record in self.state.parameters for path in record.paths} == arrays.keys()
        for entry in self.entries:
            leaf: Any = self.state[self._canonical(entry)]
            assert (leaf.step, leaf.frozen) == (entry.count, entry.frozen), (entry.places, leaf)
            for place in entry.places:
                np.testing.assert_allclose(self.backend.read(arrays[place]), entry.value, rtol=1e-8, atol=1e-10)
            for name, slot in leaf.slots.items():
                np.testing.assert_allclose(self.backend.read(slot), getattr(entry, name), rtol=1e-8, atol=1e-12)

    def _canonical(self, entry: Entry) -> str:
        canonical = {str(path) for path in self.state}
        return next(place for place in entry.places if place in canonical)

    # Surgery ----------------------------------------------------------------------------------------------------------

    def change(self) -> None:
        """One random change."""
        deeds: list[Callable[[], bool]] = [
            self.freeze, self.thaw, self.rows, self.add, self.remove, self.resize, self.rename, self.tie, self.untie,
            self.file, self.copy, self.composed, self.reset, self.drop,
        ]  # fmt: skip
        deed = deeds[int(self.rng.integers(len(deeds)))]
        if deed():
            self.deeds[deed.__name__] = self.deeds.get(deed.__name__, 0) + 1

    def freeze(self) -> bool:
        entry = self._any()
        entry.frozen = True
        self.state = self.state.freeze(entry.places[0])
        return True

    def thaw(self) -> bool:
        entry = self._any()
        entry.frozen = False
        entry.rows[:] = False
        self.state = self.state.thaw(entry.places[-1])
        return True

    def rows(self) -> bool:
        entry = self._any()
        rows = self.rng.random(len(entry.value)) < 0.3
        if not rows.any() or (entry.rows | rows).all():
            return False
        entry.rows |= rows
        self.state = self.state.freeze(entry.places[0], rows=rows)
        return True

    def add(self) -> bool:
        if len(self.entries) >= MOST:
            return False
        self._new()
        return self._adapt()

    def remove(self) -> bool:
        if len(self.entries) <= LEAST:
            return False
        self.entries.remove(self._any())
        return self._adapt()

    def resize(self) -> bool:
        entry = self._any()
        size, new = len(entry.value), int(self.rng.integers(2, 6))
        if entry.rows[:new].all():
            return False
        for name in ("value", "mu", "nu"):
            old = getattr(entry, name)
            grown = np.zeros((new, 3))
            grown[: min(size, new)] = old[:new]
            setattr(entry, name, grown)
        entry.rows = np.concatenate([entry.rows, np.zeros(6, bool)])[:new]
        return self._adapt(resize="keep")

    def rename(self) -> bool:
        entry = self._any()
        old, new = list(entry.places), [self._name() for _ in entry.places]
        arrays = self._arrays()
        entry.places = new
        names = dict(zip(old, new, strict=True))
        self.model = self._model({names.get(place, place): array for place, array in arrays.items()})
        self.state, _ = op.adapt(self.state, self.model, rename=names)
        return True

    def tie(self) -> bool:
        entry = self._any()
        if len(entry.places) > 2:
            return False
        entry.places.append(self._name())
        return self._adapt()

    def untie(self) -> bool:
        entry = self._any()
        if len(entry.places) < 2:
            return False
        place = next(each for each in entry.places if each != self._canonical(entry))
        own = Entry(entry.value)
        own.mu, own.nu, own.count, own.frozen, own.rows = (
            entry.mu.copy(), entry.nu.copy(), entry.count, entry.frozen, entry.rows.copy(),
        )  # fmt: skip
        entry.places.remove(place)
        own.places = [place]
        self.entries.append(own)
        self.state = self.state.untie(place)
        # The place gets an array of its own with the next step.
        self.step()
        return True

    def _adapt(self, **options: Any) -> bool:
        self.model = self._model(self._arrays())
        self.state, _ = op.adapt(self.state, self.model, **options)
        return True

    def file(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            op.save(Path(folder) / "run", self.state, self.model)
            # Into a model of zeros, so that the values are those of the file.
            self.state, self.model, *_ = op.load(Path(folder) / "run", self._model({}, empty=True))
        return True

    def copy(self) -> bool:
        self.state, self.model = pickle.loads(pickle.dumps((self.state, self.model)))
        return True

    def composed(self) -> bool:
        whole: Any = op.compose({"inner": self.state})["inner"]
        self.state = whole
        return True

    def reset(self) -> bool:
        entry = self._any()
        entry.mu, entry.nu, entry.count = np.zeros_like(entry.mu), np.zeros_like(entry.nu), 0
        self.state = self.state.reset(entry.places[0])
        return True

    def drop(self) -> bool:
        entry = self._any()
        if not entry.frozen:
            return False
        entry.mu, entry.nu, entry.count = np.zeros_like(entry.mu), np.zeros_like(entry.nu), 0
        self.state = self.state.drop(entry.places[0])
        return True


def resident() -> int:
    """The bytes of memory that the process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(steps: int, backend: Backend, seed: int = 0) -> tuple[dict[str, int], list[int]]:
    """Take the steps. Returns how often each change was made, and the resident memory after each tenth of the steps."""
    soak, memory = Soak(backend, seed), []
    with backend.active():
        for at in range(1, steps + 1):
            soak.step()
            if at % EVERY == 0:
                soak.change()
                soak.check()
            if at % (steps // 10) == 0:
                memory.append(resident())
    return soak.deeds, memory


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    backend = next(each for each in BACKENDS if each.name == (sys.argv[2] if len(sys.argv) > 2 else "numba"))
    start = time.perf_counter()
    deeds, memory = run(steps, backend)
    sys.stdout.write(f"{steps:,} steps in {time.perf_counter() - start:.0f} s, {sum(deeds.values()):,} changes: {deeds}\n")
    sys.stdout.write(f"resident memory after each tenth, in MB: {[round(each / 1e6) for each in memory]}\n")
