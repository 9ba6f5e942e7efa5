"""Every rule beside its reference: PyTorch's, optax's, or the paper's formula in NumPy.

`python -m tests.parity` measures all of them, and writes the table of `docs/rules.md` anew.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import optimisers as op
from optimisers.schedules import Linear
from tests.conftest import BACKENDS, EPS, Backend, dtype_of, leaf, numpy_dtype, random_array, train, wide

STEPS = 20
Arrays = Mapping[str, np.ndarray]

SHAPES = {"w": (6, 4), "b": (5,), "s": (1,)}
MATRICES = {"tall": (6, 4), "wide": (3, 5)}
ANY = ("float64", "float32")
COMPLEX = ("complex128", "complex64")
HALVES = ("float16", "bfloat16")


def is_double(dtype: str) -> bool:
    return dtype in ("float64", "complex128")


# References -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Another implementation of a rule: where parameters end that start somewhere and meet these gradients."""

    name: str
    run: Callable[[Arrays, Sequence[Arrays]], Arrays]
    exact: bool = False
    """Whether it runs in double precision, whatever the dtype of the case."""


@contextmanager
def _double() -> Iterator[None]:
    # NAdam keeps its product of momenta in the default dtype, on which its bias correction rests.
    import torch

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def pytorch(
    optimiser: str,
    *,
    name: str = "",
    clip: Callable[[Any, list[Any]], Any] | None = None,
    average: float | None = None,
    exact: bool = False,
    **options: Any,
) -> Reference:
    """An optimiser of `torch.optim`: after a clipping of the gradients, or seen through a moving average."""

    def run(start: Arrays, gradients: Sequence[Arrays]) -> Arrays:
        import torch
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        model = torch.nn.ParameterDict({name: torch.tensor(array) for name, array in start.items()})
        # Muon iterates in bfloat16; here in the dtype of the parameter. It divides what it is given in place.
        with _double(), patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            stepper = getattr(torch.optim, optimiser)(list(model.values()), **options)
            averaged = None if average is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average))
            for each in gradients:
                for name, parameter in model.items():
                    parameter.grad = torch.tensor(each[name])
                if clip is not None:
                    clip(torch.nn.utils, list(model.values()))
                stepper.step()
                if averaged is not None:
                    averaged.update_parameters(model)
        seen: Any = model if averaged is None else averaged.module
        return {name: parameter.detach().numpy() for name, parameter in seen.items()}

    return Reference(name or f"`torch.optim.{optimiser}`", run, exact)


def _clip_values(limit: float) -> Callable[[Any, list[Any]], None]:
    return lambda utils, tensors: utils.clip_grad_value_(tensors, limit)


def _clip_norms(limit: float, together: bool) -> Callable[[Any, list[Any]], None]:
    """Clipping of all gradients together, or of each. PyTorch adds 1e-6 to the norm that it divides by; not so here."""

    def clip(utils: Any, tensors: list[Any]) -> None:
        for group in [tensors] if together else [[each] for each in tensors]:
            norm = utils.get_total_norm([each.grad for each in group])
            utils.clip_grads_with_norm_(group, limit, norm - 1e-6)

    return clip


def optax(
    name: str,
    make: Callable[[Any], Any],
    *,
    wrap: Callable[[Any, Any], Any] = lambda o, params: params,
    look: Callable[[Any, Any, Any], Any] = lambda o, state, params: params,
) -> Reference:
    """A transformation of optax. It runs in double precision: in single, its bias corrections cost it four digits."""

    @cache
    def made() -> tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]:
        import jax
        import optax

        transformation = make(optax)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        # Code that runs 20 times has to be compiled quickly, not well.
        quick = {"xla_backend_optimization_level": 0}
        return jax.jit(transformation.init, compiler_options=quick), jax.jit(step, compiler_options=quick)

    def run(start: Arrays, gradients: Sequence[Arrays]) -> Arrays:
        import jax
        import optax

        with jax.enable_x64(True):
            init, step = made()
            params = wrap(optax, dict(start))
            state = init(params)
            for grads in gradients:
                params, state = step(params, state, dict(grads))
            return {name: np.asarray(array) for name, array in look(optax, state, params).items()}

    return Reference(f"`optax.{name}`", run, exact=True)


def formula(name: str, step: Callable[[int, Any, Any, Any], Any]) -> Reference:
    """A formula in NumPy, from `(t, p, g, m)` to the new p. What it keeps in `m` starts at zero."""

    def run(start: Arrays, gradients: Sequence[Arrays]) -> Arrays:
        end = dict(start)
        memory: dict[str, Any] = {name: defaultdict(float) for name in start}
        for t, each in enumerate(gradients, 1):
            end = {name: step(t, p, each[name], memory[name]) for name, p in end.items()}
        return end

    return Reference(f"{name}, in NumPy", run, exact=True)


def _adam_direction(t: int, g: Any, m: Any, first: float, second: float, eps: float) -> Any:
    m["mu"] = first * m["mu"] + (1 - first) * g
    m["nu"] = second * m["nu"] + (1 - second) * np.abs(g) ** 2
    return m["mu"] / (1 - first**t) / (np.sqrt(m["nu"] / (1 - second**t)) + eps)


def _oadam(t: int, p: Any, g: Any, m: Any) -> Any:
    now = 0.1 * _adam_direction(t, g, m, 0.6, 0.8, 1e-6)
    before, m["before"] = m["before"], now
    return p - 2 * now + before


def _cautious(t: int, p: Any, g: Any, m: Any) -> Any:
    direction = _adam_direction(t, g, m, 0.5, 0.9, 1e-8)
    mask = (m["mu"] * g > 0) * 1.0
    return p * (1 - 0.1 * 0.2) - 0.1 * direction * mask / max(mask.mean(), 1e-3)


def _cautious_amsgrad(t: int, p: Any, g: Any, m: Any) -> Any:
    _adam_direction(t, g, m, 0.5, 0.9, 1e-8)
    m["peak"] = np.maximum(m["peak"], m["nu"])
    mask = (m["mu"] * g > 0) * 1.0
    direction = m["mu"] / (1 - 0.5**t) / (np.sqrt(m["peak"] / (1 - 0.9**t)) + 1e-8)
    return p * (1 - 0.1 * 0.2) - 0.1 * direction * mask / max(mask.mean(), 1e-3)


def _adafactor(t: int, p: Any, g: Any, m: Any) -> Any:
    m["nu"] = m["nu"] + t**-0.8 * (g**2 - m["nu"])
    step = g / np.sqrt(m["nu"])
    return p - 0.4 * step / max(1.0, float(np.sqrt((step**2).mean())))


def _schedule_free(t: int, p: Any, g: Any, m: Any) -> Any:
    rate = 0.1 * min(t - 1, 8) / 8
    m["largest"] = max(m["largest"], rate)
    m["weights"] += m["largest"]
    share = m["largest"] / m["weights"] if m["weights"] else 0.0
    before = p if t == 1 else m["z"]
    average = (p - (1 - 0.8) * before) / 0.8
    m["nu"] = 0.99 * m["nu"] + 0.01 * np.abs(g) ** 2
    m["z"] = before - rate * (g / (np.sqrt(m["nu"] / (1 - 0.99**t)) + 1e-5) + 0.2 * p)
    return (1 - 0.8) * m["z"] + 0.8 * ((1 - share) * average + share * m["z"])


def _plain_muon(t: int, p: Any, g: Any, m: Any) -> Any:
    m["velocity"] = 0.95 * m["velocity"] + g
    x = g + 0.95 * m["velocity"]
    x = x / np.linalg.norm(x)
    for _ in range(5):
        x = 3.4445 * x - 4.775 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return p * (1 - 0.1 * 0.1) - 0.1 * x


# Cases ----------------------------------------------------------------------------------------------------------------


def _model(state: op.State, model: Any) -> Any:
    return model


@dataclass(frozen=True, eq=False)
class Comparison:
    """A rule with some options, and what it is compared with."""

    rule: op.Rule
    reference: Any
    of: type[op.Rule] | None = None
    """Which member of a chain the case is about."""
    also: str = ""
    """What is compared beside the options of the rule."""
    dtypes: tuple[str, ...] = ANY

    @property
    def subject(self) -> type[op.Rule]:
        return self.of or type(self.rule)

    @property
    def changed(self) -> dict[str, Any]:
        """The options of the rule that are not as usual."""
        mine = next(member for member in (self.rule, *self.rule.members) if type(member) is self.subject)
        usual = {each.name: each.default for each in dataclasses.fields(mine)}  # type: ignore[arg-type]
        return {name: value for name, value in mine.hyperparameters.items() if value != usual[name]}

    def without(self, name: str) -> op.Rule:
        """The rule with one option as usual."""

        def usual(member: op.Rule) -> op.Rule:
            default = next(each.default for each in dataclasses.fields(member) if each.name == name)  # type: ignore[arg-type]
            return dataclasses.replace(member, **{name: default})  # type: ignore[type-var]

        if type(self.rule) is self.subject:
            return usual(self.rule)
        return op.Chain(*(usual(member) if type(member) is self.subject else member for member in self.rule.members))

    @property
    def options(self) -> list[str]:
        """What the table says of it."""
        if self.subject is op.Chain:
            found = [f"`{type(member).__name__}`" for member in self.rule.members]
        else:
            found = [_shown(name, value) for name, value in self.changed.items()] or ["defaults"]
        return found + [self.also] * bool(self.also) + ["complex numbers"] * (self.dtypes == COMPLEX)

    def tolerance(self, dtype: str) -> float:
        """The largest deviation that may be."""
        raise NotImplementedError

    def deviation(self, backend: Backend, dtype: str) -> float:
        """How far the rule is from its reference."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Case(Comparison):
    """A rule whose numbers are those of another implementation, step by step."""

    reference: Reference
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    broken: tuple[int, ...] = ()
    """The steps at which a gradient holds NaN."""
    lean: float = 0.0
    """What is added to all gradients, so that the parameters go somewhere."""
    size: float = 1.0
    """What all gradients are multiplied by."""
    fade: float = 1.0
    """What gradients are multiplied by from one step to the next."""
    outcome: Callable[[op.State, Any], Any] = _model
    """What is compared, from the state and the model after the last step."""

    def tolerance(self, dtype: str) -> float:
        """1e-12 in double precision, eight units in the last place in single."""
        return 1e-12 if is_double(dtype) else 8 * EPS["float32"]

    def deviation(self, backend: Backend, dtype: str) -> float:
        """The largest difference, relative to the largest number of the parameter at its start or end."""
        start, gradients = self.data(dtype)
        with backend.active():
            made = [{name: backend.make(array) for name, array in each.items()} for each in gradients]
            state, model = train(self.rule, {name: backend.make(array) for name, array in start.items()}, *made)
            outcome = self.outcome(state, model)
        worst = 0.0
        for name, right in true_end(self, dtype).items():
            found = wide(backend.read(outcome[name]))
            assert found.shape == right.shape
            assert np.isfinite(found).all()
            assert np.isfinite(right).all()
            scale = max(np.abs(wide(start[name])).max(), np.abs(right).max())
            worst = max(worst, float(np.abs(found - right).max() / scale))
        return worst

    def data(self, dtype: str) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
        """Where the parameters start, and the gradients of each step."""
        rng = np.random.default_rng(3)
        kind = "complex128" if dtype.startswith("complex") else "float64"

        def made() -> dict[str, np.ndarray]:
            return {name: random_array(rng, shape, kind).astype(numpy_dtype(dtype)) for name, shape in self.shapes.items()}

        start = made()
        gradients = [{name: array + array.dtype.type(self.lean) for name, array in made().items()} for _ in range(STEPS)]
        for step, each in enumerate(gradients):
            factor = self.size * self.fade**step
            if factor != 1:
                each |= {name: (array * array.dtype.type(factor)).astype(array.dtype) for name, array in each.items()}
        for step in self.broken:
            gradients[step]["w"][0, 0] = np.nan
        return start, gradients


@cache
def true_end(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Where the reference of a case ends, run once for all backends."""

    def cast(arrays: Arrays) -> Arrays:
        if case.reference.exact:
            return {name: wide(array) for name, array in arrays.items()}
        return {name: array.astype(np.float32) for name, array in arrays.items()} if dtype in HALVES else arrays

    start, gradients = case.data(dtype)
    end = case.reference.run(cast(start), [cast(each) for each in gradients])
    return {name: wide(array) for name, array in end.items()}


def _shown(name: str, value: Any) -> str:
    return f"`{name}={value!r}`" if value is False or isinstance(value, str) else f"`{name}`"


@dataclass(frozen=True, eq=False)
class Statistic(Comparison):
    """A rule that draws numbers: how far its sample is from the distribution it promises, in standard errors."""

    reference: str
    measure: Callable[[Backend, str], float] = lambda backend, dtype: 0.0

    def tolerance(self, dtype: str) -> float:
        return 4.0

    def deviation(self, backend: Backend, dtype: str) -> float:
        with backend.active():
            return self.measure(backend, dtype)


_NOISY = op.Chain(op.AddNoise(0.3, 0.4, seed=5), op.Descent(1.0))


def _noise(backend: Backend, dtype: str) -> float:
    """The mean and the variance of the noise at each step."""
    zeros = np.zeros((100, 100))
    model: Any = {"w": backend.array(zeros, dtype)}
    state, worst, before = op.setup(_NOISY, model), 0.0, zeros
    for step in range(1, STEPS + 1):
        state, model = op.update(state, model, {"w": backend.array(zeros, dtype)})
        now = wide(backend.read(model["w"]))
        noise = (before - now) / (0.3 / step**0.4) ** 0.5
        # The mean of n squares of unit variance has the variance 2/n.
        errors = abs(noise.mean()) * noise.size**0.5, abs((noise**2).mean() - 1) * (noise.size / 2) ** 0.5
        worst, before = max(worst, *errors), now
    return worst


_ROUNDING = op.Chain(op.StochasticRounding(7), op.Descent(1.0))


def _rounding(backend: Backend, dtype: str) -> float:
    """The share that is rounded up, at five places between two neighbours: nothing but these two may come out."""
    size, gap, worst = 10_000, 2.0**-7, 0.0
    for part in (0.125, 0.25, 0.5, 0.75, 0.875):
        model = {"w": backend.array(np.ones(size), dtype)}
        state = op.setup(_ROUNDING, model)
        gradient = {"w": backend.array(np.full(size, -part * gap), dtype)}
        found = wide(backend.read(op.update(state, model, gradient)[1]["w"]))
        assert set(np.unique(found)) == {1.0, 1.0 + gap}
        share = float((found > 1.0).mean())
        worst = max(worst, abs(share - part) / (part * (1 - part) / size) ** 0.5)
    return worst


def _masters(state: op.State, model: Any) -> Any:
    """The float32 masters of parameters that are their rounded copies."""
    masters = {name: leaf(state, name).slots["master"] for name in model}
    for name, array in model.items():
        backend = next(each for each in BACKENDS if type(each.array(0.0, "float32")) is type(array))
        copy, master = backend.read(array), backend.read(masters[name])
        assert (copy == master.astype(copy.dtype)).all(), f"{name} is not its {dtype_of(array)} copy"
    return masters


def _beside(rule: op.Rule) -> op.Rule:
    """A part of a chain before plain descent."""
    return op.Chain(rule, op.Descent(0.1))


def _muon(**options: Any) -> Case:
    theirs = {"adjust_lr_fn": None, **options}
    rule = op.Muon(0.1, **options)
    return Case(rule, pytorch("Muon", name="`torch.optim.Muon`, without its bfloat16", lr=0.1, **theirs), shapes=MATRICES)


def _same(rule: type[op.Rule], optimiser: str, *options: dict[str, Any], **fixed: Any) -> list[Case]:
    """A rule whose options have the names that PyTorch gives them. `fixed` goes to PyTorch alone."""
    return [Case(rule(**each), pytorch(optimiser, **each, **fixed)) for each in options]


_ADAM = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-5}
_DECAY = {**_ADAM, "weight_decay": 0.2}
_CAUTIOUS = {"betas": (0.5, 0.9), "weight_decay": 0.2, "cautious": True}
_OPTAX_ADAM = {"b1": 0.8, "b2": 0.99, "eps": 1e-5}

CASES: Sequence[Comparison] = (
    # Descent
    *_same(op.Descent, "SGD", {"lr": 0.3}),
    *_same(op.Momentum, "SGD", {"lr": 0.1, "momentum": 0.8}, name="`torch.optim.SGD(momentum=…)`"),
    *_same(op.Nesterov, "SGD", {"lr": 0.1, "momentum": 0.8}, name="`torch.optim.SGD(nesterov=True)`", nesterov=True),
    *_same(
        op.SGD,
        "SGD",
        {},
        {"lr": 0.1, "weight_decay": 0.2},
        {"lr": 0.1, "momentum": 0.8},
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2, "nesterov": True},
    ),
    Case(op.SGD(0.1, 0.8, 0.3, 0.2), pytorch("SGD", lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.2), dtypes=COMPLEX),
    # Adam and its kin
    *_same(op.Adam, "Adam", {}, _ADAM),
    Case(op.Adam(**_ADAM), optax("adam", lambda o: o.adam(0.1, **_OPTAX_ADAM)), dtypes=COMPLEX),
    *_same(op.AMSGrad, "Adam", {}, _ADAM, name="`torch.optim.Adam(amsgrad=True)`", amsgrad=True),
    # PyTorch multiplies p by 1 - lr λ before the step. This second rounding of p errs to the same side at each step: with the
    # defaults in float32, by as much as is allowed here.
    *_same(
        op.AdamW,
        "AdamW",
        {},
        _DECAY,
        {**_DECAY, "amsgrad": True},
        name="`torch.optim.AdamW`, in float64",
        exact=True,
    ),
    Case(op.AdamW(**_DECAY), optax("adamw", lambda o: o.adamw(0.1, **_OPTAX_ADAM, weight_decay=0.2)), dtypes=COMPLEX),
    Case(op.AdamW(0.1, **_CAUTIOUS), formula("Liang et al. (2024)", _cautious)),
    Case(op.AdamW(0.1, **_CAUTIOUS, amsgrad=True), formula("Liang et al. (2024)", _cautious_amsgrad)),
    *_same(op.AdaMax, "Adamax", {}, _DECAY),
    *_same(
        op.NAdam,
        "NAdam",
        {},
        {**_DECAY, "momentum_decay": 0.1},
        {**_DECAY, "decoupled_weight_decay": True},
        {**_ADAM, "momentum_decay": 0.0},
        name="`torch.optim.NAdam`, its product of momenta in float64",
    ),
    # With the second decay at 0.6 the denominator is never trusted, and its factor would be one over zero.
    *_same(
        op.RAdam,
        "RAdam",
        {},
        _DECAY,
        {**_DECAY, "decoupled_weight_decay": True},
        {**_DECAY, "betas": (0.8, 0.6), "decoupled_weight_decay": True},
    ),
    Case(op.OAdam(0.1, (0.6, 0.8), 1e-6), formula("Daskalakis et al. (2018)", _oadam)),
    Case(op.OAdam(0.1, (0.6, 0.8), 1e-6), formula("Daskalakis et al. (2018)", _oadam), dtypes=COMPLEX),
    Case(op.AdaBelief(), optax("adabelief", lambda o: o.adabelief(1e-3))),
    Case(
        op.AdaBelief(**_ADAM, eps_root=1e-5),
        optax("adabelief", lambda o: o.adabelief(0.1, **_OPTAX_ADAM, eps_root=1e-5)),
    ),
    Case(op.AdaBelief(0.1), optax("adabelief", lambda o: o.adabelief(0.1)), dtypes=COMPLEX),
    Case(op.Adan(), optax("adan", lambda o: o.adan(1e-3))),
    Case(
        op.Adan(0.1, (0.9, 0.8, 0.95), 1e-6, 1e-5, 0.2),
        optax("adan", lambda o: o.adan(0.1, 0.9, 0.8, 0.95, 1e-6, 1e-5, 0.2)),
    ),
    Case(op.Lion(), optax("lion", lambda o: o.lion(1e-4, weight_decay=0.0))),
    Case(op.Lion(0.1, (0.8, 0.95), 0.2), optax("lion", lambda o: o.lion(0.1, 0.8, 0.95, weight_decay=0.2))),
    Case(op.Lion(0.1), optax("lion", lambda o: o.lion(0.1, weight_decay=0.0)), dtypes=COMPLEX),
    # By the history of each element
    *_same(
        op.RMSProp,
        "RMSprop",
        {},
        {"lr": 0.1, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.2},
        {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.2},
        {"lr": 0.1, "centered": True},
        {"lr": 0.1, "momentum": 0.5, "centered": True, "weight_decay": 0.2},
    ),
    *_same(
        op.AdaGrad,
        "Adagrad",
        {},
        {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.2, "initial_accumulator_value": 0.4, "eps": 1e-6},
    ),
    *_same(op.AdaDelta, "Adadelta", {}, {"lr": 0.8, "rho": 0.8, "eps": 1e-2, "weight_decay": 0.2}),
    *_same(op.Rprop, "Rprop", {}, {"lr": 0.1, "etas": (0.4, 1.3), "step_sizes": (0.03, 0.15)}),
    # Matrices
    _muon(),
    _muon(weight_decay=0.2, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    _muon(ns_coefficients=(3.0, -4.0, 2.0), ns_steps=3, adjust_lr_fn="original"),
    dataclasses.replace(_muon(eps=1e-5, adjust_lr_fn="original"), size=1e-6),
    *_same(
        op.Adafactor,
        "Adafactor",
        {},
        {"lr": 0.4, "beta2_decay": -0.5, "eps": (1e-3, 2.0), "d": 1.1, "weight_decay": 0.2},
    ),
    Case(
        op.Adafactor(0.4, factored=False, relative_step=False, scale_parameter=False),
        formula("Shazeer and Stern (2018)", _adafactor),
    ),
    Case(op.Muon(0.1, adjust_lr_fn="none"), formula("Jordan et al. (2024)", _plain_muon), shapes=MATRICES),
    # Measured against the parameter
    Case(op.LAMB(), optax("lamb", lambda o: o.lamb(1e-3))),
    Case(op.LAMB(**_DECAY), optax("lamb", lambda o: o.lamb(0.1, **_OPTAX_ADAM, weight_decay=0.2))),
    Case(op.LARS(), optax("lars", lambda o: o.lars(1.0))),
    Case(
        op.LARS(0.1, 0.8, 0.2, 0.5, 1e-3),
        optax("lars", lambda o: o.lars(0.1, 0.2, trust_coefficient=0.5, eps=1e-3, momentum=0.8)),
    ),
    Case(op.LARS(0.1, nesterov=True), optax("lars", lambda o: o.lars(0.1, nesterov=True))),
    # Without a schedule, or a learning rate
    Case(op.Prodigy(), optax("contrib.prodigy", lambda o: o.contrib.prodigy())),
    # The estimate rests on p₀ - p: after small steps of a float32 parameter little of that is left but its rounding, which any
    # implementation meets. Hence a first estimate that takes larger ones.
    Case(
        op.Prodigy(0.5, (0.8, 0.99), 0.9, 1e-6, 0.2, 0.05, 2.0),
        optax("contrib.prodigy", lambda o: o.contrib.prodigy(0.5, (0.8, 0.99), 0.9, 1e-6, 0.05, 2.0, 0.2)),
        also="an estimate that grows",
        lean=1.0,
    ),
    Case(
        op.Prodigy(d0=0.05, d_coef=5.0, safeguard_warmup=True),
        optax("contrib.prodigy", lambda o: o.contrib.prodigy(estim_lr0=0.05, estim_lr_coef=5.0, safeguard_warmup=True)),
        also="an estimate that grows",
        lean=1.0,
    ),
    Case(op.ScheduleFree(), optax("contrib.schedule_free_adamw", lambda o: o.contrib.schedule_free_adamw())),
    Case(
        op.ScheduleFree(0.1, (0.8, 0.99), 1e-5, 0.2),
        optax(
            "contrib.schedule_free_adamw",
            lambda o: o.contrib.schedule_free_adamw(0.1, **_OPTAX_ADAM, weight_decay=0.2),
        ),
    ),
    # Optax weighs a step with the rate of the next one.
    Case(
        op.ScheduleFree(Linear(0.0, 0.1, 8), (0.8, 0.99), 1e-5, 0.2, 1.0),
        formula("Defazio et al. (2024)", _schedule_free),
    ),
    Case(
        op.ScheduleFree(0.1),
        optax(
            "contrib.schedule_free_adamw",
            lambda o: o.contrib.schedule_free_adamw(0.1),
            look=lambda o, state, params: o.contrib.schedule_free_eval_params(state, params),
        ),
        also="the weights to evaluate with",
        outcome=lambda state, model: op.evaluation(state, model)[1],
    ),
    # Parts of a chain
    Case(
        _beside(op.WeightDecay()),
        pytorch("SGD", name="`weight_decay` of `torch.optim.SGD`", lr=0.1, weight_decay=5e-4),
        op.WeightDecay,
    ),
    Case(
        op.Chain(op.WeightDecay(0.2), op.Adam(0.1)),
        pytorch("Adam", name="`weight_decay` of `torch.optim.Adam`", lr=0.1, weight_decay=0.2),
        op.WeightDecay,
        "first of its chain",
    ),
    Case(
        op.Chain(op.Adam(0.1), op.WeightDecay(0.02)),
        optax("add_decayed_weights", lambda o: o.chain(o.adam(0.1), o.add_decayed_weights(-0.02))),
        op.WeightDecay,
        "last of its chain",
    ),
    Case(
        _beside(op.SignDecay(0.2)),
        formula("Tibshirani (1996)", lambda t, p, g, m: p - 0.1 * (g + 0.2 * np.sign(p))),
        op.SignDecay,
    ),
    Case(
        _beside(op.SignDecay(0.2)),
        formula("Tibshirani (1996)", lambda t, p, g, m: p - 0.1 * (g + 0.2 * p / np.abs(p))),
        op.SignDecay,
        dtypes=COMPLEX,
    ),
    Case(
        _beside(op.ClipGrad(0.9)),
        pytorch("SGD", name="`torch.nn.utils.clip_grad_value_`", clip=_clip_values(0.9), lr=0.1),
        op.ClipGrad,
    ),
    *(
        Case(
            _beside(rule),
            pytorch(
                "SGD", name=f"`torch.nn.utils.clip_grad_norm_`{each}, without its 1e-6", clip=_clip_norms(2.0, together), lr=0.1
            ),
            type(rule),
            dtypes=dtypes,
        )
        for rule, each, together in ((op.ClipNorm(2.0), " of each parameter", False), (op.ClipGlobalNorm(2.0), "", True))
        for dtypes in (ANY, COMPLEX)
    ),
    Case(
        _beside(op.ClipAdaptive(0.3, 2.5)),
        optax("adaptive_grad_clip", lambda o: o.chain(_rows_and_vectors(o, 0.3, 2.5), o.sgd(0.1))),
        op.ClipAdaptive,
    ),
    Case(
        _beside(op.ClipAdaptive(0.3, 2.5, -1)),
        optax("adaptive_grad_clip", lambda o: o.chain(o.adaptive_grad_clip(0.3, 2.5), o.sgd(0.1))),
        op.ClipAdaptive,
    ),
    Case(_beside(op.CentraliseGrad()), optax("centralize", lambda o: o.chain(o.centralize(), o.sgd(0.1))), op.CentraliseGrad),
    Case(
        _beside(op.CentraliseGrad(-1)),
        formula("Yong et al. (2020)", lambda t, p, g, m: p - 0.1 * (g - g.mean(0) if g.ndim > 1 else g)),
        op.CentraliseGrad,
    ),
    Statistic(_NOISY, "the mean and the variance of 10,000 draws a step", op.AddNoise, measure=_noise),
    Case(
        op.Chain(op.AccumGrad(), op.Adam(0.1)),
        optax("MultiSteps", lambda o: o.MultiSteps(o.adam(0.1), 2, accumulator_dtype="float64")),
        op.AccumGrad,
    ),
    Case(
        op.Chain(op.AccumGrad(3), op.Adam(0.1)),
        optax("MultiSteps", lambda o: o.MultiSteps(o.adam(0.1), 3, accumulator_dtype="float64")),
        op.AccumGrad,
    ),
    Case(
        op.Chain(op.SkipNonFinite(), op.Adam(0.1)),
        optax("apply_if_finite", lambda o: o.apply_if_finite(o.adam(0.1), 9)),
        op.SkipNonFinite,
        "NaN at three steps",
        broken=(2, 3, 11),
    ),
    *(
        Case(
            op.Chain(op.Adam(0.1), op.Lookahead(**options)),
            optax(
                "lookahead", make, wrap=lambda o, params: o.LookaheadParams(params, params), look=lambda o, s, params: params.fast
            ),
            op.Lookahead,
        )
        for options, make in (
            ({}, lambda o: o.lookahead(o.adam(0.1), 5, 0.5)),
            ({"k": 3, "alpha": 0.8}, lambda o: o.lookahead(o.adam(0.1), 3, 0.8)),
        )
    ),
    *(
        Case(
            op.Chain(op.AdamW(0.1), op.Average(decay)),
            pytorch("AdamW", name="`torch.optim.swa_utils.get_ema_multi_avg_fn`", average=decay, lr=0.1),
            op.Average,
            outcome=op.averaged,
        )
        for decay in (0.999, 0.8)
    ),
    Case(
        op.Chain(op.MixedPrecision(), op.AdamW(0.1)),
        pytorch("AdamW", name="`torch.optim.AdamW` on float32 copies", lr=0.1),
        op.MixedPrecision,
        "the masters; float16 and bfloat16",
        dtypes=HALVES,
        outcome=_masters,
    ),
    Statistic(
        _ROUNDING,
        "the share of 10,000 that is rounded up",
        op.StochasticRounding,
        "five places between two neighbours, in bfloat16",
        ("bfloat16",),
        _rounding,
    ),
    Case(
        op.Chain(op.ClipGlobalNorm(2.0), op.AdamW(**_DECAY)),
        pytorch(
            "AdamW",
            name="`torch.nn.utils.clip_grad_norm_`, without its 1e-6, and `torch.optim.AdamW`",
            clip=_clip_norms(2.0, True),
            **_DECAY,
        ),
    ),
)


def _rows_and_vectors(optax: Any, clipping: float, eps: float) -> Any:
    """optax's clipping with the units along axis 0, as PyTorch lays out its layers."""
    return optax.partition(
        {"matrix": optax.adaptive_grad_clip(clipping, eps, axis=1), "vector": optax.adaptive_grad_clip(clipping, eps)},
        {"w": "matrix", "b": "vector", "s": "vector"},
    )


# The table ------------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"
BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"


@dataclass(frozen=True)
class Row:
    """A line of the table: a rule, its reference, the options compared, and for each backend the cell of deviations."""

    rule: str
    reference: str
    options: str
    cells: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"| {' | '.join((f'`{self.rule}`', self.reference, self.options, *self.cells))} |"


def _key(case: Comparison) -> tuple[str, str]:
    return case.subject.__name__, case.reference if isinstance(case.reference, str) else case.reference.name


def rows(measure: bool = False) -> list[Row]:
    """The lines of the table, a rule's together; without measuring, their cells are missing."""
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for case in CASES:
        groups[_key(case)].append(case)
    found = []
    for (rule, reference), cases in groups.items():
        options = ", ".join(dict.fromkeys(option for case in cases for option in case.options))
        cells = tuple(_cell(cases, backend) for backend in BACKENDS) if measure else ()
        found.append(Row(rule, reference, options, cells))
    return found


def _cell(cases: Sequence[Comparison], backend: Backend) -> str:
    """The largest deviation in double and in single precision; of a distribution, in standard errors."""
    worst: dict[bool, float] = {}
    for case in cases:
        for dtype in case.dtypes:
            if dtype in backend.dtypes:
                double = is_double(dtype)
                worst[double] = max(worst.get(double, 0.0), case.deviation(backend, dtype))
    unit = " σ" if isinstance(cases[0], Statistic) else ""
    return "; ".join(_digit(worst[double]) + unit if double in worst else "–" for double in (True, False))


def _digit(value: float) -> str:
    """A number with one significant digit: 3e-16."""
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.0e}") if 0 < value < 0.1 else f"{value:.1g}"


def header() -> list[str]:
    """The first two lines of the table."""
    names = ["rule", "reference", "options compared", *(each.name for each in BACKENDS)]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


@cache
def written() -> tuple[list[str], list[Row]]:
    """The first two lines and the rows of the table as it stands in the page."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    found = []
    for line in lines[2:]:
        rule, reference, options, *cells = (each.strip() for each in line.strip("|").split("|"))
        found.append(Row(rule.strip("`"), reference, options, tuple(cells)))
    return lines[:2], found


def noted(case: Comparison, backend: Backend, dtype: str) -> float:
    """The deviation that the table gives for the row of a case."""
    cell = next(row for row in written()[1] if (row.rule, row.reference) == _key(case)).cells[BACKENDS.index(backend)]
    return float(cell.split("; ")[not is_double(dtype)].removesuffix(" σ"))


def write() -> None:
    """Measure everything, and write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table = "\n".join([*header(), *map(str, rows(measure=True))])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
