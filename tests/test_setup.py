"""Making a state: which rule each parameter gets, which parameters there are, and what starts frozen."""

from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers import select
from optimisers.errors import DtypeError, HyperparameterError, OptimiserWarning, PathError, StateError
from tests.conftest import Backend, all_bits, assert_close, bits, dtype_of, leaf, train


def _model() -> dict[str, Any]:
    return {"encoder": [{"w": np.ones((2, 2)), "bias": np.ones(2)} for _ in range(2)], "head": np.ones(3)}


def _rules(state: op.State) -> dict[str, op.Rule]:
    return {str(each.path): each.rule for each in state.leaves()}


# Rules by selector ----------------------------------------------------------------------------------------------------


def test_the_first_selector_that_matches_gives_the_rule() -> None:
    rules = {"**.bias": op.Descent(0.1), "encoder.0": op.Adam(), "encoder": op.AdamW(), "**": op.Momentum()}
    assert _rules(op.setup(rules, _model())) == {
        "encoder.0.bias": op.Descent(0.1),
        "encoder.0.w": op.Adam(),
        "encoder.1.bias": op.Descent(0.1),
        "encoder.1.w": op.AdamW(),
        "head": op.Momentum(),
    }


def test_keys_of_a_mapping_are_selectors_of_any_kind() -> None:
    rules = {
        op.Path("head"): op.Descent(0.1),
        ("encoder", 0, "w"): op.Descent(0.2),
        select.ndim(2): op.Descent(0.3),
        lambda parameter: parameter.path[1] == 0: op.Descent(0.4),
        list: op.Descent(0.5),
    }
    state = op.setup(rules, _model())
    rates = {name: rule.hyperparameters["lr"] for name, rule in _rules(state).items()}
    assert rates == {"encoder.0.bias": 0.4, "encoder.0.w": 0.2, "encoder.1.bias": 0.5, "encoder.1.w": 0.3, "head": 0.1}


def test_a_function_gives_each_parameter_its_rule() -> None:
    state = op.setup(lambda parameter: op.Adam(0.1 if parameter.ndim == 2 else 0.2), _model())
    assert len(state.rules) == 2
    assert leaf(state, "head").rule == op.Adam(0.2)
    assert leaf(state, "encoder.1.w").rule == op.Adam(0.1)


def test_a_parameter_that_no_selector_matches_is_an_error() -> None:
    with pytest.raises(StateError, match=r'head: no selector of the rules matches it; add one, such as "\*\*"'):
        op.setup({"encoder": op.Adam()}, _model())


def test_a_selector_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(PathError, match='no parameter matches "encodr"; did you mean "encoder"'):
        op.setup({"encodr": op.Adam(), "**": op.Descent()}, _model())


def test_a_selector_that_is_never_reached_is_an_error() -> None:
    with pytest.raises(StateError, match=r"the selector 'head' is never reached: .* move it up"):
        op.setup({"**": op.Adam(), "head": op.Descent()}, _model())


def test_two_rules_through_two_paths_of_a_tie_are_an_error() -> None:
    w = np.ones((2, 3))
    model = {"embed": w, "head": {"weight": w.T, "bias": np.ones(3)}}
    with pytest.raises(
        StateError, match=r"embed and head\.weight are one parameter, but 'embed' gives it Adam.*'\*\*' gives it Des"
    ):
        op.setup({"embed": op.Adam(), "**": op.Descent()}, model)
    state = op.setup({select.path("embed") | select.path("head.weight"): op.Adam(), "**": op.Descent()}, model)
    assert leaf(state, "head.weight").rule == op.Adam()
    same = op.setup({"embed": op.Adam(0.5), "head": op.Adam(0.5)}, model)
    assert len(same.rules) == 1


@pytest.mark.parametrize("wish", [op.Adam, "Adam", 0.1, None, [op.Adam()], {"w": np.ones(1)}], ids=str)
def test_what_is_no_rule_is_an_error(wish: Any) -> None:
    with pytest.raises((HyperparameterError, StateError, PathError)):
        op.setup(wish, _model())


def test_a_rule_that_is_none_is_an_error_that_names_the_parameter() -> None:
    with pytest.raises(HyperparameterError, match=r"encoder\.0\.bias: None is not a rule"):
        op.setup(lambda parameter: None, _model())  # type: ignore[arg-type,return-value]
    with pytest.raises(HyperparameterError, match=r"0\.1 is not a rule"):
        op.setup({"**": 0.1}, _model())  # type: ignore[dict-item]
    with pytest.raises(HyperparameterError, match="the rule comes first, then the model"):
        op.setup([np.ones(1)], op.Adam())  # type: ignore[arg-type]
    with pytest.raises(HyperparameterError, match=r"call it: Adam\(\)"):
        op.setup(op.Adam, _model())


def test_groups_of_equal_rules_are_one_group() -> None:
    state = op.setup({"encoder": op.Adam(0.1), "head": op.Adam(0.1)}, _model())
    assert len(state.rules) == 1


def test_making_many_groups_compares_few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = [np.ones(1) for _ in range(300)]
    compared = 0
    equal = op.Descent.__eq__

    def counted(self: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return equal(self, other)

    monkeypatch.setattr(op.Descent, "__eq__", counted)
    state = op.setup(lambda parameter: op.Descent(0.001 * (1 + parameter.path[0])), model)  # type: ignore[operator]
    assert len(state.rules) == 300
    assert compared < 3000


# A hundred groups -----------------------------------------------------------------------------------------------------


def _hundred(backend: Backend, make: Any) -> tuple[list[Any], dict[Any, op.Rule], list[list[Any]]]:
    rng = np.random.default_rng(0)
    model = [backend.array(rng.normal(size=3)) for _ in range(100)]
    rules = {op.Path((at,)): make(0.001 * (at + 1), 0.9 - 0.005 * at) for at in range(100)}
    grads = [[backend.array(rng.normal(size=3)) for _ in range(100)] for _ in range(4)]
    return model, rules, grads


@pytest.mark.parametrize(
    "make",
    [
        lambda lr, beta: op.AdamW(lr, (beta, 0.999), weight_decay=lr),
        lambda lr, beta: op.SGD(lr, momentum=beta, dampening=lr),
        lambda lr, beta: op.Chain(op.ClipNorm(10 * lr), op.Adam(lr, (beta, 0.99))),
    ],
    ids=["AdamW", "SGD", "Chain"],
)
def test_a_hundred_groups_equal_a_hundred_runs(backend: Backend, make: Any) -> None:
    model, rules, grads = _hundred(backend, make)
    state, new = train(op.setup(rules, model), model, grads[0], [None, *grads[1][1:]], *grads[2:])
    for at, rule in enumerate(rules.values()):
        mine = [grads[k][at] for k in range(4) if (at, k) != (0, 1)]
        alone, own = train(rule, [model[at]], *[[g] for g in mine])
        assert_close(backend.read(new[at]), backend.read(own[0]), 4e-16)
        assert leaf(state, at).step == leaf(alone, 0).step == len(mine)
        for name, slot in leaf(alone, 0).slots.items():
            assert_close(backend.read(leaf(state, at).slots[name]), backend.read(slot), 4e-16)


def test_a_step_of_a_hundred_groups_is_one_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from optimisers.backends import numba as compiled

    (backend,) = [each for each in _backends() if each.name == "numba"]
    model, rules, grads = _hundred(backend, lambda lr, beta: op.AdamW(lr, (beta, 0.999)))
    state, model = train(op.setup(rules, model), model, [grads[0][0], *[None] * 99], grads[1])
    calls: list[int] = []
    share = compiled._share
    monkeypatch.setattr(compiled, "_share", lambda chunks, work: (calls.append(len(chunks)), share(chunks, work)))
    state = state.adjust(select.ndim(1), lr=0.5).adjust(lambda parameter: parameter.path[0] % 3 == 0, lr=0.25)
    state, model = op.update_(state, model, grads[2])
    assert calls == [100]
    assert len(state.rules) == 100


def _backends() -> Any:
    from tests.conftest import BACKENDS

    return BACKENDS


# Which parameters there are -------------------------------------------------------------------------------------------


def test_arrays_that_are_not_trainable_are_none_of_the_states_business(backend: Backend) -> None:
    model = {"w": backend.array([1.0]), "average": {"mean": backend.array([5.0]), "count": 3}}
    state = op.setup(op.Adam(0.1), model, trainable="w")
    assert [str(path) for path in state] == ["w"]
    nan = {"w": backend.array([1.0]), "average": {"mean": backend.array([np.nan]), "count": None}}
    for grads in (nan, {"w": backend.array([1.0])}, {"w": backend.array([1.0]), "average": None}):
        _, new = op.update(state, model, grads)
        assert new["average"]["mean"] is model["average"]["mean"]
        assert_close(backend.read(new["w"]), [0.9], 1e-8)
    with pytest.raises(PathError, match="no parameter matches"):
        op.setup(op.Adam(), model, trainable="nothing")
    with pytest.raises(PathError, match="no parameter matches"):
        op.setup(op.Adam(), model, trainable="w", frozen="average")


def test_a_model_without_parameters_is_warned_of() -> None:
    for model in ({}, [], None, 3, {"n": np.arange(3), "text": "x"}):
        for rule in (op.Adam(), {"**": op.Adam()}, lambda parameter: op.Adam()):
            with pytest.warns(OptimiserWarning, match="no trainable parameter"):
                state = op.setup(rule, model)
            assert len(state) == 0
            after, new = op.update(state, model, {})
            assert new is model
            assert (after.step, list(after.leaves())) == (0, [])
            assert "0 parameters" in repr(state)


def test_a_frozen_selector_may_name_what_is_tied(backend: Backend) -> None:
    w = backend.array([1.0])
    state = op.setup(op.Adam(), {"a": w, "b": w, "c": backend.array([1.0])}, frozen="b")
    assert [each.frozen for each in state.leaves()] == [True, False]


# The dtype of the state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["float64", np.float64, np.dtype("float64"), float], ids=str)
def test_state_dtype_takes_the_dtypes_of_any_library(numpy_backend: Backend, wish: Any) -> None:
    model = {"w": np.ones(2, np.float32), "h": np.ones(2, np.float16)}
    state, new = train(op.setup(op.Adam(0.1), model, state_dtype=wish), model, model)
    assert {dtype_of(slot) for each in state.leaves() for slot in each.slots.values()} == {"float64"}
    assert {name: dtype_of(array) for name, array in new.items()} == {"w": "float32", "h": "float16"}
    assert_close(new["w"], [0.9, 0.9], 1e-6)


def test_state_dtype_takes_the_dtype_of_torch_and_of_others() -> None:
    import array_api_strict
    import ml_dtypes
    import torch

    for wish, dtype in ((torch.bfloat16, "bfloat16"), (array_api_strict.float64, "float64"), (ml_dtypes.bfloat16, "bfloat16")):
        model = {"w": torch.ones(2)}
        assert dtype_of(leaf(op.setup(op.Adam(), model, state_dtype=wish), "w").slots["mu"]) == dtype


@pytest.mark.parametrize("wish", ["float33", "int32", np.int64, "complex64", "text", 3, bool, object()])
def test_a_state_dtype_that_is_none_is_an_error(wish: Any) -> None:
    with pytest.raises(DtypeError, match="state_dtype"):
        op.setup(op.Adam(), {"w": np.ones(2)}, state_dtype=wish)


def test_a_shorter_state_dtype_loses_only_what_it_must(numpy_backend: Backend) -> None:
    model = {"w": np.ones(4, np.float32)}
    grads = [{"w": np.full(4, g, np.float32)} for g in (1.0, 2.0, 3.0)]
    exact, _ = train(op.Momentum(0.1), model, *grads)
    short, _ = train(op.setup(op.Momentum(0.1), model, state_dtype="bfloat16"), model, *grads)
    assert_close(leaf(short, "w").slots["velocity"], leaf(exact, "w").slots["velocity"], 2**-7)


# The same from the same -----------------------------------------------------------------------------------------------


def test_setup_reads_the_model_and_changes_nothing(backend: Backend) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([2.0])}
    before = {name: bits(backend, array) for name, array in model.items()}
    first, second = op.setup(op.Adam(), model), op.setup(op.Adam(), model)
    assert first == second
    assert first.layout is second.layout
    assert {name: bits(backend, array) for name, array in model.items()} == before
    assert all_bits(backend, first, model) == all_bits(backend, second, model)
