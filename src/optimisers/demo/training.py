"""The training: all of the model on one text, then its trunk frozen and thawed layer by layer on another."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from autograd import value_and_grad
from numpy.typing import NDArray

import optimisers as op
from optimisers.demo.corpus import Corpus, Ids
from optimisers.demo.model import DILATIONS, loss, new_model
from optimisers.errors import StateError
from optimisers.schedules import Cosine, Joined, Schedule, warmup

__all__ = ["Outcome", "Phase", "Training", "phases", "step"]

SEQUENCES, LENGTH = 16, 64
"""Of a batch."""
TRUNK = "layers"
# Its decorator hides its signature from type checkers.
_value_and_grad: Any = value_and_grad
_SAMPLED, _SAMPLE_LENGTH = 32, 256
_SAMPLES = 40
_RUN = "optimisers demo"


@dataclass(frozen=True)
class Phase:
    """A stretch of the training: what changes at its start, how long it takes, on which part of the text."""

    name: str
    part: str
    peak: float
    """The largest learning rate."""
    freeze: str | None = None
    thaw: str | None = None
    steps: int = 0

    def enter(self, state: op.State) -> op.State:
        """The state with what this phase freezes or thaws."""
        state = state if self.freeze is None else state.freeze(self.freeze)
        return state if self.thaw is None else state.thaw(self.thaw)


# Of each phase its share of all steps. The last layer thaws first.
_PLAN = (
    (0.5, Phase("all trains", "first", 12e-3)),
    (0.14, Phase("trunk frozen", "second", 6e-3, freeze=TRUNK)),
    *((0.12, Phase(f"{TRUNK}.{at} thawed", "second", 3e-3, thaw=f"{TRUNK}.{at}")) for at in reversed(range(len(DILATIONS)))),
)


def phases(steps: int) -> list[Phase]:
    """All phases that have a step, when there are so many steps in all."""
    shares, wanted = zip(*_PLAN, strict=True)
    ends = np.ceil(steps * np.cumsum(shares) - 1e-6).astype(int)
    lengths = np.diff(ends, prepend=0).tolist()
    return [replace(phase, steps=length) for phase, length in zip(wanted, lengths, strict=True) if length]


@dataclass(frozen=True, repr=False)
class Waves(Schedule):
    """The learning rate: a rise and a fall in each phase."""

    schedule: Joined

    @classmethod
    def over(cls, plan: list[Phase]) -> "Waves":
        """The waves of these phases."""
        parts = [
            warmup(Cosine(phase.peak, phase.steps, phase.peak / 10), max(1, phase.steps // 10), phase.peak / 10) for phase in plan
        ]
        return cls(Joined(tuple(parts), tuple(np.cumsum([phase.steps for phase in plan])[:-1].tolist())))

    def __call__(self, step: Any) -> Any:
        return self.schedule(step)

    def __repr__(self) -> str:
        return f"Waves({len(self.schedule.schedules)})"


@dataclass(frozen=True)
class Outcome:
    """What a phase came to."""

    phase: str
    part: str
    first_step: int
    steps: int
    live_elements: int
    frozen: tuple[str, ...]
    """The paths that were frozen."""
    frozen_elements: int
    frozen_weights_moved: float
    """The largest change of any of their weights."""
    frozen_moments_moved: float
    """The largest change of any of their moments."""
    train_loss: float
    held_out_loss: float


@dataclass
class Training:
    """A training as far as it has come."""

    corpus: Corpus
    seed: int
    plan: list[Phase]
    state: op.State
    model: Any
    rate: Waves
    random: np.random.Generator
    losses: list[float] = field(default_factory=list)
    samples: list[tuple[int, float]] = field(default_factory=list)
    """The held-out loss, measured on a part of the held-out text: after how many steps, and how large."""
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    """How long it took before it was resumed."""
    _open: tuple[Phase, int, dict[str, list[Any]]] | None = None

    @classmethod
    def new(cls, corpus: Corpus, steps: int, seed: int) -> "Training":
        """A training that has yet to begin."""
        for_model, for_batches = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        plan = phases(steps)
        rate = Waves.over(plan)
        model = new_model(len(corpus.alphabet), for_model)
        rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(rate, betas=(0.9, 0.99), weight_decay=0.4))
        state = op.setup(rule, model).adjust(op.select.ndim(1), weight_decay=0.0)
        return cls(corpus, seed, plan, state, model, rate, for_batches)

    @classmethod
    def resumed(cls, corpus: Corpus, file: Path) -> "Training":
        """A training that goes on where its file was written.

        **Raises** `StateError` for the file of some other run, or one that is damaged; `OSError` for one that cannot be read.
        """
        state, model, _, kept = op.load(file, new_model(len(corpus.alphabet), np.random.default_rng()))
        if not isinstance(kept, dict) or kept.get("run") != _RUN:
            raise StateError(f"{file} is not of a run of the demo")
        try:
            return cls._of(corpus, state, model, kept)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StateError(f"{file} is not as the demo wrote it ({type(error).__name__}: {error})") from error

    @classmethod
    def _of(cls, corpus: Corpus, state: op.State, model: Any, kept: dict[str, Any]) -> "Training":
        self = cls.new(corpus, kept["steps"], kept["seed"])
        # The file has the waves as a schedule of the library, since it holds no code.
        self.state, self.model = state.adjust(lr=self.rate), model
        self.random.bit_generator.state = kept["random"]
        self.losses, self.seconds = [float(each) for each in kept["losses"]], float(kept["seconds"])
        if len(self.losses) != state.step:
            raise ValueError("its losses are not those of its steps")
        self.samples = [(at, reached) for at, reached in kept["samples"]]
        self.outcomes = [Outcome(**{**each, "frozen": tuple(each["frozen"])}) for each in kept["outcomes"]]
        if kept["begun"] is not None:
            self._open = (self.plan[len(self.outcomes)], kept["begun"]["first"], kept["begun"]["frozen"])
        return self

    def save(self, file: Path, seconds: float) -> None:
        """Write all that it takes to go on, and how many seconds it took so far."""
        begun = None if self._open is None else {"first": self._open[1], "frozen": self._open[2]}
        kept = {
            "run": _RUN,
            "steps": self.steps,
            "seed": self.seed,
            "random": self.random.bit_generator.state,
            "losses": self.losses,
            "seconds": seconds,
            "samples": self.samples,
            "outcomes": list(map(asdict, self.outcomes)),
            "begun": begun,
        }
        op.save(file, self.state.adjust(lr=self.rate.schedule), self.model, extra=kept)

    @property
    def steps(self) -> int:
        """How many steps it takes in all."""
        return sum(phase.steps for phase in self.plan)

    @property
    def live_elements(self) -> int:
        """How many numbers train."""
        return sum(record.size for record in self.state.parameters if not record.frozen)

    def enter(self, phase: Phase) -> None:
        """Begin a phase, or go on with it where it was begun."""
        if self._open is None or self._open[0] is not phase:
            self.state = phase.enter(self.state)
            self._open = (phase, len(self.losses), _frozen(self.state, self.model))

    def advance(self) -> bool:
        """Take one step on a random batch of the text of the phase that was begun; `False` when it is at its end."""
        assert self._open is not None
        phase, first, _ = self._open
        if len(self.losses) - first == phase.steps:
            return False
        inputs, targets = _batch(getattr(self.corpus, phase.part), self.random)
        self.state, self.model, reached = step(self.state, self.model, inputs, targets)
        self.losses.append(reached)
        if len(self.losses) % max(1, self.steps // _SAMPLES) == 0:
            self.samples.append((len(self.losses), float(loss(self.model, *_spread(self.corpus.held_out)))))
        return True

    def leave(self) -> bool:
        """End the phase that was begun: measure what it came to. `False` when none was begun, or it has taken no step."""
        if self._open is None:
            return False
        phase, first, before = self._open
        steps = len(self.losses) - first
        if not steps:
            return False
        weights, moments = _moved(before, _frozen(self.state, self.model))
        held_out = self.corpus.held_out[None]
        self.outcomes.append(
            Outcome(
                phase=phase.name,
                part=phase.part,
                first_step=first,
                steps=steps,
                live_elements=self.live_elements,
                frozen=tuple(before),
                frozen_elements=sum(values[0].size for values in before.values()),
                frozen_weights_moved=weights,
                frozen_moments_moved=moments,
                train_loss=float(np.mean(self.losses[first:][-50:])),
                held_out_loss=float(loss(self.model, held_out[:, :-1], held_out[:, 1:])),
            )
        )
        self._open = None
        return True


def step(state: op.State, model: Any, inputs: Ids, targets: Ids) -> tuple[op.State, Any, float]:
    """One step: differentiate with respect to what is live, and update it. Returns the loss before the step, too."""
    params, rebuild = op.partition(state, model)
    reached, grads = _value_and_grad(lambda live: loss(rebuild(live), inputs, targets))(params)
    state, model = op.update_(state, model, grads)
    return state, model, float(reached)


def _batch(text: Ids, random: np.random.Generator) -> tuple[Ids, Ids]:
    starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
    rows = text[starts[:, None] + np.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def _spread(text: Ids) -> tuple[Ids, Ids]:
    """A batch of sequences from all over a text, always the same."""
    starts = np.linspace(0, len(text) - _SAMPLE_LENGTH - 1, _SAMPLED).astype(int)
    rows = text[starts[:, None] + np.arange(_SAMPLE_LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def _frozen(state: op.State, model: Any) -> dict[str, list[NDArray[Any]]]:
    """For each frozen parameter a copy of its weights, and of its slots."""
    weights = op.trainables(model)
    return {
        str(leaf.path): [weights[str(leaf.path)].copy(), *(slot.copy() for slot in leaf.slots.values())]
        for leaf in state.leaves()
        if leaf.frozen
    }


def _moved(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> tuple[float, float]:
    """The largest change of weights, and of slots."""
    changes = [[float(np.abs(new - old).max()) for old, new in zip(before[path], after[path], strict=True)] for path in before]
    return max((change[0] for change in changes), default=0.0), max((max(change[1:]) for change in changes), default=0.0)
