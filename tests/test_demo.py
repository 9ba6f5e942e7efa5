"""The demonstration: what it trains, what it leaves alone, what it writes, how it is interrupted."""

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from autograd import value_and_grad
from autograd.test_util import check_grads
from rich.console import Console

import optimisers as op
from optimisers import demo
from optimisers.demo import corpus as corpora
from optimisers.demo import model as models
from optimisers.demo import training as trainings
from optimisers.demo.corpus import Corpus
from optimisers.errors import StateError

FILES = {"losses.png", "sample.txt", "metrics.json", "run.safetensors"}


@pytest.fixture(scope="module")
def text() -> Corpus:
    """The text, cut short."""
    whole = corpora.read()
    return dataclasses.replace(whole, first=whole.first[:20_000], second=whole.second[:20_000], held_out=whole.held_out[:2_000])


@pytest.fixture(scope="module", autouse=True)
def small(text: Corpus) -> Iterator[None]:
    """Makes the demonstration quick: less text, a smaller model, fewer sequences in a batch, a shorter sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "WIDTH", 16)
        patch.setattr(models, "HIDDEN", 64)
        patch.setattr(demo, "read", lambda: text)
        patch.setattr(demo, "_SAMPLE_LENGTH", 40)
        patch.setattr(trainings, "SEQUENCES", 4)
        yield


@pytest.fixture(scope="module")
def whole_run(small: None, tmp_path_factory: pytest.TempPathFactory) -> "Run":
    """A run from beginning to end."""
    return run(tmp_path_factory.mktemp("demo") / "new" / "folder", steps=240)


class Run(NamedTuple):
    finished: bool
    printed: str
    out: Path
    metrics: dict[str, Any]


def run(out: Path, steps: int | None, seed: int | None = None, *, terminal: bool = False, resume: bool = False) -> Run:
    """Run the demonstration."""
    printed = io.StringIO()
    console = Console(file=printed, width=140, force_terminal=terminal, highlight=False, markup=False, soft_wrap=True)
    finished = demo.run(steps=steps, seed=seed, out=out, resume=resume, console=console)
    metrics = out / "metrics.json"
    return Run(finished, printed.getvalue(), out, json.loads(metrics.read_text("utf-8")) if metrics.exists() else {})


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the step after so many."""
    taken, real = iter(range(steps)), trainings.step

    def step(*arguments: Any) -> Any:
        if next(taken, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(trainings, "step", step)


# The text -------------------------------------------------------------------------------------------------------------


def test_held_out_text_shares_no_paragraph_with_the_text_trained_on():
    corpus = corpora.read()
    trained, held_out = (
        {" ".join(paragraph.split()) for paragraph in corpus.decode(ids).split("\n\n")}
        for ids in (np.concatenate([corpus.first, corpus.second]), corpus.held_out)
    )
    shared = trained & held_out
    # The cut may leave two pieces of one paragraph.
    assert len(held_out) > 100
    assert len(shared) <= 1


def test_text_survives_the_way_to_numbers_and_back():
    corpus = corpora.read({"topic": "def f():\n    return “ß”"})
    assert corpus.decode(corpus.encode("def “ß”")) == "def “ß”"


def test_entropy_of_equally_many_of_each_is_the_logarithm_of_their_number():
    assert corpora.entropy(np.array([3, 0, 2, 1, 5] * 4)) == pytest.approx(np.log(5))


# The model ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> dict[str, Any]:
    return models.new_model(20, np.random.default_rng(0))


def test_model_is_float32_and_its_head_is_found_to_be_its_embedding_transposed(model: dict[str, Any]):
    state = op.setup(op.Adam(), model)
    assert dict(state["embed"].ties) == {op.Path("head.weight"): "transposed"}  # type: ignore[union-attr]
    assert {record.dtype for record in state.parameters} == {"float32"}


@pytest.mark.parametrize("at", [0, 5, 63, 99])
def test_scores_depend_on_no_later_character(model: dict[str, Any], at: int):
    ids = np.random.default_rng(1).integers(0, 20, (1, 100))
    changed = ids.copy()
    changed[:, at:] = (changed[:, at:] + 1) % 20
    before, after = models._scores(model, ids), models._scores(model, changed)
    np.testing.assert_array_equal(before[:at], after[:at])
    assert (before[at] != after[at]).any()


def test_model_sees_as_far_as_its_context_says_and_no_further(model: dict[str, Any]):
    ids = np.random.default_rng(1).integers(0, 20, (1, models.CONTEXT + 1))
    scores = []
    for changed in (None, 0, 1):
        copy = ids.copy()
        if changed is not None:
            copy[0, changed] = (copy[0, changed] + 1) % 20
        scores.append(models._scores(model, copy)[-1])
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[0] != scores[2]).any()


@pytest.mark.parametrize("dilation", [1, 3, 50])
def test_gradient_of_windows_is_that_of_differences(dilation: int):
    x = np.random.default_rng(0).standard_normal((2 * 7, 3))
    check: Any = check_grads
    check(lambda x: models._windows(x, 2, dilation), modes=["rev"], order=1)(x)


def test_gradient_of_the_loss_is_that_of_differences(model: dict[str, Any]):
    state = op.setup(op.Adam(), model)
    params, rebuild = op.partition(state, model)
    wide = {path: array.astype(np.float64) for path, array in params.items()}
    ids = np.random.default_rng(1).integers(0, 20, (2, 9))

    def loss(params: Any) -> Any:
        return models.loss(rebuild(params), ids[:, :-1], ids[:, 1:])

    differentiate: Any = value_and_grad
    _, grads = differentiate(loss)(wide)
    direction = {path: np.random.default_rng(2).standard_normal(array.shape) for path, array in wide.items()}
    there, back = (loss({path: array + sign * 1e-6 * direction[path] for path, array in wide.items()}) for sign in (1, -1))
    assert sum(np.vdot(grads[path], direction[path]) for path in wide) == pytest.approx((there - back) / 2e-6, rel=1e-4)


def test_loss_of_huge_scores_is_finite(model: dict[str, Any]):
    model["head"]["bias"][3] = 1e4
    assert models.loss(model, np.array([[1, 2]]), np.array([[3, 3]])) == pytest.approx(0, abs=1e-6)


def test_gradients_of_frozen_parameters_are_never_asked_for(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    asked: list[set[str]] = []
    real = op.update_

    def update_(state: Any, model: Any, grads: Any) -> Any:
        asked.append(set(grads))
        assert {grad.dtype.name for grad in grads.values()} == {"float32"}
        return real(state, model, grads)

    monkeypatch.setattr(op, "update_", update_)
    ids = np.random.default_rng(1).integers(0, 20, (2, 9))
    trainings.step(op.setup(op.Adam(), model).freeze("layers"), model, ids[:, :-1], ids[:, 1:])
    assert asked == [{"embed", "head.bias", "head.norm"}]


# The plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50, 999])
def test_phases_share_out_all_steps(steps: int):
    plan = trainings.phases(steps)
    assert sum(phase.steps for phase in plan) == steps
    assert all(phase.steps >= 1 for phase in plan)


def test_phases_freeze_the_trunk_and_thaw_its_last_layer_first(text: Corpus):
    training = trainings.Training.new(text, 100, 0)
    frozen = []
    for phase in training.plan:
        training.enter(phase)
        frozen.append(sorted({str(leaf.path).rpartition("layers.")[2][0] for leaf in training.state.leaves() if leaf.frozen}))
    assert frozen == [[], ["0", "1", "2"], ["0", "1"], ["0"], []]
    assert [phase.part for phase in training.plan] == ["first"] + ["second"] * 4


def test_learning_rate_rises_and_falls_in_each_phase():
    plan = trainings.phases(1000)
    rate = trainings.Waves.over(plan)
    start = 0
    for phase in plan:
        values = [rate(step) for step in range(start, start + phase.steps)]
        top = int(np.argmax(values))
        assert max(values) == pytest.approx(phase.peak)
        assert 0 < top < phase.steps // 5
        assert min(values[0], values[-1]) > 0
        assert max(values[0], values[-1]) < phase.peak / 5
        start += phase.steps


def test_only_matrices_decay(text: Corpus):
    state = trainings.Training.new(text, 10, 0).state
    decays = {len(leaf.shape): leaf.rule.hyperparameters["weight_decay"] for leaf in state.leaves()}
    assert decays == {1: 0.0, 2: 0.4}


# A run ----------------------------------------------------------------------------------------------------------------


def test_run_writes_a_picture_a_sample_and_the_figures(whole_run: Run, text: Corpus):
    out, metrics = whole_run.out, whole_run.metrics
    assert whole_run.finished
    assert {file.name for file in out.iterdir()} == FILES
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_text("utf-8")) == len("The ") + 40 + 1
    assert metrics["steps"] == len(metrics["train_losses"]) == 240
    assert metrics["unigram_entropy_nats"] == pytest.approx(corpora.entropy(text.held_out))
    assert metrics["unigram_entropy_bits"] == pytest.approx(metrics["unigram_entropy_nats"] / np.log(2))
    assert metrics["held_out_loss_bits"] == pytest.approx(metrics["held_out_loss_nats"] / np.log(2))


def test_held_out_loss_falls_below_the_entropy_of_single_characters(whole_run: Run):
    metrics = whole_run.metrics
    samples = [loss for _, loss in metrics["held_out_samples"]]
    assert len(samples) == 40
    assert samples[-1] < 0.7 * samples[0]
    assert metrics["held_out_loss_nats"] < 0.9 * metrics["unigram_entropy_nats"]
    assert metrics["below_entropy"] == pytest.approx(1 - metrics["held_out_loss_nats"] / metrics["unigram_entropy_nats"])


def test_run_prints_what_happens(whole_run: Run):
    for shown in (
        "head.weight is embed transposed",
        "step 240/240",
        "trunk frozen: ",
        "entropy of single characters",
        "metrics.json",
    ):
        assert shown in whole_run.printed
    assert (whole_run.out / "sample.txt").read_text("utf-8") in whole_run.printed
    assert "tied: head.weight" in " ".join(whole_run.printed.split())


def test_frozen_trunk_does_not_move_and_keeps_its_moments_and_counts(whole_run: Run):
    metrics = whole_run.metrics
    frozen = metrics["phases"][1]
    assert frozen["phase"] == "trunk frozen"
    assert len(frozen["frozen"]) == 12
    assert frozen["frozen_elements"] + frozen["live_elements"] == metrics["elements"]
    assert [phase["frozen_weights_moved"] for phase in metrics["phases"]] == [0] * 5
    assert [phase["frozen_moments_moved"] for phase in metrics["phases"]] == [0] * 5
    assert "frozen: 12 parameters" in whole_run.printed
    assert "weights moved by 0, moments by 0; still at step 120" in whole_run.printed
    assert metrics["tied"]


def test_what_moves_while_it_should_be_frozen_is_measured(text: Corpus):
    training = trainings.Training.new(text, 10, 0)
    training.plan[1] = dataclasses.replace(training.plan[1], steps=1)
    training.enter(training.plan[1])
    training.advance()
    training.model["layers"][1]["out"][3, 4] += 0.5
    training.state["layers.2.norm"].slots["mu"][7] -= 0.25  # type: ignore[union-attr]
    assert training.leave()
    assert training.outcomes[0].frozen_weights_moved == pytest.approx(0.5)
    assert training.outcomes[0].frozen_moments_moved == pytest.approx(0.25)


def test_tie_and_dtypes_hold_through_all_phases(text: Corpus):
    training = trainings.Training.new(text, 12, 0)
    for phase in training.plan:
        training.enter(phase)
        for _ in range(phase.steps):
            training.advance()
        np.testing.assert_array_equal(training.model["embed"], training.model["head"]["weight"].T)
        assert np.shares_memory(training.model["embed"], training.model["head"]["weight"])
    leaves = list(training.state.leaves())
    assert {array.dtype.name for array in op.trainables(training.model).values()} == {"float32"}
    assert {slot.dtype.name for leaf in leaves for slot in leaf.slots.values()} == {"float32"}
    assert {str(leaf.path): leaf.step for leaf in leaves}["embed"] == 12
    late = {leaf.step for leaf in leaves if str(leaf.path).startswith("layers.0")}
    assert late == {training.plan[0].steps + training.plan[-1].steps}


def test_same_seed_gives_the_same_losses_and_text_and_another_seed_gives_others(tmp_path: Path):
    first, second, other = (run(tmp_path / str(at), steps=5, seed=seed) for at, seed in enumerate((3, 3, 4)))
    assert first.metrics["train_losses"] == second.metrics["train_losses"]
    assert first.metrics["held_out_loss_nats"] == second.metrics["held_out_loss_nats"]
    assert (first.out / "sample.txt").read_bytes() == (second.out / "sample.txt").read_bytes()
    assert first.metrics["train_losses"] != other.metrics["train_losses"]


def test_terminal_shows_a_bar_with_phase_loss_rate_and_what_trains(tmp_path: Path):
    _, printed, _, metrics = run(tmp_path, steps=8, terminal=True)
    assert "━" in printed
    for shown in ("trunk frozen", "8/8", "loss ", "lr 0.0", f"{metrics['elements']:,} train"):
        assert shown in printed
    assert "step 8/8" not in printed


def test_one_step_is_enough(tmp_path: Path):
    finished, _, _, metrics = run(tmp_path, steps=1)
    assert finished
    assert [phase["phase"] for phase in metrics["phases"]] == ["all trains"]


# Interrupted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 12, 15])
def test_interrupted_run_reports_what_it_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int):
    interrupted_after(steps, monkeypatch)
    finished, printed, _, metrics = run(tmp_path, steps=24)
    assert not finished
    assert {file.name for file in tmp_path.iterdir()} == FILES
    assert f"Interrupted after {steps} of 24 steps" in printed
    assert metrics["steps"] == sum(phase["steps"] for phase in metrics["phases"]) == steps
    assert metrics["steps_planned"] == 24
    assert metrics["phases"][-1]["held_out_loss"] == metrics["held_out_loss_nats"]


def test_run_interrupted_between_phases_reports_the_phases_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = trainings.Training.enter

    def enter(training: Any, phase: Any) -> None:
        if phase.freeze:
            raise KeyboardInterrupt
        real(training, phase)

    monkeypatch.setattr(trainings.Training, "enter", enter)
    finished, printed, _, metrics = run(tmp_path, steps=10)
    assert not finished
    assert printed.count("all trains: 5 steps") == 1
    assert [phase["phase"] for phase in metrics["phases"]] == ["all trains"]


def test_run_interrupted_before_the_held_out_loss_was_sampled_is_drawn_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_after(2, monkeypatch)
    _, _, _, metrics = run(tmp_path, steps=400)
    assert metrics["held_out_samples"] == []
    assert (tmp_path / "losses.png").exists()


def test_run_that_is_interrupted_at_once_says_so_and_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_after(0, monkeypatch)
    finished, printed, *_ = run(tmp_path, steps=24)
    assert not finished
    assert "nothing to show" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("steps", [0, 1, 13, 15, 22])
def test_resumed_run_ends_as_if_it_had_not_been_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int):
    whole = run(tmp_path / "whole", steps=24, seed=3)
    with monkeypatch.context() as patch:
        interrupted_after(steps, patch)
        finished, printed, *_ = run(tmp_path / "a b", steps=24, seed=3)
    assert not finished
    assert f"optimisers demo --resume --out '{tmp_path}/a b'" in printed
    resumed = run(tmp_path / "a b", None, resume=True)
    assert resumed.finished
    assert {**resumed.metrics, "seconds": 0} == {**whole.metrics, "seconds": 0}
    assert (resumed.out / "sample.txt").read_bytes() == (whole.out / "sample.txt").read_bytes()
    first, second = (op.load(each.out / "run.safetensors") for each in (whole, resumed))
    assert first.state == second.state
    assert all((first.model[name] == second.model[name]).all() for name in first.model)


def test_finished_run_that_is_resumed_is_reported_again(tmp_path: Path):
    first = run(tmp_path, steps=4)
    again = run(tmp_path, steps=4, seed=0, resume=True)
    assert again.finished
    assert again.metrics["train_losses"] == first.metrics["train_losses"]


def test_what_cannot_be_resumed_is_an_error(tmp_path: Path):
    with pytest.raises(StateError, match="to go on with; begin one without --resume"):
        run(tmp_path / "nowhere", None, resume=True)
    assert not (tmp_path / "nowhere").exists()
    run(tmp_path, steps=2)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(StateError, match="has --steps 2, and goes on with it; leave --steps out"):
        run(tmp_path, steps=3, resume=True)
    with pytest.raises(StateError, match="has --seed 0"):
        run(tmp_path, None, seed=1, resume=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    training = trainings.Training.new(demo.read(), 2, 0)
    op.save(tmp_path / "run.safetensors", training.state.adjust(lr=0.1), training.model, extra={"epoch": 1})
    with pytest.raises(StateError, match="is not of a run of the demo"):
        run(tmp_path, None, resume=True)
