"""What is frozen does not move, whatever its gradient, and costs nothing; thawed, it goes on where it was."""

from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import PathError, ShapeError, StateError
from tests.conftest import Backend, all_bits, assert_close, bits, leaf, train

BAD = [np.nan, np.inf, -np.inf]


def _values(backend: Backend, model: Any) -> dict[str, Any]:
    return {name: backend.read(array).tolist() for name, array in model.items()}


# Parameters -----------------------------------------------------------------------------------------------------------


def test_freeze_adjust_and_thaw(backend: Backend) -> None:
    model = {"x": backend.array([1, 2]), "y": backend.array([3, 4])}
    grads = {"x": backend.array([1, 10]), "y": backend.array([100, 1000])}
    y = model["y"]
    state, model = train(op.setup(op.Descent(0.1), model).freeze("y"), model, grads)
    assert model["y"] is y
    assert_close(backend.read(model["x"]), [0.9, 1], 1e-15)
    state, model = op.update(state.adjust(lr=0.2).thaw("y"), model, grads)
    assert_close(backend.read(model["y"]), [-17, -196], 1e-15)
    assert_close(backend.read(model["x"]), [0.7, -1], 1e-15)


@pytest.mark.parametrize(
    "rule",
    [op.SGD(0.1, momentum=0.9), op.Adam(0.1), op.AdamW(0.1, weight_decay=0.1), op.Chain(op.WeightDecay(0.1), op.Descent(0.1))],
    ids=["SGD", "Adam", "AdamW", "decay"],
)
def test_a_zero_gradient_moves_nothing_that_is_frozen(backend: Backend, rule: op.Rule) -> None:
    model = {"p": backend.array([1.0])}
    state, model = train(rule, model, {"p": backend.array([1.0])})
    state = state.freeze("p")
    before = all_bits(backend, state, model)
    state, model = train(state, model, *[{"p": backend.array([0.0])}] * 3)
    assert all_bits(backend, state, model) == before
    thawed, moved = op.update(state.thaw(), model, {"p": backend.array([0.0])})
    assert bits(backend, moved["p"]) != bits(backend, model["p"])
    assert leaf(thawed, "p").step == 2


@pytest.mark.parametrize("bad", BAD)
def test_a_frozen_leaf_ignores_a_broken_gradient(backend: Backend, bad: float) -> None:
    rule = op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0), op.Adam(0.1))
    model = {"a": backend.array([1.0, 2.0]), "b": backend.array([1.0])}
    fine = {"a": backend.array([3.0, 4.0])}
    frozen = op.setup(rule, model).freeze("b")
    expected = all_bits(backend, *op.update(frozen, model, fine))
    found = all_bits(backend, *op.update(frozen, model, fine | {"b": backend.array([bad])}))
    assert found == expected
    assert found["memory"] == {"skipnonfinite": {"skipped": 0}}
    assert found["step"] == 1


def test_the_gradient_of_a_frozen_leaf_is_not_even_looked_at(backend: Backend) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state = op.setup(op.Adam(), model).freeze("b")
    for stale in (backend.array([1.0, 2.0, 3.0]), "text", np.zeros(3, np.int32), 5):
        _, new = op.update(state, model, {"a": backend.array([1.0]), "b": stale})
        assert new["b"] is model["b"]


def test_the_global_norm_leaves_frozen_parameters_out(backend: Backend) -> None:
    rule = op.Chain(op.ClipGlobalNorm(1.0))
    model = {"live": backend.array([0.0, 0.0]), "frozen": backend.array([0.0, 0.0])}
    grads = {"live": backend.array([3.0, 4.0]), "frozen": backend.array([0.0, 12.0])}
    state = op.setup(rule, model)
    assert op.global_norm(grads, state) == 13.0
    state = state.freeze("frozen")
    assert op.global_norm(grads, state) == 5.0
    _, new = op.update(state, model, grads)
    assert_close(backend.read(new["live"]), [-0.6, -0.8], 1e-15)
    grads = {"live": backend.array([3.0, 0.0]), "frozen": backend.array([400.0, 0.0])}
    _, new = op.update(state, model, grads)
    assert_close(backend.read(new["live"]), [-1, 0], 1e-15)


def test_a_parameter_thawed_late_takes_its_own_first_step(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.setup(op.Adam(0.1), model, frozen="b"), model, *[one] * 10)
    state, model = op.update(state.thaw("b"), model, one)
    assert_close(backend.read(model["b"]), [-0.1], 1e-8)
    assert_close(backend.read(model["a"]), [-1.1], 1e-7)
    assert (state.step, leaf(state, "a").step, leaf(state, "b").step) == (11, 11, 1)


def test_a_parameter_frozen_from_the_start_has_no_slots(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": {"c": backend.array([0.0, 0.0])}}
    state = op.setup(op.Adam(0.1), model, frozen="b")
    assert dict(leaf(state, "b.c").slots) == {}
    assert leaf(state, "b.c").nbytes == 0
    assert leaf(state, "a").nbytes == 16
    thawed = state.thaw("b")
    assert {name: backend.read(slot).tolist() for name, slot in leaf(thawed, "b.c").slots.items()} == {
        "mu": [0.0, 0.0],
        "nu": [0.0, 0.0],
    }
    assert dict(leaf(state, "b.c").slots) == {}


def test_drop_frees_the_slots_of_what_is_frozen(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.Adam(0.1), model, one, one)
    dropped = state.freeze("b").drop()
    assert dict(leaf(dropped, "b").slots) == {}
    assert leaf(dropped, "a").slots["mu"] is leaf(state, "a").slots["mu"]
    fresh = leaf(dropped.thaw("b"), "b")
    assert (fresh.step, backend.read(fresh.slots["mu"]).tolist()) == (0, [0.0])
    again = leaf(state.freeze("b").thaw("b"), "b")
    assert (again.step, again.slots["mu"]) == (2, leaf(state, "b").slots["mu"])
    with pytest.raises(StateError, match="a is live"):
        dropped.drop("a")
    with pytest.raises(StateError, match="a is live"):
        dropped.drop(["a", "b"])


def test_either_path_of_a_tie_freezes_both_and_a_mask_freezes_neither(backend: Backend) -> None:
    w = backend.array([1.0])
    model = {"a": w, "b": w}
    g = {"a": backend.array([1.0]), "b": backend.array([10.0])}
    for path in ("a", "b"):
        _, new = op.update(op.setup(op.Descent(0.1), model).freeze(path), model, g)
        assert new["a"] is new["b"] is w
    for path, expected in (("a", 0.0), ("b", 0.9)):
        _, new = op.update(op.setup(op.Descent(0.1), model).mask(path), model, g)
        assert new["a"] is new["b"]
        assert_close(backend.read(new["a"]), [expected], 1e-15)


def test_freezing_and_thawing_many_times_leaves_no_trace(backend: Backend) -> None:
    model = {"a": {"w": backend.array([1.0, 2.0])}, "b": backend.array([3.0])}
    g = {"a": {"w": backend.array([1.0, -1.0])}, "b": backend.array([0.5])}
    state, model = train(op.AdamW(0.1), model, g)
    other = state
    for _ in range(20):
        other = other.freeze("a").thaw("a").freeze("**").thaw().freeze("a.w", rows=[0]).thaw("a.w").mask("b").unmask("b")
    assert other == state
    assert other.layout is state.layout
    for _ in range(3):
        state, model_a = op.update(state, model, g)
        other, model_b = op.update(other, model, g)
        assert other == state
        assert bits(backend, model_a["b"]) == bits(backend, model_b["b"])


def test_a_branch_freezes_whole_by_path_glob_type_and_predicate() -> None:
    model = {"encoder": [{"w": np.ones((2, 2)), "b": np.ones(2)} for _ in range(2)], "head": np.ones(2)}
    state = op.setup(op.Adam(), model)

    def frozen(state: op.State) -> list[str]:
        return [str(each.path) for each in state.leaves() if each.frozen]

    everything = ["encoder.0.b", "encoder.0.w", "encoder.1.b", "encoder.1.w"]
    assert frozen(state.freeze("encoder")) == everything
    assert frozen(state.freeze(("encoder",))) == everything
    assert frozen(state.freeze("encoder.*.b")) == ["encoder.0.b", "encoder.1.b"]
    assert frozen(state.freeze(list)) == everything
    assert frozen(state.freeze(lambda parameter: parameter.ndim == 2)) == ["encoder.0.w", "encoder.1.w"]
    assert frozen(state.freeze(["head", "encoder.1"])) == ["encoder.1.b", "encoder.1.w", "head"]
    assert frozen(state.freeze("encoder").thaw("encoder.1.w")) == everything[:3]
    assert frozen(state.freeze("**").thaw()) == []
    assert frozen(op.setup(op.Adam(), model, frozen=op.select.ndim(1))) == ["encoder.0.b", "encoder.1.b", "head"]


def test_nothing_steps_when_all_is_frozen(backend: Backend) -> None:
    model = {"a": backend.array([1.0])}
    state = op.setup(op.Chain(op.AccumGrad(1), op.Adam()), model).freeze("**")
    after, new = op.update(state, model, {"a": backend.array([1.0])})
    assert new is model
    assert after == state


# Rows -----------------------------------------------------------------------------------------------------------------


def _rows(backend: Backend, rule: op.Rule, rows: Any, gradient: Any, steps: int = 1) -> tuple[op.State, np.ndarray]:
    model = {"e": backend.array(np.ones((3, 2)))}
    state = op.setup(rule, model).freeze("e", rows=rows)
    for count in range(steps):
        step = op.update_ if count % 2 else op.update
        state, model = step(state, model, {"e": backend.array(gradient)})
    return state, backend.read(model["e"])


def test_frozen_rows_do_not_decay(backend: Backend) -> None:
    state, values = _rows(backend, op.AdamW(0.1, weight_decay=0.1), [1, 2], np.zeros((3, 2)), steps=3)
    assert values[1:].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert_close(values[0], [0.99**3] * 2, 1e-15)
    assert leaf(state, "e").frozen_rows == ((1, 3),)


@pytest.mark.parametrize("bad", BAD)
def test_frozen_rows_ignore_a_broken_gradient(backend: Backend, bad: float) -> None:
    gradient = np.array([[3.0, 4.0], [bad, 1.0], [bad, bad]])
    state, values = _rows(backend, op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0), op.Momentum(1.0)), [1, 2], gradient)
    assert_close(values, [[0.4, 0.2], [1, 1], [1, 1]], 1e-15)
    assert_close(backend.read(leaf(state, "e").slots["velocity"]), [[0.6, 0.8], [0, 0], [0, 0]], 1e-15)
    state, values = _rows(backend, op.Chain(op.ClipNorm(1.0)), slice(1, None), gradient)
    assert_close(values, [[0.4, 0.2], [1, 1], [1, 1]], 1e-15)


def test_frozen_rows_are_in_no_norm() -> None:
    state = op.setup(op.Adam(), {"e": np.ones((3, 2))}).freeze("e", rows=[0, 2])
    assert op.global_norm({"e": np.array([[9.0, 9.0], [3.0, 4.0], [np.nan, 1.0]])}, state) == 5.0


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([0], ((0, 1),)),
        ([2, 0], ((0, 1), (2, 3))),
        ([-1], ((2, 3),)),
        (1, ((1, 2),)),
        (slice(None), ((0, 3),)),
        (slice(None, None, 2), ((0, 1), (2, 3))),
        (np.array([True, True, False]), ((0, 2),)),
        ([False, False, True], ((2, 3),)),
        (np.array([1, 2], np.uint8), ((1, 3),)),
        ([], ()),
    ],
    ids=repr,
)
def test_rows_may_be_a_mask_a_slice_or_numbers(rows: Any, runs: Any) -> None:
    state = op.setup(op.Adam(), {"e": np.ones((3, 2))})
    assert leaf(state.freeze("e", rows=rows), "e").frozen_rows == runs


def test_rows_add_up_and_thaw_one_by_one() -> None:
    state = op.setup(op.Adam(), {"e": np.ones((4, 2))}).freeze("e", rows=[0]).freeze("e", rows=[2, 3])
    assert leaf(state, "e").frozen_rows == ((0, 1), (2, 4))
    assert leaf(state.thaw("e", rows=[3]), "e").frozen_rows == ((0, 1), (2, 3))
    assert leaf(state.thaw("e"), "e").frozen_rows == ()
    whole = state.freeze("e").thaw("e", rows=[0])
    assert (leaf(whole, "e").frozen, leaf(whole, "e").frozen_rows) == (False, ((1, 4),))
    assert not leaf(state, "e").frozen


@pytest.mark.parametrize("rows", [[3], [-4], [0.5], [True, False], "text", None.__class__, [[True, False, True]]], ids=repr)
def test_rows_that_do_not_fit_are_an_error(rows: Any) -> None:
    state = op.setup(op.Adam(), {"e": np.ones((3, 2))})
    with pytest.raises(ShapeError, match="e has 3 rows"):
        state.freeze("e", rows=rows)


def test_a_parameter_without_axes_has_no_rows() -> None:
    state = op.setup(op.Adam(), {"s": np.array(1.0)})
    with pytest.raises(ShapeError, match="s has no rows"):
        state.freeze("s", rows=[0])


def test_a_parameter_with_all_rows_frozen_stays(backend: Backend) -> None:
    rule = op.Chain(op.ClipNorm(1.0), op.ClipGlobalNorm(1.0), op.AdamW(0.1))
    state, values = _rows(backend, rule, slice(None), np.ones((3, 2)), steps=2)
    assert values.tolist() == np.ones((3, 2)).tolist()
    assert not backend.read(leaf(state, "e").slots["nu"]).any()


def test_frozen_rows_hold_in_every_dtype(setting: tuple[Backend, str]) -> None:
    backend, dtype = setting
    model = {"e": backend.array(np.ones((3, 2, 2)), dtype)}
    state = op.setup(op.Chain(op.ClipGlobalNorm(2.0), op.AdamW(0.1, weight_decay=0.1)), model).freeze("e", rows=[1])
    state, model = train(state, model, *[{"e": backend.array(np.full((3, 2, 2), 0.5), dtype)}] * 2)
    values = backend.read(model["e"])
    assert (values[1] == 1).all()
    assert (values[[0, 2]] != 1).all()
    assert not np.asarray(backend.read(leaf(state, "e").slots["mu"]))[1].any()


# Rows of rules on whole arrays ----------------------------------------------------------------------------------------


@op.rule
class Doubled(op.Rule):
    """On whole arrays, with a slot of the parameter's shape and one of a single row."""

    slots = {"seen": op.LIKE, "total": op.Slot(shape=lambda shape: shape[1:])}

    def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        seen, total = slots
        return g + g, (seen + g, total + xp._library.sum(g, axis=0))


def test_frozen_rows_hold_for_rules_on_whole_arrays(backend: Backend) -> None:
    gradient = np.array([[1.0, 2.0], [np.nan, np.inf], [10.0, 20.0]])
    state, values = _rows(backend, Doubled(), [1], gradient, steps=2)
    assert_close(values, [[-3, -7], [1, 1], [-39, -79]], 0.0)
    assert_close(backend.read(leaf(state, "e").slots["seen"]), [[2, 4], [0, 0], [20, 40]], 0.0)
    # A slot without rows of its own sees a frozen row's gradient as zero.
    assert_close(backend.read(leaf(state, "e").slots["total"]), [22, 44], 0.0)


# What it costs --------------------------------------------------------------------------------------------------------


def _parts(state: op.State) -> list[Any]:
    """The parts of the plan that was made last."""
    *_, plan = state.layout.cache["plans"].values()
    return plan.parts


def test_frozen_parameters_are_not_in_the_plan(backend: Backend) -> None:
    model = {str(at): backend.array([1.0]) for at in range(50)}
    state = op.setup(op.Adam(), model).freeze(lambda parameter: parameter.name != "7")
    op.update(state, model, model)
    assert [part.paths for part in _parts(state)] == [[op.Path(("7",))]]


def test_frozen_parameters_and_rows_are_not_in_the_table_of_chunks() -> None:
    model = {"a": np.ones(100), "b": np.ones((10, 3)), "c": np.ones(100)}
    state = op.setup(op.Adam(), model).freeze("a").freeze("b", rows=[0, 1, 2, 9])
    op.update(state, model, model)
    (part,) = _parts(state)
    assert part.paths == [op.Path("b"), op.Path("c")]
    assert part.kept["work"].chunks.tolist() == [[0, 9, 18], [1, 0, 100]]


def test_freezing_and_thawing_come_back_to_the_same_plan() -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    state, model = train(op.Adam(), model, {"a": np.ones(2), "b": np.ones(2)})
    frozen = state.freeze("a")
    frozen, model = op.update(frozen, model, model)
    assert state.freeze("a").layout is frozen.layout
    thawed = state.freeze("a").thaw("a")
    assert thawed.layout is state.layout
    plans = dict(state.layout.cache["plans"])
    op.update(thawed, model, model)
    assert state.layout.cache["plans"] == plans


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_selector_that_matches_nothing_is_an_error() -> None:
    state = op.setup(op.Adam(), {"encoder": {"weight": np.ones(2)}, "decoder": np.ones(2)})
    for method in (state.freeze, state.thaw, state.mask, state.unmask, state.reset, state.drop, state.adjust):
        with pytest.raises(PathError, match=r'no parameter matches "encodr\.\*\*"; did you mean "encoder\.\*\*"'):
            method("encodr.**")
    with pytest.raises(PathError, match="did you mean"):
        op.setup(op.Adam(), {"encoder": np.ones(2)}, frozen="encodr")
