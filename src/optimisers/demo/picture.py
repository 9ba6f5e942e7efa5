"""The picture: how the losses fell, and what was frozen when."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from optimisers.demo.training import Training

__all__ = ["draw"]

_TRAIN, _HELD_OUT, _RATE = "#3b6fb6", "#c2452d", "#555555"
_LIVE, _FROZEN = "#7fb58a", "#c9d6ea"


def draw(training: Training, entropy: float, file: Path) -> None:
    """Draw a training into a PNG; the entropy of single characters is drawn for comparison."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(5, 1.2, 1.8))
    _losses(above, training, entropy)
    middle.plot(np.arange(len(training.losses)), [training.rate(at) for at in range(len(training.losses))], color=_RATE)
    middle.set_ylabel("learning rate")
    middle.set_ylim(bottom=0)
    _bands(below, training)
    for axes in (above, middle, below):
        axes.spines[["top", "right"]].set_visible(False)
        for outcome in training.outcomes[1:]:
            axes.axvline(outcome.first_step, color="black", linewidth=0.6, linestyle=":")
    above.set_xlim(0, max(1, len(training.losses)))
    figure.savefig(file, dpi=130)


def _losses(axes: Axes, training: Training, entropy: float) -> None:
    losses = np.array(training.losses)
    axes.plot(np.arange(len(losses)), losses, color=_TRAIN, linewidth=0.6, alpha=0.35)
    axes.plot(np.arange(len(losses)), _smooth(losses), color=_TRAIN, linewidth=1.8, label="training loss (running mean)")
    if training.samples:
        steps, held_out = zip(*training.samples, strict=True)
        axes.plot(
            steps, held_out, color=_HELD_OUT, marker="o", markersize=3, linewidth=1.4, label="held-out loss (sample of the text)"
        )
    axes.axhline(entropy, color="black", linewidth=1, linestyle="--", label=f"entropy of single characters: {entropy:.2f}")
    axes.set_ylabel("loss (nats per character)")
    axes.set_title("A language model on the Python language reference, trained, frozen and thawed")
    axes.legend(loc="upper right", framealpha=1, edgecolor="white")
    top = max(float(losses.max()), entropy) * 1.05
    axes.set_ylim(0, top)
    for outcome in training.outcomes:
        axes.text(
            outcome.first_step + outcome.steps / 2,
            0.03 * top,
            outcome.phase.replace(" ", "\n"),
            ha="center",
            va="bottom",
            fontsize=8,
        )


def _smooth(losses: np.ndarray) -> np.ndarray:
    """The running mean that forgets, without its bias towards zero at the start."""
    weight = 0.9
    mean, total, smooth = 0.0, 0.0, []
    for each in losses:
        mean, total = weight * mean + (1 - weight) * each, weight * total + (1 - weight)
        smooth.append(mean / total)
    return np.array(smooth)


def _bands(axes: Axes, training: Training) -> None:
    """For each branch of the model a bar, coloured by whether it was frozen."""
    branches = list(dict.fromkeys(_branch(str(path)) for path in training.state))
    for row, branch in enumerate(branches):
        for outcome in training.outcomes:
            frozen = branch in map(_branch, outcome.frozen)
            axes.barh(
                row,
                outcome.steps,
                left=outcome.first_step,
                height=0.8,
                color=_FROZEN if frozen else _LIVE,
                hatch="///" if frozen else None,
                edgecolor="white",
                linewidth=0,
            )
    for label, color, hatch in (("trains", _LIVE, None), ("frozen", _FROZEN, "///")):
        axes.bar(0, 0, color=color, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.1)
    axes.set_yticks(range(len(branches)), branches)
    axes.invert_yaxis()
    axes.set_xlabel("step")


def _branch(path: str) -> str:
    """What a parameter is drawn with: its layer, or the part of the model that it stands in."""
    keys = path.split(".")
    return ".".join(keys[:2]) if keys[0] == "layers" else keys[0]
