"""Files: runs that go on bit for bit, on any library; what does not fit, what is damaged, and processes that are killed."""

import json
import os
import random
import re
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from torch import nn

import optimisers as op
from optimisers.errors import DtypeError, ModelError, OptimiserError, PathError, StateError, TieError
from optimisers.files import inspect, tensors
from optimisers.schedules import Cosine, one_cycle, warmup
from tests.conftest import BACKENDS, RULES, Backend, leaf, steps_of, trains
from tests.resumed import RULES as RESUMED
from tests.resumed import main as run

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_bit_for_bit(name: str, backend: Backend, file: Path) -> None:
    rule, rng = RULES[name], np.random.default_rng(0)
    shapes = [shape for shape in ((4, 3), (3,)) if trains(rule, shape, "float64")]
    values = [rng.normal(size=shape) for shape in shapes]
    grads = [[rng.normal(size=shape) for shape in shapes] for _ in range(5)]

    def steps(state: op.State, model: Any, some: Any) -> tuple[op.State, Any]:
        for each in some:
            state, model = op.update(state, model, list(map(backend.array, each)))
        return state, model

    model = list(map(backend.array, values))
    state, model = steps(op.setup(rule, model), model, grads[:3])
    op.save(file, state, model)
    again, other, report, _ = op.load(file, list(map(backend.array, values)), rule=rule)
    assert again is not None
    assert report is not None
    assert len(report.kept) == len(shapes)
    assert again == state
    state, model = steps(state, model, grads[3:])
    again, other = steps(again, other, grads[3:])
    assert again == state
    for a, b in zip(model, other, strict=True):
        np.testing.assert_array_equal(backend.read(a), backend.read(b))


@pytest.mark.parametrize("rule", RESUMED)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_run_that_is_interrupted_goes_on_in_a_new_process(library: str, rule: str, tmp_path: Path) -> None:
    at = int(np.random.default_rng(crc32(f"{library} {rule}".encode())).integers(1, 9))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(library, rule, f"{whole}.safetensors", 0, 10, f"{whole}.npz")
    run(library, rule, f"{parts}.safetensors", 0, at, f"{parts}.npz")
    command = [sys.executable, "-m", "tests.resumed", library, rule, f"{parts}.safetensors", str(at), "10", f"{parts}.npz"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    with np.load(f"{whole}.npz") as first, np.load(f"{parts}.npz") as second:
        for name in first.files:
            np.testing.assert_array_equal(first[name], second[name])
    expected, found = (op.load(f"{each}.safetensors").state for each in (whole, parts))
    assert found == expected


@pytest.mark.parametrize("there", [each for each in BACKENDS if each.name in ("numba", "torch", "jax")], ids=str)
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.name != "strict"], indirect=True, ids=str)
def test_a_state_goes_on_in_another_library(backend: Backend, there: Backend, file: Path) -> None:
    table = backend.array(np.arange(12.0).reshape(4, 3))
    model = {"embed": table, "b": backend.array(np.ones(3))}
    state = op.setup(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1)), model)
    for _ in range(3):
        state, model = op.update(state, model, model)
    state = state.freeze("b").freeze("embed", rows=[1])
    op.save(file, state, model)
    other, values, report, _ = op.load(file, {"embed": there.array(np.zeros((4, 3))), "b": there.array(np.zeros(3))})
    assert other is not None
    assert report is not None
    assert [each.rule for each in other.leaves()] == [each.rule for each in state.leaves()]
    assert (steps_of(other), leaf(other, "b").frozen, leaf(other, "embed").frozen_rows) == (steps_of(state), True, ((1, 2),))
    for name in ("embed", "b"):
        np.testing.assert_array_equal(there.read(values[name]), backend.read(model[name]))
        for slot, each in leaf(state, name).slots.items():
            np.testing.assert_array_equal(there.read(leaf(other, name).slots[slot]), backend.read(each))


def test_a_file_without_a_model_is_read_into_numpy(file: Path) -> None:
    model = {"w": torch.ones(3), "n": torch.arange(2)}
    state, model = op.update(op.setup(op.Adam(), model), model, {"w": torch.ones(3)})
    op.save(file, state, model)
    again, values, report, _ = op.load(file)
    assert again is not None
    assert (report, set(values), values["n"].tolist()) == (None, {"w", "n"}, [0, 1])
    leaf(again, "w").slots["mu"][...] = 7.0  # the file stays
    assert op.load(file).state != again
    op.save(file, state)
    assert op.load(file).model is None


def test_ties_are_stored_once_and_are_there_again(file: Path) -> None:
    table = np.arange(12.0).reshape(4, 3)
    model = {"embed": table, "head": table.T}
    state, model = op.update(op.setup(op.Adam(), model), model, {"embed": np.ones((4, 3))})
    op.save(file, state.mask("head"), model)
    assert sorted(tensors.read(file).arrays) == ["embed", "embed/mu", "embed/nu"]
    fresh = np.zeros((4, 3))
    again, values, *_ = op.load(file, {"embed": fresh, "head": fresh.T})
    assert again == state.mask("head")
    assert values["head"].base is values["embed"] or np.shares_memory(values["head"], values["embed"])
    np.testing.assert_array_equal(values["head"], model["head"])
    again, values, *_ = op.load(file, {"embed": np.zeros((4, 3)), "head": np.zeros((3, 4))})
    assert again == state.mask("head")
    np.testing.assert_array_equal(values["head"], values["embed"].T)
    apart = nn.ParameterDict({"embed": torch.zeros(4, 3, dtype=torch.float64), "head": torch.zeros(3, 4, dtype=torch.float64)})
    with pytest.raises(StateError, match="tied in it alone: head and embed"):
        op.load(file, apart)
    with pytest.raises(TieError, match="holds different values"):
        op.save(file, state, {"embed": np.zeros((4, 3)), "head": np.ones((3, 4))})
    assert op.load(file).state is not None


def test_a_module_gets_its_parameters_and_buffers_in_place(file: Path) -> None:
    def made() -> nn.Sequential:
        module = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
        module[2].weight = module[0].weight
        return module

    module = made()
    module(torch.arange(4)).square().sum().backward()
    state, _ = op.update_(op.setup(op.AdamW(0.1), module), module)
    op.save(file, state, module)
    other = made()
    before = other[0].weight
    again, same, *_ = op.load(file, other)
    assert same is other
    assert other[0].weight is before
    assert again == state
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(module.state_dict()["1.running_mean"], other.state_dict()["1.running_mean"])
    compiled: Any = torch.compile(made(), backend="eager")
    again, *_ = op.load(file, compiled)
    assert again == state
    op.save(file, again, nn.DataParallel(other))
    assert op.load(file, made()).state == state
    inside, values, *_ = op.load(file, {"m": made()}, rename={"": "m"})
    assert inside is not None
    assert torch.equal(values["m"][0].weight, module.get_parameter("0.weight"))
    assert torch.equal(values["m"].state_dict()["1.running_var"], module.state_dict()["1.running_var"])


def test_equinox_and_nnx_models_go_on(file: Path) -> None:
    import equinox as eqx
    from flax import nnx

    model: Any = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    state = op.setup(op.Adam(), model)
    _, grads = op.value_and_grad(lambda model: (model(jnp.ones(2)) ** 2).sum(), state)(model)
    state, model = op.update(state, model, grads)
    op.save(file, state, model)
    again, other, *_ = op.load(file, eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(1)))
    assert again == state
    assert (other(jnp.ones(2)) == model(jnp.ones(2))).all()

    net: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    state = op.setup(op.Adam(), net)
    op.save(file, state, net)
    again, other, *_ = op.load(file, nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    assert again == state
    assert (other(jnp.ones(2)) == net(jnp.ones(2))).all()


def test_an_ensemble_goes_on(file: Path) -> None:
    models = {"w": jnp.ones((3, 2))}
    state = jax.vmap(lambda model: op.setup(op.Adam(), model))(models)
    state, models = jax.vmap(lambda state, model: op.update(state, model, model))(state, models)
    op.save(file, state)
    again, *_ = op.load(file)
    assert again is not None
    assert [each.tolist() for each in again.counters] == [[1, 1, 1]]
    np.testing.assert_array_equal(leaf(again, "w").slots["mu"], leaf(state, "w").slots["mu"])


# Rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        op.AdamW(warmup(Cosine(1e-3, 100), 10), betas=(0.9, Cosine(0.99, 10))),
        op.SGD(one_cycle(0.1, 30), momentum=0.9, nesterov=True),
        op.Chain(op.ClipGrad(1.0), op.Chain(op.WeightDecay(0.1), op.Adam(1e-3))),
        op.Chain(),
        op.Muon(0.02, fallback=op.AdamW(Cosine(1e-3, 5))),
        op.Adam(np.float32(0.1)),
        op.Descent(float("1e-300")),
    ],
    ids=str,
)
def test_rules_and_schedules_of_the_library_are_in_the_file(rule: op.Rule, file: Path) -> None:
    state = op.setup(rule, {"w": np.ones((2, 2))})
    op.save(file, state.adjust(weight_decay=0.25) if "weight_decay" in rule.hyperparameters else state)
    again = op.load(file).state
    assert again is not None
    expected = state.adjust(weight_decay=0.25) if "weight_decay" in rule.hyperparameters else state
    assert again.rules == expected.rules


@op.rule
class OfTheUser(op.Rule):
    lr: op.Hyper = 0.1

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr}

    def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
        return h.lr * g


def _halved(step: Any) -> Any:
    return 0.5**step


def test_what_is_code_is_given_again_and_its_numbers_come_from_the_file(file: Path) -> None:
    model = {"w": np.ones(2), "b": np.ones(2)}
    rules = {"b": OfTheUser(0.3), "**": op.AdamW(_halved, weight_decay=0.1)}
    state = op.setup(rules, model).adjust(weight_decay=0.7)
    op.save(file, state, model)
    with pytest.raises(StateError, match=r"w: AdamW\.lr is _halved, which is code, .* give the rule: load\(…, rule=…\)"):
        op.load(file, model)
    again, *_ = op.load(file, model, rule=rules)
    assert again == state
    assert leaf(again, "w").rule == op.AdamW(_halved, weight_decay=0.7)
    with pytest.raises(StateError, match=r"w: the file has AdamW here, and SGD\(.*\) is given for it"):
        op.load(file, model, rule={"b": OfTheUser(), "**": op.SGD()})


def test_a_rule_of_the_users_is_not_taken_for_one_of_the_library(file: Path) -> None:
    @op.rule
    class Descent(op.Rule):
        lr: op.Hyper = 0.5

        def scalars(self, step: Any) -> dict[str, Any]:
            return {"lr": self.lr}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return -h.lr * g

    op.save(file, op.setup(Descent(), {"w": np.ones(2)}))
    assert type(op.load(file).state.rules[0]) is Descent
    op.save(file, op.setup(op.Descent(), {"w": np.ones(2)}))
    assert type(op.load(file).state.rules[0]) is op.Descent


def test_a_rule_that_is_not_there_is_an_error_and_nothing_is_imported(file: Path) -> None:
    state = op.setup(op.Adam(), {"w": np.ones(2)})
    document, arrays = tensors_of(file, state)
    for name in ("Nothing", "os.system", "optimisers.rules.adam.Adam", "Rule", "builtins"):
        document["rules"] = [{"rule": name, "with": {}}]
        tensors.write(file, arrays, document)
        with pytest.raises(StateError, match="which is not there; define or import it first"):
            op.load(file)


def tensors_of(file: Path, state: op.State) -> tuple[Any, Any]:
    """The document and the arrays of a state, to be changed and written again."""
    op.save(file, state, None)
    contents = tensors.read(file)
    return dict(contents.document), {name: np.array(each) for name, each in contents.arrays.items()}


# What fits ------------------------------------------------------------------------------------------------------------


def test_parameters_are_found_by_name(file: Path) -> None:
    first = nn.ParameterDict({"p1": torch.ones(2, 2), "p2": torch.ones(2, 2)})
    state, _ = op.update(op.setup(op.Adam(), first), first, {"p1": torch.ones(2, 2), "p2": torch.full((2, 2), 5.0)})
    op.save(file, state)
    second = nn.Module()
    for name in ("p2", "p1"):
        second.register_parameter(name, nn.Parameter(torch.ones(2, 2)))
    again, *_ = op.load(file, second)
    assert again is not None
    assert [float(leaf(again, name).slots["mu"][0, 0]) for name in ("p1", "p2")] == pytest.approx([0.1, 0.5])


def test_a_swapped_head_is_named_with_both_shapes_and_adapted_on_request(file: Path) -> None:
    model = {"trunk": np.ones(3), "head": {"weight": np.ones((10, 3))}}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    op.save(file, state, model)
    smaller = {"trunk": np.zeros(3), "head": {"weight": np.zeros((3, 3))}}
    with pytest.raises(StateError, match=r"does not fit the model; changed: head\.weight \(shape \[10, 3\] -> \[3, 3\]\); load"):
        op.load(file, smaller)
    assert not smaller["trunk"].any()
    again, values, report, _ = op.load(file, smaller, strict=False)
    assert again is not None
    assert report is not None
    assert steps_of(again) == {"head.weight": 0, "trunk": 1}
    np.testing.assert_array_equal(values["trunk"], model["trunk"])
    assert not values["head"]["weight"].any()
    assert list(map(str, report.fresh)) == ["head.weight"]
    grown, values, *_ = op.load(file, {"trunk": np.zeros(3), "head": {"weight": np.zeros((12, 3))}}, resize="pad")
    assert grown is not None
    assert steps_of(grown) == {"head.weight": 1, "trunk": 1}
    np.testing.assert_array_equal(values["head"]["weight"][:10], model["head"]["weight"])
    assert not values["head"]["weight"][10:].any()


def test_all_that_does_not_fit_is_listed(file: Path) -> None:
    model = {"a": np.ones(2), "b": np.ones(2), "n": np.arange(3)}
    state = op.setup(op.Adam(), model)
    op.save(file, state, model)
    with pytest.raises(StateError, match=r"missing in it: c; not in the model: a; of another dtype: b \(float64 -> float32\)"):
        op.load(file, {"b": np.ones(2, np.float32), "c": np.ones(2), "n": np.arange(3)})
    with pytest.raises(StateError, match=r"missing in it: m; changed: n \(shape\)"):
        op.load(file, {"a": np.ones(2), "b": np.ones(2), "n": np.arange(4), "m": np.arange(1)})
    again, values, *_ = op.load(file, {"x": {"b": np.zeros(2), "a": np.zeros(2), "n": np.zeros(3, int)}}, rename={"": "x"})
    assert again is not None
    assert sorted(map(str, again)) == ["x.a", "x.b"]
    assert values["x"]["n"].tolist() == [0, 1, 2]
    with pytest.raises(PathError, match='rename: no parameter stands at or below "z"'):
        op.load(file, model, rename={"z": "y"})


@pytest.mark.parametrize("shell", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_with_shells_load_into_the_plain_model(shell: str, file: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = {f"{shell}{name}": torch.full_like(each, 3) for name, each in module.state_dict().items()}
    safetensors.torch.save_file(names, file)
    state, same, report, _ = op.load(file, module)
    assert (state, same) == (None, module)
    assert (len(report.kept), report.fresh, report.dropped) == (4, {}, ())
    assert all((each == 3).all() for each in module.state_dict().values())
    inside = {f"{shell}{name}": each for name, each in {"0.weight": np.ones((2, 2)), "0.bias": np.ones(2)}.items()}
    flat = {op.Path(name): each for name, each in inside.items()}
    nested: Any = {}
    for path, each in flat.items():
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = each
    begun, nested = op.update(op.setup(op.Adam(), nested), nested, nested)
    op.save(file, begun, nested)
    again, values, *_ = op.load(file, [{"weight": np.zeros((2, 2)), "bias": np.zeros(2)}])
    assert again is not None
    assert steps_of(again) == {"0.bias": 1, "0.weight": 1}
    np.testing.assert_array_equal(values[0]["weight"], flat_value(nested, f"{shell}0.weight"))


def flat_value(tree: Any, path: str) -> Any:
    for key in op.Path(path):
        tree = tree[key]
    return tree


def test_files_of_other_tools_fill_a_model_and_say_what_does_not_fit(file: Path) -> None:
    safetensors.numpy.save_file({"embed.weight": np.ones((3, 2)), "b": np.ones(2, np.float32), "more": np.ones(1)}, file)
    table = np.zeros((3, 2))
    model = {"embed": {"weight": table}, "head": table.T, "b": np.zeros(2)}
    with pytest.raises(StateError, match="does not fit the model; not in the model: more"):
        op.load(file, model)
    _, values, *_ = op.load(file, model, strict=False)
    assert values["head"].all()
    assert values["embed"]["weight"].all()
    assert values["b"].dtype == np.float64
    assert set(op.load(file).model) == {"embed.weight", "b", "more"}


def test_transformers_reads_what_it_saved_into_a_state_of_ours(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=11, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    other = GPT2LMHeadModel(config)
    assert not torch.equal(model.transformer.wte.weight, other.transformer.wte.weight)
    op.load(tmp_path / "model.safetensors", other)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_slots_that_start_as_the_parameter_start_as_the_one_in_the_file(file: Path) -> None:
    def made(value: float, requires_grad: bool) -> nn.Module:
        module = nn.Module()
        module.register_parameter("w", nn.Parameter(torch.full((3,), value), requires_grad=requires_grad))
        return module

    module = made(5.0, requires_grad=False)
    op.save(file, op.setup(op.Chain(op.SGD(0.1), op.Lookahead()), module), module)
    again, *_ = op.load(file, made(0.0, requires_grad=True))
    (slow,) = leaf(again, "w").slots.values()
    assert slow.tolist() == [5.0, 5.0, 5.0]


def test_values_that_would_not_fit_into_a_dtype_are_named(file: Path) -> None:
    model = {"w": np.ones(2), "n": np.array([300])}
    op.save(file, op.setup(op.Adam(), model), model)
    with pytest.raises(StateError, match=r"of another dtype: n \(int64 -> int8\)"):
        op.load(file, {"w": np.ones(2), "n": np.array([3], np.int8)})
    safetensors.numpy.save_file({"c": np.ones(2, np.complex64)}, file)
    with pytest.raises(StateError, match=r"changed: c \(complex64 -> float64\)"):
        op.load(file, {"c": np.ones(2)})


def test_two_arrays_of_a_file_that_would_get_one_name_are_an_error(file: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(2), "module.w": np.zeros(2)}, file)
    with pytest.raises(PathError, match="two arrays of the file would both be called w"):
        op.load(file, {"w": np.ones(2)})


def test_places_of_all_kinds_can_be_renamed_or_given_up(file: Path) -> None:
    w = np.ones(2)
    model = {"a": w, "c": w, "b": np.ones(2), "stats": np.arange(2)}
    state = op.setup(op.Adam(), model)
    op.save(file, state, model)
    u = np.zeros(2)
    again, values, *_ = op.load(file, {"a": u, "d": u, "st": np.zeros(2, int)}, rename={"c": "d", "stats": "st", "b": None})
    assert [str(path) for path in again] == ["a"]
    assert values["st"].tolist() == [0, 1]
    op.save(file, state)
    again, *_ = op.load(file, {"a": u, "c": u, "e": np.ones(2), "stats": np.arange(2)}, rename={"b": "e"})
    assert [str(path) for path in again] == ["a", "e"]


def test_a_module_that_cannot_be_written_is_an_error_and_nothing_has_changed(file: Path) -> None:
    class Expanded(nn.Module):
        def __init__(self, expanded: bool) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("a", torch.ones(2) * (not expanded))
            self.register_buffer("m", torch.ones(1).expand(4) if expanded else torch.ones(4))

    op.save(file, op.setup(op.Adam(), Expanded(False)), Expanded(False))
    module = Expanded(True)
    with pytest.raises(OptimiserError, match="a tensor that cannot be written"):
        op.load(file, module)
    assert not module.get_buffer("a").any()


def test_a_link_stays_one(file: Path) -> None:
    state = op.setup(op.Adam(), {"w": np.ones(2)})
    op.save(file, state)
    link = file.parent / "link"
    link.symlink_to(file)
    op.save(link, state.evolved(step=5))
    assert link.is_symlink()
    assert op.load(file).state.step == 5


# Arrays and names -------------------------------------------------------------------------------------------------------


def test_names_do_not_collide(file: Path) -> None:
    keys: list[Any] = [
        "step",
        "mu",
        "nu",
        "a.b",
        "a/b",
        "a/mu",
        "a b",
        "",
        0,
        "0",
        "é/ü.",
        "数",
        '"',
        "\\",
        "__metadata__",
        "/numbers/0",
        (1, "x"),
    ]
    model = {key: np.full(2, float(at)) for at, key in enumerate(keys)}
    model["a"] = {"mu": np.ones(1), "b": np.ones(1)}  # type: ignore[assignment]
    state = op.setup(op.Adam(), model)
    state, model = op.update(state, model, model)
    op.save(file, state, model)
    again, values, *_ = op.load(file, model)
    assert again == state
    for key in keys:
        np.testing.assert_array_equal(values[key], model[key])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(8.0).reshape(2, 4).T,
        np.arange(8.0)[::2],
        np.arange(8.0).reshape(2, 4)[::-1],
        np.ones(3, np.float16),
        np.ones((0, 3)),
        np.array(2.0),
        np.arange(3) + 1j,
        (np.arange(3) + 1j).astype(np.complex64),
        np.arange(3.0).astype(">f8"),
    ],
    ids=["transposed", "every second", "backwards", "half", "empty", "0-d", "complex128", "complex64", "big endian"],
)
def test_arrays_come_back_as_they_were(array: np.ndarray, file: Path) -> None:
    model = {"w": array, "n": array.astype(np.int8) if array.dtype.kind != "c" else np.arange(2)}
    state, model = op.update(op.setup(op.Momentum(0.5), model), model, {"w": array.astype(array.dtype.newbyteorder("="))})
    op.save(file, state, model)
    again, values, *_ = op.load(
        file,
        {
            "w": np.zeros_like(np.ascontiguousarray(array)).reshape(array.shape).astype(model["w"].dtype),
            "n": np.zeros_like(model["n"]),
        },
    )
    assert again == state
    np.testing.assert_array_equal(values["w"], model["w"])
    assert values["w"].dtype == model["w"].dtype


def test_slots_keep_their_own_dtype(file: Path) -> None:
    model = {
        "w": torch.ones(3, dtype=torch.bfloat16),
        "t": torch.ones(4, 2).t(),
        "c": torch.ones(1, 4, 3, 3).to(memory_format=torch.channels_last),
    }
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    op.save(file, state, model)
    again, values, *_ = op.load(file, {name: torch.zeros_like(each) for name, each in model.items()})
    assert again == state
    assert leaf(again, "w").slots["mu"].dtype == torch.float32
    assert all(torch.equal(values[name], each) for name, each in model.items())


def test_what_no_file_can_hold_is_named(file: Path) -> None:
    model = {"w": np.ones(2, np.longdouble)}
    op.save(file, op.setup(op.Adam(), {"v": np.ones(1)}))
    before = file.read_bytes()
    with pytest.raises(DtypeError, match=r"w/mu: safetensors has no (longdouble|float128); convert it before saving"):
        op.save(file, op.setup(op.Adam(), model), model)

    class Key:
        def __lt__(self, other: Any) -> bool:
            return False

    keyed = {Key(): np.ones(2)}
    with pytest.raises(StateError, match="a key of this path is no text, number or literal, so no file can name it"):
        op.save(file, op.setup(op.Adam(), keyed))
    assert file.read_bytes() == before


# Damage -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\0" * 8, b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{}", bytes(range(256)) * 8, b"{}" * 50]
)
def test_what_is_no_file_of_this_kind_is_an_error(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(StateError, match=re.escape(str(file))):
        op.load(file)


def test_a_file_that_is_not_there_is_an_error_of_the_system(file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        op.load(file)
    with pytest.raises(FileNotFoundError):
        op.save(file.parent / "no" / "folder", op.setup(op.Adam(), {"w": np.ones(2)}))
    with pytest.raises(OSError, match=r"(?i)directory|device"):
        op.load(file.parent)


def test_every_damage_is_noticed(file: Path) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(3, 2))
    model = {"embed": table, "head": table.T, "b": rng.normal(size=4).astype(np.float32), "n": np.arange(3)}
    state = op.setup(op.Chain(op.ClipNorm(1.0), op.AdamW(Cosine(0.1, 5))), model).freeze("embed", rows=[1])
    state, model = op.update(state, model, {"embed": table, "b": np.ones(4)})
    op.save(file, state, model, extra={"epoch": 3, "order": np.arange(3)})
    whole = file.read_bytes()
    size = len(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = most = 0
    for at in range(20_000):
        damaged = bytearray(whole)
        kind = at % 5
        if kind == 0:
            damaged[rng.integers(size)] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            damaged = damaged[: rng.integers(size)]
        elif kind == 2:
            start = int(rng.integers(header))
            damaged[start : start + int(rng.integers(1, 20))] = rng.bytes(int(rng.integers(0, 20)))
        elif kind == 3:
            a, b = sorted(rng.integers(0, size, 2))
            damaged[a:b] = damaged[a:b][::-1]
        else:
            number = re.search(rb"\d+", bytes(damaged[int(rng.integers(8, header)) : header]))
            if number:
                spot = damaged.find(number.group(), 8)
                damaged[spot : spot + len(number.group())] = str(int(rng.integers(10 ** int(rng.integers(1, 18))))).encode()
        file.write_bytes(damaged)
        measured = at % 200 < 5
        if measured:
            tracemalloc.start()
        try:
            again, values, *_ = op.load(file)
        except OptimiserError:
            refused += 1
            continue
        finally:
            if measured:
                most = max(most, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
        assert again == op.State(state.layout, state.rules, state.counters, state.step, state.slots, state.memory)
        assert all((np.asarray(values[name]) == model[name]).all() for name in values)
    assert refused > 19_000
    # No number in a header makes more room than the file takes, whatever Python itself needs for the error.
    assert most < 2 * size + 200_000


def test_documents_that_describe_no_state_are_errors(file: Path) -> None:
    model = {"a": np.ones((3, 2)), "b": np.ones(2)}
    state, _ = op.update(op.setup({"a": op.Adam(), "b": op.SGD(0.1, momentum=0.9)}, model).freeze("a", rows=[0]), model, model)
    document, arrays = tensors_of(file, state)
    rng = np.random.default_rng(0)
    wrong = [None, -1, 1.5, "x", [], {}, [1], {"a": 1}, [None], True, 10**30, "a.b", [[0, 1]], float("nan")]

    def places(node: Any, path: tuple[Any, ...] = ()) -> Any:
        yield path
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in children:
            yield from places(child, (*path, key))

    every = [path for path in places(document) if path]
    refused = 0
    for at in range(2_000):
        changed = json.loads(json.dumps(document))
        *above, last = every[at % len(every)]
        node = changed
        for key in above:
            node = node[key]
        if rng.integers(4):
            node[last] = wrong[int(rng.integers(len(wrong)))]
        else:
            del node[last]
        tensors.write(file, arrays, changed)
        try:
            loaded = op.load(file).state
        except OptimiserError:
            refused += 1
            continue
        assert loaded is not None
        assert len(loaded) <= 2
    assert refused > 1_000


def test_names_that_are_no_text_are_errors(file: Path) -> None:
    model = {"a\ud800": np.ones(2)}
    with pytest.raises(StateError, match=r"'a.ud800': a key of this path is no text"):
        op.save(file, op.setup(op.Adam(), model), model)


def test_a_folder_is_no_file(file: Path) -> None:
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        op.load(file.parent)


def test_metadata_that_are_null_are_none(file: Path) -> None:
    header = json.dumps({"__metadata__": None, "a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(1).tobytes())
    assert op.load(file).model == {"a": np.ones(1)}


def test_long_names_of_files_can_be_written(file: Path) -> None:
    long = file.with_name("x" * 255)
    op.save(long, op.setup(op.Adam(), {"a": np.ones(2)}))
    assert op.load(long).state is not None


def test_a_later_schema_is_an_error(file: Path) -> None:
    document, arrays = tensors_of(file, op.setup(op.Adam(), {"a": np.ones(2)}))
    tensors.write(file, arrays, {**document, "schema": 99})
    with pytest.raises(StateError, match="is of schema 99, and this library reads up to 2; update it"):
        op.load(file)


def test_whatever_a_file_holds_beyond_the_model_is_listed(file: Path) -> None:
    table = np.ones((2, 2))
    model = {"embed": table, "head": table.T, "ids": np.arange(3), "w": np.ones(2)}
    rule = {"w": op.SGD(0.1), "**": op.Adam()}
    op.save(file, op.setup(rule, model), model)
    for gone, named in (("ids", "not in the model: ids"), ("head", "not in the model: head")):
        smaller = {name: each for name, each in model.items() if name != gone}
        with pytest.raises(StateError, match=named):
            op.load(file, smaller)
        assert op.load(file, smaller, rename={gone: None}).state is not None
    # Also where the state has several rules, and none was said to be for new parameters.
    other = {("trunk" if name == "w" else name): each for name, each in model.items()}
    with pytest.raises(StateError, match=r"missing in it: trunk.*not in the model: w"):
        op.load(file, other)


def test_of_a_file_of_another_tool_a_report_tells_what_became_of_each_parameter(file: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2), "b": np.ones(3), "x": np.ones(1)}, file)
    model = {"a": np.zeros(2), "b": np.zeros(4), "c": np.zeros(1)}
    with pytest.raises(StateError, match="missing in it: c; not in the model: x; changed: b"):
        op.load(file, model)
    values, report = op.load(file, model, strict=False)[1:3]
    assert values["a"].tolist() == [1.0, 1.0]
    assert report.as_dict()["fresh"] == {"c": "not in the file", "b": "shape [3] -> [4]"}
    assert (report.kept, report.dropped) == ((op.Path("a"),), (op.Path("x"),))
    with pytest.raises(StateError, match="holds values and no state; resize and rule are for states"):
        op.load(file, model, resize="pad")
    with pytest.raises(StateError, match="rename and resize are for the model"):
        op.load(file, rename={"a": "b"})
    with pytest.raises(ModelError, match="load takes the name of a file and then the model, and not dict first"):
        op.load(model, file)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"tensors": 3}', '{"tensors": {"w": 1}}', "[" * 100_000, '{"tensors": {}}'])
def test_documents_that_are_none_are_errors_for_all_who_read_them(text: str, file: Path) -> None:
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    safetensors.numpy.save_file({}, file, metadata={"optimisers": text, "optimisers.checksum": checksum})
    for read in (
        op.load,
        inspect.contents_of,
        lambda file: inspect.rename(file, file, {"a": "b"}),
        lambda file: inspect.misfits(file, file),
    ):
        with pytest.raises(OptimiserError):
            read(file)


def test_drafts_that_killed_processes_have_left_are_taken_away(file: Path) -> None:
    old, young, others = (file.with_name(name) for name in (f".{file.name}.draft-1", f".{file.name}.draft-2", ".else.draft-1"))
    for each in (old, young, others):
        each.write_bytes(b"")
    for each in (old, others):
        os.utime(each, (0, 0))
    op.save(file, op.setup(op.Adam(), {"a": np.ones(2)}))
    assert sorted(each.name for each in file.parent.iterdir()) == sorted([file.name, young.name, others.name])


def test_of_a_file_only_other_dtypes_count_as_converted(backend: Backend, file: Path) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    op.save(file, op.setup(op.Adam(), model), model)
    assert op.load(file, model).report.converted == {}
    cast = {"a": backend.array([1.0]), "b": backend.array([1.0], "float32")}
    assert op.load(file, cast, strict=False).report.converted == {op.Path("b"): ("float64", "float32")}


def test_a_file_of_the_first_schema_loads(file: Path) -> None:
    table = np.zeros((4, 3), np.float32)
    model = {"embed": table, "head": {"weight": table.T, "bias": np.zeros(4)}, "trunk": np.zeros(2), "seen": np.zeros(3, int)}
    old = Path(__file__).parent / "data" / "schema_1.safetensors"
    state, model, report, extra = op.load(old, model)
    assert extra is None
    assert (state.step, leaf(state, "embed").step, leaf(state, "trunk").step, leaf(state, "trunk").frozen) == (3, 3, 1, True)
    assert (leaf(state, "embed").frozen_rows, leaf(state, "embed").masked) == (((1, 3),), {op.Path("head.weight")})
    # Gradients of one and a momentum of 0.9.
    np.testing.assert_allclose(leaf(state, "head.bias").slots["velocity"], np.full(4, 2.71))
    np.testing.assert_allclose(model["head"]["bias"], np.full(4, -0.1 * (1 + 1.9 + 2.71)))
    assert model["seen"].tolist() == [0, 1, 2]
    op.save(file, state, model)
    assert tensors.read(file).document["schema"] == 2
    assert op.load(file, model).state == state
    assert len(report.kept) == 3


# What a run keeps beside its state --------------------------------------------------------------------------------------


def test_extra_data_come_back(backend: Backend, file: Path) -> None:
    rng = np.random.default_rng(0)
    extra = {
        "epoch": 3,
        "rng": rng.bit_generator.state,
        "order": rng.permutation(7),
        "seen": (backend.array([1.0, 2.0]), None, True, "näme", float("inf")),
        "best": np.float32(0.5),
        "python": random.Random(0).getstate(),
        "turned": np.complex64(1j),
        "": {},
    }
    model = {"a": backend.array(np.ones(2))}
    op.save(file, op.setup(op.Adam(), model), model, extra=extra)
    for again in (op.load(file).extra, op.load(file, model).extra, op.load(file, model, strict=False).extra):
        assert again["rng"] == extra["rng"]
        assert again["order"].tolist() == extra["order"].tolist()
        assert again["seen"][0].tolist() == [1.0, 2.0]
        assert again["seen"][1:] == (None, True, "näme", float("inf"))
        assert again["python"] == extra["python"]
        assert again["turned"] == 1j
        assert (again["epoch"], again["best"], again[""]) == (3, 0.5, {})
    op.save(file, op.setup(op.Adam(), model))
    assert op.load(file).extra is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"rng": np.random.default_rng()},
            r"extra\['rng'\] is a Generator; a file holds mappings, lists, numbers, texts and arrays",
        ),
        ({"a": [0, {1: 2}]}, r"extra\['a'\]\[1\]: 1 cannot be a key"),
        ({"/array": 1}, "'/array' cannot be a key"),
        (open, "extra is a builtin"),
        ({"key": jax.random.key(0)}, r"extra\['key'\] is an array whose values cannot be read"),
        ({"t": torch.ones(1, device="meta")}, r"extra\['t'\] is an array whose values cannot be read"),
        ({"m": np.ma.masked_array([1.0], [True])}, r"extra\['m'\] is an array of masked values, which no file holds"),
        ({"s": [np.array(["a"])]}, r"extra\['s'\]\[0\] is an array of str32, which no file holds"),
    ],
)
def test_extra_data_that_no_file_holds_are_errors(extra: Any, message: str, file: Path) -> None:
    state = op.setup(op.Adam(), {"a": np.ones(2)})
    op.save(file, state, extra=1)
    with pytest.raises(StateError, match=message):
        op.save(file, state, extra=extra)
    assert op.load(file).extra == 1


def test_extra_data_that_hold_themselves_are_an_error(file: Path) -> None:
    extra: dict[str, Any] = {}
    extra["self"] = extra
    with pytest.raises(StateError, match="extra is nested too deeply, or holds itself"):
        op.save(file, op.setup(op.Adam(), {"a": np.ones(2)}), extra=extra)


def test_checksums_can_be_left_out(file: Path) -> None:
    model = {"a": np.ones(2)}
    op.save(file, op.setup(op.Adam(), model), model)
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(StateError, match="is damaged: its checksum is another one"):
        op.load(file)
    assert op.load(file, verify=False).state is not None


# Writing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_file(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed", str(file), "200"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "200 times killed, 200 times whole\n"


def test_saving_copies_nothing_and_loading_everything_once(file: Path) -> None:
    model = {name: np.ones(500_000) for name in "abcd"}
    state, model = op.update(op.setup(op.Adam(), model), model, model)
    total = 3 * sum(each.nbytes for each in model.values())

    def peak(call: Any) -> int:
        tracemalloc.start()
        kept = call()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del kept
        return found

    assert peak(lambda: op.save(file, state, model)) < 0.1 * total
    assert peak(lambda: op.load(file, model)) < 1.2 * total
    assert peak(lambda: op.load(file)) < 1.2 * total


def test_a_failed_save_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = op.setup(op.Adam(), {"a": np.ones(2)})
    op.save(file, state)
    before = file.read_bytes()

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        op.save(file, state.evolved(step=1))
    assert (file.read_bytes(), os.listdir(file.parent)) == (before, [file.name])


def test_a_file_keeps_its_rights_and_a_new_one_gets_the_usual(file: Path) -> None:
    state = op.setup(op.Adam(), {"a": np.ones(2)})
    old = os.umask(0o027)
    try:
        op.save(file, state)
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.chmod(0o600)
        op.save(file, state)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_keys_for_random_numbers_are_saved_with_the_model(file: Path) -> None:
    from flax import nnx

    def dropping(seed: int) -> Any:
        return nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))

    model = dropping(1)
    model(jnp.ones((1, 2)))
    state = op.setup(op.Adam(), model)
    op.save(file, state, model)
    _, again, *_ = op.load(file, dropping(2))
    np.testing.assert_array_equal(model(jnp.ones((8, 2))), again(jnp.ones((8, 2))))
    tree = {"w": jnp.ones(2), "key": jax.random.key(7), "many": jax.random.split(jax.random.key(8, impl="rbg"), 3)}
    op.save(file, op.setup(op.Adam(), tree), tree)
    _, values, *_ = op.load(file, {**tree, "key": jax.random.key(0), "many": jax.random.split(jax.random.key(9, impl="rbg"), 3)})
    assert (values["key"] == tree["key"]).all()
    assert (values["many"] == tree["many"]).all()
    with pytest.raises(StateError, match=r"changed: key \(shape\)"):
        op.load(file, {**tree, "key": jax.random.key(0, impl="rbg")})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a device or a pipe"):
        op.save(pipe, op.setup(op.Adam(), {"w": np.ones(2)}))
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_complex_numbers_are_read_wherever_they_lie_in_the_file(tmp_path: Path) -> None:
    """In a process of its own, which PyTorch would end at an address that it cannot read. The name moves what lies behind it."""
    code = (
        "import sys, torch, optimisers as op\n"
        "for name in ['a' * length for length in range(1, 17)]:\n"
        "    model = {name: torch.full((), 2 + 3j, dtype=torch.complex128)}\n"
        "    state = op.setup(op.SGD(0.1, momentum=0.9), model)\n"
        "    state, model = op.update(state, model, model)\n"
        "    op.save(sys.argv[1], state, model)\n"
        "    again = op.load(sys.argv[1], {name: torch.zeros((), dtype=torch.complex128)})\n"
        "    assert again.state == state and again.model[name] == model[name]\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros((5, 2)), r"a: the state was made for shape \(3, 2\), but the model holds \(5, 2\)"),
        (np.zeros((3, 2), complex), "a: the state was made for float64, but the model holds complex128"),
        (torch.zeros((3, 2), dtype=torch.float64), "a: the state was made for a numpy array, but the model holds a torch array"),
    ],
)
def test_a_model_that_is_not_the_one_of_the_state_is_not_saved(other: Any, message: str, tmp_path: Path) -> None:
    state = op.setup(op.Adam(), {"a": np.zeros((3, 2))})
    with pytest.raises(ModelError, match=message):
        op.save(tmp_path / "run.safetensors", state, {"a": other})
    assert not list(tmp_path.iterdir())


def test_a_frozen_tie_that_is_broken_is_not_saved(tmp_path: Path) -> None:
    shared = np.ones(2)
    state = op.setup(op.Descent(0.1), {"a": shared, "b": shared}, frozen="a")
    with pytest.raises(TieError, match="a and b are tied, but the model holds different values"):
        op.save(tmp_path / "run.safetensors", state, {"a": shared, "b": np.full(2, 7.0)})
