"""How far a training is: a bar on a terminal, elsewhere a line now and then."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from optimisers.demo.training import Training

__all__ = ["Display"]

_LINES = 20


class _Speed(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.0f} steps/s" if task.speed else "", style="progress.data.speed")


class Display:
    """Shows a training that goes on: phase, step, loss, learning rate, how many elements train."""

    def __init__(self, console: Console, training: Training) -> None:
        self._console = console
        self._training = training
        self._steps = training.steps
        self._bar = Progress(
            TextColumn("{task.description:<15}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            _Speed(),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task("", total=self._steps, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, phase: str) -> None:
        """Show the step that was just taken."""
        training, done = self._training, len(self._training.losses)
        figures = f"loss {training.losses[-1]:.3f}  lr {training.rate(done - 1):.4f}  {training.live_elements:,} train"
        self._bar.update(self._task, completed=done, description=phase, figures=figures)
        if not self._console.is_terminal and (done % max(1, self._steps // _LINES) == 0 or done == self._steps):
            self._console.print(f"{phase:<15}  step {done:>{len(str(self._steps))}}/{self._steps}  {figures}")
