"""A state is a persistent value: read by path, changed by methods that return another one, compared, copied and pickled."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import optimisers as op
from optimisers.errors import HyperparameterError, OptimiserError, PathError, StateError
from tests.conftest import RULES, Backend, all_bits, assert_close, bits, branch, dtype_of, leaf, train

SHARED = np.ones((2, 3))


def _model() -> dict[str, Any]:
    shared = SHARED.copy()
    return {"embed": shared, "body": [{"w": np.ones((2, 2)), "b": np.ones(2)} for _ in range(2)], "head": {"w": shared.T}}


def _ones(model: Any) -> dict[str, Any]:
    return {name: np.ones_like(array) for name, array in op.trainables(model).items()}


def _trained(rule: Any = None, steps: int = 2) -> tuple[op.State, Any]:
    model = _model()
    return train(rule or op.Adam(0.1), model, *[_ones(model)] * steps)


NAMES = ["body.0.b", "body.0.w", "body.1.b", "body.1.w", "embed"]


# Reading --------------------------------------------------------------------------------------------------------------


def test_a_state_is_a_collection_of_canonical_paths() -> None:
    state, _ = _trained()
    assert len(state) == 5
    assert list(map(str, state)) == NAMES
    assert all(isinstance(path, op.Path) for path in state)
    assert [each.path for each in state.leaves()] == list(state)
    assert [each.path for each in state.parameters] == list(state)
    for path in ("embed", "head.w", ("head", "w"), op.Path("body.0.w"), ("body", 0, "w")):
        assert path in state
    for path in ("head", "body.2", ("body", "0", "w"), "", 3.5, None):
        assert path not in state
    assert 0 in op.setup(op.Adam(), [np.ones(1)])


def test_a_leaf_shows_what_the_state_holds(backend: Backend) -> None:
    w = backend.array([[1.0, 2.0]], "float32")
    model = {"a": w, "b": w}
    state, _ = train(op.setup(op.Adam(0.1), model).mask("b"), model, {"a": w})
    found = leaf(state, "b")
    assert (str(found.path), found.shape, found.dtype, found.rule, found.step) == ("a", (1, 2), "float32", op.Adam(0.1), 1)
    assert (found.frozen, found.frozen_rows, dict(found.ties)) == (False, (), {op.Path("b"): "same"})
    assert found.masked == {op.Path("b")}
    assert list(found.slots) == ["mu", "nu"]
    assert found.nbytes == 16
    with pytest.raises(TypeError):
        found.slots["mu"] = 3  # type: ignore[index]
    with pytest.raises(AttributeError):
        found.step = 3  # type: ignore[misc]


def test_records_of_parameters() -> None:
    state, _ = _trained()
    record = state.parameters[4]
    assert (record.name, record.ndim, record.size, record.shape, record.dtype) == ("embed", 2, 6, (2, 3), "float64")
    assert list(map(str, record.paths)) == ["embed", "head.w"]
    assert [str(each.path) for each in record.occurrences] == ["embed", "head.w"]
    assert record.occurrences[1].owners == (dict, dict)
    assert record.owners == (dict,)
    bare = op.setup(op.Adam(), np.ones(3)).parameters[0]
    assert (bare.name, bare.path, bare.size) == (None, (), 3)


@pytest.mark.parametrize("path", ["embed.x", "body.2", "bodi", ("body", "0"), 7, "head.w.0"], ids=str)
def test_a_path_to_nothing_is_an_error(path: Any) -> None:
    state, _ = _trained()
    with pytest.raises(PathError, match="the state has nothing at"):
        state[path]
    with pytest.raises(KeyError):
        state[path]


def test_the_nearest_branch_is_named() -> None:
    state, _ = _trained()
    with pytest.raises(PathError, match=r'nothing at "body\.0\.x"; did you mean "body\.0\.[bw]"'):
        state["body.0.x"]


def test_a_branch_trains_on_its_own(backend: Backend) -> None:
    model = {"a": {"w": backend.array([1.0]), "v": [backend.array([2.0])]}, "b": backend.array([3.0])}
    one = {"w": backend.array([1.0]), "v": [backend.array([1.0])]}
    state, model = train(op.Adam(0.1), model, {"a": one, "b": backend.array([1.0])})
    inner = branch(state, "a")
    assert [str(path) for path in inner] == ["v.0", "w"]
    assert inner.step == 1
    inner, part = op.update(inner, model["a"], one)
    whole, new = op.update(state, model, {"a": one})
    assert bits(backend, part["w"]) == bits(backend, new["a"]["w"])
    assert bits(backend, leaf(inner, "v.0").slots["mu"]) == bits(backend, leaf(whole, "a.v.0").slots["mu"])
    assert branch(state, "a.v") == branch(branch(state, "a"), "v")
    assert branch(state, "") == state


def test_a_branch_keeps_flags_and_what_is_left_out() -> None:
    model = {"a": {"w": np.ones((3, 1)), "v": np.ones(1), "stat": np.ones(1)}, "b": np.ones(1)}
    state = op.setup(op.Adam(), model, trainable=["a.w", "a.v", "b"]).freeze("a.v").freeze("a.w", rows=[1]).mask("a.w")
    inner = branch(state, "a")
    assert leaf(inner, "v").frozen
    assert leaf(inner, "w").frozen_rows == ((1, 2),)
    assert leaf(inner, "w").masked == {op.Path("w")}
    _, new = op.update(inner, model["a"], {"w": np.ones((3, 1))})
    assert new["stat"] is model["a"]["stat"]


# Persistence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.freeze("body"),
        lambda state: state.freeze("embed", rows=[0]),
        lambda state: state.thaw(),
        lambda state: state.mask("head"),
        lambda state: state.unmask(),
        lambda state: state.tie("body.0.w", "body.1.w"),
        lambda state: state.untie("head.w"),
        lambda state: state.adjust(lr=0.5),
        lambda state: state.adjust("body.0", lr=0.5),
        lambda state: state.replace("embed", op.AdamW(0.1)),
        lambda state: state.replace(op.Momentum(0.1)),
        lambda state: state.reset("body.0"),
        lambda state: state.freeze("body").drop(),
        lambda state: state["body"],
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: op.update(state, _model(), {"body": [{"w": np.ones((2, 2))}, None]})[0],
    ],
    ids=range(16),
)
def test_no_method_changes_the_state_it_is_called_on(numpy_backend: Backend, change: Any) -> None:
    state, model = _trained()
    twin = copy.deepcopy(state)
    arrays = op.trainables(model)
    before = all_bits(numpy_backend, state, arrays)
    change(state)
    assert state == twin
    assert all_bits(numpy_backend, state, arrays) == before
    state, model = op.update(state, model, _ones(model))
    assert leaf(state, "embed").step == 3


def test_methods_share_the_slots_they_do_not_change() -> None:
    state, _ = _trained()
    for other in (
        state.freeze("body"),
        state.mask("head"),
        state.adjust(lr=0.5),
        state.replace("body", op.AdamW()),
        state.reset("body"),
        state.tie("body.0.w", "body.1.w"),
        state.freeze("body").drop("body"),
    ):
        assert leaf(other, "embed").slots["mu"] is leaf(state, "embed").slots["mu"]


# Equality -------------------------------------------------------------------------------------------------------------


def test_equal_states_are_equal(backend: Backend) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([2.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    first, _ = train(op.Adam(0.1), model, one)
    second, _ = train(op.Adam(0.1), model, one)
    assert first == second
    assert first == first.freeze("a").thaw("a")
    assert first.__eq__(3) is NotImplemented
    with pytest.raises(TypeError):
        hash(first)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.freeze("body.0.w"),
        lambda state: state.freeze("body.0.w", rows=[0]),
        lambda state: state.mask("head.w"),
        lambda state: state.untie("head.w"),
        lambda state: state.adjust("embed", lr=0.5),
        lambda state: state.replace("embed", op.AdamW(0.1)),
        lambda state: state.reset("embed"),
        lambda state: state["body"],
        lambda state: op.update(state, _model(), {"embed": np.zeros((2, 3))})[0],
    ],
    ids=range(9),
)
def test_states_that_differ_are_not_equal(change: Any) -> None:
    state, _ = _trained()
    assert change(state) != state


def test_states_differ_by_memory_dtype_and_library() -> None:
    import torch

    model = {"w": np.ones(2)}
    rule = op.Chain(op.SkipNonFinite(), op.Adam())
    state = op.setup(rule, model)
    skipped, _ = op.update(state, model, {"w": np.array([1.0, np.nan])})
    assert skipped != state
    assert op.setup(rule, model, state_dtype="float32") != state
    assert op.setup(rule, {"w": np.ones(2, np.float32)}) != state
    assert op.setup(rule, {"w": torch.ones(2, dtype=torch.float64)}) != state


# Copies and pickles ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_state_pickles_and_copies_with_every_rule(numpy_backend: Backend, name: str) -> None:
    model = {"a": np.ones((2, 3)), "b": np.ones(2, np.float32)}
    grads = {"a": np.full((2, 3), 0.5), "b": np.ones(2, np.float32)}
    state, model = train(op.setup(RULES[name], model).freeze("a", rows=[0]), model, grads)
    for made in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert made == state
        assert made.layout is state.layout
        after, new = op.update(made, model, grads)
        expected, right = op.update(state, model, grads)
        assert after == expected
        assert new["a"].tolist() == right["a"].tolist()


def test_a_copy_has_slots_of_its_own(backend: Backend) -> None:
    model = {"a": backend.array([1.0])}
    state, model = train(op.Momentum(0.1), model, {"a": backend.array([1.0])})
    made = copy.deepcopy(state)
    op.update_(state, model, {"a": backend.array([1.0])})
    assert backend.read(leaf(made, "a").slots["velocity"]).tolist() == [1.0]


def test_a_state_pickles_with_ties_masks_memory_and_what_was_untied() -> None:
    model = _model()
    state = op.setup(op.Chain(op.AccumGrad(3), op.Adam()), model, trainable=["embed", "body.0"], frozen="body.0.b")
    state, model = train(state.mask("head.w"), model, _kept(_ones(model)))
    for each in (state, state.untie("head.w"), state.adjust("embed", lr=0.5)):
        made = pickle.loads(pickle.dumps(each))
        assert made == each
        assert made.memory == {"accumgrad": {"filled": 1}}
        after, _ = op.update(made, model, _kept(_ones(model)))
        expected, _ = op.update(each, model, _kept(_ones(model)))
        assert after == expected


def _kept(grads: dict[str, Any]) -> dict[str, Any]:
    return {name: g for name, g in grads.items() if name in ("embed", "body.0.w")}


# Text -----------------------------------------------------------------------------------------------------------------


def test_a_state_can_be_read_by_a_person() -> None:
    state, _ = _trained()
    assert repr(state) == "State(step=2, 5 parameters, Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08))"
    state = state.freeze("body.0").freeze("embed", rows=[1]).mask("head.w").adjust("body.1", lr=0.5)
    assert repr(state) == "State(step=2, 5 parameters, 2 frozen, 1 partly frozen, 2 rules)"
    lines = str(state).splitlines()
    assert lines[0] == repr(state)
    assert len(lines) == 8
    assert [line.split()[0] for line in lines[1:6]] == NAMES
    assert [line.partition("]")[2].split()[0] for line in lines[1:6]] == ["A", "A", "B", "B", "A"]
    assert "frozen" in lines[1]
    assert lines[7] == "  B = Adam(lr=0.5, betas=(0.9, 0.999), eps=1e-08)"
    assert lines[5].endswith("1 of 2 rows frozen, tied: head.w (transposed), masked: head.w")
    assert "float64[2, 3]" in lines[5]
    one = op.setup(op.Adam(), np.ones(2))
    assert "1 parameter," in repr(one)
    assert "(the model)" in str(one)


def test_a_leaf_can_be_read_by_a_person() -> None:
    state, _ = _trained(op.Momentum(0.1))
    assert repr(leaf(state, "body.0.b")) == (
        "Leaf('body.0.b', float64[2], Momentum(lr=0.1, momentum=0.9), slots=['velocity'], step=2)"
    )
    marked = leaf(state.freeze("embed", rows=[1]).freeze("embed"), "embed")
    assert repr(marked).endswith("step=2, frozen, frozen_rows=((1, 2),), ties=['head.w'])")


def test_a_layout_says_what_it_is_the_layout_of() -> None:
    state, _ = _trained()
    assert repr(state.layout) == "Layout(5 parameters, 1 groups)"


def test_a_long_state_is_shown_in_part() -> None:
    state = op.setup(op.Adam(), [np.ones(1) for _ in range(1000)])
    lines = str(state).splitlines()
    assert len(lines) < 40
    assert lines[-1] == "  … and 976 more"


# Adjust ---------------------------------------------------------------------------------------------------------------


def test_adjust_keeps_all_moments(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.Adam(0.1), model, one, one)
    other = state.adjust("a", lr=1.0, betas=(0.5, 0.9))
    assert leaf(other, "a").rule == op.Adam(1.0, (0.5, 0.9))
    assert leaf(other, "b").rule == op.Adam(0.1)
    assert leaf(other, "a").slots == leaf(state, "a").slots
    assert leaf(other, "a").step == 2
    other, new = op.update(other, model, one)
    assert_close(backend.read(new["b"]), [-0.3], 1e-7)
    assert float(backend.read(new["a"])[0]) < -0.9


def test_adjust_acts_on_the_members_of_a_chain_that_have_the_name() -> None:
    model = {"w": np.ones(2), "b": np.ones(2)}
    rule = op.Chain(op.ClipNorm(1.0), op.WeightDecay(0.1), op.AdamW(0.1, weight_decay=0.2))
    state = op.setup({"w": rule, "b": op.Descent(0.1)}, model).adjust(lr=0.5, weight_decay=0.3)
    assert leaf(state, "w").rule == op.Chain(op.ClipNorm(1.0), op.WeightDecay(0.3), op.AdamW(0.5, weight_decay=0.3))
    assert leaf(state, "b").rule == op.Descent(0.5)


def test_adjusting_back_makes_the_groups_one_again() -> None:
    state, _ = _trained()
    other = state.adjust("body", lr=0.5)
    assert (len(other.rules), len(state.rules)) == (2, 1)
    back = other.adjust("body", lr=0.1)
    assert back == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lrr": 0.1}, r'no selected rule has a hyperparameter "lrr"; did you mean "lr"'),
        ({"momentun": 0.1}, '"momentun"'),
        ({"lr": -0.1}, r"lr must lie in \[0, inf\)"),
        ({"lr": float("nan")}, "lr is not a number"),
        ({"lr": "fast"}, "lr is a number or a schedule"),
        ({"lr": None}, "lr is a number or a schedule"),
        ({"betas": 0.9}, "betas is 2 numbers"),
        ({"betas": (0.9, 0.9, 0.9)}, "betas is 2 numbers"),
    ],
    ids=str,
)
def test_an_adjustment_that_cannot_be_is_an_error(change: Any, message: str) -> None:
    for rule in (op.Adam(), op.Chain(op.ClipGrad(), op.Adam())):
        state = op.setup(rule, _model())
        with pytest.raises(HyperparameterError, match=message):
            state.adjust(**change)
        with pytest.raises(HyperparameterError, match=message):
            state.adjust("body", **change)


def test_a_static_option_is_not_adjusted_but_replaced() -> None:
    state, _ = _trained(op.SGD(0.1, momentum=0.9))
    with pytest.raises(HyperparameterError, match=r"use state\.replace"):
        state.adjust(nesterov=True)
    other = state.replace(op.SGD(0.1, momentum=0.9, nesterov=True))
    assert leaf(other, "embed").slots["velocity"] is leaf(state, "embed").slots["velocity"]


def test_a_name_that_no_selected_rule_has_is_an_error() -> None:
    state = op.setup({"body": op.Descent(), "**": op.Adam()}, _model())
    with pytest.raises(HyperparameterError, match='"betas"; there are "lr"'):
        state.adjust("body", betas=(0.5, 0.5))
    assert leaf(state.adjust(betas=(0.5, 0.5)), "body.0.w").rule == op.Descent()


def test_adjust_without_names_changes_nothing() -> None:
    state, _ = _trained()
    assert state.adjust() == state


def test_adjusting_all_makes_no_new_layout() -> None:
    state, model = _trained()
    other = state.adjust(lr=0.5)
    assert other.layout is state.layout
    plans = dict(state.layout.cache["plans"])
    op.update(other, model, _ones(model))
    assert state.layout.cache["plans"] == plans
    # Moving a part into a group of its own does once, and changing it again does not.
    apart = other.adjust("body", lr=0.25)
    assert apart.adjust("body", lr=0.125).layout is apart.layout


# Replace --------------------------------------------------------------------------------------------------------------


def test_replace_keeps_the_slots_of_one_name_and_kind_and_with_them_the_count() -> None:
    state, model = _trained(op.Adam(0.1))
    other = state.replace("embed", op.AdamW(0.2))
    assert leaf(other, "embed").slots["mu"] is leaf(state, "embed").slots["mu"]
    assert leaf(other, "embed").step == 2
    assert leaf(other, "embed").rule == op.AdamW(0.2)
    assert leaf(other, "body.0.w").rule == op.Adam(0.1)
    fresh = state.replace(op.Momentum(0.1))
    assert (leaf(fresh, "embed").step, leaf(fresh, "embed").slots["velocity"].tolist()) == (2, np.zeros((2, 3)).tolist())
    assert fresh.step == 2
    assert leaf(fresh.replace(op.Adam(0.1)), "embed").step == 0
    assert not leaf(state.replace(op.Descent(0.1)), "embed").slots
    after, _ = op.update(fresh, model, _ones(model))
    assert leaf(after, "embed").slots["velocity"].tolist() == np.ones((2, 3)).tolist()


def test_replace_by_a_chain_that_holds_the_rule_keeps_the_slots(backend: Backend) -> None:
    model = {"w": backend.array([1.0])}
    one = {"w": backend.array([1.0])}
    state, model = train(op.Adam(0.1), model, one, one)
    other = state.replace(op.Chain(op.ClipNorm(10.0), op.Adam(0.1)))
    assert leaf(other, "w").slots == leaf(state, "w").slots
    assert leaf(other, "w").step == 2
    accumulating = state.replace(op.Chain(op.AccumGrad(2), op.Adam(0.1)))
    assert backend.read(leaf(accumulating, "w").slots["total"]).tolist() == [0.0]
    assert leaf(accumulating, "w").slots["mu"] is leaf(state, "w").slots["mu"]
    assert (leaf(accumulating, "w").step, accumulating.memory) == (2, {"accumgrad": {"filled": 0}})


def test_replace_does_not_keep_a_slot_of_another_kind() -> None:
    @op.rule
    class Wrong(op.Rule):
        slots = {"nu": op.LIKE}

        def kernel(xp: Any, g: Any, p: Any, h: Any, nu: Any) -> Any:
            return g, nu + g

    model = {"z": np.array([1j, 2j])}
    state, _ = train(Wrong(), model, {"z": np.array([1j, 1j])})
    found = leaf(state.replace(op.Adam()), "z")
    assert (dtype_of(found.slots["nu"]), found.slots["nu"].tolist(), found.step) == ("float64", [0.0, 0.0], 0)


def test_replace_leaves_frozen_parameters_without_slots() -> None:
    state = op.setup(op.Adam(), {"w": np.ones(2)}, frozen="w")
    for other in (state.replace(op.Momentum()), state.replace(op.Descent()).replace(op.Adam())):
        assert not leaf(other, "w").slots
        assert leaf(other.thaw(), "w").slots


def test_replace_keeps_the_dtype_of_the_state() -> None:
    state = op.setup(op.Descent(), {"w": np.ones(2, np.float32)}, state_dtype="float64")
    assert dtype_of(leaf(state.replace(op.Adam()), "w").slots["mu"]) == "float64"


@pytest.mark.parametrize("wrong", [op.Adam, 3, None, "Adam"])
def test_replace_takes_rules_alone(wrong: Any) -> None:
    state, _ = _trained()
    with pytest.raises(HyperparameterError, match="replace takes a rule"):
        state.replace("embed", wrong) if wrong is not None else state.replace(None)  # type: ignore[arg-type]
    with pytest.raises(PathError):
        state.replace("nothing", op.Adam())


# Reset ----------------------------------------------------------------------------------------------------------------


def test_reset_starts_afresh(backend: Backend) -> None:
    model = {"a": backend.array([0.0]), "b": backend.array([0.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.Adam(0.1), model, one, one)
    other = state.reset("a")
    assert (leaf(other, "a").step, leaf(other, "b").step, other.step) == (0, 2, 2)
    assert backend.read(leaf(other, "a").slots["mu"]).tolist() == [0.0]
    other, model = op.update(other, model, one)
    assert_close(backend.read(model["a"]), [-0.3], 1e-7)
    whole = state.reset()
    assert [each.step for each in whole.leaves()] == [0, 0]
    frozen = op.setup(op.Adam(), model, frozen="a").reset()
    assert not leaf(frozen, "a").slots


# Memory of the whole tree ---------------------------------------------------------------------------------------------


def test_memory_goes_with_the_rule() -> None:
    model = {"w": np.ones(2)}
    state, model = train(op.Chain(op.AccumGrad(4), op.Adam()), model, model)
    assert state.memory == {"accumgrad": {"filled": 1}}
    assert state.adjust(n=3).memory == {"accumgrad": {"filled": 1}}
    assert state.replace(op.Adam()).memory == {}
    assert state.freeze("w").memory == {"accumgrad": {"filled": 1}}


def test_every_error_is_of_the_family_and_of_the_kind_one_expects() -> None:
    state, model = _trained()
    cases: list[tuple[Any, type[Exception]]] = [
        (lambda: state["nothing"], KeyError),
        (lambda: state.adjust(lr=-1.0), ValueError),
        (lambda: state.drop("embed"), ValueError),
        (lambda: op.update(state, [], {}), TypeError),
        (lambda: op.update(state, model, {"embed": np.ones(7)}), ValueError),
        (lambda: op.update(state, model, {"embed": np.ones((2, 3), int)}), TypeError),
        (lambda: op.update(state, model), ValueError),
    ]
    for run, kind in cases:
        with pytest.raises(OptimiserError) as caught:
            run()
        assert isinstance(caught.value, kind)
        assert not str(caught.value).startswith(("'", '"'))
    assert str(OptimiserError()) == ""


def test_replace_finds_the_slots_of_a_part_that_another_has_the_same_name_of() -> None:
    state, _ = _trained(op.AdaGrad(0.1))
    other = state.replace(op.Chain(op.AccumGrad(2), op.AdaGrad(0.1)))
    assert leaf(other, "embed").slots["adagrad.total"] is leaf(state, "embed").slots["total"]
    assert leaf(other, "embed").step == 2
    assert not leaf(other, "embed").slots["accumgrad.total"].any()
    back = other.replace(op.AdaGrad(0.1))
    assert leaf(back, "embed").slots["total"] is leaf(state, "embed").slots["total"]


def test_a_part_that_needs_the_count_from_its_beginning_takes_the_others_with_it() -> None:
    state, _ = _trained(op.Adam(0.1))
    other = state.replace(op.Chain(op.RAdam(0.1), op.Adam(0.1)))
    assert leaf(other, "embed").step == 0
    assert not any(slot.any() for slot in leaf(other, "embed").slots.values())


def test_factored_slots_behind_a_transpose_start_afresh() -> None:
    w = np.arange(6.0).reshape(2, 3) + 1
    model = {"enc": w, "dec": w.T}
    grads = {"enc": np.ones((2, 3)), "dec": np.ones((3, 2))}
    state, model = train(op.Adafactor(0.1), model, grads)
    after, _ = op.update(state.untie("enc"), model, grads)
    assert [leaf(after, name).step for name in ("dec", "enc")] == [2, 1]
    assert {name: slot.shape for name, slot in leaf(after, "enc").slots.items()} == {"row": (2, 1), "column": (1, 3)}
    nested = {"a": {"w": w}, "b": {"w": w.T}}
    state, _ = train(op.Adafactor(0.1), nested, {"a": {"w": w}})
    part = branch(state, "b")
    assert (leaf(part, "w").step, leaf(part, "w").slots["row"].shape) == (0, (3, 1))


# Spent ----------------------------------------------------------------------------------------------------------------


def _spending() -> dict[str, Any]:
    """Ways in which `update_` writes into the slots of a state, each as a rule, a parameter and a gradient."""
    ones = np.ones((3, 3), np.float32)
    return {
        "in one pass": (op.Momentum(), ones, ones),
        "a gradient of another dtype": (op.Momentum(), ones, ones.astype(np.float64)),
        "on whole arrays": (op.Muon(), ones, ones),
        "factored": (op.Adafactor(), ones, ones),
    }


@pytest.mark.parametrize("kind", _spending())
@pytest.mark.parametrize("reference", [False, True])
def test_a_state_whose_slots_were_written_is_spent(kind: str, reference: bool) -> None:
    rule, param, grad = _spending()[kind]
    with op.reference_only() if reference else nullcontext():
        old, model = op.update(op.setup(rule, {"w": param.copy()}), {"w": param.copy()}, {"w": grad})
        before = {name: slot.copy() for name, slot in old["w"].slots.items()}  # type: ignore[union-attr]
        op.update_(old, model, {"w": grad * 2})
    wrote = any((slot != before[name]).any() for name, slot in old["w"].slots.items())  # type: ignore[union-attr]
    assert old.spent
    assert wrote


def test_a_spent_state_is_refused_everywhere() -> None:
    model = {"w": np.ones(3)}
    old, model = op.update(op.setup(op.ScheduleFree(), model), model, model)
    op.update_(old, model, model)
    average = op.setup(op.Chain(op.Adam(), op.Average()), model)
    average, model = op.update(average, model, model)
    op.update_(average, model, model)
    for ask in (
        lambda: op.evaluation(old, model),
        lambda: op.averaged(average, model),
        lambda: pickle.dumps(old),
        lambda: copy.deepcopy(old),
        lambda: old.freeze("w"),
        lambda: op.update(old, model, model),
    ):
        with pytest.raises(StateError, match="update_ has written"):
            ask()


def test_states_that_hold_nan_are_equal_to_their_copies() -> None:
    model = {"w": np.ones(3)}
    state, _ = op.update(op.setup(op.Adam(), model), model, {"w": np.array([np.nan, 1.0, np.inf])})
    assert pickle.loads(pickle.dumps(state)) == state
    assert copy.deepcopy(state) == state


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_a_state_behind_a_closed_gate_is_not_spent(library: str) -> None:
    make: Any = {"numpy": np.array, "jax": jnp.array, "torch": torch.tensor}[library]
    model = {"w": make([1.0, 2.0])}
    state, model = op.update(op.setup(op.Chain(op.SkipNonFinite(), op.Adam(0.1)), model), model, {"w": make([1.0, 1.0])})
    after, model = op.update_(state, model, {"w": make([np.nan, 1.0])})
    assert not state.spent
    assert after.memory["skipnonfinite"]["skipped"] == 1
    assert op.update(state, model, {"w": make([1.0, 1.0])})[0].step == 2


def test_the_state_of_an_ensemble_is_reset_dropped_and_given_rules_inside_of_vmap_alone() -> None:
    def members(w: Any) -> op.State:
        return op.setup(op.Adam(0.1), {"w": w}).freeze("w")

    state = jax.vmap(members)(jnp.ones((4, 3)))
    calls: list[Any] = [lambda: state.reset(), lambda: state.drop(), lambda: state.replace(op.SGD(0.1))]
    for call in calls:
        with pytest.raises(StateError, match=r"the state of an ensemble.*do it inside of jax\.vmap"):
            call()
    assert jax.vmap(lambda state: state.reset())(state)["w"].slots["mu"].shape == (4, 3)
    asleep = jax.vmap(lambda w: op.setup(op.Adam(0.1), {"w": w}, frozen="w"))(jnp.ones((4, 3)))
    with pytest.raises(StateError, match=r"the state of an ensemble.*do it inside of jax\.vmap"):
        asleep.thaw("w")
    assert jax.vmap(lambda state: state.thaw("w"))(asleep)["w"].slots["mu"].shape == (4, 3)


def test_a_leaf_is_copied_and_pickled() -> None:
    state, _ = _trained()
    for again in (copy.deepcopy(leaf(state, "embed")), pickle.loads(pickle.dumps(leaf(state, "embed")))):
        assert repr(again) == repr(leaf(state, "embed"))
        np.testing.assert_array_equal(again.slots["mu"], leaf(state, "embed").slots["mu"])
