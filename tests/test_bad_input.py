"""Bad input is an error of the library's own family, which names the path and the remedy, before anything changed."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import (
    DtypeError,
    GradientError,
    HyperparameterError,
    ModelError,
    OptimiserError,
    PathError,
    ShapeError,
    StateError,
    TieError,
)
from tests.conftest import Backend, all_bits, rule_classes, train


def _model(backend: Backend) -> dict[str, Any]:
    shared = backend.array([9.0])
    # The parameter that is wrong stands last, so that a step without foresight has changed the others by then.
    return {
        "a": backend.array([1.0, 2.0]),
        "b": backend.array([1.0, 2.0], "float32"),
        "tied": [shared, shared],
        "z": {"w": backend.array(np.ones((2, 3)))},
    }


def _grads(backend: Backend, last: Any) -> dict[str, Any]:
    return {
        "a": backend.array([1.0, 1.0]),
        "b": backend.array([1.0, 1.0], "float32"),
        "tied": [backend.array([1.0]), backend.array([2.0])],
        "z": {"w": last},
    }


def _flat(model: Any) -> dict[str, Any]:
    return {"a": model["a"], "b": model["b"], "t": model["tied"][0], "w": model["z"]["w"]}


GRADIENTS: dict[str, tuple[Callable[[Backend], Any], type[OptimiserError], str]] = {
    "another shape": (lambda b: b.array(np.ones((3, 2))), ShapeError, r"z\.w: the gradient has shape \(3, 2\).*must be equal"),
    "broadcastable": (lambda b: b.array(np.ones((1, 3))), ShapeError, r"z\.w: the gradient has shape \(1, 3\)"),
    "no axes": (lambda b: b.array(1.0), ShapeError, r"z\.w: the gradient has shape \(\)"),
    "integers": (lambda b: b.array(np.ones((2, 3)), "int64"), DtypeError, r"z\.w: the gradient has dtype int64.*convert"),
    "booleans": (lambda b: b.array(np.ones((2, 3)), "bool"), DtypeError, r"z\.w: the gradient has dtype bool"),
    "complex": (lambda b: b.array(np.ones((2, 3)), "complex128"), DtypeError, r"z\.w: the gradient is complex128.*real part"),
    "a number": (lambda b: 1.0, GradientError, r"z\.w: the gradient is a float, not an array; pass an array or None"),
    "text": (lambda b: "gradient", GradientError, r"z\.w: the gradient is a str"),
    "a list": (lambda b: [[1.0] * 3] * 2, GradientError, r"z\.w"),
    "a function": (lambda b: len, GradientError, r"z\.w: the gradient is a builtin_function_or_method"),
    "another library": (
        lambda b: np.ones((2, 3)) if b.name in ("strict", "torch", "lists") else __import__("torch").ones(2, 3),
        GradientError,
        r"z\.w: the gradient is a \w+ array, the parameter a \w+ array; convert it",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("step", [op.update, op.update_])
def test_a_gradient_that_does_not_fit(backend: Backend, name: str, step: Any) -> None:
    make, error, message = GRADIENTS[name]
    for rule in (op.Adam(0.1), op.Chain(op.ClipGlobalNorm(1.0), op.AccumGrad(2), op.Momentum(0.1))):
        model = _model(backend)
        good = _grads(backend, backend.array(np.ones((2, 3))))
        state, model = train(rule, model, good, in_place=step is op.update_)
        before = all_bits(backend, state, _flat(model))
        with pytest.raises(error, match=message):
            step(state, model, _grads(backend, make(backend)))
        assert all_bits(backend, state, _flat(model)) == before
        step(state, model, good)


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_a_gradient_of_one_place_of_a_tie_that_does_not_fit(backend: Backend, step: Any) -> None:
    model = _model(backend)
    state = op.setup(op.Adam(0.1), model)
    before = all_bits(backend, state, _flat(model))
    for wrong, error in ((backend.array([1.0, 2.0]), ShapeError), (backend.array([1], "int32"), DtypeError), (3.0, GradientError)):
        for place in (0, 1):
            grads = _grads(backend, None)
            grads["tied"][place] = wrong
            with pytest.raises(error, match=rf"tied\.{place}"):
                step(state, model, grads)
    assert all_bits(backend, state, _flat(model)) == before


@pytest.mark.parametrize("step", [op.update, op.update_])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grads: grads | {"zz": grads["a"]}, '"zz", the model has nothing there'),
        (lambda grads: grads | {"z": grads["a"]}, '"z", where the model has a branch'),
        (lambda grads: grads | {"z": [grads["a"]]}, r'"z\.0", the model has nothing there'),
        (lambda grads: grads | {"tied": [*grads["tied"], grads["a"]]}, r'"tied\.2", the model has nothing there'),
        (lambda grads: {"z.v": grads["a"]}, r'"z\.v", the model has nothing there; did you mean "z\.w"'),
        (lambda grads: [grads["a"]], '"0", the model has nothing there'),
        (lambda grads: grads["a"], '"the model", where the model has a branch'),
        (lambda grads: None, "update needs gradients: a tree like the model, or a mapping"),
        (lambda grads: "gradients", 'at "the model"'),
        (lambda grads: 3.0, 'at "the model"'),
    ],
    ids=range(10),
)
def test_gradients_of_another_shape_of_tree(backend: Backend, step: Any, change: Any, message: str) -> None:
    model = _model(backend)
    state = op.setup(op.Adam(0.1), model)
    before = all_bits(backend, state, _flat(model))
    with pytest.raises(GradientError, match=message):
        step(state, model, change(_grads(backend, backend.array(np.ones((2, 3))))))
    assert all_bits(backend, state, _flat(model)) == before


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_a_path_that_cannot_be_read_in_a_mapping_of_gradients(step: Any) -> None:
    model = {"a": np.ones(1), "b": [np.ones(1)]}
    state = op.setup(op.Adam(), model)
    with pytest.raises(PathError, match=r"cannot read the path 'b\.\.0'"):
        step(state, model, {"b..0": np.ones(1)})


@pytest.mark.parametrize("step", [op.update, op.update_])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"z\.w: the state has a parameter here, but the model holds None"),
        (1.0, r"z\.w: the state has a parameter here, but the model holds a float"),
        ("text", r"z\.w: the state has a parameter here, but the model holds a str"),
    ],
    ids=str,
)
def test_a_model_with_no_array_where_one_is_expected(backend: Backend, step: Any, wrong: Any, message: str) -> None:
    model = _model(backend)
    grads = _grads(backend, backend.array(np.ones((2, 3))))
    state = op.setup(op.Adam(0.1), model)
    before = all_bits(backend, state, _flat(model))
    with pytest.raises(ModelError, match=message):
        step(state, model | {"z": {"w": wrong}}, grads)
    assert all_bits(backend, state, _flat(model)) == before


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_a_frozen_parameter_is_not_looked_at(backend: Backend, step: Any) -> None:
    model = _model(backend)
    state = op.setup(op.Adam(0.1), model).freeze("z")
    _, new = step(state, model | {"z": {"w": None}}, {"a": backend.array([1.0, 1.0])})
    assert new["z"]["w"] is None


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_a_nan_learning_rate_never_reaches_a_parameter(backend: Backend, step: Any) -> None:
    model = _model(backend)
    grads = _grads(backend, backend.array(np.ones((2, 3))))
    with pytest.raises(HyperparameterError, match="lr is not a number"):
        op.Adam(float("nan"))
    with pytest.raises(HyperparameterError, match="lr is not a number"):
        op.setup(op.Adam(), model).adjust("z", lr=float("nan"))
    state = op.setup(op.Adam(), model).adjust("z", lr=lambda step: float("nan"))
    before = all_bits(backend, state, _flat(model))
    with pytest.raises(HyperparameterError, match="lr is not a number"):
        step(state, model, grads)
    assert all_bits(backend, state, _flat(model)) == before


def test_a_schedule_that_returns_no_number(backend: Backend) -> None:
    model = _model(backend)
    grads = _grads(backend, backend.array(np.ones((2, 3))))
    for wrong in ("fast", None, (0.1, 0.2)):
        state = op.setup(op.Adam(lambda step, wrong=wrong: wrong), model)
        with pytest.raises(HyperparameterError, match="lr"):
            op.update_(state, model, grads)


@pytest.mark.parametrize("wrong", [None, 3, "state", {}, np.ones(2)], ids=repr)
def test_what_is_no_state(wrong: Any) -> None:
    for run in (
        lambda: op.update(wrong, {"w": np.ones(2)}, {"w": np.ones(2)}),
        lambda: op.update_(wrong, {"w": np.ones(2)}, {"w": np.ones(2)}),
        lambda: op.partition(wrong, {"w": np.ones(2)}),
        lambda: op.summary(wrong),
    ):
        with pytest.raises(OptimiserError, match=r"\w+ takes a State"):
            run()


def test_a_model_and_a_state_that_changed_places() -> None:
    model = {"w": np.ones(2)}
    state = op.setup(op.Adam(), model)
    with pytest.raises(OptimiserError, match="mind the order of the arguments"):
        op.update(model, state, model)  # type: ignore[arg-type]


def test_what_was_not_unpacked() -> None:
    model = {"w": np.ones(2)}
    stepped = op.update(op.setup(op.Adam(), model), model, model)
    with pytest.raises(OptimiserError, match=r"not tuple; give the first in it, as in state, model = update\("):
        op.update(stepped, model, model)  # type: ignore[arg-type]


READ_ONLY = np.ones(2)
READ_ONLY.flags.writeable = False


def test_a_read_only_array_is_replaced_and_not_written(numpy_backend: Backend) -> None:
    model = {"a": READ_ONLY, "b": np.ones(2), "t": (READ_ONLY[:1].reshape(1, 1), 3)}
    model["t"] = (np.broadcast_to(np.float64(1.0), ()), 3)
    state = op.setup(op.Descent(0.5), model)
    for step in (op.update, op.update_):
        _, new = step(state, model, {"a": np.ones(2), "b": np.ones(2), "t": (np.array(1.0), None)})
        assert new["a"].tolist() == [0.5, 0.5]
        assert new["t"][0] == 0.5
        assert READ_ONLY.tolist() == [1.0, 1.0]
        assert new["a"].flags.writeable
    assert new["b"] is model["b"]


def test_a_message_names_the_path_in_its_spelling() -> None:
    model = {"a.b": {0: [np.ones(1)]}}
    state = op.setup(op.Adam(), model)
    with pytest.raises(ShapeError, match=re.escape('"a.b".0.0: the gradient has shape')):
        op.update(state, model, {"a.b": {0: [np.ones(2)]}})
    with pytest.raises(ShapeError, match="the model: the gradient has shape"):
        op.update(op.setup(op.Adam(), np.ones(1)), np.ones(1), np.ones(2))


def test_every_error_names_what_is_wrong_and_a_remedy_in_one_line() -> None:
    model = {"encoder": {"w": np.ones(2)}, "head": np.ones(2)}
    state = op.setup(op.Adam(), model)
    runs: list[Callable[[], Any]] = [
        lambda: state.freeze("encodr"),
        lambda: state["hed"],
        lambda: state.adjust(lrr=1.0),
        lambda: state.tie("hed", "encoder.w"),
        lambda: op.update(state, model, {"encoder": {"w": np.ones(3)}}),
        lambda: op.update(state, {"head": np.ones(2)}, {}),
        lambda: op.setup({"encoder": op.Adam()}, model),
    ]
    for run in runs:
        with pytest.raises(OptimiserError) as caught:
            run()
        message = str(caught.value)
        assert "\n" not in message
        assert re.search(r"encoder|head|lr", message)
        assert re.search(r"did you mean|call adapt|must be equal|add one", message)
        assert len(message) < 300


def test_the_family_is_the_built_in_kind_too() -> None:
    for error, kind in (
        (PathError, KeyError),
        (HyperparameterError, ValueError),
        (ShapeError, ValueError),
        (DtypeError, TypeError),
        (GradientError, ValueError),
        (TieError, ValueError),
        (ModelError, TypeError),
        (StateError, ValueError),
    ):
        assert issubclass(error, OptimiserError)
        assert issubclass(error, kind)
        assert str(error("a sentence")) == "a sentence"


# Hyperparameters -------------------------------------------------------------------------------------------------------


def _wrong(rule: op.Rule) -> list[tuple[str, Any]]:
    """For every hyperparameter of a rule, values that it cannot have, one element of a tuple at a time."""
    found: list[tuple[str, Any]] = []
    for name, value in rule.hyperparameters.items():
        whole = name in ("seed", "unit_axis", "ns_steps")
        flag, text, part = isinstance(value, bool) or name == "factored", isinstance(value, str), name == "fallback"
        bad: list[Any] = [math.nan, -math.inf, "0.1", [0.1], np.array([0.1, 0.2]), 1 + 1j, {"a": 0.1}, op.Adam, b"1"]
        bad += [0.5, 2, -1] if flag or text or part else [True, False]
        bad += [None] if name not in ("beta3", "fallback", "factored", "adjust_lr_fn") and not isinstance(value, tuple) else []
        bad += [1.5, math.inf, lambda step: 1] if whole else []
        bad += [] if name in ("clip_value", "max_norm") else [math.inf]
        bad += [-1.0] if name not in ("dampening", "beta2_decay", "unit_axis", "ns_coefficients") else []
        bad += [1.0, 1.5] if name in ("betas", "alpha", "rho", "beta3") and not isinstance(rule, op.Lookahead) else []
        bad += [0.0] if name in ("n", "k", "d", "d0", "d_coef", "clipping", "clip_value", "max_norm", "trust_coefficient") else []
        if isinstance(value, tuple):
            bad += [None] if value[0] is not None else []
            found += [(name, (*value[:at], each, *value[at + 1 :])) for at in range(len(value)) for each in bad]
            found += [(name, each) for each in (value[:-1], (*value, 0.5), (), 0.5, None, "0.1, 0.1", True)]
        else:
            found += [(name, each) for each in bad]
    return found


@pytest.mark.parametrize("cls", rule_classes(), ids=lambda cls: cls.__name__)
def test_a_hyperparameter_out_of_its_range_or_kind_names_itself(cls: type[op.Rule]) -> None:
    for name, value in _wrong(cls()):
        with pytest.raises(HyperparameterError, match=rf"^{cls.__name__}\({name}=.*{name}") as caught:
            pytest.fail(f"{cls(**{name: value})!r}")
        assert len(str(caught.value)) < 300
        # The same by `adjust`, but for what is static.
        with pytest.raises(HyperparameterError, match=name):
            cls().adjusted(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op.Rprop(etas=(1.2, 0.5)), r"etas must be a number in \(0, 1\) and one above 1"),
        (lambda: op.Rprop(etas=(0.0, 1.2)), "etas"),
        (lambda: op.Rprop(step_sizes=(1.0, 0.5)), "the first of step_sizes must not be above the second"),
        (lambda: op.Lookahead(alpha=1.5), r"alpha must lie in \[0, 1\]"),
        (lambda: op.Average(1.5), r"decay must lie in \[0, 1\]"),
        (lambda: op.Adafactor(beta2_decay=0.5), r"beta2_decay must lie in \(-inf, 0\]"),
        (lambda: op.Adafactor(eps=(None, None)), "eps"),
        (lambda: op.Muon(ns_steps=0), r"ns_steps must lie in \[1, 100\)"),
        (lambda: op.Muon(adjust_lr_fn="moonlight"), 'adjust_lr_fn is "original", "match_rms_adamw" or "none"'),
        (lambda: op.Muon(fallback=op.Adam), r"fallback is a rule or None"),  # type: ignore[arg-type]
        (lambda: op.SGD(nesterov="yes", momentum=0.9), "nesterov is True or False"),  # type: ignore[arg-type]
    ],
    ids=range(11),
)
def test_hyperparameters_that_contradict_each_other_or_the_paper(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        make()


def test_what_may_be_missing_infinite_or_of_numpy_is_taken() -> None:
    assert op.Prodigy(beta3=None).beta3 is None
    assert op.Adafactor(eps=(1e-30, 1e-3)).eps == (1e-30, 1e-3)
    assert op.Adafactor(factored=True).factored is True
    assert op.ClipNorm(math.inf).max_norm == math.inf
    assert op.AdamW(cautious=np.True_).cautious is True  # type: ignore[arg-type]
    assert op.AdamW(amsgrad=np.bool_(False)) == op.AdamW()  # type: ignore[arg-type]
    assert op.AddNoise(seed=np.int64(3)) == op.AddNoise(seed=3)  # type: ignore[arg-type]
    assert op.Muon(fallback=op.Chain(op.ClipNorm(), op.Adam())).fallback == op.Chain(op.ClipNorm(), op.Adam())
