"""Models that change: heads swapped, layers moved, vocabularies resized, ties that come and go."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import optimisers as op
from optimisers.errors import ModelError, PathError, ShapeError, StateError
from tests.conftest import BACKENDS, RULES, Backend, leaf, steps_of, trained_on, trains

# Names ----------------------------------------------------------------------------------------------------------------


def test_a_swapped_head_starts_afresh_and_the_trunk_goes_on(backend: Backend) -> None:
    state, model = trained_on(backend, op.Adam(0.1), {"trunk": (3,), "head": (3, 10)})
    mu = backend.read(leaf(state, "trunk").slots["mu"]).copy()
    model = {"trunk": model["trunk"], "head": backend.array(np.ones((3, 4)))}
    new, report = op.adapt(state, model)
    assert steps_of(new) == {"head": 0, "trunk": 3}
    assert (list(map(str, report.kept)), {str(path): why for path, why in report.fresh.items()}) == (
        ["trunk"],
        {"head": "shape [3, 10] -> [3, 4]"},
    )
    np.testing.assert_array_equal(backend.read(leaf(new, "trunk").slots["mu"]), mu)
    assert not backend.read(leaf(new, "head").slots["mu"]).any()
    new, model = op.update(new, model, model)
    assert steps_of(new) == {"head": 1, "trunk": 4}
    assert new.step == 4


RENAMES: dict[str, tuple[Any, dict[str, int]]] = {
    "branches": ({"encoder": "backbone.encoder", "head": "top"}, {"backbone.encoder.0.w": 1, "backbone.encoder.1.w": 2, "top": 3}),
    "all below a new name": ({"": "m"}, {"m.encoder.0.w": 1, "m.encoder.1.w": 2, "m.head": 3}),
    "a layer in the middle": ({"encoder.1": "encoder.2"}, {"encoder.0.w": 1, "encoder.2.w": 2, "head": 3}),
    "two swapped": ({"encoder.0": "encoder.1", "encoder.1": "encoder.0"}, {"encoder.1.w": 1, "encoder.0.w": 2, "head": 3}),
    "a regular expression": (
        {re.compile(r"encoder\.(\d)\.w"): r"blocks.\1.weight"},
        {"blocks.0.weight": 1, "blocks.1.weight": 2, "head": 3},
    ),
    "a function": (lambda path: ("m", *path) if path[0] == "head" else path, {"encoder.0.w": 1, "encoder.1.w": 2, "m.head": 3}),
    "one that goes": ({"encoder.0": None}, {"encoder.1.w": 2, "head": 3}),
    "the inner of two": ({"encoder": "e", "encoder.1": "last"}, {"e.0.w": 1, "last.w": 2, "head": 3}),
}


def _nested(paths: dict[str, Any]) -> Any:
    tree: dict[Any, Any] = {}
    for path, value in paths.items():
        *above, last = op.Path(path)
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


@pytest.mark.parametrize("name", RENAMES)
def test_renamed_parameters_keep_their_state(name: str) -> None:
    rename, expected = RENAMES[name]
    model = _nested({"encoder.0.w": np.ones(2), "encoder.1.w": np.ones(2), "head": np.ones(2)})
    state = op.setup(op.Adam(), model)
    for at, path in enumerate(["encoder.0.w", "encoder.1.w", "head"]):
        for _ in range(at + 1):
            state, model = op.update(state, model, {path: np.full(2, at + 1.0)})
    state = state.freeze("head")
    new, report = op.adapt(state, _nested({path: np.ones(2) for path in expected}), rename=rename)
    assert steps_of(new) == expected
    for path, count in expected.items():
        expected_mu = count * (1 - 0.9**count)
        np.testing.assert_allclose(leaf(new, path).slots["mu"], expected_mu)
        assert leaf(new, path).frozen == (count == 3)
    assert set(map(str, report.renamed.values())) == set(expected) - {"encoder.0.w", "encoder.1.w", "head"} or name == "two swapped"
    assert list(map(str, report.dropped)) == (["encoder.0.w"] if name == "one that goes" else [])


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"encodr": "x"}, 'rename: no parameter stands at or below "encodr"; did you mean "encoder"'),
        ({re.compile("q"): "x"}, "rename: no path matches the regular expression 'q'"),
        ({"encoder.0": "encoder.1"}, "encoder.0.w and encoder.1.w would both be called encoder.1.w"),
        (lambda path: 1.5, '"encoder.0.w" becomes 1.5, which is no path'),
        ("encoder", "rename is a mapping of paths or a function, not str"),
    ],
)
def test_a_rename_that_cannot_be_is_an_error(rename: Any, message: str) -> None:
    model = _nested({"encoder.0.w": np.ones(2), "encoder.1.w": np.ones(2), "head": np.ones(2)})
    state = op.setup(op.Adam(), model)
    with pytest.raises(PathError, match=re.escape(message)):
        op.adapt(state, model, rename=rename)


def test_what_is_renamed_to_what_the_model_lacks_starts_afresh() -> None:
    model = _nested({"encoder.0.w": np.ones(2), "encoder.1.w": np.ones(2), "head": np.ones(2)})
    state = op.setup(op.Adam(), model)
    new = _nested({"trunk.0.w": np.ones(2), "head": np.ones(2)})
    _, report = op.adapt(state, new, rename={"encoder": "trunk"})
    assert (list(map(str, report.kept)), list(map(str, report.dropped))) == (["head", "trunk.0.w"], ["encoder.1.w"])


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"layers": "encoder"}, '"layers.0" becomes "encoder.0", where the model has nothing .*; did you mean "encoder"'),
        ({re.compile("^layers"): "encodr.layers"}, '"layers.0" becomes "encodr.layers.0", where the model has nothing'),
        (lambda path: ("x", *path), '"head" becomes "x.head", where the model has nothing'),
        ({"": "cls"}, '"head" becomes "cls.head", where the model has nothing'),
    ],
)
def test_a_rename_of_which_nothing_arrives_is_an_error(rename: Any, message: str, tmp_path: Path) -> None:
    model = {"layers": [np.ones(2)], "head": np.ones(2)}
    state = op.setup(op.Adam(), model)
    new = {"encoder": {"layers": [np.ones(2)]}, "head": np.ones(2)}
    with pytest.raises(PathError, match=message):
        op.adapt(state, new, rename=rename)
    op.save(tmp_path / "run.safetensors", state, model)
    with pytest.raises(PathError, match=message):
        op.load(tmp_path / "run.safetensors", new, rename=rename, strict=False)


def test_a_new_parameter_among_several_rules_needs_one() -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    state = op.setup({"a": op.Adam(), "b": op.SGD(0.1)}, model)
    larger = {**model, "c": np.ones(2), "d": np.ones(3)}
    with pytest.raises(StateError, match=r"c is new, and the state has 2 rules; say which .* rule=…"):
        op.adapt(state, larger)
    new, _ = op.adapt(state, larger, rule={"c": op.Lion(), "**": op.SGD(0.5)})
    assert [type(each.rule).__name__ for each in new.leaves()] == ["Adam", "SGD", "Lion", "SGD"]
    again, _ = op.adapt(state, {"a": np.ones(3), "b": np.ones(2)})
    assert leaf(again, "a").rule == op.Adam()


def test_what_the_state_did_not_train_it_does_not_train_afterwards() -> None:
    model = {"a": np.ones(2), "table": np.ones(2)}
    state = op.setup(op.Adam(), model, trainable="a")
    new, report = op.adapt(state, {"b": np.ones(2), "lookup": np.ones(2)}, rename={"a": "b", "table": "lookup"})
    assert [str(path) for path in new] == ["b"]
    assert not report.fresh


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "pad"])
def test_a_grown_vocabulary_keeps_its_rows(backend: Backend, policy: str) -> None:
    state, model = trained_on(backend, op.Adam(0.1), {"embed": (4, 3), "w": (2,)})
    state = state.freeze("embed", rows=[0, 3])
    grown = np.ones((6, 3))
    grown[:4] = backend.read(model["embed"])
    new, report = op.adapt(state, {"embed": backend.array(grown), "w": model["w"]}, resize=policy)
    mu = backend.read(leaf(new, "embed").slots["mu"])
    np.testing.assert_array_equal(mu[:4], backend.read(leaf(state, "embed").slots["mu"]))
    assert not mu[4:].any()
    assert (leaf(new, "embed").step, leaf(new, "embed").frozen_rows) == (3, ((0, 1), (3, 4)))
    assert {str(path): shapes for path, shapes in report.resized.items()} == {"embed": ((4, 3), (6, 3))}
    op.update(new, {"embed": backend.array(grown), "w": model["w"]}, {"embed": backend.array(grown)})


@pytest.mark.parametrize(
    ("policy", "shape", "carried"),
    [
        ("keep", (3, 5), True),
        ("pad", (3, 5), False),
        ("truncate", (3, 5), False),
        ("truncate", (2, 2), True),
        ("pad", (5, 4), True),
        ("keep", (4, 3, 1), False),
        (None, (5, 4), False),
    ],
)
def test_a_policy_says_what_is_carried(policy: str | None, shape: tuple[int, ...], carried: bool) -> None:
    model = {"w": np.ones((4, 3)), "head": np.ones(3)}
    state, _ = op.update(op.setup(op.Adam(), model), model, {"w": np.arange(12.0).reshape(4, 3)})
    new, report = op.adapt(state, {"w": np.ones(shape), "head": np.ones(3)}, resize={"w": policy} if policy else None)
    mu, old = leaf(new, "w").slots["mu"], leaf(state, "w").slots["mu"]
    assert leaf(new, "w").step == int(carried)
    assert bool(report.resized) == carried
    expected = np.zeros(shape)
    if carried:
        part = tuple(slice(min(a, b)) for a, b in zip(shape, old.shape, strict=True))
        expected[part] = old[part]
    np.testing.assert_array_equal(mu, expected)


@pytest.mark.parametrize("name", [name for name in RULES if trains(RULES[name], (4, 3), "float64")])
def test_every_rule_is_carried_into_another_shape(name: str) -> None:
    rng = np.random.default_rng(0)
    model = {"w": rng.normal(size=(4, 3))}
    state = op.setup(RULES[name], model)
    for _ in range(3):
        state, model = op.update(state, model, {"w": rng.normal(size=(4, 3))})
    grown = {"w": np.concatenate([model["w"], np.ones((2, 3))])}
    new, _ = op.adapt(state, grown, resize="keep")
    assert leaf(new, "w").step == leaf(state, "w").step
    grads = rng.normal(size=(6, 3))
    new, _ = op.update(new, grown, {"w": grads})
    back, _ = op.adapt(new, model, resize="truncate")
    for slot, value in leaf(back, "w").slots.items():
        assert value.shape == leaf(state, "w").slots[slot].shape


def test_what_starts_as_a_copy_of_the_parameter_does_so_in_new_rows() -> None:
    model = {"w": np.ones((2, 2), np.float16)}
    state, model = op.update(op.setup(op.Chain(op.MixedPrecision(), op.SGD(0.1)), model), model, {"w": np.ones((2, 2))})
    grown = {"w": np.concatenate([model["w"], np.full((1, 2), 7, np.float16)])}
    new, _ = op.adapt(state, grown, resize="pad")
    (master,) = leaf(new, "w").slots.values()
    np.testing.assert_allclose(master, [[0.9, 0.9], [0.9, 0.9], [7, 7]], rtol=1e-6)


def test_a_policy_or_selector_that_is_none_is_an_error() -> None:
    model = {"w": np.ones(2)}
    state = op.setup(op.Adam(), model)
    with pytest.raises(ShapeError, match="resize='grow': a policy is one of 'keep', 'pad', 'truncate'"):
        op.adapt(state, model, resize="grow")
    with pytest.raises(PathError, match='no parameter matches "v"'):
        op.adapt(state, model, resize={"v": "keep"})


# Ties -----------------------------------------------------------------------------------------------------------------


def test_two_halves_that_share_an_array_are_tied_by_adapt() -> None:
    table = np.ones((4, 3))
    encoder, decoder = {"embed": table}, {"head": table.T, "b": np.ones(4)}
    first, second = op.setup(op.Adam(), encoder), op.setup(op.Adam(), decoder)
    first, encoder = op.update(first, encoder, {"embed": np.ones((4, 3))})
    second, _ = op.update(second, decoder, {"head": np.ones((3, 4))})
    state = op.compose({"encoder": first, "decoder": second})
    assert steps_of(state) == {"encoder.embed": 1, "decoder.b": 0, "decoder.head": 1}
    model = {"encoder": {"embed": table}, "decoder": {"head": table.T, "b": np.ones(4)}}
    new, report = op.adapt(state, model)
    assert {str(a): str(b) for a, b in report.tied.items()} == {"encoder.embed": "decoder.head"}
    assert len(new) == 2
    new, model = op.update(new, model, {"encoder": {"embed": np.ones((4, 3))}})
    assert model["decoder"]["head"].base is model["encoder"]["embed"] or np.shares_memory(
        model["decoder"]["head"], model["encoder"]["embed"]
    )


def test_a_tie_that_is_gone_leaves_a_copy_of_the_state_at_each_place(sharing_backend: Backend) -> None:
    table = sharing_backend.array(np.ones((4, 3)))
    model = {"embed": table, "head": table.T}
    state, model = op.update(op.setup(op.Adam(), model), model, {"embed": sharing_backend.array(np.arange(12.0).reshape(4, 3))})
    apart = {"embed": sharing_backend.array(np.ones((4, 3))), "head": sharing_backend.array(np.zeros((3, 4)))}
    new, report = op.adapt(state, apart)
    assert {str(a): str(b) for a, b in report.untied.items()} == {"head": "embed"}
    mu = [sharing_backend.read(leaf(new, name).slots["mu"]) for name in ("embed", "head")]
    np.testing.assert_array_equal(mu[0], mu[1].T)
    assert not np.shares_memory(mu[0], mu[1])
    assert steps_of(new) == {"embed": 1, "head": 1}
    back, report = op.adapt(new, model)
    assert {str(a): str(b) for a, b in report.tied.items()} == {"head": "embed"}
    assert len(back) == 1


def test_a_tie_that_jit_hides_is_taken_from_the_state() -> None:
    table = jnp.ones((4, 3))
    model = {"embed": table, "head": table, "b": jnp.ones(3)}
    step = jax.jit(op.update)
    state, model = step(op.setup(op.Adam(), model), model, {"embed": table})
    assert model["embed"] is not model["head"]
    new, report = op.adapt(
        state,
        {"m": {"embed": model["embed"], "head": model["head"]}, "b": jnp.ones(3)},
        rename={"embed": "m.embed", "head": "m.head"},
    )
    assert {str(each.path): list(map(str, each.ties)) for each in new.leaves()} == {"b": [], "m.embed": ["m.head"]}
    assert not report.untied
    new, report = op.adapt(state, {**model, "head": model["head"] + 1})
    assert {str(a): str(b) for a, b in report.untied.items()} == {"head": "embed"}


def test_a_tie_that_a_copy_of_views_has_lost_is_taken_from_the_state() -> None:
    table = np.ones((4, 3))
    model = {"embed": table, "head": table.T}
    state = op.setup(op.Adam(), model)
    copied = copy.deepcopy(model)
    assert not np.shares_memory(copied["embed"], copied["head"])
    new, report = op.adapt(state, copied)
    assert (new, str(report)) == (state, "1 kept")


def test_an_untied_place_has_to_have_its_array_first() -> None:
    w = np.ones(2)
    model = {"a": w, "b": w}
    state = op.setup(op.Adam(), model).untie("b")
    with pytest.raises(StateError, match="b was untied and gets an array of its own with the next update; take that step first"):
        op.adapt(state, model)
    state, model = op.update(state, model, {"a": np.ones(2)})
    new, _ = op.adapt(state, model)
    assert len(new) == 2


def test_masks_and_frozen_rows_follow_a_canonical_place_that_has_gone() -> None:
    table = np.ones((4, 3))
    model = {"a": {"w": table}, "b": {"w": table}, "c": {"w": table}}
    state = op.setup(op.Adam(), model).mask("b").freeze("a", rows=[1])
    new, report = op.adapt(state, {"b": {"w": table}, "c": {"w": table}})
    (only,) = new.leaves()
    assert (str(only.path), set(map(str, only.masked)), only.frozen_rows) == ("b.w", {"b.w"}, ((1, 2),))
    assert report.dropped == (op.Path("a.w"),)
    model = {"a": {"w": table}, "t": {"w": table.T}}
    state = op.setup(op.Adam(), model).freeze("a", rows=[1])
    with pytest.raises(StateError, match=r"rows of a\.w are frozen, and at t\.w, where it is seen transposed, they are no rows"):
        op.adapt(state, {"t": {"w": table.T}})


def test_slots_that_cannot_be_turned_start_afresh_and_say_so() -> None:
    table = np.random.default_rng(0).normal(size=(4, 3))
    model = {"e": table, "h": table.T}
    state, model = op.update(op.setup(op.Adafactor(0.1), model), model, {"e": table})
    new, report = op.adapt(state, {"h": model["h"].copy()})
    assert (leaf(new, "h").step, report.kept) == (0, ())
    assert "it is seen transposed now" in str(report)


def test_masks_and_frozen_rows_stay_where_a_parameter_starts_afresh() -> None:
    table = np.ones((4, 2))
    state = op.setup(op.Adam(), {"e": table, "h": table}).mask("h").freeze("e", rows=[1])
    grown = np.ones((5, 2))
    new, _ = op.adapt(state, {"e": grown, "h": grown})
    (only,) = new.leaves()
    assert (set(map(str, only.masked)), only.frozen_rows, only.step) == ({"h"}, ((1, 2),), 0)


def test_a_name_that_two_would_get_is_an_error() -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    state = op.setup(op.Adam(), model, trainable="a")
    with pytest.raises(PathError, match="a and what did not train would both be called a"):
        op.adapt(state, {"a": np.ones(2)}, rename={"b": "a"})
    with pytest.raises(PathError, match="two of the keys are one path"):
        op.adapt(state, model, rename={"a": "c", ("a",): "d"})
    with pytest.raises(PathError, match="two of the names are one path"):
        op.compose({"a.b": state, ("a", "b"): state})
    with pytest.raises(PathError, match=r"'a' -> '.*9' cannot be carried out on a"):
        op.adapt(state, model, rename={re.compile("a"): r"\9"})
    with pytest.raises(StateError, match=r"compose\(step=-3\): a count of steps is a whole number"):
        op.compose({"a": state}, step=-3)


def test_a_state_of_two_libraries_is_spent_when_one_of_them_was_written() -> None:
    model = {"a": np.ones(2), "b": jnp.ones(2)}
    state = op.setup(op.Adam(), model)
    op.update_(state, model, model)
    with pytest.raises(StateError, match="use the state that it returned"):
        op.update(state, model, model)


# Dtypes and libraries ---------------------------------------------------------------------------------------------------


def test_slots_follow_their_parameter_into_another_dtype() -> None:
    model = {"w": np.ones(3), "v": np.ones(2, np.float32)}
    state, model = op.update(op.setup(op.Adam(), model), model, {"w": np.ones(3), "v": np.ones(2)})
    new, report = op.adapt(state, {name: each.astype(np.float32) for name, each in model.items()})
    assert leaf(new, "w").slots["mu"].dtype == np.float32
    assert {str(path): each for path, each in report.converted.items()} == {"w": ("float64", "float32")}
    assert leaf(new, "v").slots["mu"] is leaf(state, "v").slots["mu"]


@pytest.mark.parametrize("there", [each for each in BACKENDS if each.name in ("numba", "torch", "jax", "strict")], ids=str)
def test_a_run_goes_on_in_another_library(backend: Backend, there: Backend) -> None:
    rules = {"**.b": op.SGD(0.1, momentum=0.9), "**": op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1))}
    values = {"x": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3)}}

    def grads(library: Backend, at: int) -> Any:
        rng = np.random.default_rng(at)
        return {"x": {"w": library.array(rng.normal(size=(2, 3))), "b": library.array(rng.normal(size=3))}}

    def run(first: Backend, second: Backend) -> tuple[op.State, Any]:
        model = {"x": {name: first.array(each) for name, each in values["x"].items()}}
        state = op.setup(rules, model)
        for at in range(3):
            state, model = op.update(state, model, grads(first, at))
        state = state.freeze("x.b", rows=[0])
        model = {"x": {name: second.array(first.read(each)) for name, each in model["x"].items()}}
        state, report = op.adapt(state, model)
        if second.make is not first.make:
            assert {str(path) for path in report.converted} == {"x.w", "x.b"}
        for at in range(3, 6):
            state, model = op.update(state, model, grads(second, at))
        return state, {name: second.read(each) for name, each in model["x"].items()}

    state, found = run(backend, there)
    expected, right = run(BACKENDS[0], BACKENDS[0])
    for name, each in right.items():
        np.testing.assert_allclose(found[name], each, rtol=1e-12, atol=1e-12)
    assert steps_of(state) == steps_of(expected)
    assert state.step == 6
    if there.name != "jax":
        assert all(type(each.step) is int for each in state.leaves())


def test_bfloat16_goes_from_torch_to_jax_and_back() -> None:
    model: Any = {"w": torch.ones(3, dtype=torch.bfloat16)}
    state, model = op.update(op.setup(op.Adam(), model, state_dtype="bfloat16"), model, {"w": torch.tensor([1.0, 2.0, 3.0])})
    there, _ = op.adapt(state, {"w": jnp.ones(3, jnp.bfloat16)})
    assert leaf(there, "w").slots["mu"].dtype == jnp.bfloat16
    back, _ = op.adapt(there, model)
    assert torch.equal(leaf(back, "w").slots["mu"], leaf(state, "w").slots["mu"])


def test_an_embedding_of_a_module_is_resized_in_mid_training() -> None:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    module[1].weight = module[0].weight
    state = op.setup(op.AdamW(0.1), module)

    def train(state: op.State) -> op.State:
        for _ in range(2):
            module.zero_grad()
            module(torch.arange(3)).square().sum().backward()
            state, _ = op.update_(state, module)
        return state

    state = train(state)
    mu = leaf(state, "0.weight").slots["mu"].clone()
    module[0].weight = module[1].weight = nn.Parameter(torch.cat([module.get_parameter("0.weight").detach(), torch.zeros(2, 3)]))
    state, report = op.adapt(state, module, resize="pad")
    assert (len(state), {str(path) for path in report.resized}) == (1, {"0.weight"})
    assert torch.equal(leaf(state, "0.weight").slots["mu"][:5], mu)
    assert steps_of(train(state)) == {"0.weight": 4}


# The report -------------------------------------------------------------------------------------------------------------


def test_the_report_is_text_and_data() -> None:
    model = {"a": np.ones(2), "b": np.ones((2, 2)), "c": np.ones(2), "d": np.ones(2)}
    state = op.setup(op.Adam(), model)
    new = {"z": np.ones(2), "b": np.ones((3, 2)), "d": np.ones(2, np.float32), "e": np.ones(1)}
    _, report = op.adapt(state, new, rename={"a": "z"}, resize="keep")
    assert str(report).splitlines() == [
        "2 kept, 1 renamed, 1 resized, 1 converted, 1 fresh, 1 dropped",
        "  renamed    a  -> z",
        "  resized    b  [2, 2] -> [3, 2]",
        "  converted  d  float64 -> float32",
        "  fresh      e  new",
        "  dropped    c",
    ]
    assert json.loads(json.dumps(report.as_dict())) == {
        "kept": ["d", "z"],
        "renamed": {"a": "z"},
        "resized": {"b": [[2, 2], [3, 2]]},
        "converted": {"d": ["float64", "float32"]},
        "fresh": {"e": "new"},
        "dropped": ["c"],
        "tied": {},
        "untied": {},
    }


def test_a_model_that_has_not_changed_has_the_same_state() -> None:
    model = {"a": np.ones(2), "b": [np.ones(2)]}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    new, report = op.adapt(state.freeze("b"), model)
    assert new == state.freeze("b")
    assert str(report) == "2 kept"


def test_a_spent_state_is_refused() -> None:
    model = {"a": np.ones(2)}
    state = op.setup(op.Adam(), model)
    op.update_(state, model, {"a": np.ones(2)})
    for call in (lambda: op.adapt(state, model), lambda: op.compose({"m": state})):
        with pytest.raises(StateError, match="use the state that it returned"):
            call()


def test_a_declared_tie_keeps_its_canonical_place_though_the_other_comes_first(tmp_path: Path) -> None:
    w = np.ones((1, 4))
    model = {"a": np.ones((1, 4)), "t": np.ones((1, 4))}
    state = op.setup(op.Adam(), model).tie("a", "t").freeze("t", rows=[0])
    for shared in (model, {"a": w, "t": w}):
        new, report = op.adapt(state, shared)
        assert new == state
        assert (list(map(str, report.kept)), report.tied, report.untied) == (["t"], {}, {})
        op.save(tmp_path / "run", state, shared)
        assert op.load(tmp_path / "run", shared).state == state


def test_a_parameter_that_its_rule_cannot_train_any_more_takes_the_one_that_is_given() -> None:
    state = op.setup(op.Adafactor(), {"w": np.ones((3, 3))})
    with pytest.raises(StateError, match=r"w: Adafactor cannot train it: it has 1 axes, .* in adapt or load as rule="):
        op.adapt(state, {"w": np.ones(3)})
    new, report = op.adapt(state, {"w": np.ones(3)}, rule=op.Adafactor())
    assert list(leaf(new, "w").slots) == ["nu"]
    assert {str(path): why for path, why in report.fresh.items()} == {"w": "shape [3, 3] -> [3]"}


def test_what_is_no_model_is_an_error() -> None:
    state = op.setup(op.Adam(), {"w": np.ones(2)})
    with pytest.raises(ModelError, match="is a rule, and stands where the model should"):
        op.adapt(state, op.SGD())
    with pytest.raises(ModelError, match="give the model itself"):
        op.adapt(state, iter([np.ones(2)]))


def test_a_complex_parameter_does_not_lose_its_imaginary_part_unsaid() -> None:
    model = {"w": np.array([1 + 5j])}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    new, report = op.adapt(state, {"w": np.zeros(1)})
    assert (leaf(new, "w").step, leaf(new, "w").slots["mu"].dtype) == (0, np.float64)
    assert report.fresh == {op.Path("w"): "complex128 -> float64, which holds no imaginary part"}


def test_the_state_of_an_ensemble_is_not_taken_for_that_of_a_model() -> None:
    models = {"w": jnp.ones((4, 3))}
    states = jax.vmap(lambda model: op.setup(op.ScheduleFree(), model))(models)
    states, models = jax.vmap(op.update)(states, models, models)
    for ask in (lambda: op.adapt(states, models), lambda: op.evaluation(states, models), lambda: op.compose({"a": states})):
        with pytest.raises(StateError, match="this is the state of an ensemble"):
            ask()
    one, model = jax.tree.map(lambda leaf: leaf[1], (states, models))
    assert leaf(op.adapt(one, model)[0], "w").slots["z"].shape == (3,)


def test_a_place_of_another_shape_takes_the_rule_that_is_given_where_its_own_does_not_fit() -> None:
    w = np.ones((2, 3))
    state = op.setup(op.Adafactor(factored=True), {"a": w, "b": w.reshape(6)})
    new, report = op.adapt(state, {"b": np.ones(6)}, rule=op.Adam())
    assert list(leaf(new, "b").slots) == ["mu", "nu"]
    assert "cannot train it any more" in report.fresh[op.Path("b")]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("encodr", 'rename: "trunk.0" becomes "encodr.0", where the model has nothing .*; did you mean "encoder.0"'),
        ("encoder.1", 'where the model has nothing .*; did you mean "encoder.0"'),
    ],
)
def test_a_new_name_that_the_model_lacks_is_an_error(new: str, message: str, tmp_path: Path) -> None:
    model = {"trunk": [np.ones(2)], "head": np.ones(2)}
    state = op.setup(op.Adam(), model)
    changed = {"encoder": [np.ones(2)], "head": np.ones(2)}
    with pytest.raises(PathError, match=message):
        op.adapt(state, changed, rename={"trunk": new})
    op.save(tmp_path / "run.safetensors", state, model)
    with pytest.raises(PathError, match=message):
        op.load(tmp_path / "run.safetensors", changed, rename={"trunk": new}, strict=False)


def test_what_becomes_one_parameter_keeps_masks_and_refuses_rows_that_differ() -> None:
    state = op.setup(op.Descent(0.1), {"a": np.ones(3), "b": np.ones(3)})
    shared = np.ones(3)
    one, _ = op.adapt(state.mask("b"), {"a": shared, "b": shared})
    _, model = op.update(one, {"a": shared, "b": shared}, {"a": np.ones(3), "b": np.full(3, 5.0)})
    assert model["a"].tolist() == [0.9] * 3
    with pytest.raises(StateError, match=r"rows of b are frozen, which a lacks.*thaw them first, and freeze those of a"):
        op.adapt(state.freeze("b", rows=[0]), {"a": shared, "b": shared})
    one, _ = op.adapt(state.freeze("a", rows=[0]).freeze("b", rows=[0]), {"a": shared, "b": shared})
    assert leaf(one, "a").frozen_rows == ((0, 1),)


def test_what_was_left_out_is_brought_in_and_what_trains_is_left_out() -> None:
    model = {"trunk": np.ones(2), "head": np.ones(2)}
    state = op.setup(op.Descent(0.1), model, trainable="head")
    state, model = op.update(state, model, {"head": np.ones(2)})
    message = r'"trunk" was left out of training .* adapt\(state, model, trainable=…\) brings it in'
    for change in (state.thaw, state.freeze, state.reset):
        with pytest.raises(PathError, match=message):
            change("trunk")
    with pytest.raises(PathError, match=message):
        state.thaw(("trunk",))
    with pytest.raises(PathError, match='no parameter matches "0"'):
        state.thaw(0)
    same, report = op.adapt(state, model)
    assert (list(map(str, same)), list(map(str, report.fresh))) == (["head"], [])
    both, report = op.adapt(state, model, trainable="**")
    assert (steps_of(both), list(map(str, report.kept)), list(map(str, report.fresh))) == (
        {"head": 1, "trunk": 0},
        ["head"],
        ["trunk"],
    )
    both, model = op.update(both, model, {"head": np.ones(2), "trunk": np.ones(2)})
    assert (model["head"][0], model["trunk"][0]) == (0.8, 0.9)
    other, report = op.adapt(both, model, trainable="trunk")
    assert (steps_of(other), list(map(str, report.dropped))) == ({"trunk": 1}, ["head"])
    with pytest.raises(PathError, match="no parameter matches"):
        op.adapt(both, model, trainable="trunc")


def test_a_layer_that_goes_from_the_middle_leaves_the_others_what_they_had() -> None:
    model: Any = {"layers": [np.full(2, float(at)) for at in range(3)]}
    state = op.setup(op.Descent(0.1), model)
    for _ in range(2):
        state, model = op.update(state, model, {"layers": [None, np.ones(2), None]})
    shorter = {"layers": [model["layers"][0], model["layers"][2]]}
    with pytest.raises(PathError, match="or None to one that goes"):
        op.adapt(state, shorter, rename={"layers.2": "layers.1"})
    new, report = op.adapt(state, shorter, rename={"layers.1": None, "layers.2": "layers.1"})
    assert steps_of(new) == {"layers.0": 0, "layers.1": 0}
    assert list(map(str, report.dropped)) == ["layers.1"]


def test_a_frozen_parameter_that_is_one_with_a_live_one_is_an_error() -> None:
    shared, model = np.ones(2), {"a": np.ones(2), "b": np.ones(2)}
    state = op.setup(op.Adam(), model).freeze("b")
    with pytest.raises(StateError, match="b is frozen and a is not, and the model has one parameter for both"):
        op.adapt(state, {"a": shared, "b": shared})
    _, report = op.adapt(state.freeze("a"), {"a": shared, "b": shared})
    assert len(report.tied) == 1


def test_ties_of_a_tree_of_tensors_are_found_again_after_pickling() -> None:
    w = torch.ones(2, 3)
    model = {"a": w, "b": w.T}
    state, model = pickle.loads(pickle.dumps((op.setup(op.Adam(0.1), model), model)))
    assert str(op.adapt(state, model)[1]) == "1 kept"


def test_parts_for_half_precision_go_and_come_with_it() -> None:
    half, full = ({"w": torch.full((3,), 1.0, dtype=dtype)} for dtype in (torch.bfloat16, torch.float32))
    rule = op.Chain(op.StochasticRounding(), op.MixedPrecision(), op.Adam(1e-4))
    state, half = op.update(op.setup(rule, half), half, half)
    wide, report = op.adapt(state, full)
    assert (list(leaf(wide, "w").slots), leaf(wide, "w").step, list(map(str, report.converted))) == (["mu", "nu"], 1, ["w"])
    _, after = op.update(wide, full, {"w": torch.ones(3)})
    assert after["w"].tolist() == pytest.approx([1.0 - 1e-4] * 3, abs=1e-6)
    narrow, _ = op.adapt(wide, half, rule=rule)
    assert (list(leaf(narrow, "w").slots), leaf(narrow, "w").step) == (["master", "mu", "nu"], 1)
    assert torch.equal(leaf(narrow, "w").slots["mu"], leaf(wide, "w").slots["mu"])
    assert torch.equal(leaf(narrow, "w").slots["master"], half["w"].float())
    # Without the rule, and where its numbers are others now, what did nothing is not known any more.
    assert list(leaf(op.adapt(wide, half)[0], "w").slots) == ["mu", "nu"]
    assert list(leaf(op.adapt(wide.adjust(lr=1.0), half, rule=rule)[0], "w").slots) == ["mu", "nu"]
