"""Models of every kind are opened, and put together again as they were."""

import copy
import enum
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import optimisers as op
from optimisers.errors import ModelError, OptimiserWarning
from tests.conftest import Backend, assert_close


class Point(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", "w")  # noqa: PYI024


@dataclass
class Plain:
    weight: Any
    name: str = "plain"
    rest: Any = None


@dataclass(frozen=True)
class Frozen:
    weight: Any
    derived: Any = field(init=False, default=None)


@dataclass(slots=True)
class Slotted:
    weight: Any
    name: str = "slotted"


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    weight: Any
    name: str = "both"


@dataclass(kw_only=True)
class KeywordOnly:
    weight: Any


class Settings(dict[str, Any]):
    note = "kept"


class Layers(list[Any]):
    note = "kept"


class Pair(tuple[Any, ...]):
    __slots__ = ()


W = np.ones(2)


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        ({"b": W, "a": W + 1}, ["a", "b"]),
        ([W, [W + 1]], ["0", "1.0"]),
        ((W, (W + 1,)), ["0", "1.0"]),
        (Point(W, [W + 1]), ["x", "y.0"]),
        (Old(W), ["w"]),
        (OrderedDict(b=W, a=W + 1), ["b", "a"]),
        (defaultdict(list, {"b": W, "a": [W + 1]}), ["a.0", "b"]),
        (deque([W, W + 1], maxlen=5), ["0", "1"]),
        (Plain(W, rest={"v": W + 1}), ["weight", "rest.v"]),
        (Frozen(W), ["weight"]),
        (Slotted(W), ["weight"]),
        (FrozenSlotted(W), ["weight"]),
        (KeywordOnly(weight=W), ["weight"]),
        (Settings(b=W, a=W + 1), ["a", "b"]),
        (Layers([W, W + 1]), ["0", "1"]),
        (Pair((W, W + 1)), ["0", "1"]),
        ({"deep": [{"x": (Plain([Frozen(W)]),)}]}, ["deep.0.x.0.weight.0.weight"]),
        ({"none": None, "empty": {}, "list": [], "w": W}, ["w"]),
        (W, [""]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "list",
)
def test_models_of_every_kind(numpy_backend: Backend, model: Any, paths: list[str]) -> None:
    state = op.setup(op.Descent(1.0), model)
    assert [str(path) for path in state] == paths
    assert list(op.trainables(model)) == paths
    for step in (op.update, op.update_):
        own = copy.deepcopy(model)
        _, new = step(state, own, dict.fromkeys(state, np.ones(2)))
        assert type(new) is type(model)
        assert_close(
            np.concatenate(list(op.trainables(new).values())), np.concatenate(list(op.trainables(model).values())) - 1, 0.0
        )
        # The gradients may as well be a tree like the model.
        _, again = step(state, copy.deepcopy(model), copy.deepcopy(model))
        assert_close(np.concatenate(list(op.trainables(again).values())), np.zeros(2 * len(paths)), 0.0)


def test_what_is_beside_the_arrays_is_kept() -> None:
    settings = Settings(w=np.ones(1))
    layers = Layers([np.ones(1)])
    layers.note = "changed"
    ordered = OrderedDict(z=np.ones(1), a=np.ones(1))
    model = {
        "settings": settings,
        "layers": layers,
        "ordered": ordered,
        "defaults": defaultdict(list, k=np.ones(1)),
        "queue": deque([np.ones(1)], maxlen=3),
        "plain": Plain(np.ones(1), "a name", {"f": len, "n": 3}),
        "slotted": Slotted(np.ones(1), "another"),
        "both": FrozenSlotted(np.ones(1), "third"),
        "text": "hello",
        "ints": np.arange(3),
    }
    _, new = op.update(op.setup(op.Descent(1.0), model), model, dict.fromkeys(op.trainables(model), np.ones(1)))
    assert new["settings"].note == "kept"
    assert new["layers"].note == "changed"
    assert list(new["ordered"]) == ["z", "a"]
    assert new["defaults"].default_factory is list
    assert new["queue"].maxlen == 3
    assert (new["plain"].name, new["plain"].rest) == ("a name", {"f": len, "n": 3})
    assert (new["slotted"].name, new["both"].name) == ("another", "third")
    assert new["ints"] is model["ints"]
    assert all(array.tolist() == [0.0] for array in op.trainables(new).values())
    assert all(array.tolist() == [1.0] for array in op.trainables(model).values())


def test_a_dataclass_is_rebuilt_without_calling_its_constructor() -> None:
    @dataclass
    class Picky:
        weight: Any
        calls: int = 0

        def __post_init__(self) -> None:
            self.calls += 1
            self.extra = "beside the fields"

    model = Picky(np.ones(1))
    _, new = op.update(op.setup(op.Descent(1.0), model), model, {"weight": np.ones(1)})
    assert (new.calls, new.extra, new.weight.tolist()) == (1, "beside the fields", [0.0])
    assert model.weight.tolist() == [1.0]


def test_update_in_place_returns_the_very_model_where_it_could_write() -> None:
    inner = Plain(np.ones(2))
    model = {"a": inner, "t": (np.ones(2),)}
    state = op.setup(op.Descent(1.0), model)
    _, new = op.update_(state, model, dict.fromkeys(state, np.ones(2)))
    assert new is model
    assert inner.weight.tolist() == [0.0, 0.0]


def test_what_did_not_move_is_shared() -> None:
    model = {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}}
    state = op.setup(op.Descent(1.0), model).freeze("b")
    _, new = op.update(state, model, {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}})
    assert new["b"]["w"] is model["b"]["w"]
    assert new["a"]["w"] is not model["a"]["w"]


# Registered types -----------------------------------------------------------------------------------------------------


def test_a_registered_type_is_opened_and_only_its_trainable_children_train() -> None:
    @op.register(children=["weight", "average"], trainable=["weight"])
    class Norm:
        def __init__(self) -> None:
            self.weight, self.average, self.count = np.ones(2), {"mean": np.zeros(2)}, 7

    model = {"norm": Norm()}
    state = op.setup(op.Descent(1.0), model)
    assert [str(path) for path in state] == ["norm.weight"]
    _, new = op.update(state, model, {"norm.weight": np.ones(2)})
    assert type(new["norm"]) is Norm
    assert (new["norm"].weight.tolist(), new["norm"].count) == ([0.0, 0.0], 7)
    assert new["norm"].average["mean"] is model["norm"].average["mean"]
    assert model["norm"].weight.tolist() == [1.0, 1.0]


def test_a_registered_type_may_have_any_attributes() -> None:
    class Free:
        a: Any
        b: Any
        text: str

        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    op.register(Free)
    model = Free(b=np.ones(1), a=Free(w=np.ones(1)), text="x")
    assert list(op.trainables(model)) == ["b", "a.w"]
    _, new = op.update(op.setup(op.Descent(1.0), model), model, {"a.w": np.ones(1)})
    assert (new.a.w.tolist(), new.text, new.b is model.b) == ([0.0], "x", True)


def test_a_registered_type_may_say_how_it_is_opened_and_rebuilt() -> None:
    class Packed:
        def __init__(self, parts: list[np.ndarray]) -> None:
            self.parts = parts

    op.register(
        Packed,
        children=lambda node: {f"part{at}": each for at, each in enumerate(node.parts)},
        rebuild=lambda node, children: Packed(list(children.values())),
        trainable=["part1"],
    )
    model = Packed([np.ones(1), np.ones(1)])
    state = op.setup(op.Descent(1.0), model)
    assert [str(path) for path in state] == ["part1"]
    _, new = op.update(state, model, {"part1": np.ones(1)})
    assert [part.tolist() for part in new.parts] == [[1.0], [0.0]]


def test_fields_of_a_dataclass_may_be_told_not_to_train() -> None:
    @op.register(trainable=["weight"])
    @dataclass
    class Norm:
        weight: Any
        average: Any

    model = [Norm(np.ones(1), np.ones(1))]
    assert list(op.trainables(model)) == ["0.weight"]


def test_a_structure_does_not_keep_the_arrays_of_a_model_alive() -> None:
    import gc
    import weakref

    @dataclass
    class Holder:
        weight: Any

    model = Holder(np.ones(10))
    watched = weakref.ref(model.weight)
    state = op.setup(op.Descent(), model)
    op.update(state, model, {"weight": np.ones(10)})
    del model
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("wrong", [3, "Norm", len])
def test_only_types_can_be_registered(wrong: Any) -> None:
    with pytest.raises(ModelError, match="register takes a type"):
        op.register(wrong)


def test_a_type_is_registered_once() -> None:
    class Once:
        pass

    op.register(Once)
    with pytest.raises(ModelError, match="Once is registered already"):
        op.register(Once)
    for builtin in (dict, list, tuple):
        with pytest.raises(ModelError, match="registered"):
            op.register(builtin)


def test_a_type_that_hides_arrays_is_warned_of_once() -> None:
    class Hidden:
        def __init__(self) -> None:
            self.w = np.ones(2)

    model = {"w": np.ones(1), "hidden": Hidden(), "nothing": SimpleNamespace()}
    with pytest.warns(OptimiserWarning, match=r"the model holds a Hidden, .* call optimisers\.register\(Hidden\)"):
        state = op.setup(op.Descent(1.0), model)
    assert len(state) == 1
    _, new = op.update(state, model, {"w": np.ones(1)})
    assert new["hidden"] is model["hidden"]
    op.register(Hidden)
    assert list(op.trainables(model)) == ["hidden.w", "w"]


# Keys -----------------------------------------------------------------------------------------------------------------


def test_no_name_of_a_parameter_collides_with_another(backend: Backend) -> None:
    names: list[Any] = ["step", "mu", "nu", "slots", "memory", "a.b", "a/b", "a b", "", "0", "*", "**", '"', "\\", 0, 1]
    model: Any = {name: backend.array([float(at)]) for at, name in enumerate(names)}
    model["a"] = {"b": backend.array([100.0])}
    state = op.setup(op.Adam(1.0), model)
    assert len(state) == len(names) + 1
    assert len(op.trainables(model)) == len(names) + 1
    for name in names:
        own = op.Path((name,))
        assert own in state
        moved, new = op.update(state, model, {own: backend.array([1.0])})
        assert [each.path for each in moved.leaves() if each.step] == [own]
        assert_close(backend.read(new[name]), backend.read(model[name]) - 1, 1e-6)
        assert [each.path for each in state.freeze(own).leaves() if each.frozen] == [own]
        assert new["a"]["b"] is model["a"]["b"]
    grads = {name: backend.array([1.0]) for name in names}
    moved, new = op.update(state, model, grads | {"a": {"b": backend.array([1.0])}})
    assert all(each.step == 1 for each in moved.leaves())
    assert_close(backend.read(new["a"]["b"]), [99.0], 1e-6)


@pytest.mark.parametrize(
    ("model", "frozen", "name"),
    [
        ({"a": {"b": W}, "a.b": W + 1}, ("a.b",), ("a", "b")),
        ({"a": {"b": W}, "a.b": W + 1}, ("a", "b"), ("a.b",)),
        ({"0": W, 0: W + 1}, ("0",), (0,)),
        ({"0": W, 0: W + 1}, (0,), ("0",)),
        ({'"q"': W, "q": W + 1}, ("q",), ('"q"',)),
        ({'"q"': W, "q": W + 1}, ('"q"',), ("q",)),
    ],
)
def test_partition_names_one_parameter_whatever_else_the_root_holds(model: Any, frozen: Any, name: Any) -> None:
    state = op.setup(op.Descent(1.0), model).freeze(op.Path(frozen))
    params, _ = op.partition(state, model)
    (spelled,) = params
    assert op.Path(spelled) == name
    state, _ = op.update(state, model, {spelled: np.ones(2)})
    assert [each.path for each in state.leaves() if each.step] == [name]


def test_keys_of_enumerations_and_other_types(numpy_backend: Backend) -> None:
    class Part(enum.Enum):
        HEAD = 1
        TAIL = 2

    model = {Part.HEAD: np.ones(1)}
    state = op.setup(op.Descent(1.0), model)
    _, new = op.update(state, model, {Part.HEAD: np.ones(1)})
    assert new[Part.HEAD].tolist() == [0.0]
    model = {(0, 1): np.ones(1), "x": np.ones(1), 3: np.ones(1)}
    state = op.setup(op.Descent(1.0), model)
    _, new = op.update(state, model, {(0, 1): np.ones(1)})
    assert new[0, 1].tolist() == [0.0]
    assert op.Path(((0, 1),)) in state


def test_a_counter_is_a_dict_like_any_other() -> None:
    model = {"seen": Counter(a=3), "w": np.ones(1)}
    _, new = op.update(op.setup(op.Descent(1.0), model), model, {"w": np.ones(1)})
    assert new["seen"] == Counter(a=3)
    assert type(new["seen"]) is Counter


# Models that cannot be read -------------------------------------------------------------------------------------------


def test_a_model_that_refers_to_itself_is_an_error() -> None:
    loop: dict[str, Any] = {"w": np.ones(1), "inner": {"list": [1, 2]}}
    loop["inner"]["list"].append({"back": loop})
    with pytest.raises(ModelError, match=r"inner\.list\.2\.back is the model itself again"):
        op.setup(op.Adam(), loop)
    child = Plain(np.ones(1))
    child.rest = {"parent": child}
    with pytest.raises(ModelError, match=r"refers to itself: a\.rest\.parent is a again"):
        op.setup(op.Adam(), {"a": child})


def test_a_model_that_is_too_deep_is_an_error() -> None:
    model: Any = np.ones(1)
    for _ in range(1500):
        model = [model]
    with pytest.raises(ModelError, match="nested more than"):
        op.trainables(model)


def test_one_container_at_two_places_is_fine() -> None:
    layer = {"w": np.zeros(1)}
    model = {"a": layer, "b": layer}
    state = op.setup(op.Descent(1.0), model)
    assert len(state) == 1
    for step in (op.update, op.update_):
        _, new = step(state, copy.deepcopy(model), {"a": {"w": np.ones(1)}, "b": {"w": np.ones(1)}})
        assert new["a"]["w"].tolist() == [-2.0]
        assert new["a"]["w"] is new["b"]["w"]


# Models that are not the state's --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w": np.ones(3), "v": np.ones(1)}, r"w: the state was made for shape \(2,\), but the model holds \(3,\)"),
        ({"w": np.ones(2, np.float32), "v": np.ones(1)}, "w: the state was made for float64, but the model holds float32"),
        ({"w": None, "v": np.ones(1)}, "w: the state has a parameter here, but the model holds None"),
        ({"w": 1.0, "v": np.ones(1)}, "w: the state has a parameter here, but the model holds a float"),
        ({"w": [1.0, 2.0], "v": np.ones(1)}, "w"),
        ({"w": np.ones(2)}, 'the state has a parameter at "v", the model has nothing there'),
        ({"w": np.ones(2), "u": np.ones(1)}, 'the state has a parameter at "v"'),
        ({"w": np.ones(2), "v": np.ones(1), "new": np.ones(1)}, 'a parameter at "new" that the state does not know'),
        ([np.ones(2), np.ones(1)], "the state has a parameter at"),
        (None, "the state has a parameter at"),
    ],
    ids=range(10),
)
def test_a_model_that_is_not_the_states_is_an_error(numpy_backend: Backend, changed: Any, message: str) -> None:
    model = {"w": np.ones(2), "v": np.ones(1)}
    state = op.setup(op.Adam(), model)
    for warm in (False, True):
        for step in (op.update, op.update_):
            with pytest.raises(ModelError, match=message):
                step(state, changed, {"w": np.ones(2), "v": np.ones(1)})
        if not warm:
            state, model = op.update(state, model, {"w": np.ones(2), "v": np.ones(1)})


def test_an_array_of_another_library_is_an_error(backend: Backend) -> None:
    import torch

    state = op.setup(op.Adam(), {"w": backend.array([1.0])})
    other = torch.ones(1, dtype=torch.float64) if isinstance(backend.array([1.0]), np.ndarray) else np.ones(1)
    with pytest.raises(ModelError, match=r"w: the state was made for a \w+ array, but the model holds a \w+ array"):
        op.update(state, {"w": other}, {"w": backend.array([1.0])})


def test_an_array_that_became_trainable_is_noticed() -> None:
    model = {"w": np.ones(2), "n": np.arange(3), "k": 3}
    state = op.setup(op.Descent(), model)
    state, model = op.update(state, model, {"w": np.ones(2)})
    for changed in ({"n": np.ones(3)}, {"k": np.ones(3)}):
        with pytest.raises(ModelError, match="that the state does not know"):
            op.update(state, {**model, **changed}, {"w": np.ones(2)})


def test_threads_that_meet_a_new_type_at_once_all_open_it() -> None:
    def meet(round_: int) -> list[int]:
        kind = make_dataclass(f"New{round_}", ["weight", "rest"])
        model = [kind(np.ones(2), kind(np.ones(3), None)) for _ in range(4)]
        barrier = threading.Barrier(4)

        def count() -> int:
            barrier.wait()
            return len(op.trainables(model))

        with ThreadPoolExecutor(4) as pool:
            return [each.result() for each in [pool.submit(count) for _ in range(4)]]

    for round_ in range(50):
        assert meet(round_) == [8] * 4


def test_nodes_that_exist_only_while_a_model_is_opened_stay_apart() -> None:
    @dataclass
    class Box:
        items: dict[str, Any]
        name: str = ""

    class Holder:
        def __init__(self, **arrays: Any) -> None:
            self.arrays = arrays

    op.register(
        Holder,
        children=lambda holder: {"box": Box(holder.arrays, name="made on the way")},
        rebuild=lambda holder, new: Holder(**new["box"].items),
    )
    w = np.ones(2)
    model = [Holder(p=w), Holder(q=w)]
    _, new = op.update(op.setup(op.Descent(1.0), model), model, {})
    assert [list(holder.arrays) for holder in new] == [["p"], ["q"]]


def test_a_type_can_be_registered_after_it_was_met() -> None:
    class Late:
        def __init__(self) -> None:
            self.weight = np.ones(2)

    with pytest.warns(OptimiserWarning, match="holds a Late"):
        op.trainables([Late(), np.ones(1)])
    op.register(Late)
    assert len(op.trainables([Late(), np.ones(1)])) == 2


def test_a_node_that_stands_twice_stays_one() -> None:
    @dataclass
    class Layer:
        weight: Any

    layer = Layer(np.ones(2))
    model = {"a": layer, "b": [layer], "c": Layer(np.ones(2))}
    state, new = op.update(op.setup(op.Descent(1.0), model), model, {"a.weight": np.ones(2)})
    assert new["a"] is new["b"][0]
    _, new = op.update(state.untie("b.0.weight"), new, {"a.weight": np.ones(2)})
    assert new["a"] is not new["b"][0]
    assert (new["b"][0].weight == 0).all()
