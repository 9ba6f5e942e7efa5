"""What every rule promises, on every backend and every dtype."""

import copy
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

import optimisers as op
from optimisers.schedules import Linear
from tests.conftest import (
    DTYPES,
    EPS,
    RULES,
    SETTINGS,
    Backend,
    all_bits,
    assert_apart,
    assert_close,
    dtype_of,
    random_array,
    train,
    trains,
    wide,
)

SHAPES = {"w": (3, 4), "b": (4,), "s": ()}
STEPS = ("wbs", "w", "wbs", "", "wbs")
"""For each step, the parameters that have a gradient."""


@cache
def _data(dtype: str) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(7)
    start = {name: random_array(rng, shape, dtype) for name, shape in SHAPES.items()}
    return start, [{name: random_array(rng, SHAPES[name], dtype) for name in names} for names in STEPS]


@cache
def _true_run(name: str, dtype: str) -> tuple[op.State, dict[str, np.ndarray]]:
    """The same numbers in double precision, on the reference backend."""
    start, gradients = _data(dtype)
    with op.reference_only():
        return train(
            RULES[name],
            {name: wide(array) for name, array in start.items()},
            *({name: wide(array) for name, array in each.items()} for each in gradients),
        )


class Run:
    """One rule on one backend and dtype: a run by `update`, and one by `update_`."""

    def __init__(self, name: str, backend: Backend, dtype: str) -> None:
        self.name, self.backend, self.dtype, self.rule = name, backend, dtype, RULES[name]
        start, gradients = _data(dtype)
        self.pure: list[tuple[op.State, dict[str, Any]]] = []
        self.in_place: list[dict[str, Any]] = []
        self.bits: list[dict[str, Any]] = []
        self.touched: list[int] = []
        self.arrays: list[dict[str, np.ndarray]] = []
        model, other = self._made(start), self._made(start)
        state, twin = op.setup(self.rule, model), op.setup(self.rule, other)
        self.pure.append((state, model))
        for step, each in enumerate(gradients):
            grads = self._made(each)
            before = all_bits(backend, state, model), all_bits(backend, state, grads), list(map(id, model.values()))
            after, new = op.update(state, model, grads)
            if (all_bits(backend, state, model), all_bits(backend, state, grads), list(map(id, model.values()))) != before:
                self.touched.append(step)
            self.arrays.append(self._seen(after, new, grads, model, state))
            state, model = after, new
            self.pure.append((state, model))
            self.bits.append(all_bits(backend, state, model))
            grads = self._made(each)
            twin, other = op.update_(twin, other, grads)
            self.in_place.append(all_bits(backend, twin, other))
            self.arrays.append(self._seen(twin, other, grads))

    def _made(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.backend.make(array) for name, array in arrays.items()}

    def _seen(self, state: op.State, model: Any, grads: Any, old: Any = None, before: op.State | None = None) -> dict[str, Any]:
        """All arrays that must not share memory after a step; those that a pure step left behind among them."""
        read = self.backend.read
        seen = {f"parameter {name}": read(array) for name, array in model.items()}
        seen |= {f"gradient {name}": read(array) for name, array in grads.items()}
        seen |= {f"{each.path} {name}": read(slot) for each in state.leaves() for name, slot in each.slots.items()}
        seen |= {f"old {name}": read(array) for name, array in (old or {}).items() if array is not model[name]}
        if before is not None:
            kept = {id(slot) for each in state.leaves() for slot in each.slots.values()}
            olds = {f"old {each.path} {name}": slot for each in before.leaves() for name, slot in each.slots.items()}
            seen |= {name: read(slot) for name, slot in olds.items() if id(slot) not in kept}
        return seen


RUNS = [
    (name, *setting)
    for setting in SETTINGS
    for name in RULES
    if all(trains(RULES[name], shape, setting[1]) for shape in SHAPES.values())
]
"""Every rule in every setting that it is for."""


@pytest.fixture(scope="module", params=[pytest.param(each, id=f"{each[1]}-{each[2]}-{each[0]}") for each in RUNS])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run of every rule in every setting, made once for all the tests that look at it."""
    name, backend, dtype = request.param
    with backend.active():
        yield Run(name, backend, dtype)


def test_only_signs_and_matrices_ask_for_real_parameters() -> None:
    missing = {(name, dtype) for name in RULES for _, dtype in SETTINGS} - {(name, dtype) for name, _, dtype in RUNS}
    assert missing == {("Rprop", "complex64"), ("Rprop", "complex128")}


def _slot_dtype(dtype: str, real: bool) -> str:
    computed = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    return {"complex64": "float32", "complex128": "float64"}.get(computed, computed) if real else computed


# A run ----------------------------------------------------------------------------------------------------------------


def test_parameters_and_slots_keep_their_dtypes_and_shapes(run: Run) -> None:
    for step, (state, model) in enumerate(run.pure):
        for each in state.leaves():
            array = model[str(each.path)]
            assert (dtype_of(array), tuple(array.shape)) == (run.dtype, SHAPES[str(each.path)]), f"step {step}"
            kinds = {name: kind for member in each.rule.members for name, kind in member.slots.items()}
            assert each.slots.keys() == kinds.keys()
            for name, kind in kinds.items():
                slot, shape = each.slots[name], kind.shape(each.shape) if kind.shape else each.shape
                assert (dtype_of(slot), tuple(slot.shape)) == (_slot_dtype(run.dtype, kind.real), shape), f"step {step}: {name}"


def test_numbers_agree_with_double_precision(run: Run) -> None:
    state, model = run.pure[-1]
    true, right = _true_run(run.name, run.dtype)
    start, _ = _data(run.dtype)
    # In half precision each step rounds the parameter once; the arithmetic is that of float32.
    tolerance = (4 if run.dtype.endswith("float16") else 24) * EPS[run.dtype]
    if run.name == "AddNoise" and run.backend.name == "jax":
        tolerance = 0.2  # it draws its own numbers
    assert np.abs(right["w"] - wide(start["w"])).max() > 0.05, "the rule takes no steps"
    for name, array in right.items():
        assert_close(run.backend.read(model[name]), array, tolerance)
    for mine, its in zip(state.leaves(), true.leaves(), strict=True):
        assert (mine.path, mine.step) == (its.path, its.step)
        for name, slot in its.slots.items():
            assert_close(run.backend.read(mine.slots[name]), slot, tolerance)
    assert state.step == true.step
    assert state.memory.keys() == true.memory.keys()
    for member, memory in true.memory.items():
        assert dict(state.memory[member]) == pytest.approx(dict(memory), rel=tolerance, abs=tolerance)


def test_update_and_update_in_place_agree_bit_for_bit(run: Run) -> None:
    for pure, in_place in zip(run.bits, run.in_place, strict=True):
        assert pure == in_place


def test_update_leaves_its_arguments_untouched(run: Run) -> None:
    assert run.touched == []


def test_nothing_shares_memory(run: Run) -> None:
    for arrays in run.arrays:
        assert_apart(arrays)


# Convergence ----------------------------------------------------------------------------------------------------------


CONVERGENCE = [
    (name, backend, dtype)
    for backend, dtype in SETTINGS
    if dtype == "float32" or (backend.name, dtype) in (("numba", "complex64"), ("blocks", "bfloat16"))
    for name in RULES
    if trains(RULES[name], (3,), dtype)
]


@pytest.mark.parametrize(("name", "backend", "dtype"), CONVERGENCE, ids=lambda each: str(each))
def test_a_quadratic_converges(name: str, backend: Backend, dtype: str) -> None:
    rule = RULES[name]
    curvature = np.array([0.5, 0.7, 0.9])
    start = np.array([1.0, -0.8, 1.2]) * (1 + 0.5j if dtype.startswith("complex") else 1)
    model = {"x": backend.array(start, dtype)}
    with backend.active():
        state = op.setup(rule.adjusted(lr=Linear(0.3, 0.01, 80)) if "lr" in rule.hyperparameters else rule, model)
        for _ in range(80):
            gradient = curvature * wide(backend.read(model["x"]))
            state, model = op.update_(state, model, {"x": backend.array(gradient, dtype)})
    assert np.abs(wide(backend.read(model["x"]))).max() < 0.2 * np.abs(start).max()


RATES = {"ClipGrad": 0.05, "ClipAdaptive": 0.05, "Trust": 0.05} | dict.fromkeys(
    ("Descent", "SGD", "Momentum", "Nesterov", "RAdam"), 1e-3
)
"""Learning rates for a narrow curved valley; 0.05 for the rules that choose the length of a step themselves."""


def test_rosenbrock_converges(rule: op.Rule) -> None:
    rule = rule if "lr" in rule.hyperparameters else op.Chain(rule, op.Descent())
    names = [type(member).__name__ for member in rule.members]
    rate = next((RATES[name] for name in names if name in RATES), 0.05)
    decay = {"weight_decay": 1e-4} if "weight_decay" in rule.hyperparameters else {}

    def height(x: float, y: float) -> float:
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2

    # A matrix, so that rules for matrices take part as well.
    model = {"xy": np.array([[0.3, 1.0]])}
    state = op.setup(rule.adjusted(lr=Linear(rate, rate / 10, 600), **decay), model)
    assert height(*model["xy"][0]) > 80
    for _ in range(600):
        x, y = model["xy"][0]
        gradient = np.array([[-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)]])
        state, model = op.update_(state, model, {"xy": gradient})
    # The floor of the valley lies at 0.49 where the run comes down to it.
    assert height(*model["xy"][0]) < 0.4


# Least squares on scikit-learn's diabetes data: 442 patients, 10 columns, and the progress of the disease. The columns are
# correlated, so descent at the best fixed rate is slow.


@cache
def _diabetes(dtype: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Columns and answers of unit variance; for complex numbers turned by a phase. And the least error that is possible."""
    found: Any = load_diabetes(return_X_y=True)
    columns, answers = found
    columns = (columns - columns.mean(0)) / columns.std(0)
    answers = (answers - answers.mean()) / answers.std()
    if dtype.startswith("complex"):
        columns, answers = columns * np.exp(0.3j * np.arange(10)), answers * np.exp(0.5j)
    best = np.linalg.lstsq(columns, answers, rcond=None)[0]
    return columns.astype(dtype), answers.astype(dtype), float(np.mean(np.abs(columns @ best - answers) ** 2))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for dtype in ("float32", "complex64") for name in RULES if trains(RULES[name], (10,), dtype)],
)
def test_a_regression_converges(name: str, dtype: str) -> None:
    columns, answers, least = _diabetes(dtype)
    rule = RULES[name] if "lr" in RULES[name].hyperparameters else op.Chain(RULES[name], op.Descent())
    decay = {"weight_decay": 1e-4} if "weight_decay" in rule.hyperparameters else {}
    model = {"weight": np.full(10, 0.1, dtype), "bias": np.ones((), dtype)}
    state = op.setup(rule.adjusted(lr=Linear(0.1, 0.001, 300), **decay), model)
    for _ in range(300):
        off = columns @ model["weight"] + model["bias"] - answers
        grads = {"weight": columns.conj().T @ off / len(off), "bias": np.asarray(off.mean())}
        state, model = op.update_(state, model, grads)
    error = float(np.mean(np.abs(columns @ model["weight"] + model["bias"] - answers) ** 2))
    assert least <= error < 1.03 * least


# Rules as values ------------------------------------------------------------------------------------------------------


def _same(a: Any, b: Any) -> None:
    assert a == b
    assert hash(a) == hash(b)
    assert type(a) is type(b)


def test_a_rule_is_a_value(rule: op.Rule) -> None:
    _same(rule, copy.deepcopy(rule))
    _same(rule, pickle.loads(pickle.dumps(rule)))
    assert rule == rule.adjusted()
    assert rule != op.Descent(0.125)
    with pytest.raises(AttributeError):
        rule.lr = 3.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RULES)
def test_the_repr_of_a_rule_makes_it_again(name: str) -> None:
    names = vars(op) | {type(member).__name__: type(member) for member in RULES[name].members}
    _same(eval(repr(RULES[name]), dict(names)), RULES[name])


def test_scalars_of_many_steps_are_those_of_each(rule: op.Rule) -> None:
    steps = np.arange(1, 8)
    for member in rule.members:
        together = member.scalars(steps, **member.memory)
        for at, step in enumerate(steps.tolist()):
            alone = member.scalars(step, **member.memory)
            assert alone.keys() == together.keys()
            for name, value in alone.items():
                # NumPy and Python may raise to a power with a last bit of difference, and RAdam subtracts such powers.
                assert np.broadcast_to(together[name], steps.shape)[at] == pytest.approx(value, rel=1e-11, abs=0)


def test_rules_that_differ_in_numbers_alone_run_the_same_program(rule: op.Rule) -> None:
    from optimisers.rules.program import program_of

    changes = {
        name: value * 0.5
        for name, value in rule.hyperparameters.items()
        if isinstance(value, float) and not isinstance(value, bool) and value
    }
    assert program_of(rule.adjusted(**changes)) is program_of(rule)


# The dtype of the state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dtype_holds_from_the_first_step_to_the_last(numpy_backend: Backend, dtype: str, wish: str) -> None:
    start, gradients = _data(dtype)
    state = op.setup(op.AdamW(0.1), start, state_dtype=wish)
    state, _ = train(state, start, *gradients)
    # No complex dtype is shorter than complex64.
    complex_wish = "complex128" if wish == "float64" else "complex64"
    mu = complex_wish if dtype.startswith("complex") else wish
    for each in state.leaves():
        found = {name: dtype_of(slot) for name, slot in each.slots.items()}
        assert found == {"mu": mu, "nu": wish}
