"""Watching a training as it runs: at every so many steps a sample of gradient norms, update ratios and learning rates."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from optimisers.backends.arrays import WRITABLE
from optimisers.errors import ModelError, OptimiserWarning, StateError
from optimisers.gradients import gather
from optimisers.model.layout import Layout
from optimisers.model.reading import open_with
from optimisers.monitoring.lines import SampleFile
from optimisers.monitoring.norms import Watch, check_readable, gradient_squares, holding, probe_of, step_squares
from optimisers.monitoring.recording import Recording
from optimisers.monitoring.sampling import rates_of, sample_of, write
from optimisers.state import State, check_state
from optimisers.update import step as take_step

__all__ = ["Monitor"]


class Monitor:
    r"""Records how a training goes: for each parameter the norm of its gradient, how far steps move it, and its learning rate.

    $$\text{grad\_norm} = \|g\|_2 \qquad \text{update\_ratio} = \|\Delta p\|_2 / \|p\|_2$$

    g is the gradient as it is given, summed over the occurrences of a tied parameter and before any rule acts on it; p is the
    parameter before the step, and Δp what the step did to it in the end, in its own dtype. Frozen rows are left out. There is no
    ratio for a parameter of zeros. The learning rate is the rule's `lr` at the state's step; in a chain, that of the last member
    that has one.

    A sample belongs to a step that was taken, when its number (`state.step` after it) is a multiple of `every`, so a resumed run
    samples the same steps. Where a gate is closed (`AccumGrad` between firings, `SkipNonFinite`) no step is taken; of a window of
    `AccumGrad`, the gradient is that of the call that fires. On other steps nothing is read or copied. A step in one compiled pass
    adds the sums up on its way; elsewhere the monitor keeps a copy of the live parameters of NumPy and PyTorch.

    For steps that are taken elsewhere (inside `jax.jit`) there are `due` and `record`, for optimizers of PyTorch `attach`.

    **Arguments:**

    - `file`: where samples are appended, one line of JSON each (see `optimisers.monitoring.lines`); what is there already belongs
      to the recording. One process alone may write to it. With `None`, they are kept in memory only.
    - `every`: between samples, in steps.
    - `writer`: anything with `add_scalar(tag, value, step)`, such as `torch.utils.tensorboard.SummaryWriter`. It gets
      `grad_norm/<path>` and `update_ratio/<path>`, and for all parameters that share a rate one `lr/<path of the first>`.

    `recording` is what was recorded, a `Recording`. A monitor can be pickled and copied; its `writer` stays behind.

    **Raises** `StateError` for an `every` below 1, a writer without `add_scalar`, or a file of something else; `OSError` for a
    file that cannot be made or written; and when it first records, `StateError` for a file of another model. If writing fails later
    on, as on a full disk, it warns: the step is taken, and the sample is kept to be written with the next one.

    Example:
        >>> import numpy as np, optimisers as op, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> model = {"w": np.array([3.0, 4.0])}
        >>> state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(file, every=2)
        >>> for _ in range(4):
        ...     state, model = monitor.update_(state, model, {"w": np.array([0.6, 0.8])})
        >>> recording = op.Recording.read(file)
        >>> recording.steps, recording.grad_norm.ravel(), recording.update_ratio.ravel().round(4)
        (array([2, 4]), array([1., 1.]), array([0.0204, 0.0213]))
        >>> recording.plot(file.with_suffix(".html"))
    """

    def __init__(self, file: "str | os.PathLike[str] | None" = None, *, every: int = 10, writer: Any = None) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise StateError(f"Monitor(every={every!r}): every is a whole number of steps, 1 or more")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise StateError(
                f"Monitor(writer={writer!r}): a writer has add_scalar(tag, value, step), as TensorBoard's SummaryWriter"
            )
        self.every = every
        self.writer = writer
        self._file = None if file is None else SampleFile(file)
        self.recording = Recording()
        if self._file is not None:
            self._file.ready()
            self.recording = Recording(self._file.samples())
        self._attached: WeakSet[Any] = WeakSet()
        self._begun = False
        # The probe, with the copies that it keeps from sample to sample.
        self._probe: State | None = None

    def __repr__(self) -> str:
        file = "" if self._file is None else f"{self._file.name!r}, "
        return f"Monitor({file}every={self.every}, {self.recording!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "writer": None, "_probe": None, "_attached": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _attached=WeakSet())

    # Steps ------------------------------------------------------------------------------------------------------------

    def update(self, state: State, model: Any, grads: Any = None) -> tuple[State, Any]:
        """Take one step as `optimisers.update` does, and record it if it is due."""
        return self._step(state, model, grads, in_place=False)

    def update_(self, state: State, model: Any, grads: Any = None) -> tuple[State, Any]:
        """Take one step as `optimisers.update_` does, and record it if it is due.

        **Raises** as that does, and `StateError` inside `jax.jit`, where numbers cannot be read; nothing has changed then.
        """
        return self._step(state, model, grads, in_place=True)

    def _step(self, state: State, model: Any, grads: Any, *, in_place: bool) -> tuple[State, Any]:
        if not self.due(state):
            return take_step(state, model, grads, in_place=in_place)
        self._ready(state)
        rates = rates_of(state)
        watch = Watch(self._probe_for(state.layout), in_place=in_place)
        new_state, new_model = take_step(state, model, grads, in_place=in_place, watch=watch)
        if watch.stepped:
            self._add(state, int(new_state.step), watch.stepped, watch.squares(new_state, new_model), rates)
            self._keep(watch.probe)
        return new_state, new_model

    def due(self, state: "State | int") -> bool:
        """Whether the next step is to be sampled.

        **Arguments:** `state`: before the step; or the number of steps taken so far, for loops that know it themselves: to read the
        count of a state that comes out of `jax.jit` is to wait for that step.

        **Raises** `StateError` inside `jax.jit`.
        """
        if isinstance(state, State):
            return (_count(state) + 1) % self.every == 0
        if not isinstance(state, int):
            check_state(state, "Monitor")
        return (state + 1) % self.every == 0

    def record(self, state: State, model: Any, grads: Any, new_state: State, new_model: Any) -> None:
        """Record a step that was taken elsewhere, due or not. If none was taken (a gate was closed), nothing is recorded.

        **Arguments:** the state and the model before it, the gradients as `update` takes them, the state and the model after it.
        The arrays of the model before must still hold what they held: take the step with `update`, or inside a `jax.jit` that they
        are not donated to.

        **Raises** `StateError` inside `jax.jit`, for arrays that were donated, and for states of different models; `ModelError`,
        `GradientError`, `ShapeError` and `DtypeError` as `update` does.

        Example:
            >>> import jax, jax.numpy as jnp, optimisers as op
            >>> model = {"w": jnp.array([3.0, 4.0])}
            >>> state, monitor = op.setup(op.Descent(0.1), model), op.Monitor(every=2)
            >>> step = jax.jit(op.update)
            >>> for at in range(4):
            ...     new_state, new_model = step(state, model, model)
            ...     if monitor.due(at):
            ...         monitor.record(state, model, model, new_state, new_model)
            ...     state, model = new_state, new_model
            >>> monitor.recording.steps, monitor.recording.update_ratio.ravel().round(4)
            (array([2, 4]), array([0.1, 0.1]))
        """
        before, after = _count(state), _count(new_state)
        if state.layout.index.keys() != new_state.layout.index.keys():
            raise StateError("record takes the states before and after one step, and these are of different models")
        if before == after:
            return
        self._ready(state)
        view = open_with(state.layout, model)
        gradients = gather(grads, state.layout, view)
        probe = holding(probe_of(state.layout), view.arrays, gradients, copy=False)
        squares = gradient_squares(probe, view.arrays, gradients)
        self._record(state, new_state, new_model, probe, gradients, squares)

    def _record(
        self, state: State, new_state: State, new_model: Any, probe: State, gradients: Sequence[Any], squares: np.ndarray
    ) -> None:
        arrays = open_with(new_state.layout, new_model).arrays
        squares = np.concatenate([squares, step_squares(probe, arrays, gradients)])
        counts = [[int(count) for count in each.counters] for each in (state, new_state)]
        pairs = zip(gradients, state.parameters, new_state.parameters, strict=True)
        stepped = [at for at, (grad, a, b) in enumerate(pairs) if grad is not None and counts[0][a.counter] != counts[1][b.counter]]
        self._add(state, _count(new_state), stepped, squares, rates_of(state))

    def attach(self, optimizer: Any) -> "Attached":
        """Record the steps of an `optimisers.interop.torch_optim.Optimizer`, when they are due.

        The gradients are those that the step leaves behind in `.grad`, so a closure may compute them.

        **Returns** a handle whose `remove()` ends it.

        **Raises** `ModelError` for any other optimizer, `StateError` for one that it is attached to already.

        Example:
            >>> import torch, optimisers as op
            >>> from optimisers.interop.torch_optim import Optimizer
            >>> module = torch.nn.Linear(2, 1)
            >>> optimizer, monitor = Optimizer(module, op.AdamW(1e-3)), op.Monitor(every=2)
            >>> handle = monitor.attach(optimizer)
            >>> for _ in range(4):
            ...     optimizer.zero_grad()
            ...     module(torch.ones(3, 2)).square().mean().backward()
            ...     optimizer.step()
            >>> handle.remove()
            >>> monitor.recording
            Recording(2 samples, steps 2 to 4, 2 parameters)
        """
        if not isinstance(getattr(optimizer, "op_state", None), State):
            raise ModelError(
                f"attach takes an optimisers.interop.torch_optim.Optimizer, not {type(optimizer).__name__}; where a trainer has "
                "put one into a shell, attach to what is inside"
            )
        if optimizer in self._attached:
            raise StateError("this monitor is attached to this optimizer already; remove() of the handle ends that")
        self._attached.add(optimizer)
        before: list[tuple[State, State]] = []

        def hold(optimizer: Any, *_: Any) -> None:
            before.clear()
            state = optimizer.op_state
            if self.due(state):
                self._ready(state)
                arrays = open_with(state.layout, optimizer.module).arrays
                live = [None if record.frozen else array for record, array in zip(state.parameters, arrays, strict=True)]
                self._keep(holding(self._probe_for(state.layout), arrays, live, copy=True))
                assert self._probe is not None
                before.append((state, self._probe))

        def add(optimizer: Any, *_: Any) -> None:
            for state, probe in before:
                if _count(optimizer.op_state) != _count(state):
                    view = open_with(state.layout, optimizer.module)
                    gradients = gather(None, state.layout, view)
                    squares = gradient_squares(probe, view.arrays, gradients)
                    self._record(state, optimizer.op_state, optimizer.module, probe, gradients, squares)
            before.clear()

        hooks = (optimizer.register_step_pre_hook(hold), optimizer.register_step_post_hook(add))
        return Attached(lambda: self._attached.discard(optimizer), *(hook.remove for hook in hooks))

    # Samples ----------------------------------------------------------------------------------------------------------

    def _ready(self, state: State) -> None:
        """See that a sample can be written, before anything changes; the first time, that it belongs to what is in the file."""
        if self._file is None:
            return
        if not self._begun and len(self.recording):
            here = {str(path) for path in state}
            last = int(self.recording.steps[-1])
            if here.isdisjoint(self.recording.paths):
                raise StateError(f"{self._file.name} holds a recording of another model; give a new file")
            if _count(state) == 0:
                warnings.warn(
                    f"{self._file.name} holds samples up to step {last}, and this run begins at 0; from now on they are "
                    "passed over when it is read",
                    OptimiserWarning,
                    stacklevel=4,
                )
        self._begun = True
        self._file.ready()

    def _probe_for(self, layout: Layout) -> State:
        """The probe for a layout: the one with copies to write into, as long as they fit."""
        fresh = probe_of(layout)
        return self._probe if self._probe is not None and self._probe.layout is fresh.layout else fresh

    def _keep(self, probe: State) -> None:
        # Arrays that were held as they are would live on.
        self._probe = probe if {*probe.layout.libraries} <= {*WRITABLE} else None

    def _add(self, state: State, number: int, stepped: Sequence[int], squares: np.ndarray, rates: np.ndarray) -> None:
        sample = sample_of(state, number, stepped, squares, rates)
        self.recording.add(sample)
        if self._file is not None:
            self._file.append(sample)
        if self.writer is not None:
            try:
                write(self.writer, sample, state, rates)
            except Exception as error:  # noqa: BLE001  # a writer may raise whatever it likes
                # The step has been taken: to raise would lose it.
                warnings.warn(f"the writer cannot write step {number} ({error})", OptimiserWarning, stacklevel=4)


class Attached:
    """A monitor's hold on an optimizer; `remove()` ends it."""

    def __init__(self, *removals: Callable[[], Any]) -> None:
        self._removals = removals

    def remove(self) -> None:
        """Let go of the optimizer; the second time, nothing."""
        removals, self._removals = self._removals, ()
        for remove in removals:
            remove()


def _count(state: State) -> int:
    """The steps that a state has taken.

    **Raises** `StateError` where that cannot be told.
    """
    check_state(state, "Monitor")
    step = state.step
    check_readable((step, *state.counters))
    if getattr(step, "shape", ()) != ():
        raise StateError("this is the state of an ensemble; record its members one by one")
    return int(step)
