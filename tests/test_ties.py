"""Several occurrences of one array: one parameter, one state, one step."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import ModelError, PathError, StateError, TieError
from tests.conftest import Backend, assert_close, branch, leaf, random_array, train


def _spellings(state: op.State) -> list[str]:
    return [str(path) for path in state]


# One object, several places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [op.update, op.update_])
@pytest.mark.parametrize(
    ("first", "second", "w_after", "c_after"),
    [
        ([3, 3], ([10, 10], [7, 7]), [0, 1], [0, 1]),
        ([3, 3], None, [0.7, 1.7], [1, 2]),
        (None, ([5, 5], [7, 7]), [0.3, 1.3], [0.5, 1.5]),
    ],
    ids=["all", "first", "second"],
)
def test_gradients_of_tied_places_are_added(
    backend: Backend, step: Any, first: Any, second: Any, w_after: Any, c_after: Any
) -> None:
    w, c = backend.array([1, 2]), backend.array([1, 2])
    model = (w, (c, w))
    state = op.setup(op.Descent(0.1), model)
    grads = (
        None if first is None else backend.array(first),
        None if second is None else (backend.array(second[0]), backend.array(second[1])),
    )
    state, new = step(state, model, grads)
    assert new[0] is new[1][1]
    assert_close(backend.read(new[0]), w_after, 1e-15)
    assert_close(backend.read(new[1][0]), c_after, 1e-15)


def test_one_object_listed_twice_steps_once_for_one_gradient_object(backend: Backend) -> None:
    x, g = backend.array([0.0]), backend.array([1.0])
    for rule in (op.Descent(0.1), op.Adam(0.1)):
        state, model = train(rule, {"a": x, "b": x}, {"a": g, "b": g})
        assert_close(backend.read(model["a"]), [-0.1], 1e-8)
        assert leaf(state, "a").step == 1
        assert len(state) == 1


def test_the_canonical_path_is_the_first_in_traversal_order(backend: Backend) -> None:
    w = backend.array([1.0, 2.0])
    state = op.setup(op.Adam(), {"z": w, "m": [w, {"k": w}], "b": backend.array([1.0])})
    assert _spellings(state) == ["b", "m.0"]
    assert dict(leaf(state, "z").ties) == {op.Path("m.1.k"): "same", op.Path("z"): "same"}
    assert leaf(state, "z") == leaf(state, "m.0") == leaf(state, "m.1.k")


def test_an_embedding_tied_to_a_head_is_one_leaf(sharing_backend: Backend) -> None:
    table = sharing_backend.array(np.ones((4, 3)))
    model = {"embed": table, "head": table.T}
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.Adam(0.1)), model)
    assert len(state) == 1
    assert {name: tuple(slot.shape) for name, slot in leaf(state, "head").slots.items()} == {"mu": (4, 3), "nu": (4, 3)}
    # Each partial gradient has norm 1.5; together they point the same way.
    partial = np.zeros((4, 3))
    partial[0, 0] = 1.5
    grads = {"embed": sharing_backend.array(partial), "head": sharing_backend.array(partial.T)}
    assert op.global_norm(grads, state) == pytest.approx(3.0, rel=1e-15)
    assert op.global_norm(grads) == pytest.approx(1.5 * 2**0.5)
    state, model = op.update(state, model, grads)
    assert leaf(state, "embed").step == 1
    assert_close(sharing_backend.read(leaf(state, "embed").slots["mu"])[0, 0], 0.1, 1e-12)
    assert_close(sharing_backend.read(model["head"]), sharing_backend.read(model["embed"]).T, 0.0)


def test_a_chain_acts_on_the_summed_gradient(backend: Backend) -> None:
    w = backend.array([0.0, 0.0])
    grads = {"a": backend.array([8.0, -8.0]), "b": backend.array([8.0, 3.0])}
    _, model = train(op.Chain(op.ClipGrad(10.0)), {"a": w, "b": w}, grads)
    assert_close(backend.read(model["a"]), [-10, 5], 1e-15)


def test_short_gradients_are_added_in_the_dtype_of_the_arithmetic(numpy_backend: Backend) -> None:
    w = np.zeros(1, np.float16)
    big = np.full(1, 6e4, np.float16)
    state = op.setup(op.Momentum(0.0), {"a": w, "b": w})
    state, _ = op.update(state, {"a": w, "b": w}, {"a": big, "b": big.copy()})
    assert leaf(state, "a").slots["velocity"][0] == 2 * np.float32(big[0])


# The same memory, seen otherwise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [op.update, op.update_])
@pytest.mark.parametrize("transposed_first", [False, True])
def test_a_transpose_is_a_tie(sharing_backend: Backend, step: Any, transposed_first: bool) -> None:
    start, first, second = (random_array(np.random.default_rng(seed), (2, 3), "float64") for seed in range(3))
    w = sharing_backend.make(start)
    names = ("b", "a") if transposed_first else ("a", "b")
    model = {names[0]: w, names[1]: w.T}
    state = op.setup(op.Descent(0.1), model)
    assert len(state) == 1
    assert dict(leaf(state, "a").ties) == {op.Path("b"): "transposed"}
    grads = {names[0]: sharing_backend.make(first), names[1]: sharing_backend.make(second.T)}
    for count in (1, 2):
        state, model = step(state, model, grads)
        expected = start - count * 0.1 * (first + second)
        assert_close(sharing_backend.read(model[names[0]]), expected, 1e-15)
        assert_close(sharing_backend.read(model[names[1]]), expected.T, 1e-15)
        assert np.shares_memory(sharing_backend.read(model["a"]), sharing_backend.read(model["b"]))


@pytest.mark.parametrize("step", [op.update, op.update_])
def test_three_views_of_one_array_are_one_parameter(sharing_backend: Backend, step: Any) -> None:
    start, *grads = (random_array(np.random.default_rng(seed), (2, 3), "float64") for seed in range(4))
    w = sharing_backend.make(start)
    model = {"flat": w.reshape(6), "itself": w, "turned": w.T}
    state = op.setup(op.Adam(0.1), model)
    assert dict(leaf(state, "flat").ties) == {op.Path("itself"): "reshaped", op.Path("turned"): "reshaped"}
    given = {
        "flat": sharing_backend.make(grads[0].reshape(6)),
        "itself": sharing_backend.make(grads[1]),
        "turned": sharing_backend.make(grads[2].T),
    }
    state, model = step(state, model, given)
    _, alone = train(op.Adam(0.1), {"w": start}, {"w": grads[0] + grads[1] + grads[2]})
    for found in (
        sharing_backend.read(model["flat"]).reshape(2, 3),
        sharing_backend.read(model["itself"]),
        sharing_backend.read(model["turned"]).T,
    ):
        assert_close(found, alone["w"], 1e-15)


def test_every_arrangement_of_axes_is_found(sharing_backend: Backend) -> None:
    start = random_array(np.random.default_rng(0), (2, 3, 4), "float64")
    turned = sharing_backend.make(start)
    model = {"a": turned, "b": turned.swapaxes(0, 2), "c": turned.swapaxes(1, 2).swapaxes(0, 1)}
    state, new = train(op.Descent(1.0), model, {"b": sharing_backend.make(np.arange(24.0).reshape(4, 3, 2))})
    assert len(state) == 1
    expected = start - np.arange(24.0).reshape(4, 3, 2).swapaxes(0, 2)
    assert_close(sharing_backend.read(new["a"]), expected, 1e-15)
    assert_close(sharing_backend.read(new["c"]), expected.swapaxes(1, 2).swapaxes(0, 1), 1e-15)


def test_a_reshape_of_a_strided_array_is_a_tie(sharing_backend: Backend) -> None:
    a = sharing_backend.array(np.arange(8.0))[::2]
    b = a.reshape(2, 2)
    if not np.shares_memory(sharing_backend.read(a), sharing_backend.read(b)):
        b = a.view(2, 2)  # PyTorch's reshape copies, its view does not
    state, model = train(op.Descent(1.0), {"a": a, "b": b}, {"b": sharing_backend.array([[1.0, 0.0], [0.0, 1.0]])})
    assert _spellings(state) == ["a"]
    assert_close(sharing_backend.read(model["a"]), [-1, 2, 4, 5], 0.0)


def test_a_scalar_and_a_vector_of_one_element_may_be_one_parameter(sharing_backend: Backend) -> None:
    one = sharing_backend.array([5.0])
    state, model = train(op.Adam(0.1), {"a": one, "b": {"c": one.reshape(())}}, {"b": {"c": sharing_backend.array(1.0)}})
    assert tuple(model["b"]["c"].shape) == ()
    assert_close(sharing_backend.read(model["b"]["c"]), 4.9, 1e-8)
    inner = branch(state, "b")
    assert leaf(inner, "c").shape == tuple(leaf(inner, "c").slots["mu"].shape) == ()


# What is no tie -------------------------------------------------------------------------------------------------------


def test_equal_values_are_no_tie(backend: Backend) -> None:
    state = op.setup(op.Adam(), {"a": backend.array([1.0]), "b": backend.array([1.0])})
    assert len(state) == 2


def test_arrays_of_size_zero_are_no_tie(sharing_backend: Backend) -> None:
    base = sharing_backend.array(np.zeros((0, 3)))
    assert len(op.setup(op.Adam(), {"a": base, "b": base.T})) == 2


def test_neighbours_in_one_buffer_are_no_tie(sharing_backend: Backend) -> None:
    buffer = sharing_backend.array(np.arange(6.0))
    state, model = train(op.Descent(1.0), {"a": buffer[:3], "b": buffer[3:]}, {"b": sharing_backend.array([1.0, 1, 1])})
    assert len(state) == 2
    assert_close(sharing_backend.read(model["b"]), [2, 3, 4], 0.0)


def test_interleaved_arrays_are_no_tie() -> None:
    buffer = np.arange(6.0)
    for step in (op.update, op.update_):
        model = {"even": buffer[::2], "odd": buffer[1::2]}
        state = op.setup(op.Descent(1.0), model)
        _, model = step(state, model, {"odd": np.ones(3)})
        assert_close(model["even"], [0, 2, 4], 0.0)
        assert_close(model["odd"], [0, 2, 4], 0.0)


@pytest.mark.parametrize(
    "cut",
    [
        lambda buffer: (buffer[:4], buffer[2:]),
        lambda buffer: (buffer, buffer[:3]),
        lambda buffer: (buffer[::2], buffer[:3]),
        lambda buffer: (buffer[:4].reshape(2, 2), buffer[1:5].reshape(2, 2)),
    ],
    ids=["halves", "part", "strided", "shifted"],
)
def test_arrays_that_share_a_part_of_their_memory_are_an_error(sharing_backend: Backend, cut: Any) -> None:
    first, second = cut(sharing_backend.array(np.arange(6.0)))
    with pytest.raises(TieError, match=r"inner\.one and two share a part of their memory.*copy one"):
        op.setup(op.Adam(), {"inner": {"one": first}, "two": second})


def test_an_array_seen_through_another_dtype_is_an_error() -> None:
    whole = np.arange(4.0)
    with pytest.raises(TieError, match="a and b share a part"):
        op.setup(op.Adam(), {"a": whole, "b": whole.view(np.complex128)})


def test_a_reversed_view_is_an_error() -> None:
    whole = np.arange(4.0)
    with pytest.raises(TieError, match="a and b share a part"):
        op.setup(op.Adam(), {"a": whole, "b": whole[::-1]})


def test_a_broadcast_array_is_an_error(sharing_backend: Backend) -> None:
    one = sharing_backend.array(np.ones((3, 1)))
    spread = np.broadcast_to(one, (3, 4)) if isinstance(one, np.ndarray) else one.expand(3, 4)
    with pytest.raises(TieError, match=r"w: several elements .* copy it"):
        op.setup(op.Adam(), {"w": spread})


# Ties made and undone -------------------------------------------------------------------------------------------------


def test_tie_makes_two_arrays_one_parameter(backend: Backend) -> None:
    for given, expected in (((3.0, 7.0), 10.0), ((3.0, None), 3.0), ((None, 7.0), 7.0)):
        model = {"a": backend.array([1.0]), "b": backend.array([1.0])}
        state = op.setup(op.Descent(0.1), model).tie("b", "a")
        grads = {name: None if g is None else backend.array([g]) for name, g in zip("ab", given, strict=True)}
        for step in (op.update, op.update_):
            _, new = step(state, model, grads)
            assert new["a"] is new["b"]
            assert_close(backend.read(new["a"]), [1 - 0.1 * expected], 1e-15)
            model = {"a": backend.array([1.0]), "b": backend.array([1.0])}


def test_ties_may_be_given_to_setup(backend: Backend) -> None:
    model = {"a": backend.array([[1.0, 2.0]]), "b": backend.array([[1.0], [2.0]]), "c": backend.array([1.0, 2.0])}
    state = op.setup(op.Descent(1.0), model, ties=[("b", "a", "transpose"), ("c", "a", "reshape")])
    assert dict(leaf(state, "a").ties) == {op.Path("b"): "transposed", op.Path("c"): "reshaped"}
    _, model = op.update(state, model, {"b": backend.array([[1.0], [1.0]]), "c": backend.array([0.0, 5.0])})
    assert_close(backend.read(model["a"]), [[0, -4]], 1e-15)
    assert_close(backend.read(model["b"]), [[0], [-4]], 1e-15)
    assert_close(backend.read(model["c"]), [0, -4], 1e-15)


def test_tie_keeps_the_slots_of_the_parameter_that_stays() -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    state, model = train(op.Adam(0.1), model, {"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)})
    tied = state.tie("a", "b")
    assert tied["a"] == tied["b"]
    assert leaf(tied, "a").path == op.Path("b")
    assert leaf(tied, "a").step == 1
    assert leaf(tied, "a").slots["mu"] is leaf(state, "b").slots["mu"]
    assert len(state) == 2


def test_tying_an_alias_brings_its_ties_along() -> None:
    w, v = np.ones(2), np.ones(2)
    state = op.setup(op.Descent(1.0), {"a": w, "b": w, "c": v, "d": v}).tie("c", "a")
    assert {str(path) for path in leaf(state, "a").ties} == {"b", "c", "d"}
    _, model = op.update(state, {"a": w, "b": w, "c": v, "d": v}, {name: np.ones(2) for name in "abcd"})
    assert len({id(array) for array in model.values()}) == 1
    assert_close(model["d"], [-3, -3], 0.0)


def test_what_has_ties_of_its_own_is_not_tied_through_a_view() -> None:
    w = np.ones((3, 2))
    state = op.setup(op.Adam(), {"a": np.ones((2, 3)), "b": w, "c": w})
    with pytest.raises(TieError, match=r"b has ties of its own, .* tie a to it instead"):
        state.tie("b", "a", view="transpose")
    assert {str(path) for path in leaf(state.tie("a", "b", view="transpose"), "b").ties} == {"a", "c"}


def test_where_it_is_too_hard_to_tell_memory_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def hard(*_: Any, **__: Any) -> bool:
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", hard)
    whole = np.arange(6.0)
    with pytest.raises(TieError, match="a and b share a part"):
        op.setup(op.Adam(), {"a": whole[::2], "b": whole[1::2]})


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (("b", "a"), r'b has shape \(3, 2\), which is not that of a: \(2, 3\).*view="transpose"'),
        (("c", "a", "reshape"), r"c has shape \(4,\), which is not a reshape of a"),
        (("d", "a"), "d is numpy float32, but a is numpy float64"),
        (("b", "a", "sideways"), "view='sideways' is unknown"),
        (("a", "a"), "one parameter already"),
        (("f", "e"), "one parameter already"),
        (("f", "a"), "f is tied to e"),
        (("d2", "f"), "f is an alias itself"),
    ],
)
def test_a_tie_that_does_not_fit_is_an_error(tie: Any, message: str) -> None:
    e = np.ones((2, 3))
    model = {"a": np.ones((2, 3)), "b": np.ones((3, 2)), "c": np.ones(4), "d": np.ones((2, 3), np.float32), "e": e, "f": e}
    model["d2"] = np.ones((2, 3))
    with pytest.raises(TieError, match=message):
        op.setup(op.Adam(), model, ties=[tie])


def test_an_unknown_path_in_a_tie_is_an_error() -> None:
    with pytest.raises(PathError, match=r'no parameter stands at "heda\.weight"; did you mean "head\.weight"'):
        op.setup(op.Adam(), {"head": {"weight": np.ones(2)}, "embed": np.ones(2)}).tie("heda.weight", "embed")
    for wrong in ("ab", ("a",), ("a", "b", "same", 3)):
        with pytest.raises(PathError, match="a tie is"):
            op.setup(op.Adam(), {"a": np.ones(2), "b": np.ones(2)}, ties=[wrong])  # type: ignore[list-item]


def test_untie_gives_a_place_a_state_and_an_array_of_its_own(backend: Backend) -> None:
    for step in (op.update, op.update_):
        w = backend.array([1.0, 2.0])
        model: Any = {"a": w, "b": w}
        state, model = train(op.Adam(0.1), model, {"a": backend.array([1.0, 1.0])}, in_place=step is op.update_)
        apart = state.untie("b")
        assert leaf(apart, "b").step == leaf(apart, "a").step == 1
        assert leaf(apart, "b").slots["mu"] is not leaf(apart, "a").slots["mu"]
        assert not leaf(apart, "a").ties
        assert leaf(state, "a").ties
        before = backend.read(model["a"]).copy()
        apart, model = step(apart, model, {"b": backend.array([1.0, 1.0])})
        assert_close(backend.read(model["a"]), before, 0.0)
        assert_close(backend.read(model["b"]), before - 0.1, 1e-7)
        assert (leaf(apart, "a").step, leaf(apart, "b").step) == (1, 2)


def test_untie_through_a_view_turns_the_slots(sharing_backend: Backend) -> None:
    w = sharing_backend.array(np.zeros((2, 3)))
    g = np.arange(6.0).reshape(2, 3) + 1
    state, model = train(op.Momentum(1.0), {"a": w, "b": w.T}, {"a": sharing_backend.make(g)})
    state = state.untie("b")
    assert leaf(state, "b").shape == (3, 2)
    assert_close(sharing_backend.read(leaf(state, "b").slots["velocity"]), g.T, 0.0)
    state, model = op.update_(state, model, {"b": sharing_backend.make(g.T)})
    assert_close(sharing_backend.read(model["a"]), -g, 1e-15)
    assert_close(sharing_backend.read(model["b"]), -(1 + 1.9) * g.T, 1e-15)


def test_untying_what_is_not_tied_is_an_error() -> None:
    w = np.ones(2)
    state = op.setup(op.Adam(), {"a": w, "b": w, "c": np.ones(2)})
    with pytest.raises(TieError, match="c is not tied"):
        state.untie("c")
    with pytest.raises(TieError, match="a is the canonical path of its parameter; untie b"):
        state.untie("a")
    with pytest.raises(PathError):
        state.untie("d")


# Ties that no longer hold ---------------------------------------------------------------------------------------------


def test_a_copied_or_pickled_model_keeps_its_ties(numpy_backend: Backend) -> None:
    w = numpy_backend.array([[1.0, 2.0], [3.0, 4.0]])
    model = {"a": w, "b": w, "turned": w.T}
    state = op.setup(op.Descent(0.1), model)
    g = np.ones((2, 2))
    expected = op.update(state, model, {"turned": g})[1]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for step in (op.update, op.update_):
            _, new = step(state, copy.deepcopy(made), {"turned": g})
            assert new["a"] is new["b"]
            assert np.shares_memory(new["a"], new["turned"])
            for name, array in expected.items():
                assert_close(new[name], array, 0.0)


def test_a_model_cast_to_another_dtype_keeps_the_ties_of_its_objects() -> None:
    w = np.ones(2)
    model = {"a": w, "b": w}
    cast = {id(array): array.astype(np.float32) for array in model.values()}
    made = {name: cast[id(array)] for name, array in model.items()}
    assert len(op.setup(op.Adam(), made)) == 1
    with pytest.raises(ModelError, match="a: the state was made for float64, but the model holds float32"):
        op.update(op.setup(op.Adam(), model), made, {"a": np.ones(2)})


def test_tied_places_that_drifted_apart_are_an_error_that_names_both(backend: Backend) -> None:
    w = backend.array([1.0, 2.0])
    state = op.setup(op.Adam(), {"a": {"w": w}, "b": w})
    broken = {"a": {"w": w}, "b": backend.array([1.0, 2.5])}
    for step in (op.update, op.update_):
        with pytest.raises(TieError, match=r'a\.w and b are tied, but .*untie\("b"\)'):
            step(state, broken, {"b": w})
    assert_close(backend.read(w), [1, 2], 0.0)


def test_tied_copies_may_hold_nan() -> None:
    w = np.array([[np.nan, 1.0]])
    state = op.setup(op.Descent(), {"a": w, "b": w.T})
    _, model = op.update(state, copy.deepcopy({"a": w, "b": w.T}), {"a": np.ones((1, 2))})
    assert_close(model["b"][1], [0.9], 1e-15)


def test_a_tied_place_without_an_array_is_an_error() -> None:
    w = np.ones(2)
    state = op.setup(op.Adam(), {"a": w, "b": w})
    for wrong in (None, 3.0, "text"):
        with pytest.raises(ModelError, match="b"):
            op.update(state, {"a": w, "b": wrong}, {"a": w})


def test_parameters_that_became_one_array_are_an_error(backend: Backend) -> None:
    state = op.setup(op.Adam(), {"a": backend.array([1.0]), "b": backend.array([1.0])})
    one = backend.array([1.0])
    with pytest.raises(TieError, match=r'a and b hold the same array.*state\.tie\("b", "a"\)'):
        op.update_(state, {"a": one, "b": one}, {"a": one})


# Branches -------------------------------------------------------------------------------------------------------------


def test_a_branch_of_the_state_has_relative_ties(sharing_backend: Backend) -> None:
    w = sharing_backend.array(np.zeros((2, 3)))
    g = np.arange(6.0).reshape(2, 3)
    model = {"x": {"one": w}, "y": {"two": w.T, "three": w.T}}
    state, model = train(op.Momentum(1.0), model, {"x": {"one": sharing_backend.make(g)}, "y": None})
    inner = branch(state, "y")
    assert [str(path) for path in inner] == ["three"]
    found = leaf(inner, "two")
    assert found.shape == (3, 2)
    assert dict(found.ties) == {op.Path("two"): "same"}
    assert type(found.slots["velocity"]) is type(w)
    assert_close(sharing_backend.read(found.slots["velocity"]), g.T, 0.0)
    inner, part = op.update(inner, model["y"], {"two": sharing_backend.make(g.T)})
    assert part["two"] is part["three"]
    assert_close(sharing_backend.read(part["two"]), -2.9 * g.T, 1e-15)


def test_a_tie_that_leaves_the_branch_is_dropped() -> None:
    w = np.ones(2)
    state = op.setup(op.Adam(), {"x": {"one": w}, "y": {"two": w}})
    assert not leaf(branch(state, "x"), "one").ties
    assert not leaf(branch(state, "y"), "two").ties


def test_frozen_rows_go_through_a_tie_or_are_refused() -> None:
    w = np.ones((2, 3))
    state = op.setup(op.Adam(), {"a": w, "same": {"b": w}, "turned": {"c": w.T}}).freeze("a", rows=[0])
    assert leaf(branch(state, "same"), "b").frozen_rows == ((0, 1),)
    assert leaf(state.untie("same.b"), "same.b").frozen_rows == ((0, 1),)
    with pytest.raises(StateError):
        state["turned"]
    with pytest.raises(StateError):
        state.untie("turned.c")


# Masks ----------------------------------------------------------------------------------------------------------------


def test_a_masked_place_no_longer_contributes(backend: Backend) -> None:
    w = backend.array([0.0])
    model = {"a": w, "b": w, "c": w}
    state = op.setup(op.Descent(1.0), model).mask("b")
    grads = {name: backend.array([g]) for name, g in zip("abc", (1.0, 10.0, 100.0), strict=True)}
    _, new = op.update(state, model, grads)
    assert_close(backend.read(new["a"]), [-101], 0.0)
    assert new["a"] is new["b"]
    _, new = op.update(state.mask("a"), model, grads)
    assert_close(backend.read(new["a"]), [-100], 0.0)
    _, new = op.update(state.mask("a").unmask("b"), model, grads)
    assert_close(backend.read(new["a"]), [-110], 0.0)
    _, new = op.update(state.mask("**").unmask(), model, grads)
    assert_close(backend.read(new["a"]), [-111], 0.0)


def test_a_wholly_masked_parameter_takes_no_step(backend: Backend) -> None:
    w = backend.array([1.0])
    state = op.setup(op.AdamW(0.1), {"a": w, "b": w, "c": backend.array([1.0])}).mask("a").mask("b")
    nan = backend.array([float("nan")])
    state, model = op.update(state, {"a": w, "b": w, "c": backend.array([1.0])}, {"a": nan, "b": nan, "c": backend.array([1.0])})
    assert model["a"] is w
    assert (leaf(state, "a").step, leaf(state, "c").step) == (0, 1)
    assert leaf(state, "a").masked == {op.Path("a"), op.Path("b")}


def test_a_frozen_parameter_is_not_tied_to_a_live_one() -> None:
    model = {"a": np.ones(3), "b": np.ones(3)}
    state = op.setup(op.Descent(0.1), model)
    for one, other in (("a", "b"), ("b", "a")):
        with pytest.raises(TieError, match=f"{one} is frozen and {other} is not"):
            state.freeze(one).tie("b", "a")
    with pytest.raises(TieError, match="rows of b are frozen, which a lacks"):
        state.freeze("b", rows=[0]).tie("b", "a")
    assert leaf(state.freeze("*").tie("b", "a"), "a").frozen
    assert leaf(state.freeze("a", rows=[0]).tie("b", "a"), "b").frozen_rows == ((0, 1),)


@pytest.mark.parametrize("frozen", ["a", "b", "c"])
def test_what_starts_frozen_freezes_all_that_setup_ties_to_it(frozen: str) -> None:
    model = {name: np.ones(3) for name in "abcd"}
    state = op.setup(op.Descent(0.1), model, frozen=frozen, ties=[("b", "a"), ("c", "a")])
    assert [(str(each.path), each.frozen) for each in state.leaves()] == [("a", True), ("d", False)]


@pytest.mark.parametrize("ties", ["ab", 3, [3], ["ab"], [("a",)]])
def test_ties_that_are_none_are_refused(ties: Any) -> None:
    with pytest.raises(PathError, match=r"\(alias, path\) or \(alias, path, view\)"):
        op.setup(op.Adam(), {"a": np.ones(2), "b": np.ones(2)}, ties=ties)


def test_a_gradient_that_is_a_slot_is_read_before_it_is_written(sharing_backend: Backend) -> None:
    make = sharing_backend.array
    model: Any = {"a": make([1.0, 1.0]), "b": make([1.0, 1.0])}
    state, model = op.update(op.setup(op.Adam(0.1), model), model, {"a": make([1.0, 2.0]), "b": make([3.0, 4.0])})
    grads = {"a": make([9.0, 9.0]), "b": leaf(state, "a").slots["mu"]}
    _, pure = op.update(state, model, grads)
    _, written = op.update_(state, model, grads)
    for name in "ab":
        np.testing.assert_array_equal(sharing_backend.read(written[name]), sharing_backend.read(pure[name]))


def test_a_parameter_that_is_a_slot_is_refused(sharing_backend: Backend) -> None:
    make = sharing_backend.array
    grads = {"a": make([1.0, 1.0]), "b": make([1.0, 1.0])}
    state = op.setup(op.Adam(0.1), grads)
    model = {"a": leaf(state, "b").slots["nu"], "b": make([1.0, 1.0])}
    with pytest.raises(TieError, match="a lies in the memory of a slot, which the step writes; give the model a copy"):
        op.update_(state, model, grads)
    assert not sharing_backend.read(leaf(state, "b").slots["nu"]).any()


def test_memory_in_the_midst_of_a_slot_is_found(sharing_backend: Backend) -> None:
    make = sharing_backend.array
    model: Any = {"a": make([1.0, 1.0, 1.0, 1.0]), "b": make([1.0, 1.0])}
    grads = {"a": make([1.0, 2.0, 3.0, 4.0]), "b": make([1.0, 1.0])}
    state, model = op.update(op.setup(op.Adam(0.1), model), model, grads)
    inside = leaf(state, "a").slots["mu"][2:]
    with pytest.raises(TieError, match="b lies in the memory of a slot"):
        op.update_(state, {**model, "b": inside}, grads)
    _, pure = op.update(state, model, {**grads, "b": inside})
    _, written = op.update_(state, model, {**grads, "b": inside})
    for name in "ab":
        np.testing.assert_array_equal(sharing_backend.read(written[name]), sharing_backend.read(pure[name]))


def test_a_place_that_was_untied_and_tied_again_has_no_array_of_its_own_to_come() -> None:
    w = np.ones(2)
    model = {"a": w, "b": w}
    state = op.setup(op.Descent(0.1), model).untie("b")
    assert state.detached == {op.Path("b")}
    state = state.tie("b", "a")
    assert state.detached == frozenset()
    _, new = op.update_(state, model, {"a": np.ones(2)})
    assert new["a"] is new["b"] is w


@pytest.mark.parametrize("frozen", "abcd")
def test_a_chain_of_ties_is_frozen_whole(frozen: str) -> None:
    model = {name: np.ones(2) for name in "abcd"}
    state = op.setup(op.Descent(0.1), model, ties=[("d", "c"), ("c", "b"), ("b", "a")], frozen=frozen)
    assert [str(path) for path in state] == ["a"]
    assert leaf(state, "a").frozen
