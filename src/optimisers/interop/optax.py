"""Optax: its gradient transformations as rules, and rules as gradient transformations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optimisers.assignment import check_kind
from optimisers.backends.arrays import compute_dtype, library_of
from optimisers.errors import HyperparameterError, ModelError, StateError
from optimisers.rules.base import Rule, Slot
from optimisers.rules.decorator import rule
from optimisers.rules.values import is_of_optax
from optimisers.setup import setup
from optimisers.update import update

__all__ = ["FromOptax", "as_optax", "from_optax"]


class _Name(str):
    """A key of the flat tree that a transformation sees, so that no key of its own can be taken for one."""

    __slots__ = ()


_ALONE = "parameter"


class _Leaf(NamedTuple):
    """One array in the state of a transformation: the parameter that it belongs to, if any; its name, dtype and shape."""

    owner: str | None
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Transformation:
    """A gradient transformation on flat trees."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]

    def start(self, params: Mapping[str, Any]) -> list[Any]:
        """The leaves of the state for such parameters."""
        return jax.tree.leaves(self.init(_named(params)))

    def form(self, params: Mapping[str, Any]) -> "tuple[tuple[_Leaf, ...], Any]":
        """What the leaves of the state for such parameters are, and how they are put together."""
        return _form(self, tuple((name, tuple(array.shape), str(array.dtype)) for name, array in params.items()))

    def step(
        self, grads: Mapping[str, Any], params: Mapping[str, Any], leaves: Sequence[Any], structure: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        """What is to be subtracted from each parameter, and the new leaves of the state."""
        steps, new = _step(self, structure, _named(grads), _named(params), list(leaves))
        return {str(name): step for name, step in steps.items()}, new


def _named(arrays: Mapping[str, Any]) -> dict[_Name, Any]:
    return {_Name(name): jnp.asarray(array) for name, array in arrays.items()}


@lru_cache(maxsize=1024)
def _form(transformation: _Transformation, params: tuple[tuple[str, tuple[int, ...], str], ...]) -> tuple[tuple[_Leaf, ...], Any]:
    model = {_Name(name): jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in params}
    found, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(transformation.init, model))
    leaves = []
    for path, leaf in found:
        owners = [str(key.key) for key in path if isinstance(getattr(key, "key", None), _Name)]
        rest = tuple(key for key in path if not isinstance(getattr(key, "key", None), _Name))
        name = jax.tree_util.keystr(rest, simple=True, separator=".")
        leaves.append(_Leaf(owners[0] if owners else None, name, str(leaf.dtype), tuple(leaf.shape)))
    return tuple(leaves), structure


@partial(jax.jit, static_argnums=(0, 1))
def _step(transformation: _Transformation, structure: Any, grads: Any, params: Any, leaves: list[Any]) -> tuple[Any, list[Any]]:
    updates, state = transformation.update(grads, jax.tree.unflatten(structure, leaves), params)
    new, after = jax.tree.flatten(state)
    if after != structure:
        raise StateError("the transformation changes the structure of its state from step to step, which a rule cannot")
    return jax.tree.map(jnp.negative, updates), new


@dataclass(frozen=True)
class _Start:
    """What one leaf of the state starts as, for one parameter."""

    transformation: _Transformation
    number: int

    def __call__(self, parameter: Any) -> Any:
        if library_of(parameter) not in ("jax", "numpy"):
            raise StateError(f"a transformation of Optax trains arrays of JAX and NumPy, not of {library_of(parameter)}")
        array = jnp.asarray(parameter)
        return self.transformation.start({_ALONE: array.astype(compute_dtype(str(array.dtype)))})[self.number]


@dataclass(frozen=True)
class _Apply:
    """`apply` of a transformation that speaks of one parameter."""

    transformation: _Transformation

    def __call__(self, xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
        _, structure = self.transformation.form({_ALONE: p})
        steps, new = self.transformation.step({_ALONE: g}, {_ALONE: p}, slots, structure)
        return steps[_ALONE], tuple(new)


@dataclass(frozen=True)
class _ApplyTree:
    """`apply_tree` of a transformation that speaks of all parameters together: what belongs to none of them is its memory."""

    transformation: _Transformation

    def __call__(self, h: Any, grads: Any, params: Any, slots: Any, state: Any) -> Any:
        form, structure = self.transformation.form(params)
        for name, own in slots.items():
            if sum(leaf.owner == name for leaf in form) != len(own):
                raise StateError(
                    f"{name}: the transformation treats parameters by their names or sees them as one vector; give setup a mapping "
                    "from selectors to rules instead"
                )
        if state is None:
            state = tuple(leaf for leaf, (owner, *_) in zip(self.transformation.start(params), form, strict=True) if owner is None)
        own, shared = {name: iter(leaves) for name, leaves in slots.items()}, iter(state)
        leaves = [next(shared if owner is None else own[owner]) for owner, *_ in form]
        steps, new = self.transformation.step(grads, params, leaves, structure)
        kept: dict[str | None, list[Any]] = {name: [] for name in (*params, None)}
        for (owner, *_), leaf in zip(form, new, strict=True):
            kept[owner].append(leaf)
        rest = tuple(kept.pop(None))
        return steps, {name: tuple(leaves) for name, leaves in kept.items()}, {"state": rest}


@rule
class FromOptax(Rule):
    """A gradient transformation of Optax as a rule. `from_optax` makes it.

    Slots: the arrays in the state of the transformation that belong to a parameter, under their names there; for one that acts on
    each parameter alone, its counts as well. Memory: `state`, the other arrays of one that acts on the whole tree.
    """

    transformation: Any
    over_tree: bool
    leaves: Any = None

    options = ("transformation", "leaves")
    individual = ("leaves",)
    unsaved = "keeps a state of Optax, which a file of this library cannot hold; save the state as a pytree of JAX, with Orbax"

    @property
    def slots(self) -> Mapping[str, Slot]:
        return dict(self._slots()) if self.leaves else {}

    def _slots(self) -> Iterator[tuple[str, Slot]]:
        last = [leaf.name.rpartition(".")[2] for leaf in self.leaves]
        for number, (leaf, name) in enumerate(zip(self.leaves, last, strict=True)):
            if leaf.owner is not None or not self.over_tree:
                yield (
                    name if last.count(name) == 1 and not name.isdigit() else leaf.name,
                    Slot(dtype=leaf.dtype, start=_Start(self.transformation, number)),
                )

    @property
    def scope(self) -> str | None:
        return "tree" if self.over_tree else None

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"state": None} if self.over_tree else {}

    @property
    def apply(self) -> Callable[..., Any] | None:
        return None if self.over_tree else _Apply(self.transformation)

    @property
    def apply_tree(self) -> Callable[..., Any] | None:
        return _ApplyTree(self.transformation) if self.over_tree else None

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> Rule:
        leaves, _ = self.transformation.form({_ALONE: jax.ShapeDtypeStruct(shape, jnp.dtype(compute_dtype(dtype)))})
        return self.with_values({**self.hyperparameters, "leaves": leaves})

    def __repr__(self) -> str:
        name = getattr(self.transformation.update, "__qualname__", "…").partition(".")[0]
        return f"from_optax({name})"


def from_optax(transformation: Any) -> FromOptax:
    """A gradient transformation of Optax as a rule, for JAX and NumPy models.

    One that acts on each parameter alone (`optax.adam`, `optax.lion`, …) keeps a state and a count for each, as all rules here do.
    One that does not (`optax.clip_by_global_norm`, `optax.MultiSteps`, …) acts on the live parameters together, which it sees
    as a flat dict from path to array. Which of the two it is, is found out by trying it on two small arrays.

    The rule is complete: it subtracts from the parameters what the transformation would have added. A part of a rule (`optax.clip`)
    does not scale by a negative learning rate, as a complete one does at its end; put it into an `optax.chain`. Masks and labels
    that go by path see that flat dict as well; give `setup` a mapping from selectors to rules instead. The functions of Optax
    cannot be pickled, nor can a state that holds them.

    **Arguments:**

    - `transformation`: an `optax.GradientTransformation`. It is called without extra arguments.

    **Raises** `HyperparameterError` for something else, or when it needs extra arguments.

    Example:
        >>> import jax.numpy as jnp, optax, optimisers as op
        >>> from optimisers.interop.optax import from_optax
        >>> model = {"w": jnp.ones(2), "v": jnp.ones(3)}
        >>> state = op.setup({"w": from_optax(optax.adam(0.1)), "v": op.Descent(0.1)}, model)
        >>> state, model = op.update(state, model, model)
        >>> sorted(state["w"].slots)
        ['count', 'mu', 'nu']
    """
    if not is_of_optax(transformation):
        raise HyperparameterError(f"from_optax takes an optax.GradientTransformation, not {type(transformation).__name__}")
    form = _Transformation(transformation.init, transformation.update)
    return FromOptax(form, over_tree=not _each_alone(form))


def _each_alone(transformation: _Transformation) -> bool:
    """Whether what comes out for one parameter is the same without a second one, and whatever stands in it, before or behind."""
    mine = jnp.linspace(-1.0, 2.0, 16, dtype=jnp.float32).reshape(4, 4)

    def outcome(**others: Any) -> list[Any]:
        params = {"m": mine} | {name: value + 1 for name, value in others.items()}
        grads = {"m": mine * 0.5} | others
        leaves, (form, structure) = transformation.start(params), transformation.form(params)
        found = []
        for _ in range(3):
            steps, leaves = transformation.step(grads, params, leaves, structure)
            found.append(steps["m"])
        return [*found, *(leaf for leaf, (owner, *_) in zip(leaves, form, strict=True) if owner in ("m", None))]

    others = [jnp.full((4, 4), value, jnp.float32) for value in (1e3, jnp.nan)]
    # Compilers round one program in one way and a larger one in another.
    with jax.disable_jit():
        try:
            alone = outcome()
        except (TypeError, ValueError) as error:
            raise HyperparameterError(
                "the transformation cannot be called with gradients, state and parameters alone, which it sees as a flat dict from "
                f"path to array: {error}"
            ) from error
        return all(_same(alone, outcome(**{name: other})) for name in ("a", "z") for other in others)


def _same(a: list[Any], b: list[Any]) -> bool:
    plain = [[jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in each] for each in (a, b)]
    return len(a) == len(b) and all(x.shape == y.shape and bool((x == y).all()) for x, y in zip(*plain, strict=True))


def as_optax(rule: Any) -> optax.GradientTransformation:
    """A rule, or whatever `setup` takes for one, as a gradient transformation of Optax.

    Its state is the `State` of the parameters. The updates that it returns are the differences between the new parameters and the
    old ones: `optax.apply_updates` gives the new ones within rounding.

    Example:
        >>> import jax.numpy as jnp, optax, optimisers as op
        >>> from optimisers.interop.optax import as_optax
        >>> tx = as_optax(op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-3)))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> state.step
        1
    """

    check_kind(rule, "as_optax")

    def init(params: Any) -> Any:
        return setup(rule, params)

    def step(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ModelError("the transformation needs the parameters: call tx.update(gradients, state, params)")
        state, new = update(state, params, updates)
        return jax.tree.map(jnp.subtract, new, params), state

    return optax.GradientTransformation(init, step)
