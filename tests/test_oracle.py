"""Random models, rules and surgery, stepped by the library and by an oracle that knows nothing of trees.

`OPTIMISERS_FUZZ=2000 pytest tests/test_oracle.py` runs that many random examples in place of the repeatable ones.
"""

import copy
import math
import os
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import optimisers as op
from optimisers import schedules, select
from optimisers.errors import OptimiserError, PathError, ShapeError, StateError
from tests.oracle import Member, Oracle, Parameter, RefusedError, Rule, slot_names

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
Random: TypeAlias = np.random.Generator
Keys: TypeAlias = tuple[Any, ...]

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


# Models ---------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


class Config(dict[Any, Any]):
    pass


@dataclass
class Layer:
    weight: Any
    bias: Any


@dataclass(frozen=True)
class Fixed:
    mu: Any
    step: Any


@dataclass(slots=True)
class Slotted:
    w: Any


@dataclass(frozen=True, slots=True)
class FixedSlotted:
    w: Any


def activation(x: float) -> float:
    return max(x, 0.0)


FIELDS: dict[type, int] = {Pair: 2, Layer: 2, Fixed: 2, Slotted: 1, FixedSlotted: 1}
MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Config)
CONTAINERS: tuple[type, ...] = (dict, list, tuple, Layer, Pair, OrderedDict, Fixed, Config, Slotted, FixedSlotted)
WORDS = ("w", "step", "mu", "a.b", "a", "b", "a/b", "x y", "", "0", "1", "*", "**", 'say "so"', "back\\slash", "[0]", "naïve")
KEYS: tuple[Any, ...] = (*WORDS, 0, 1, -1, ("t", 0), ("t",))
JUNK: tuple[Any, ...] = (3, None, "name", activation, True, 1.5, np.arange(3), np.array([True]), np.float64(2.0), 2j)
SHAPES = ((3,), (2, 3), (), (1,), (2, 2), (2, 1, 3), (0,), (3, 0), (1, 4), (2, 2, 2), (4, 6))
LARGE = (40, 512)
"""More than the reference takes at once."""
LAYOUTS = ("plain", "plain", "plain", "fortran", "strided", "reversed", "read-only", "unaligned")


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The children of a container by key, in the library's order; `None` for a leaf."""
    if isinstance(node, OrderedDict):
        return list(node.items())
    if isinstance(node, dict):
        return [(key, node[key]) for key in in_order(node)]
    if isinstance(node, Pair):
        return list(node._asdict().items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    return [(each.name, getattr(node, each.name)) for each in fields(node)] if is_dataclass(node) else None


def in_order(keys: Iterable[Any]) -> list[Any]:
    """Keys by value, else by type and value, else as they come."""
    for order in (lambda key: key, lambda key: (type(key).__qualname__, key)):
        try:
            return sorted(keys, key=order)
        except TypeError:
            continue
    return list(keys)


def walk(node: Any, keys: Keys = (), owners: tuple[type, ...] = ()) -> Iterator[tuple[Keys, tuple[type, ...], Any]]:
    """Every leaf with its keys and the types that enclose it."""
    below = children(node)
    if below is None:
        yield keys, owners, node
    for key, child in below or ():
        yield from walk(child, (*keys, key), (*owners, type(node)))


def made(kind: type, parts: Mapping[Any, Any]) -> Any:
    """A container of a type from its children."""
    if issubclass(kind, dict):
        return kind(parts)
    return kind(parts.values()) if kind in (list, tuple) else kind(*parts.values())


def swapped(node: Any, change: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    """A model with other leaves; what `change` returns for a whole branch other than the branch itself stands in its place."""
    new = change(keys, node)
    if new is not node or children(node) is None:
        return new
    order = list(node) if isinstance(node, dict) else [key for key, _ in children(node) or ()]
    below = dict(children(node) or ())
    return made(type(node), {key: swapped(below[key], change, (*keys, key)) for key in order})


def at(node: Any, keys: Keys) -> Any:
    for key in keys:
        node = dict(children(node) or ())[key]
    return node


@dataclass(frozen=True)
class Look:
    """How an occurrence is seen from its parameter: transposes and reshapes in a row, each with its inverse."""

    steps: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def see(self, array: np.ndarray) -> np.ndarray:
        for kind, argument, _ in self.steps:
            array = array.transpose(argument) if kind == "transpose" else array.reshape(argument)
        return array

    def then(self, other: "Look") -> "Look":
        return Look(self.steps + other.steps)

    @property
    def inverse(self) -> "Look":
        return Look(tuple((kind, back, argument) for kind, argument, back in reversed(self.steps)))

    def keeps_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether the rows along axis 0 are rows in this view as well."""
        rows = np.broadcast_to(np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)), shape)
        seen = self.see(np.ascontiguousarray(rows))
        return seen.shape[:1] == shape[:1] and all(bool((seen[row] == row).all()) for row in range(shape[0]))


def transposed(shape: tuple[int, ...], order: Iterable[int]) -> Look:
    axes = tuple(order)
    return Look((("transpose", axes, tuple(axes.index(axis) for axis in range(len(shape)))),))


def reshaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> Look:
    return Look((("reshape", wanted, shape),))


def laid_out(values: np.ndarray, layout: str) -> np.ndarray:
    """The same values, lying otherwise in memory."""
    if layout == "fortran":
        return np.array(values, order="F")
    if layout == "strided" and values.ndim:
        room = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        room[..., ::2] = values
        return room[..., ::2]
    if layout == "reversed" and values.ndim:
        return np.ascontiguousarray(values[::-1])[::-1]
    if layout == "unaligned":
        room = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
        room[...] = values
        return room
    made = np.array(values, order="C")
    made.flags.writeable = layout != "read-only"
    return made


def drawn_random(draw: Draw) -> Random:
    """Chance for what need not shrink. It spreads wider than what Hypothesis draws piece by piece."""
    return np.random.default_rng(draw(st.integers(0, 2**32)))


def any_of(random: Random, options: Sequence[Any]) -> Any:
    return options[int(random.integers(len(options)))]


def some_of(random: Random, options: Iterable[Any]) -> list[Any]:
    return [each for each in options if random.random() < 0.4]


def random_array(random: Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return laid_out(np.asarray(random.normal(size=shape)).astype(dtype), any_of(random, LAYOUTS))


@dataclass
class Builder:
    """Makes a random model, its ties included."""

    random: Random
    dtypes: Sequence[str]
    bases: list[np.ndarray] = field(default_factory=list)
    known: dict[int, tuple[int, Look, np.ndarray]] = field(default_factory=dict)
    """For every array by `id`: the number of its base, how it is seen from there, and the array."""

    def build(self, leaves: int) -> Any:
        model = self.node(leaves, 3)
        return model if self.bases else {"w": self.parameter(), "rest": model}

    def node(self, leaves: int, depth: int) -> Any:
        if (leaves == 1 and self.random.random() < 0.6) or not depth:
            return self.leaf()
        kind = any_of(self.random, CONTAINERS)
        count = FIELDS[kind] if kind in FIELDS else int(self.random.integers(min(leaves, 1), min(leaves, 4) + 1))
        keys = list(range(count))
        if kind in MAPPINGS:
            keys = [KEYS[at] for at in self.random.choice(len(KEYS), count, replace=False)]
        shares = self.random.multinomial(leaves, [1 / count] * count) if count else []
        return made(kind, {key: self.node(int(share), depth - 1) for key, share in zip(keys, shares, strict=True)})

    def leaf(self) -> Any:
        kind = any_of(self.random, ["parameter", "parameter", "parameter", "tie", "tie", "junk"])
        if kind == "junk":
            return any_of(self.random, JUNK)
        return self.tie() if kind == "tie" and self.bases else self.parameter()

    def parameter(self) -> np.ndarray:
        shape = LARGE if self.random.random() < 0.02 else any_of(self.random, SHAPES)
        array = random_array(self.random, shape, any_of(self.random, self.dtypes))
        self.bases.append(array)
        return self.note(array, len(self.bases) - 1, Look())

    def note(self, array: np.ndarray, base: int, look: Look) -> np.ndarray:
        self.known[id(array)] = (base, look, array)
        return array

    def tie(self) -> np.ndarray:
        base, look, array = any_of(self.random, list(self.known.values()))
        kind = any_of(self.random, ["object", "view", "transpose", "reshape", "both"])
        # Empty arrays occupy no memory, so only identity can tie them.
        if kind == "object" or not array.size:
            return array
        further = Look()
        if kind in ("transpose", "both"):
            further = transposed(array.shape, map(int, self.random.permutation(array.ndim)))
        if kind in ("reshape", "both"):
            wanted = any_of(self.random, factors(array.size))
            further = further.then(reshaped(further.see(array).shape, wanted))
        alias = further.see(array)[...]
        return self.note(alias, base, look.then(further)) if np.shares_memory(alias, array) else array


def factors(size: int) -> list[tuple[int, ...]]:
    """Some shapes of a size."""
    pairs = [(low, size // low) for low in range(1, min(size, 8) + 1) if size % low == 0]
    return [(size,), *pairs, *((1, low, high) for low, high in pairs), *([()] if size == 1 else [])]


# Rules ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheduled:
    """A schedule of the library, and what it should be."""

    schedule: Any
    formula: Callable[[int], float]

    def __repr__(self) -> str:
        return f"Scheduled({self.schedule})"

    def __call__(self, step: int) -> float:
        return self.formula(step)


def falling(step: Any) -> Any:
    return 0.2 / (1 + step)


SCHEDULES = (
    Scheduled(falling, lambda step: 0.2 / (1 + step)),
    Scheduled(schedules.Constant(0.07), lambda step: 0.07),
    Scheduled(schedules.Linear(0.3, 0.1, 4), lambda step: 0.3 - 0.05 * min(step, 4)),
    Scheduled(schedules.Cosine(0.2, 5, 0.02), lambda step: 0.02 + 0.09 * (1 + math.cos(math.pi * min(step, 5) / 5))),
    Scheduled(schedules.warmup(0.1, 2), lambda step: 0.05 * min(step, 2)),
    Scheduled(schedules.Linear(0.0, 0.2, 2).then(0.01, after=3), lambda step: 0.1 * min(step, 2) if step < 3 else 0.01),
)

HYPERPARAMETERS: dict[str, tuple[Any, ...]] = {
    "lr": (0.1, 0.03, np.float64(0.3), 0.0, *SCHEDULES),
    "momentum": (0.9, 0.5, SCHEDULES[2]),
    "dampening": (0.0, 0.2),
    "weight_decay": (0.1, 0.0, SCHEDULES[3]),
    "nesterov": (False, True),
    "betas": ((0.9, 0.99), (0.0, 0.5), (SCHEDULES[2], 0.9)),
    # Well above rounding, so that a float32 gradient that nearly cancels cannot turn a whole step round.
    "eps": (1e-3, 1e-2),
    "clip_value": (0.5, 2.0),
    "max_norm": (0.5, 3.0, SCHEDULES[2]),
    "n": (2, 1, 3),
}

NAMES: dict[str, tuple[str, ...]] = {
    "Descent": ("lr",),
    "Momentum": ("lr", "momentum"),
    "Nesterov": ("lr", "momentum"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "WeightDecay": ("weight_decay",),
    "SignDecay": ("weight_decay",),
    "ClipGrad": ("clip_value",),
    "ClipNorm": ("max_norm",),
    "ClipGlobalNorm": ("max_norm",),
    "AccumGrad": ("n",),
    "SkipNonFinite": (),
}
PLAIN = {"momentum": 0.0, "nesterov": False}
HEAVY = {"momentum": 0.9, "nesterov": False}
NESTEROV = {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
# Few, since each one costs a second of compilation for each dtype.
POOL: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = (
    (("Descent", {}),),
    (("Momentum", {}),),
    (("SGD", HEAVY),),
    (("SGD", NESTEROV),),
    (("Adam", {}),),
    (("AdamW", {}),),
    (("ClipGrad", {}), ("WeightDecay", {}), ("Adam", {})),
    (("ClipGlobalNorm", {}), ("AdamW", {})),
    (("ClipNorm", {}), ("SignDecay", {}), ("Descent", {})),
    (("AccumGrad", {}), ("WeightDecay", {}), ("Momentum", {})),
    (("SkipNonFinite", {}), ("AccumGrad", {}), ("ClipGlobalNorm", {}), ("Nesterov", {})),
    (("SkipNonFinite", {}), ("SGD", PLAIN)),
)
TREE_WIDE = ("SkipNonFinite", "AccumGrad", "ClipGlobalNorm")


def member_of(random: Random, kind: str, given: Mapping[str, Any], n: int) -> Member:
    hyper = {name: given[name] if name in given else any_of(random, HYPERPARAMETERS[name]) for name in NAMES[kind]}
    return Member(kind, hyper | ({"n": n} if "n" in hyper else {}))


def random_rule(random: Random, order: tuple[str, ...] | None, n: int) -> Rule:
    """One of the pool; or, with an order of the tree-wide members, any chain at all."""
    if order is None:
        return tuple(member_of(random, kind, given, n) for kind, given in any_of(random, POOL))
    kinds = [any_of(random, list(NAMES)) for _ in range(random.integers(1, 5))]
    wide = iter([kind for kind in order if kind in kinds])
    chain = []
    for kind in kinds:
        # Each tree-wide member once, and in the one order that all chains agree on.
        name = next(wide, None) if kind in TREE_WIDE else kind
        static = any_of(random, [PLAIN, HEAVY, NESTEROV]) if kind == "SGD" else {}
        chain += [member_of(random, name, static, n)] if name else []
    return tuple(chain)


def theirs(value: Any) -> Any:
    """A hyperparameter as the library takes it."""
    if isinstance(value, tuple):
        return tuple(map(theirs, value))
    return value.schedule if isinstance(value, Scheduled) else value


def library_rule(wish: Rule) -> op.Rule:
    members = [getattr(op, each.kind)(**{name: theirs(value) for name, value in each.hyper.items()}) for each in wish]
    return members[0] if len(members) == 1 else op.Chain(*members)


def adjusted(wish: Rule, changes: Mapping[str, Any]) -> Rule:
    """A rule with other hyperparameters where it has them."""
    members = []
    for each in wish:
        mine = {name: value for name, value in changes.items() if name in each.hyper}
        if each.kind == "SGD" and bool(mine.get("momentum", each.hyper["momentum"])) != bool(each.hyper["momentum"]):
            raise RefusedError("momentum on or off shapes the state")
        if each.kind == "SGD" and each.hyper["nesterov"] and mine.get("dampening"):
            raise RefusedError("nesterov goes without dampening")
        members.append(Member(each.kind, {**each.hyper, **mine}))
    return tuple(members)


# The world: a model, its state, and what the oracle makes of it -------------------------------------------------------------------


class Place(NamedTuple):
    """An occurrence: of which parameter, how it is seen from there, and the types that enclose it."""

    name: str
    look: Look
    owners: tuple[type, ...]


@dataclass
class World:
    model: Any
    state: op.State
    oracle: Oracle
    places: dict[Keys, Place]
    canonical: dict[str, Keys]
    dtypes: dict[str, str]
    masked: set[Keys] = field(default_factory=set)
    detached: set[Keys] = field(default_factory=set)
    """Places that were untied since the last step, which gives them arrays of their own."""
    mixed: bool = False
    """Whether float32 gradients were in a norm that all parameters share."""

    def of(self, name: str) -> list[Keys]:
        """The places of a parameter."""
        return [keys for keys, place in self.places.items() if place.name == name]

    def leaf(self, keys: Keys) -> op.Leaf:
        found = self.state[op.Path(keys)]
        assert isinstance(found, op.Leaf)
        return found

    def array(self, name: str) -> np.ndarray:
        return at(self.model, self.canonical[name])

    def silent(self, name: str) -> bool:
        """Whether no gradient can reach a parameter."""
        return self.oracle[name].frozen or self.masked.issuperset(self.of(name))

    def fill(self, arrays: Mapping[Keys, np.ndarray]) -> None:
        """Put arrays into the model by hand."""
        self.model = swapped(self.model, lambda keys, node: arrays.get(keys, node))

    def summed(self, given: Mapping[Keys, Any]) -> dict[str, np.ndarray]:
        """What gradients at places come to, by parameter."""
        total: dict[str, np.ndarray] = {}
        seen = set()
        for keys, grad in given.items():
            name, look, _ = self.places[keys]
            if grad is None or keys in self.masked or self.oracle[name].frozen or (name, id(grad)) in seen:
                continue
            seen.add((name, id(grad)))
            total[name] = total.get(name, 0.0) + look.inverse.see(np.asarray(grad, np.float64))
        return total

    # Comparing --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Model and state are what the oracle says."""
        self.mixed |= "float32" in self.dtypes.values() and self.oracle.holds("ClipGlobalNorm")
        for keys, place in self.places.items():
            leaf = at(self.model, keys)
            assert type(leaf) is np.ndarray
            assert leaf.dtype == self.dtypes[place.name]
            self.check_close(place.name, leaf, place.look.see(self.oracle[place.name].value))
        assert len(self.state) == len(self.oracle.parameters)
        assert set(self.state) == {op.Path(keys) for keys in self.canonical.values()}
        assert self.state.step == self.oracle.step
        memory = {"accumgrad": {"filled": self.oracle.filled}, "skipnonfinite": {"skipped": self.oracle.skipped}}
        assert {key: dict(value) for key, value in self.state.memory.items()} == {
            kind.lower(): memory[kind.lower()] for kind in ("AccumGrad", "SkipNonFinite") if self.oracle.holds(kind)
        }
        for name in self.oracle.parameters:
            self.check_leaf(name)
        self.check_memory()

    def check_leaf(self, name: str) -> None:
        expected, leaf = self.oracle[name], self.leaf(self.canonical[name])
        assert all(self.leaf(keys).path == self.canonical[name] for keys in self.of(name))
        assert leaf.shape == expected.value.shape
        assert leaf.dtype == self.dtypes[name]
        assert leaf.rule == library_rule(expected.rule)
        assert leaf.step == expected.count
        assert leaf.frozen == expected.frozen
        rows = np.zeros(expected.value.shape[:1] or (0,), bool)
        for start, stop in leaf.frozen_rows:
            rows[start:stop] = True
        np.testing.assert_array_equal(rows, expected.frozen_rows)
        assert {self.canonical[name], *leaf.ties} == set(self.of(name))
        assert leaf.masked == self.masked & set(self.of(name))
        names = [each for names in slot_names(expected.rule) for each in names]
        assert list(leaf.slots) == (names if expected.slots is not None else [])
        for each, slot in leaf.slots.items():
            assert slot.dtype == self.dtypes[name]
            assert expected.slots is not None
            self.check_close(name, slot, expected.slots[each])

    def check_close(self, name: str, actual: np.ndarray, expected: np.ndarray) -> None:
        tolerance = TOLERANCE["float32" if self.mixed else self.dtypes[name]]
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)

    def check_memory(self) -> None:
        """State arrays never lie in the memory of parameters or of each other."""
        slots = [slot for leaf in self.state.leaves() for slot in leaf.slots.values()]
        others = [self.array(name) for name in self.oracle.parameters]
        for k, slot in enumerate(slots):
            assert not any(np.shares_memory(slot, other) for other in (*slots[:k], *others))

    # Stepping ---------------------------------------------------------------------------------------------------------

    def step(self, grads: Any, given: Mapping[Keys, Any], *, reference: bool, in_place: bool) -> None:
        """One step of the library and of the oracle; `given` are the gradients in `grads` by place."""
        total = self.summed(given)
        before = self.still_bits(total)
        pure = self.pure(grads, reference)
        written = self.written(grads, given, pure, reference) if in_place else None
        moved = self.oracle.update(total)
        self.check_shared(pure[1], total, moved)
        self.state, old, self.model = pure[0], self.model, pure[1]
        if written is not None:
            self.state, self.model = written
            if self.written_whole(old, total):
                assert self.model is old
        assert self.still_bits(total) == before
        self.detached.clear()
        self.check()

    def pure(self, grads: Any, reference: bool) -> tuple[op.State, Any]:
        before = bits(self.model), facts(self.state), bits(grads)
        with op.reference_only() if reference else nullcontext():
            state, model = op.update(self.state, self.model, grads)
        assert (bits(self.model), facts(self.state), bits(grads)) == before
        assert_alike(model, self.model, self.places)
        return state, model

    def written(self, grads: Any, given: Mapping[Keys, Any], pure: tuple[op.State, Any], reference: bool) -> tuple[op.State, Any]:
        """`update_`, which has to agree with `update` bit for bit."""
        arrays = [at(self.model, keys) for keys in self.places]
        apart = not any(np.shares_memory(grad, array) for grad in given.values() if grad is not None for array in arrays)
        kept = bits(grads)
        expected = facts(pure[0]), bits(pure[1])
        with op.reference_only() if reference else nullcontext():
            state, model = op.update_(self.state, self.model, grads)
        assert (facts(state), bits(model)) == expected
        assert not apart or bits(grads) == kept
        assert_alike(model, self.model, self.places)
        return state, model

    def still_bits(self, total: Mapping[str, Any]) -> dict[str, Any]:
        """The bits of all that may not change in a step: values and slots without a gradient, and frozen rows."""
        kept: dict[str, Any] = {}
        for name, expected in self.oracle.parameters.items():
            still = ... if name not in total else expected.frozen_rows if expected.frozen_rows.any() else None
            if still is not None:
                slots = self.leaf(self.canonical[name]).slots.values()
                kept[name] = self.array(name)[still].tobytes(), [slot[still].tobytes() for slot in slots]
        return kept

    def check_shared(self, new: Any, total: Mapping[str, Any], moved: set[str]) -> None:
        """What did not move is the old array; what moved is one array at all its places."""
        for keys, place in self.places.items():
            array = at(new, keys)
            if place.name not in moved:
                assert array is at(self.model, keys) or self.is_detached(place.name)
            elif array.size:
                first = at(new, self.canonical[place.name])
                # Several transposes and reshapes in a row may end in a copy.
                assert len(place.look.steps) > 1 or np.shares_memory(array, first)
                assert not np.shares_memory(array, at(self.model, keys))

    def is_detached(self, name: str) -> bool:
        return not self.detached.isdisjoint(self.of(name))

    def written_whole(self, model: Any, total: Mapping[str, Any]) -> bool:
        """Whether all that had a gradient could be written in place, and is one array at all its places."""
        for keys, place in self.places.items():
            array, first = at(model, keys), at(model, self.canonical[place.name])
            # The stride of an axis of length one says nothing, so views may differ in it.
            alike = array is first or (np.shares_memory(array, first) and 1 not in array.shape)
            if place.name in total and not (first.flags.writeable and alike):
                return False
        return not self.detached


def bits(tree: Any) -> list[Any]:
    """Every leaf of a tree: arrays by their bits."""
    return [
        (keys, owners, (leaf.dtype, leaf.shape, leaf.tobytes()) if isinstance(leaf, (np.ndarray, np.generic)) else leaf)
        for keys, owners, leaf in walk(tree)
    ]


def facts(state: op.State) -> Any:
    """All that a state says: slots by their bits."""
    leaves = {
        leaf.path: (
            *(leaf.shape, leaf.dtype, leaf.rule, leaf.step, leaf.frozen, leaf.frozen_rows, dict(leaf.ties), leaf.masked),
            {name: (slot.dtype, slot.shape, slot.tobytes()) for name, slot in leaf.slots.items()},
        )
        for leaf in state.leaves()
    }
    return state.step, {key: dict(value) for key, value in state.memory.items()}, leaves


def assert_alike(new: Any, old: Any, places: Mapping[Keys, Any], keys: Keys = ()) -> None:
    """Two models of one structure that share all that is no parameter."""
    assert type(new) is type(old)
    below = children(old)
    if below is None:
        assert keys in places or new is old
        return
    assert not isinstance(old, dict) or list(new) == list(old)
    assert [key for key, _ in children(new) or ()] == [key for key, _ in below]
    for (key, child), (_, other) in zip(children(new) or (), below, strict=True):
        assert_alike(child, other, places, (*keys, key))


# Drawing --------------------------------------------------------------------------------------------------------------


def forms(keys: Keys) -> list[Any]:
    """The forms of a path."""
    path = op.Path(keys)
    return [str(path), path, tuple(keys), *([keys[0]] if len(keys) == 1 and type(keys[0]) is int else [])]


def draw_form(draw: Draw, keys: Keys) -> Any:
    return draw(st.sampled_from(forms(keys)))


def draw_selector(draw: Draw, world: World) -> tuple[Any, set[Keys]]:
    """A selector, and the places that it means."""
    places = world.places
    kind = draw(st.sampled_from(["path", "path", "path", "branch", "all", "glob", "type", "several", "ndim"]))
    keys = draw(st.sampled_from(list(places)))
    if kind == "branch":
        keys = keys[: draw(st.integers(0, len(keys)))]
        return draw_form(draw, keys), {each for each in places if each[: len(keys)] == keys}
    if kind == "all":
        return "**", set(places)
    if kind == "glob" and keys:
        key = draw(st.sampled_from(keys))
        return f"**.{op.Path((key,))}", {each for each in places if any(type(k) is type(key) and k == key for k in each)}
    if kind == "type" and places[keys].owners:
        owner = draw(st.sampled_from(places[keys].owners))
        return owner, {each for each, place in places.items() if any(issubclass(one, owner) for one in place.owners)}
    if kind == "several":
        other = draw(st.sampled_from(list(places)))
        both = draw_form(draw, keys), draw_form(draw, other)
        return draw(st.sampled_from([list(both), select.path(both[0]) | both[1]])), {keys, other} | below(places, keys, other)
    if kind == "ndim":
        ndim = world.oracle[places[keys].name].value.ndim
        return select.ndim(ndim), {each for each, place in places.items() if world.oracle[place.name].value.ndim == ndim}
    return draw_form(draw, keys), {keys}


def below(places: Iterable[Keys], *branches: Keys) -> set[Keys]:
    return {each for each in places for branch in branches if each[: len(branch)] == branch}


GRADIENTS = ("normal",) * 8 + ("missing", "missing", "zero", "broken", "broken", "rows", "own", "other")


def draw_gradient(draw: Draw, random: Random, world: World, keys: Keys) -> Any:
    """A gradient for one place: as a rule of its shape, broken only where it is not to be looked at."""
    name, look, _ = world.places[keys]
    expected, ignored = world.oracle[name], world.silent(name) or keys in world.masked
    shape = look.see(expected.value).shape
    kind = draw(st.sampled_from(GRADIENTS))
    if kind == "missing":
        return None
    if kind == "own":
        return at(world.model, keys)
    if kind == "other":
        return any_of(random, [array for array in (at(world.model, each) for each in world.places) if array.shape == shape])
    if kind == "broken" and ignored:
        return any_of(random, [np.full(shape, np.nan), np.full(shape, np.inf), np.ones((7, 5)), np.ones(shape, np.int64)])
    dtype = any_of(random, [*[world.dtypes[name]] * 6, "float32", "float64", "float16"])
    grad = random_array(random, shape, dtype) if kind != "zero" else np.zeros(shape, dtype)
    if kind == "broken":
        break_gradient(random, grad, expected.rule)
    if kind == "rows" and expected.frozen_rows.any():
        rows = expected.frozen_rows.reshape(-1, *[1] * (expected.value.ndim - 1))
        grad = np.where(look.see(np.array(np.broadcast_to(rows, expected.value.shape))), np.nan, grad).astype(dtype)
    return grad[()] if any_of(random, [True, False]) else grad


def break_gradient(random: Random, grad: np.ndarray, wish: Rule) -> None:
    """Put NaN or infinity into a gradient whose rule refuses such."""
    kinds = [member.kind for member in wish]
    if "SkipNonFinite" in kinds and grad.size and grad.flags.writeable:
        # A running mean makes NaN of infinity by one formula, and infinity by another.
        plain = not any(member.slots for member in wish[: kinds.index("SkipNonFinite")])
        grad[(0,) * grad.ndim] = any_of(random, [np.nan, np.inf]) if plain else np.nan


def draw_gradients(draw: Draw, world: World) -> dict[Keys, Any]:
    random = drawn_random(draw)
    given: dict[Keys, Any] = {}
    for keys, place in world.places.items():
        alike = [each for each in given if world.places[each][:2] == place[:2] and each not in world.masked]
        if alike and any_of(random, [False, False, False, True]):
            given[keys] = given[any_of(random, alike)]
        else:
            grad = draw_gradient(draw, random, world, keys)
            # One object counts once at all places of a parameter, so it cannot be seen in two ways.
            given[keys] = grad.copy() if any(grad is each for each in given.values() if each is not None) else grad
    return given


def random_world(random: Random, leaves: int, count: int, order: tuple[str, ...] | None) -> World:
    """A model with some leaves and its state, with some rules."""
    builder = Builder(random, any_of(random, [("float64",), ("float64",), ("float64", "float64", "float32"), ("float32",)]))
    model = builder.build(leaves)
    found: dict[Keys, Place] = {}
    for keys, owners, leaf in walk(model):
        if id(leaf) in builder.known:
            base, look, _ = builder.known[id(leaf)]
            found[keys] = Place(f"p{base}", look, owners)
    canonical: dict[str, Keys] = {}
    for keys, place in found.items():
        canonical.setdefault(place.name, keys)
    chosen = some_of(random, canonical) if random.random() < 0.2 else []
    canonical = {name: keys for name, keys in canonical.items() if not chosen or name in chosen}
    first = {name: found[keys].look for name, keys in canonical.items()}
    trained = {keys: place for keys, place in found.items() if place.name in canonical}
    places = {keys: Place(name, first[name].inverse.then(look), owners) for keys, (name, look, owners) in trained.items()}
    frozen = some_of(random, canonical) if random.random() < 0.5 else []
    rules, wish = random_rules(random, count, order, canonical, places)
    state = op.setup(
        wish,
        model,
        trainable=[any_of(random, forms(canonical[name])) for name in chosen] or None,
        frozen=[any_of(random, forms(canonical[name])) for name in frozen] or None,
    )
    parameters = {}
    for name in canonical:
        value = np.array(first[name].see(builder.bases[int(name[1:])]), np.float64)
        each = Parameter(value, rules[name], frozen=name in frozen, frozen_rows=np.zeros(value.shape[:1] or (0,), bool))
        each.slots = None if each.frozen else each.fresh()
        parameters[name] = each
    dtypes = {name: builder.bases[int(name[1:])].dtype.name for name in canonical}
    world = World(model, state, Oracle(parameters), places, canonical, dtypes)
    if random.random() < 0.3:
        world.masked.update(some_of(random, places))
        for keys in world.masked:
            world.state = world.state.mask(op.Path(keys))
    for name in some_of(random, canonical) if random.random() < 0.3 else []:
        if parameters[name].value.ndim:
            rows = random.random(len(parameters[name].value)) < 0.5
            world.state = world.state.freeze(op.Path(canonical[name]), rows=rows)
            world.oracle.freeze_rows(name, rows)
    return world


def random_rules(
    random: Random, count: int, order: tuple[str, ...] | None, canonical: Mapping[str, Keys], places: Mapping[Keys, Place]
) -> tuple[dict[str, Rule], Any]:
    """A rule for each parameter, and what to tell `setup`: one rule, a mapping of selectors or a function."""
    n = any_of(random, HYPERPARAMETERS["n"])
    few = [random_rule(random, order, n) for _ in range(count)]
    if len(few) == 1:
        return dict.fromkeys(canonical, few[0]), library_rule(few[0])
    rules = {name: any_of(random, few) for name in canonical}
    if random.random() < 0.5:
        return rules, lambda record: library_rule(rules[places[tuple(record.path)].name])
    rest = any_of(random, few)
    wish: dict[Any, op.Rule] = {}
    for keys, place in places.items():
        if rules[place.name] is not rest:
            wish[any_of(random, forms(keys))] = library_rule(rules[place.name])
    if any(each is rest for each in rules.values()):
        wish["**"] = library_rule(rest)
    return rules, wish


def no_gradient(draw: Draw, shape: tuple[int, ...]) -> Any:
    """What cannot be the gradient of a parameter of this shape."""
    return draw(st.sampled_from([np.ones((*shape, 2)), np.ones(shape, np.int64), np.ones(shape, np.complex128), "gradient"]))


# The machine ----------------------------------------------------------------------------------------------------------


SURGERY = ("freeze", "thaw", "freeze_or_thaw_rows", "mask", "unmask", "adjust", "replace", "reset", "drop", "untie", "tie")
DEEDS = ("nothing", *SURGERY, "copy_or_pickle", "move_away_and_back", "look_at_a_branch", "refuse")


class Training(RuleBasedStateMachine):
    """Steps and surgery in any order."""

    world: World
    order: tuple[str, ...] | None = None

    @initialize(seed=st.integers(0, 2**32), leaves=st.integers(1, 12), rules=st.integers(1, 3))
    def start(self, seed: int, leaves: int, rules: int) -> None:
        self.world = random_world(np.random.default_rng(seed), leaves, rules, self.order)
        note(f"model = {self.world.model}\nrules = {[each.rule for each in self.world.oracle.parameters.values()]}")
        self.untied = 0
        model = self.world.model
        if len(self.world.dtypes) == len(op.trainables(model)):
            expected = {str(op.Path(keys)): self.world.array(name) for name, keys in self.world.canonical.items()}
            assert {name: id(array) for name, array in op.trainables(model).items()} == {
                name: id(array) for name, array in expected.items()
            }
        flat, rebuild = op.destructure(model)
        assert bits(rebuild(flat)) == bits(model)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def change(self, new: Callable[[op.State], op.State], same: Callable[[Oracle], None]) -> bool:
        """Change state and oracle. What the oracle refuses, the state refuses; the old state stays as it was."""
        world, before = self.world, facts(self.world.state)
        tried = copy.deepcopy(world.oracle)
        try:
            same(tried)
        except RefusedError:
            with pytest.raises(OptimiserError):
                new(world.state)
            return False
        finally:
            assert facts(world.state) == before
        world.state, old = new(world.state), world.state
        assert facts(old) == before
        world.oracle = tried
        return True

    @rule(
        data=st.data(),
        first=st.sampled_from(DEEDS),
        gradients=st.sampled_from(["tree", "mapping", "partition"]),
        steps=st.integers(0, 3),
    )
    def train(self, data: st.DataObject, first: str, gradients: str, steps: int) -> None:
        """Do something else, and then take some steps."""
        world = self.world
        getattr(self, first)(data)
        if all(map(world.silent, world.oracle.parameters)) and data.draw(st.sampled_from([True, True, True, False])):
            self.change(lambda state: state.thaw().unmask(), lambda oracle: oracle.thaw(oracle.parameters))
            world.masked.clear()
        for _ in range(steps):
            grads, given = getattr(self, f"gradients_as_{gradients}")(data.draw)
            reference = self.order is not None or data.draw(st.booleans())
            world.step(grads, given, reference=reference, in_place=data.draw(st.booleans()))

    def nothing(self, data: st.DataObject) -> None:
        """Step at once."""

    # Gradients --------------------------------------------------------------------------------------------------------

    def gradients_as_tree(self, draw: Draw) -> tuple[Any, dict[Keys, Any]]:
        world = self.world
        given = draw_gradients(draw, world)
        branches = sorted({keys[:depth] for keys in given for depth in range(1, len(keys))}, key=repr)
        bare = set(draw(st.lists(st.sampled_from(branches), max_size=2))) if branches and draw(st.integers(0, 3)) == 3 else set()
        given = {keys: None if below([keys], *bare) else grad for keys, grad in given.items()}
        numbers, arrays = draw(st.booleans()), draw(st.booleans())

        def change(keys: Keys, node: Any) -> Any:
            if keys in bare:
                return None
            if children(node) is not None:
                return node
            kept = arrays if isinstance(node, (np.ndarray, np.generic)) else numbers
            return given.get(keys, node if kept else None)

        # Of a model that is one array, None would be no argument at all.
        grads = {} if (grads := swapped(world.model, change)) is None else grads
        # Without the model, arrays that are no gradients are errors.
        if not arrays:
            self.check_norm(grads, given)
        return grads, given

    def gradients_as_mapping(self, draw: Draw) -> tuple[Any, dict[Keys, Any]]:
        given = draw_gradients(draw, self.world)
        unnamed = draw(st.lists(st.sampled_from(list(given)), max_size=2))
        given = {keys: grad for keys, grad in given.items() if keys not in unnamed}
        form = draw(st.sampled_from([op.Path, lambda keys: str(op.Path(keys)), lambda keys: keys]))
        roots = {keys[0] for keys, _, _ in walk(self.world.model) if keys}
        # A spelling that is a key of the root stands for that one.
        grads = {op.Path(keys) if form(keys) in roots else form(keys): grad for keys, grad in given.items()}
        self.check_norm(grads, given)
        return grads, given

    def gradients_as_partition(self, draw: Draw) -> tuple[Any, dict[Keys, Any]]:
        world, random = self.world, drawn_random(draw)
        params, rebuild = op.partition(world.state, world.model)
        places = {name: tuple(op.Path(name)) for name in params}
        owners = [world.places[keys].name for keys in places.values()]
        assert sorted(owners) == sorted(name for name in world.oracle.parameters if not world.silent(name))
        for name, keys in places.items():
            np.testing.assert_array_equal(params[name], at(world.model, keys))
        doubled = rebuild({name: 2 * array for name, array in params.items()})
        for keys, place in world.places.items():
            factor = 2 if place.name in owners and keys not in world.masked else 1
            np.testing.assert_array_equal(at(doubled, keys), factor * at(world.model, keys))
        drawn = {name: draw_gradient(draw, random, world, keys) for name, keys in places.items()}
        grads = {name: grad for name, grad in drawn.items() if grad is not None}
        return grads, {places[name]: grad for name, grad in grads.items()}

    def check_norm(self, grads: Any, given: Mapping[Keys, Any]) -> None:
        world = self.world
        total = world.summed(given)
        expected = math.sqrt(sum(float(np.sum(grad[world.oracle[name].live] ** 2)) for name, grad in total.items()))
        if math.isfinite(expected):
            assert op.global_norm(grads, world.state) == pytest.approx(expected, rel=1e-6)

    def refuse(self, data: st.DataObject) -> None:
        world = self.world
        heard = [keys for keys, place in world.places.items() if not world.silent(place.name) and keys not in world.masked]
        if not heard:
            return
        keys = data.draw(st.sampled_from(heard))
        form = data.draw(st.sampled_from(["tree", "mapping", "unknown"]))
        given = {**draw_gradients(data.draw, world), keys: no_gradient(data.draw, at(world.model, keys).shape)}
        grads: Any = {op.Path(each): grad for each, grad in given.items()}
        if form == "tree":
            grads = swapped(world.model, lambda each, node: given.get(each, node))
        elif form == "unknown":
            grads = {op.Path((*keys, "further")): np.ones(1)}
        before = bits(world.model), facts(world.state)
        for step in (op.update, op.update_):
            with pytest.raises(OptimiserError):
                step(world.state, world.model, grads)
            assert (bits(world.model), facts(world.state)) == before

    # Surgery ----------------------------------------------------------------------------------------------------------

    def draw_names(self, data: st.DataObject) -> tuple[Any, list[str]]:
        selector, places = draw_selector(data.draw, self.world)
        return selector, sorted({self.world.places[keys].name for keys in places})

    def freeze(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        self.change(lambda state: state.freeze(selector), lambda oracle: oracle.freeze(names))

    def thaw(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        self.change(lambda state: state.thaw(selector), lambda oracle: oracle.thaw(names))

    def freeze_or_thaw_rows(self, data: st.DataObject) -> None:
        oracle = self.world.oracle
        # Rows are those of the parameter, so they are told where it is seen as it is.
        straight = [keys for keys, place in self.world.places.items() if not place.look.steps]
        if not straight:
            return
        keys = data.draw(st.sampled_from(straight))
        name = self.world.places[keys].name
        if not oracle[name].value.ndim:
            return
        size = len(oracle[name].value)
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
        rows: Any = data.draw(st.sampled_from([mask, mask.tolist(), np.flatnonzero(mask), np.flatnonzero(mask).tolist()]))
        if size and data.draw(st.booleans()):
            first = data.draw(st.integers(-size, size - 1))
            rows = slice(first, None, data.draw(st.sampled_from([1, 2])))
            mask = np.zeros(size, bool)
            mask[rows] = True
        path = draw_form(data.draw, keys)
        if data.draw(st.booleans()):
            self.change(lambda state: state.freeze(path, rows=rows), lambda oracle: oracle.freeze_rows(name, mask))
        else:
            self.change(lambda state: state.thaw(path, rows=rows), lambda oracle: oracle.thaw_rows(name, mask))

    def refused_for_rows(self, new: Callable[[op.State], op.State], name: str, look: Look) -> bool:
        """Whether rows cannot be told at a place: surely where the view moves them; the library may be more careful than that."""
        if not look.steps or not look.keeps_rows(self.world.oracle[name].value.shape):
            return bool(look.steps)
        try:
            new(self.world.state)
        except (ShapeError, StateError):
            return True
        return False

    def mask(self, data: st.DataObject) -> None:
        selector, places = draw_selector(data.draw, self.world)
        self.change(lambda state: state.mask(selector), lambda oracle: None)
        self.world.masked |= places

    def unmask(self, data: st.DataObject) -> None:
        selector, places = draw_selector(data.draw, self.world)
        self.change(lambda state: state.unmask(selector), lambda oracle: None)
        self.world.masked -= places

    def adjust(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        own = sorted({name for each in names for member in self.world.oracle[each].rule for name in member.hyper} - {"nesterov"})
        chosen = data.draw(st.lists(st.sampled_from(own or ["lr"]), min_size=1, max_size=2, unique=True))
        values = {"momentum": (0.9, 0.5, 0.0), **{name: HYPERPARAMETERS[name] for name in chosen if name != "momentum"}}
        changes = {name: data.draw(st.sampled_from(values[name])) for name in chosen}

        def same(oracle: Oracle) -> None:
            if not own:
                raise RefusedError("no rule has such a hyperparameter")
            oracle.set_rules({name: adjusted(oracle[name].rule, changes) for name in names})

        self.change(lambda state: state.adjust(selector, **{name: theirs(value) for name, value in changes.items()}), same)

    def replace(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        members = [member for each in self.world.oracle.parameters.values() for member in each.rule]
        counts = [member.hyper["n"] for member in members if "n" in member.hyper]
        random = drawn_random(data.draw)
        new = random_rule(random, self.order, any_of(random, [*counts[:1] * 5, 2, 3]))
        self.change(lambda state: state.replace(selector, library_rule(new)), lambda oracle: oracle.replace(names, new))

    def reset(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        self.change(lambda state: state.reset(selector), lambda oracle: oracle.reset(names))

    def drop(self, data: st.DataObject) -> None:
        selector, names = self.draw_names(data)
        if selector == "**":
            names = [name for name in names if self.world.oracle[name].frozen]
        self.change(lambda state: state.drop(selector), lambda oracle: oracle.drop(names))

    def untie(self, data: st.DataObject) -> None:
        world = self.world
        aliases = [keys for keys, place in world.places.items() if keys != world.canonical[place.name]]
        if not aliases:
            return
        keys = data.draw(st.sampled_from(aliases))
        name, look, owners = world.places[keys]
        path = draw_form(data.draw, keys)
        self.untied += 1
        alone = f"untied{self.untied}"

        def new(state: op.State) -> op.State:
            return state.untie(path)

        def same(oracle: Oracle) -> None:
            if oracle[name].frozen_rows.any() and self.refused_for_rows(new, name, look):
                raise RefusedError("its frozen rows are no rows there")
            oracle.parameters[alone] = oracle[name].looked_at(look.see)

        if self.change(new, same):
            world.places[keys] = Place(alone, Look(), owners)
            world.canonical[alone], world.dtypes[alone] = keys, world.dtypes[name]
            world.detached.add(keys)
            if data.draw(st.booleans()):
                world.fill({keys: np.array(at(world.model, keys))})

    def tie(self, data: st.DataObject) -> None:
        world = self.world
        options = list(self.possible_ties())
        if not options:
            return
        loser, winner, view, look = data.draw(st.sampled_from(options))
        alias, path = draw_form(data.draw, world.canonical[loser]), draw_form(data.draw, world.canonical[winner])

        def new(state: op.State) -> op.State:
            return state.tie(alias, path, view=view)

        def same(oracle: Oracle) -> None:
            one, other = oracle[loser], oracle[winner]
            if one.frozen != other.frozen:
                raise RefusedError("one is frozen, the other is not")
            alike = np.array_equal(one.frozen_rows, other.frozen_rows)
            if one.frozen_rows.any() and (not alike or self.refused_for_rows(new, winner, look)):
                raise RefusedError("its frozen rows are not those of the other")
            oracle.without([loser])

        if not self.change(new, same):
            return
        for keys in world.of(loser):
            own = world.places[keys]
            world.places[keys] = Place(winner, look.then(own.look), own.owners)
        del world.canonical[loser], world.dtypes[loser]
        copied = data.draw(st.booleans())
        seen = {keys: world.places[keys].look.see(world.array(winner)) for keys in world.of(winner)}
        del seen[world.canonical[winner]]
        world.fill({keys: np.array(array) if copied else array for keys, array in seen.items()})

    def possible_ties(self) -> Iterator[tuple[str, str, str | None, Look]]:
        world = self.world
        for loser, one in world.oracle.parameters.items():
            for winner, other in world.oracle.parameters.items():
                if loser == winner or world.dtypes[loser] != world.dtypes[winner]:
                    continue
                shape, wanted = other.value.shape, one.value.shape
                if shape == wanted:
                    yield loser, winner, None, Look()
                if len(world.of(loser)) > 1:
                    continue
                if shape[::-1] == wanted:
                    yield loser, winner, "transpose", transposed(shape, range(len(shape))[::-1])
                if math.prod(shape) == math.prod(wanted):
                    yield loser, winner, "reshape", reshaped(shape, wanted)

    # The rest ---------------------------------------------------------------------------------------------------------

    def copy_or_pickle(self, data: st.DataObject) -> None:
        world = self.world
        copied: Callable[[Any], Any] = data.draw(st.sampled_from([copy.deepcopy, pickled]))
        if data.draw(st.booleans()):
            world.model, old = copied(world.model), world.model
            assert bits(world.model) == bits(old)
        if data.draw(st.booleans()):
            world.state, before = copied(world.state), world.state
            assert facts(world.state) == facts(before)
            if all(np.isfinite(slot).all() for leaf in before.leaves() for slot in leaf.slots.values()):
                assert world.state == before
        assert str(world.state)
        assert op.summary(world.state)

    def move_away_and_back(self, data: st.DataObject) -> None:
        """Through a file, under another name, into a larger model, or simply anew: nothing is lost."""
        world, state = self.world, self.world.state
        if state.detached:
            return  # the model still has one array at both places
        deep, up = op.Path(("m", 0)), {"m": [world.model]}
        how = data.draw(st.sampled_from(["file", "state alone", "adapt", "rename", "compose"]))
        if how in ("file", "state alone"):
            with tempfile.TemporaryDirectory() as folder:
                op.save(f"{folder}/run", state, world.model if how == "file" else None)
                rule = lambda record: state.rules[state.parameters[state.layout.index[record.path]].group]  # noqa: E731
                new, model, report, _ = op.load(f"{folder}/run", world.model, rule=rule)
            assert bits(model) == bits(world.model)
            world.model = model
        elif how == "adapt":
            new, report = op.adapt(state, world.model)
        elif how == "rename":
            there, _ = op.adapt(state, up, rename={"": deep})
            new, report = op.adapt(there, world.model, rename={deep: ""})
        else:
            there, report = op.adapt(op.compose({deep: state}), up)
            assert not report.fresh
            branch = there[deep]
            alone = isinstance(branch, op.State)  # where the model is one array, it is a leaf
            new, report = op.adapt(branch, world.model) if alone else op.adapt(there, world.model, rename={deep: ""})
        assert (len(report.kept), report.fresh, report.dropped, report.tied, report.untied) == (len(state), {}, (), {}, {})
        assert facts(new) == facts(state)
        world.state = new

    def look_at_a_branch(self, data: st.DataObject) -> None:
        world = self.world
        keys = data.draw(st.sampled_from(list(world.places)))
        if not keys:
            return
        branch = keys[: data.draw(st.integers(0, len(keys) - 1))]
        inside = below(world.places, branch)
        try:
            state = world.state[op.Path(branch)]
        except StateError:
            named = [world.places[keys] for keys in inside]
            assert any(look.steps and world.oracle[name].frozen_rows.any() for name, look, _ in named)
            return
        assert isinstance(state, op.State)
        assert not any(
            inside.issuperset(own) and all(moves_rows(world, keys) for keys in own) for own in map(world.of, world.dtypes)
        )
        part = branch_of(world, branch, inside, state)
        part.check()
        given = draw_gradients(data.draw, part)
        grads = {op.Path(keys): grad for keys, grad in given.items()}
        part.step(grads, given, reference=self.order is not None, in_place=False)
        world.check()
        with pytest.raises(PathError):
            world.state[op.Path((*keys, "further"))]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def moves_rows(world: World, keys: Keys) -> bool:
    """Whether frozen rows are no rows at one place of a parameter."""
    name, look, _ = world.places[keys]
    each = world.oracle[name]
    return bool(each.frozen_rows.any()) and not look.keeps_rows(each.value.shape)


def branch_of(world: World, branch: Keys, inside: set[Keys], state: op.State) -> World:
    """The world of a branch, whose parameters are seen from their first place in it."""
    oracle = copy.deepcopy(world.oracle)
    names = {world.places[keys].name for keys in inside}
    oracle.without([name for name in oracle.parameters if name not in names])
    depth = len(branch)
    places, canonical = {}, {}
    for path in state:
        keys = (*branch, *path)
        name, look, _ = world.places[keys]
        canonical[name] = tuple(path)
        oracle.parameters[name] = oracle[name].looked_at(look.see)
        for each in world.of(name):
            if each in inside:
                other = world.places[each]
                places[each[depth:]] = Place(name, look.inverse.then(other.look), other.owners[depth:])
    places = {keys[depth:]: places[keys[depth:]] for keys in world.places if keys in inside}
    masked = {keys[depth:] for keys in world.masked & inside}
    dtypes = {name: world.dtypes[name] for name in names}
    detached = {keys[depth:] for keys in world.detached & inside}
    return World(at(world.model, branch), state, oracle, places, canonical, dtypes, masked, detached, world.mixed)


class AnyChain(Training):
    """Chains of any members, which only the reference can run at once."""

    @initialize(seed=st.integers(0, 2**32), leaves=st.integers(1, 12), rules=st.integers(1, 3), order=st.permutations(TREE_WIDE))
    def start(self, seed: int, leaves: int, rules: int, order: list[str]) -> None:
        self.order = tuple(order)
        super().start(seed, leaves, rules)


FUZZ = int(os.environ.get("OPTIMISERS_FUZZ", "0"))
SETTINGS = settings(
    max_examples=FUZZ or 150,
    derandomize=not FUZZ,
    report_multiple_bugs=False,
    deadline=None,
    stateful_step_count=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

TestPrograms = Training.TestCase
TestPrograms.settings = SETTINGS
TestAnyChain = AnyChain.TestCase
TestAnyChain.settings = settings(SETTINGS, max_examples=FUZZ or 75)
