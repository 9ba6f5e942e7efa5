"""Gradients by parameter, and flat views of a model to differentiate with respect to."""

from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import DtypeError, GradientError, ShapeError
from tests.conftest import Backend, assert_close, dtype_of, leaf, random_array, train


def _tied(backend: Backend) -> dict[str, Any]:
    w = backend.array([[1.0, 2.0]])
    return {"a": w, "b": {"c": w, "d": backend.array([3.0])}, "e": backend.array([4.0]), "n": 7}


# Partition ------------------------------------------------------------------------------------------------------------


def test_partition_gives_each_live_parameter_once(backend: Backend) -> None:
    model = _tied(backend)
    state = op.setup(op.Adam(), model).freeze("e")
    params, rebuild = op.partition(state, model)
    assert list(params) == ["a", "b.d"]
    assert params["a"] is model["a"]
    new = rebuild({"a": backend.array([[5.0, 6.0]]), "b.d": backend.array([7.0])})
    assert new["a"] is new["b"]["c"]
    assert backend.read(new["a"]).tolist() == [[5.0, 6.0]]
    assert backend.read(new["b"]["d"]).tolist() == [7.0]
    assert new["e"] is model["e"]
    assert new["n"] == 7
    assert model["b"]["d"] is params["b.d"]


def test_partition_restores_views(sharing_backend: Backend) -> None:
    w = sharing_backend.array(np.arange(6.0).reshape(2, 3))
    model = {"a": w, "t": w.T, "flat": w.reshape(6)}
    params, rebuild = op.partition(op.setup(op.Adam(), model), model)
    assert list(params) == ["a"]
    new = rebuild({op.Path("a"): w + 1})
    assert sharing_backend.read(new["t"]).tolist() == (np.arange(6.0).reshape(2, 3) + 1).T.tolist()
    assert sharing_backend.read(new["flat"]).tolist() == [1, 2, 3, 4, 5, 6]


def test_gradients_of_partition_go_into_update(backend: Backend) -> None:
    for model in (_tied(backend), backend.array([1.0]), [backend.array([1.0]), backend.array([2.0])]):
        state = op.setup(op.Descent(1.0), model)
        params, _ = op.partition(state, model)
        state, new = op.update(state, model, params)
        for array in op.trainables(new).values():
            assert not backend.read(array).any()
        assert all(each.step == 1 for each in state.leaves())


def test_partition_keeps_masked_places_as_they_are(backend: Backend) -> None:
    model = _tied(backend)
    for masked, other in (("a", "b.c"), ("b.c", "a")):
        state = op.setup(op.Descent(1.0), model).mask(masked)
        params, rebuild = op.partition(state, model)
        assert other in params
        assert masked not in params
        new = op.trainables(rebuild(params | {other: backend.array([[9.0, 9.0]])}))
        assert sorted(map(str, (backend.read(new["a"]).tolist(), backend.read(rebuild(params)["a"]).tolist()))) == (
            ["[[1.0, 2.0]]", "[[1.0, 2.0]]"] if masked == "a" else ["[[1.0, 2.0]]", "[[9.0, 9.0]]"]
        )
        _, moved = op.update(state, model, {other: backend.array([[1.0, 1.0]])})
        assert backend.read(moved["a"]).tolist() == [[0.0, 1.0]]
        assert moved["a"] is moved["b"]["c"]
    state = op.setup(op.Descent(1.0), model).mask("a").mask("b.c")
    assert list(op.partition(state, model)[0]) == ["b.d", "e"]


def test_rebuild_takes_the_live_parameters_and_nothing_else(backend: Backend) -> None:
    model = _tied(backend)
    params, rebuild = op.partition(op.setup(op.Adam(), model).freeze("e"), model)
    with pytest.raises(GradientError, match=r'lacks the live parameter "b\.d"'):
        rebuild({"a": params["a"]})
    with pytest.raises(GradientError, match='"e" is no live parameter'):
        rebuild(params | {"e": model["e"]})
    with pytest.raises(GradientError, match=r'"b\.dd" is no live parameter; did you mean "b\.d"'):
        rebuild(params | {"b.dd": model["e"]})


def test_autodiff_through_partition_sums_over_ties() -> None:
    import torch

    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model = {"a": w, "t": w.T, "frozen": torch.ones(2)}
    state = op.setup(op.Descent(1.0), model).freeze("frozen")
    params, rebuild = op.partition(state, model)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    built = rebuild(leaves)
    (built["a"].sum() + (built["t"] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum()).backward()
    grads = {name: tensor.grad for name, tensor in leaves.items()}
    _, new = op.update(state, model, grads)
    assert new["a"].tolist() == [[-1.0, -2.0], [0.0, -1.0]]


# Trainables and destructure -------------------------------------------------------------------------------------------


def test_trainables_are_each_parameter_once(backend: Backend) -> None:
    model = _tied(backend)
    found = op.trainables(model)
    assert list(found) == ["a", "b.d", "e"]
    assert found["a"] is model["a"]


def test_destructure_holds_each_parameter_once_and_rebuilding_restores_ties(backend: Backend) -> None:
    w, z = backend.array([1.0, 2.0]), backend.array([[3.0], [4.0]])
    model = (w, w, {"z": z, "n": 5, "s": backend.array(6.0)})
    flat, rebuild = op.destructure(model)
    assert backend.read(flat).tolist() == [1, 2, 6, 3, 4]
    new = rebuild(flat * 10.0)
    assert new[0] is new[1]
    assert backend.read(new[0]).tolist() == [10, 20]
    assert backend.read(new[2]["z"]).tolist() == [[30], [40]]
    assert tuple(new[2]["s"].shape) == ()
    assert new[2]["n"] == 5
    assert backend.read(w).tolist() == [1, 2]
    assert backend.read(op.destructure(new)[0]).tolist() == [10, 20, 60, 30, 40]


def test_destructure_restores_dtypes_and_views() -> None:
    w = np.array([[1.0, 2.0]], np.float32)
    model = {"a": w, "t": w.T, "h": np.ones(2, np.float16), "z": np.array([1j]), "d": np.array([0.5])}
    flat, rebuild = op.destructure(model)
    assert flat.dtype == np.complex128
    new = rebuild(flat + 1)
    assert {name: dtype_of(array) for name, array in new.items()} == {name: dtype_of(array) for name, array in model.items()}
    assert new["t"].tolist() == [[2.0], [3.0]]
    assert np.shares_memory(new["t"], new["a"])
    assert new["z"].tolist() == [1 + 1j]
    assert new["d"].tolist() == [1.5]


def test_destructure_of_a_model_without_parameters() -> None:
    flat, rebuild = op.destructure({"n": 3})
    assert flat.shape == (0,)
    assert rebuild(flat) == {"n": 3}


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), ()])
def test_a_vector_of_another_length_is_an_error(backend: Backend, shape: tuple[int, ...]) -> None:
    _, rebuild = op.destructure([backend.array([1.0, 2.0]), backend.array([3.0])])
    with pytest.raises(ShapeError, match="the model has 3 elements, but the vector has shape"):
        rebuild(backend.array(np.ones(shape)))


def test_the_gradient_of_the_rebuilt_model_sums_over_ties() -> None:
    import torch

    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    flat, rebuild = op.destructure((w, {"again": w}, torch.tensor([3.0], dtype=torch.float64)))
    flat = flat.clone().requires_grad_()
    first, second, third = rebuild(flat)
    (first.sum() * 2 + (second["again"] ** 2).sum() + 5 * third.sum()).backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [2 + 2, 2 + 4, 5]


# Norms ----------------------------------------------------------------------------------------------------------------


def test_the_global_norm_counts_an_object_once(backend: Backend) -> None:
    g = backend.array([3.0, 0.0])
    assert op.global_norm({"a": g, "b": [g, backend.array([[4.0]])], "n": None, "text": "x", "int": 3}) == pytest.approx(5.0)
    assert op.global_norm({}) == 0.0
    assert op.global_norm(None) == 0.0
    assert op.global_norm(g) == 3.0


def test_the_global_norm_takes_scalars_and_complex_numbers() -> None:
    assert op.global_norm({"a": np.float64(3.0), "b": np.array(4.0)}) == 5.0
    assert op.global_norm([np.array([3j]), np.array([4.0], np.float32)]) == 5.0


def test_the_global_norm_does_not_overflow_in_short_dtypes(backend: Backend) -> None:
    assert op.global_norm({"a": backend.array([3e30, 4e30], "float32")}) == pytest.approx(5e30, rel=1e-6)
    if "float16" in backend.dtypes:
        assert op.global_norm({"a": backend.array(np.full(4096, 600.0), "float16")}) == pytest.approx(38400.0, rel=1e-6)


def test_the_global_norm_takes_what_update_takes(backend: Backend) -> None:
    model = _tied(backend)
    state = op.setup(op.Adam(), model).freeze("e")
    g, other = backend.array([[1.0, 0.0]]), backend.array([[2.0, 0.0]])
    four = backend.array([4.0])
    for grads in (
        {"a": g, "b": {"c": other, "d": four}, "e": None, "n": None},
        {"a": g, "b": {"c": other, "d": four}, "e": four, "n": 7},
        {"a": g, "b.c": other, "b.d": four},
        {op.Path("a"): g, op.Path("b.c"): other, op.Path("b.d"): four},
    ):
        assert op.global_norm(grads, state) == 5.0
        op.update(state, model, grads)
    assert op.global_norm({"a": g, "b": None}, state) == 1.0
    assert op.global_norm({}, state) == 0.0


@pytest.mark.parametrize(
    ("grads", "error"),
    [
        ({"a": np.ones(7)}, ShapeError),
        ({"a": np.ones((1, 2), np.int64)}, DtypeError),
        ({"nothing": np.ones(1)}, GradientError),
        (None, GradientError),
    ],
    ids=range(4),
)
def test_gradients_that_do_not_fit_have_no_norm(numpy_backend: Backend, grads: Any, error: type[Exception]) -> None:
    state = op.setup(op.Adam(), _tied(numpy_backend))
    with pytest.raises(error):
        op.global_norm(grads, state)


# Gradients of many forms ----------------------------------------------------------------------------------------------


def test_every_form_of_gradients_gives_the_same_step(backend: Backend) -> None:
    model = _tied(backend)
    state = op.setup(op.Adam(0.1), model)
    rng = np.random.default_rng(0)
    g = [backend.make(random_array(rng, shape, "float64")) for shape in ((1, 2), (1, 2), (1,), (1,))]
    forms: list[Any] = [
        {"a": g[0], "b": {"c": g[1], "d": g[2]}, "e": g[3], "n": None},
        {"a": g[0], "b": {"c": g[1], "d": g[2]}, "e": g[3], "n": 7},
        {"a": g[0], "b": {"c": g[1], "d": g[2]}, "e": g[3]},
        {"a": g[0], "b.c": g[1], "b.d": g[2], "e": g[3]},
        {("a",): g[0], ("b", "c"): g[1], ("b", "d"): g[2], ("e",): g[3]},
        {op.Path("b.d"): g[2], op.Path("e"): g[3], op.Path("b.c"): g[1], op.Path("a"): g[0]},
    ]
    first, expected = op.update(state, model, forms[0])
    for form in forms[1:]:
        other, new = op.update(state, model, form)
        assert other == first
        for name, array in op.trainables(expected).items():
            assert_close(backend.read(op.trainables(new)[name]), backend.read(array), 0.0)


def test_a_bare_array_takes_a_bare_gradient_or_a_mapping(backend: Backend) -> None:
    model = backend.array([1.0])
    for grads in (backend.array([1.0]), {"": backend.array([1.0])}, {op.Path(): backend.array([1.0])}, {(): backend.array([1.0])}):
        state, new = train(op.Descent(1.0), model, grads)
        assert backend.read(new).tolist() == [0.0]
    state, new = train(op.Descent(1.0), model, {})
    assert (new is model, state.step) == (True, 0)


def test_a_gradient_that_is_a_parameter_is_read_before_it_is_written(numpy_backend: Backend) -> None:
    for flat in (False, True):
        a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
        if flat:
            whole = np.array([1.0, 2.0, 3.0, 4.0])
            a, b = whole[:2], whole[2:]
        model = {"a": a, "b": b}
        state = op.setup(op.Descent(0.1), model)
        # The gradient of a·b with respect to a is b, and the other way round.
        op.update_(state, model, {"a": b, "b": a})
        assert_close(a, [0.7, 1.6], 1e-15)
        assert_close(b, [2.9, 3.8], 1e-15)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_gradient_that_overlaps_its_own_parameter_is_read_before_it_is_written(numpy_backend: Backend, shift: int) -> None:
    whole = np.arange(1000.0)
    low, high = whole[:-1], whole[1:]
    p, g = (low, high) if shift == 1 else (high, low)
    expected = p - 0.5 * g
    op.update_(op.setup(op.Descent(0.5), [p]), [p], [g])
    assert_close(p, expected, 0.0)


def test_gradients_may_be_the_slots_or_the_old_model(numpy_backend: Backend) -> None:
    model = {"w": np.array([1.0, 2.0])}
    state, model = train(op.Momentum(0.1), model, {"w": np.ones(2)})
    velocity = leaf(state, "w").slots["velocity"]
    expected_state, expected = op.update(state, model, {"w": velocity.copy()})
    state, model = op.update_(state, model, {"w": velocity})
    assert model["w"].tolist() == expected["w"].tolist()
    assert state == expected_state


@pytest.mark.parametrize(("wrong", "message"), [(np.ones(3), r"of shape \[3\]"), (None, "a NoneType"), ([1.0], "a list")])
def test_a_model_is_not_rebuilt_of_arrays_of_another_shape(wrong: Any, message: str) -> None:
    w = np.arange(6.0).reshape(2, 3)
    model = {"a": w, "b": w.T}
    _, rebuild = op.partition(op.setup(op.Adam(), model), model)
    with pytest.raises(ShapeError, match=rf'"a" is {message}, and the parameter of shape \[2, 3\]'):
        rebuild({"a": wrong})
    with pytest.raises(ShapeError, match="the model has 6 elements, but the vector is a list"):
        op.destructure(model)[1]([0.0] * 6)
