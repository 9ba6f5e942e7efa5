"""States of Optax taken over in mid-training, with their moments and counts, and states given back to Optax."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optimisers.assignment import RuleFor
from optimisers.backends.conversion import converted
from optimisers.errors import ShapeError, StateError
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.trees import opened
from optimisers.rules.adam import Adam, AdamW
from optimisers.rules.base import Rule
from optimisers.rules.descent import SGD, Momentum, Nesterov
from optimisers.rules.lion import Lion
from optimisers.rules.program import Program
from optimisers.setup import setup
from optimisers.slots import slot_dtypes
from optimisers.state import State, check_state, check_step, check_unspent

__all__ = ["state_from_optax", "state_to_optax"]

_MOMENTS: Mapping[str, tuple[str, ...]] = {
    "ScaleByAdamState": ("mu", "nu"),
    "ScaleByLionState": ("mu",),
    "TraceState": ("trace",),
}
"""The classes of Optax that keep moments, and what they call them."""

# The rules whose slots are those of Optax: the class that keeps them, and its names for them.
_TRACE = "TraceState", {"velocity": "trace"}
_ADAM = "ScaleByAdamState", {"mu": "mu", "nu": "nu"}
_KNOWN: Mapping[type[Rule], tuple[str, Mapping[str, str]]] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    Lion: ("ScaleByLionState", {"mu": "mu"}),
    SGD: _TRACE,
    Momentum: _TRACE,
    Nesterov: _TRACE,
}

_Field = tuple[str, str]
"""The class that keeps some moments, and its name for them."""


# From Optax -----------------------------------------------------------------------------------------------------------


class _Tree(NamedTuple):
    """A tree of moments in a state of Optax: its field, its arrays by path, the count beside it."""

    field: _Field
    arrays: Mapping[Path, Any]
    count: int | None


def state_from_optax(opt_state: Any, model: Any, rule: RuleFor, *, step: int | None = None) -> State:
    """Take over a state of Optax: that of Adam, AdamW, SGD with momentum or Lion, in chains, masked or partitioned.

    Moments are copied, and turned into the array library of the model. Parameters without moments, since they were masked,
    start afresh. Of places that are tied the first one's moments count, since Optax kept some for each.

    **Arguments:**

    - `opt_state`: from `optimizer.init` or `optimizer.update`.
    - `model`: the parameters that it was made for, or a model that holds them at the same places.
    - `rule`: the rule that goes on, with the hyperparameters that the optimizer had; Optax's state holds neither them nor, among
      optimizers whose moments look alike (Adam, Adamax, RAdam, NAdam, LAMB, Yogi), which it was.
    - `step`: the count of the state, which schedules read, and of parameters of which Optax keeps none (momentum). By default the
      greatest count in the state.

    **Raises** `StateError` for a rule that has other slots than these optimizers, for moments that stand in the state twice, that
    no parameter takes, or that the rule does not keep; `ShapeError` for moments of another shape; and as `setup` does.

    Example:
        >>> import jax.numpy as jnp, optax, optimisers as op
        >>> from optimisers.interop.optax_states import state_from_optax
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer = optax.adamw(1e-3)
        >>> updates, opt_state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params), params)
        >>> state = state_from_optax(opt_state, params, op.AdamW(1e-3, weight_decay=1e-4))
        >>> state["w"].step, sorted(state["w"].slots)
        (1, ['mu', 'nu'])
    """
    check_step(step, "state_from_optax")
    state = setup(rule, model)
    trees = list(_trees(opt_state))
    latest = max(_counts(opt_state), default=0) if step is None else step
    taken: set[tuple[_Field, Path]] = set()
    parameters, slots, counts = [], [], []
    for record, fresh in zip(state.parameters, state.slots, strict=True):
        names = _names(state.rules[record.group], record.path)
        there = {name: tree for name, field in names.items() if (tree := _only(trees, field, record.path)) is not None}
        taken |= {(tree.field, path) for tree in there.values() for path in record.paths}
        if names and not there:
            count, own = 0, fresh
        else:
            own = _slots(record, state.layout.programs[record.group], names, there)
            known = [tree.count for tree in there.values() if tree.count is not None]
            count = known[0] if known else latest
        parameters.append(record._replace(counter=len(counts)))
        slots.append(own)
        counts.append(count)
    for tree in trees:
        for path in tree.arrays:
            if (tree.field, path) not in taken:
                raise StateError(
                    f"{path}: the state of Optax has {tree.field[1]} for it ({tree.field[0]}), which no parameter takes; the model "
                    "or the rule is another one"
                )
    if not trees and any(_names(rule, record.path) for record, rule in _with_rules(state)):
        raise StateError(f"no moments were found in what is to be a state of Optax, a {type(opt_state).__name__}")
    return state.arranged(parameters, slots, counters=counts or (0,), step=latest)


def _with_rules(state: State) -> Iterator[tuple[Parameter, Rule]]:
    return ((record, state.rules[record.group]) for record in state.parameters)


def _slots(record: Parameter, program: Program, names: Mapping[str, _Field], there: Mapping[str, _Tree]) -> tuple[Any, ...]:
    """Copies of the moments of a parameter, in the order of its slots."""
    if len(there) < len(names):
        found, wanted = ", ".join(there), ", ".join(names)
        raise StateError(f"{record.path}: the state of Optax has {found} for it, and {wanted} are needed")
    own = []
    for (name, _), dtype in zip(program.slots, slot_dtypes(record, program), strict=True):
        array = there[name.rpartition(".")[2]].arrays[record.path]
        if tuple(array.shape) != record.shape:
            raise ShapeError(f"{record.path}: {name} has shape {tuple(array.shape)} in the state, the parameter {record.shape}")
        own.append(converted(array, dtype, record.library, record.device))
    return tuple(own)


def _names(rule: Rule, path: Path) -> dict[str, _Field]:
    """The slots of a rule, by their plain names, and what Optax calls them."""
    found: dict[str, _Field] = {}
    for member in rule.members:
        kind, fields = _KNOWN.get(type(member), ("", {}))
        for slot in member.slots:
            field = fields.get(slot)
            if field is None or slot in found:
                raise StateError(
                    f"{path}: {type(member).__name__} keeps {slot}, which no state of Optax has that can be taken over; "
                    f"there are {', '.join(kind.__name__ for kind in _KNOWN)}"
                )
            found[slot] = kind, field
    return found


def _only(trees: list[_Tree], field: _Field, path: Path) -> _Tree | None:
    found = [tree for tree in trees if tree.field == field and path in tree.arrays]
    if len(found) > 1:
        raise StateError(f"{path}: the state of Optax has {field[1]} for it {len(found)} times; take over one part of it at a time")
    return found[0] if found else None


def _trees(node: Any) -> Iterator[_Tree]:
    """The trees of moments in a state of Optax."""
    if isinstance(node, Mapping):
        for child in node.values():
            yield from _trees(child)
        return
    if not isinstance(node, (tuple, list)):
        return
    fields = getattr(node, "_fields", None)
    if fields is None:
        for child in node:
            yield from _trees(child)
        return
    kind, count = type(node).__name__, _count(node, "count")
    for name in fields:
        value = getattr(node, name)
        if name in _MOMENTS.get(kind, ()):
            yield _Tree((kind, name), _arrays(value), count)
        elif _further(name):
            yield from _trees(value)
        else:
            _check_scalar(kind, name, value)


def _further(name: str) -> bool:
    """Whether a field holds a further state of Optax."""
    return name.startswith("inner") or name == "hyperparams_states"


def _arrays(tree: Any) -> dict[Path, Any]:
    leaves, structure = opened(tree)
    return {path: leaf for path, leaf in zip(structure.paths, leaves, strict=True) if hasattr(leaf, "dtype")}


def _check_scalar(kind: str, name: str, value: Any) -> None:
    """Check that a field of a state of Optax keeps nothing that would get lost: counts and flags, and what is zero.

    **Raises** `StateError`.
    """
    if (
        isinstance(value, (tuple, list, Mapping))
        and name != "hyperparams"
        and any(np.any(each) for each in _arrays(value).values())
    ):
        raise StateError(
            f"the state of Optax keeps {name} ({kind}), which no rule here does; Adam, AdamW, SGD with momentum and Lion are "
            "taken over"
        )


def _counts(node: Any) -> Iterator[int]:
    """All counts of steps in a state of Optax."""
    if isinstance(node, Mapping):
        for child in node.values():
            yield from _counts(child)
    elif isinstance(node, (tuple, list)):
        own = _count(node, "count")
        if own is not None:
            yield own
        for child in node:
            yield from _counts(child)


def _count(node: Any, name: str) -> int | None:
    """A count in a state of Optax, which Flax may have wrapped; `None` where it has none."""
    import jax

    # Every tuple has a method of that name.
    leaves = jax.tree.leaves(getattr(node, name)) if name in getattr(node, "_fields", ()) else []
    return int(np.asarray(leaves[0])) if len(leaves) == 1 and getattr(leaves[0], "shape", None) == () else None


# To Optax -------------------------------------------------------------------------------------------------------------


def state_to_optax(state: State, opt_state: Any) -> Any:
    """Give a state back to Optax: its own fresh state, with the moments (copied) and counts of this one.

    Of places that are tied Optax keeps moments for each, and gets the same for each.

    **Arguments:**

    - `state`: of rules whose slots are those of Adam, AdamW, SGD with momentum or Lion.
    - `opt_state`: `optimizer.init(params)` of the optimizer that goes on, chained, masked or partitioned as it may be. It does not
      change.

    **Returns** a state of the structure of `opt_state`.

    **Raises** `StateError` for moments that one of the two has alone, and for parameters with different counts where Optax keeps
    one for all; `ShapeError` for moments of another shape. Each names the path.

    Example:
        >>> import jax.numpy as jnp, optax, optimisers as op
        >>> from optimisers.interop.optax_states import state_to_optax
        >>> params = {"w": jnp.ones(2)}
        >>> state, params = op.update(op.setup(op.Adam(1e-3), params), params, {"w": jnp.ones(2)})
        >>> adam, _ = state_to_optax(state, optax.adam(1e-3).init(params))
        >>> int(adam.count), [round(float(each), 4) for each in adam.mu["w"]]
        (1, [0.1, 0.1])
    """
    check_state(state, "state_to_optax")
    check_unspent(state)
    if getattr(state.step, "shape", ()) != ():
        raise StateError("the state of an ensemble has several steps, and that of Optax one; give its members one by one")
    moments: _Moments = {}
    for record, leaf in zip(state.parameters, state.leaves(), strict=True):
        names = _names(leaf.rule, record.path)
        for name, slot in leaf.slots.items():
            field = names[name.rpartition(".")[2]]
            moments[field, record.path] = slot, int(leaf.step)
            for alias in record.aliases:
                moments[field, alias.path] = alias.view.apply(slot), int(leaf.step)
    used: set[tuple[_Field, Path]] = set()
    filled = _filled(opt_state, state, moments, used)
    first = {record.path for record in state.parameters if not record.frozen}
    for field, path in moments:
        if path in first and (field, path) not in used:
            raise StateError(
                f"{path}: the state has {field[1]} for it, and that of Optax does not; take the same rule and parameters"
            )
    return filled


_Moments = dict[tuple[_Field, Path], tuple[Any, int]]
"""The moments of a state by what Optax calls them, each with its count."""


def _filled(node: Any, state: State, moments: _Moments, used: set[tuple[_Field, Path]]) -> Any:
    """A state of Optax with other moments and counts."""
    import jax

    def inside(child: Any) -> Any:
        return _filled(child, state, moments, used)

    if isinstance(node, Mapping):
        again: Any = type(node)
        return again((key, inside(child)) for key, child in node.items())
    if not isinstance(node, (tuple, list)):
        return node
    fields = getattr(node, "_fields", None)
    if fields is None:
        return type(node)(map(inside, node))
    kind = type(node).__name__
    new: dict[str, Any] = {}
    counts: dict[int, Path] = {}
    for name in fields:
        value = getattr(node, name)
        if name in _MOMENTS.get(kind, ()):
            new[name] = _with_moments((kind, name), value, state, moments, counts)
            used |= {((kind, name), path) for path in _arrays(value)}
        elif _further(name):
            new[name] = inside(value)
        elif name not in ("hyperparams", *_COUNTS) and isinstance(value, (tuple, list, Mapping)) and _arrays(value):
            raise StateError(f"the state of Optax keeps {name} ({kind}), which no rule here does; initialise it without")
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise StateError(f"{first} is at step {one} and {second} at step {other}, and Optax keeps one count for both")
    # Without moments it is a schedule that counts.
    count = next(iter(counts), 0) if kind in _MOMENTS else int(state.step)
    for name in fields:
        if name in _COUNTS and _count(node, name) is not None:
            new[name] = jax.tree.map(lambda old: converted(np.asarray(count), str(old.dtype), "jax", None), getattr(node, name))
    named: Any = node
    return named._replace(**new)


_COUNTS = ("count", "step", "gradient_step")
"""What Optax calls its counts of steps."""


def _with_moments(field: _Field, tree: Any, state: State, moments: _Moments, counts: dict[int, Path]) -> Any:
    """A tree of moments with those of a state; as they are where a parameter has not trained."""
    leaves, structure = opened(tree)
    new = []
    for path, leaf in zip(structure.paths, leaves, strict=True):
        if not hasattr(leaf, "dtype"):
            new.append(leaf)
            continue
        at = state.layout.index.get(path)
        if at is None or ((field, path) not in moments and int(state.leaf(at).step)):
            raise StateError(f"{path}: the state of Optax keeps {field[1]} for it ({field[0]}), and the state here does not")
        slot, count = moments.get((field, path), (leaf, 0))
        if tuple(slot.shape) != tuple(leaf.shape):
            raise ShapeError(f"{path}: {field[1]} has shape {tuple(slot.shape)}, and in the state of Optax {tuple(leaf.shape)}")
        counts.setdefault(count, path)
        new.append(converted(slot, str(leaf.dtype), "jax", None))
    return structure.rebuild(tree, new)
