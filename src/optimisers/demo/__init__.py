"""The demonstration: a language model is trained, its trunk frozen, then thawed layer by layer; all of it is reported."""

import json
import math
import platform
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from threadpoolctl import threadpool_limits

import optimisers as op
from optimisers.demo.corpus import Corpus, Ids, entropy, read
from optimisers.demo.model import generate
from optimisers.demo.picture import draw
from optimisers.demo.progress import Display
from optimisers.demo.training import Training
from optimisers.errors import StateError

__all__ = ["SEED", "STEPS", "run"]

STEPS, SEED = 700, 0
"""Unless others are asked for."""

_PROMPT = "The "
_SAMPLE_LENGTH, _TEMPERATURE = 600, 0.7
_FILE, _FILES = "run.safetensors", 20


def run(
    *, steps: int | None = None, seed: int | None = None, out: Path, resume: bool = False, console: Console | None = None
) -> bool:
    """Train, report, and write `losses.png`, `sample.txt`, `metrics.json`, and now and then `run.safetensors` to go on from.

    **Arguments:**

    - `steps`: of all phases together, at least 1; by default 700.
    - `seed`: of the model, the batches and the generated text; by default 0.
    - `out`: the folder, which is made where it is missing.
    - `resume`: whether to go on with the run in the folder, with its steps and seed. It ends as if it had never been interrupted.
    - `console`: where to print; by default the standard output.

    **Returns** whether the training came to its end; `False` after Ctrl-C, which leaves a report of what was reached.
    """
    # What is printed is plain text, and its lines are left for the terminal to break.
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    start = time.perf_counter()
    if resume:
        training = _resumed(out, steps, seed)
    else:
        training = Training.new(read(), STEPS if steps is None else steps, SEED if seed is None else seed)
    out.mkdir(parents=True, exist_ok=True)
    training.save(out / _FILE, training.seconds)
    finished = True
    try:
        _introduce(console, training)
        # On matrices this small, a second thread of the BLAS mostly waits for the first.
        with threadpool_limits(1, user_api="blas"):
            _train(training, console, out / _FILE, start)
    except KeyboardInterrupt:
        finished = False
        console.print(f"\nInterrupted after {len(training.losses)} of {training.steps} steps.")
        console.print(f"To go on from the last file: optimisers demo --resume --out {shlex.quote(str(out))}")
        if not training.losses:
            console.print("There is nothing to show yet.")
            return False
        if training.leave():
            console.print(_told(training))
    _report(training, out, console, training.seconds + time.perf_counter() - start)
    return finished


def _resumed(out: Path, steps: int | None, seed: int | None) -> Training:
    """The run in a folder.

    **Raises** `StateError` where there is none, or it was begun with other steps or another seed.
    """
    if not (out / _FILE).exists():
        raise StateError(f"there is no run in {out} to go on with; begin one without --resume")
    training = Training.resumed(read(), out / _FILE)
    for name, given, there in (("steps", steps, training.steps), ("seed", seed, training.seed)):
        if given is not None and given != there:
            raise StateError(f"the run in {out} has --{name} {there}, and goes on with it; leave --{name} out")
    return training


def _every(training: Training) -> int:
    """How many steps there are between two files."""
    return max(1, training.steps // _FILES)


def _train(training: Training, console: Console, file: Path, start: float) -> None:
    with Display(console, training) as display:
        for phase in training.plan[len(training.outcomes) :]:
            training.enter(phase)
            while training.advance():
                display.show(phase.name)
                if len(training.losses) % _every(training) == 0:
                    training.save(file, training.seconds + time.perf_counter() - start)
            training.leave()
            console.print(_told(training))
    training.save(file, training.seconds + time.perf_counter() - start)


def _introduce(console: Console, training: Training) -> None:
    corpus, state = training.corpus, training.state
    first, second, held_out = (len(part) for part in _parts(corpus).values())
    elements = sum(record.size for record in state.parameters)
    ties = [f"{path} is {leaf.path} {view}" for leaf in state.leaves() for path, view in leaf.ties.items()]
    console.print(
        f"The text: the Python language reference, {len(corpus.alphabet)} kinds of characters; "
        f"{first:,} in the first part, {second:,} in the second, {held_out:,} held out."
    )
    console.print(f"The model: {elements:,} elements in {len(state)} parameters; {', '.join(ties)}: they are one parameter.\n")


def _parts(corpus: Corpus) -> dict[str, Ids]:
    return {"first": corpus.first, "second": corpus.second, "held_out": corpus.held_out}


def _told(training: Training) -> str:
    """The last phase in one line, and another about what was frozen in it."""
    outcome = training.outcomes[-1]
    line = (
        f"{outcome.phase}: {outcome.steps} steps on the {outcome.part} part of the text, held-out loss {outcome.held_out_loss:.3f}"
    )
    if not outcome.frozen:
        return f"{line}\n  nothing was frozen"
    counts = sorted({leaf.step for leaf in training.state.leaves() if str(leaf.path) in outcome.frozen})
    return (
        f"{line}\n  frozen: {len(outcome.frozen)} parameters, {outcome.frozen_elements:,} elements; "
        f"weights moved by {outcome.frozen_weights_moved:g}, moments by {outcome.frozen_moments_moved:g}; "
        f"still at step {', '.join(map(str, counts))}"
    )


def _report(training: Training, out: Path, console: Console, seconds: float) -> None:
    """Print what came out, and write it."""
    corpus, last = training.corpus, training.outcomes[-1]
    unigram = entropy(corpus.held_out)
    text = corpus.decode(
        generate(training.model, corpus.encode(_PROMPT), _SAMPLE_LENGTH, np.random.default_rng(training.seed), _TEMPERATURE)
    )
    draw(training, unigram, out / "losses.png")
    (out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    metrics = _metrics(training, unigram, seconds)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    console.print("\nGenerated text:\n", style="bold")
    console.print(text)
    console.print()
    console.print(op.summary(training.state) if console.is_terminal else str(op.summary(training.state)))
    console.print("The held-out text, in nats per character (in bits):")
    console.print(f"  entropy of single characters  {_nats(unigram)}")
    console.print(f"  loss of the model             {_nats(last.held_out_loss)}, {metrics['below_entropy']:.0%} lower\n")
    console.print(
        f"{len(training.losses)} steps in {seconds:.0f} s; written to {out}: losses.png, sample.txt, metrics.json, {_FILE}"
    )


def _nats(value: float) -> str:
    return f"{value:.3f} ({value / math.log(2):.3f})"


def _metrics(training: Training, unigram: float, seconds: float) -> dict[str, Any]:
    reached = training.outcomes[-1].held_out_loss
    return {
        "seed": training.seed,
        "steps": len(training.losses),
        "steps_planned": training.steps,
        "seconds": round(seconds, 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "characters": {name: len(part) for name, part in _parts(training.corpus).items()},
        "elements": sum(record.size for record in training.state.parameters),
        "unigram_entropy_nats": unigram,
        "unigram_entropy_bits": unigram / math.log(2),
        "held_out_loss_nats": reached,
        "held_out_loss_bits": reached / math.log(2),
        "below_entropy": 1 - reached / unigram,
        "tied": bool(np.shares_memory(training.model["embed"], training.model["head"]["weight"])),
        "phases": [asdict(outcome) for outcome in training.outcomes],
        "train_losses": training.losses,
        "held_out_samples": training.samples,
    }
