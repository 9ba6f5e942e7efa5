"""States of Optax taken over in mid-training, with their moments and counts, and states given back to Optax."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optimisers.assignment import RuleFor
from optimisers.errors import ShapeError, StateError
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.model.paths import Path
from optimisers.model.slots import converted
from optimisers.model.trees import opened
from optimisers.rules.adam import Adam, AdamW
from optimisers.rules.base import Rule
from optimisers.rules.descent import SGD, Momentum, Nesterov
from optimisers.rules.lion import Lion
from optimisers.rules.program import Program
from optimisers.setup import setup
from optimisers.state import State, check_state

__all__ = ["state_from_optax", "state_to_optax"]

_FIELDS = ("mu", "nu", "trace")
"""What Optax calls its moments."""

# The rules whose slots are those of Optax, and what Optax calls them.
_TRACE = {"velocity": "trace"}
_MOMENTS = {"mu": "mu", "nu": "nu"}
_KNOWN: Mapping[type[Rule], Mapping[str, str]] = {
    Adam: _MOMENTS,
    AdamW: _MOMENTS,
    Lion: {"mu": "mu"},
    SGD: _TRACE,
    Momentum: _TRACE,
    Nesterov: _TRACE,
}


# From Optax -----------------------------------------------------------------------------------------------------------


class _Tree(NamedTuple):
    """A tree of moments in a state of Optax: its field, its arrays by path, the count beside it."""

    field: str
    arrays: Mapping[Path, Any]
    count: int | None


def state_from_optax(opt_state: Any, model: Any, rule: RuleFor, *, step: int | None = None) -> State:
    """Take over a state of Optax: that of Adam, AdamW, SGD with momentum or Lion, in chains, masked or partitioned.

    Moments are copied, and turned into the array library of the model. Parameters without moments, since they were masked,
    start afresh. Of places that are tied the first one's moments count, since Optax kept some for each.

    **Arguments:**

    - `opt_state`: from `optimizer.init` or `optimizer.update`.
    - `model`: the parameters that it was made for, or a model that holds them at the same places.
    - `rule`: the rule that goes on, with the hyperparameters that the optimizer had; Optax's state does not hold them.
    - `step`: the count of the state, which schedules read, and of parameters of which Optax keeps none (momentum). By default the
      greatest count in the state.

    **Raises** `StateError` for a rule that has other slots than these optimizers, or for moments that stand in the state twice;
    `ShapeError` for moments of another shape; and as `setup` does.

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
    state = setup(rule, model)
    trees = list(_trees(opt_state))
    latest = max(_counts(opt_state), default=0) if step is None else step
    parameters, slots, counts = [], [], []
    for record, fresh in zip(state.parameters, state.slots, strict=True):
        names = _names(state.rules[record.group], record.path)
        there = {name: tree for name, field in names.items() if (tree := _only(trees, field, record.path)) is not None}
        if names and not there:
            count, own = 0, fresh
        else:
            own = _slots(record, state.layout.programs[record.group], names, there)
            known = [tree.count for tree in there.values() if tree.count is not None]
            count = known[0] if known else latest
        parameters.append(record._replace(counter=len(counts)))
        slots.append(own)
        counts.append(count)
    return state._next(parameters, slots, counters=counts or (0,)).evolved(step=latest)


def _slots(record: Parameter, program: Program, names: Mapping[str, str], there: Mapping[str, _Tree]) -> tuple[Any, ...]:
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


def _names(rule: Rule, path: Path) -> dict[str, str]:
    """The slots of a rule, by their plain names, and what Optax calls them."""
    found: dict[str, str] = {}
    for member in rule.members:
        for slot in member.slots:
            field = _KNOWN.get(type(member), {}).get(slot)
            if field is None or slot in found:
                raise StateError(
                    f"{path}: {type(member).__name__} keeps {slot}, which no state of Optax has that can be taken over; "
                    f"there are {', '.join(kind.__name__ for kind in _KNOWN)}"
                )
            found[slot] = field
    return found


def _only(trees: list[_Tree], field: str, path: Path) -> _Tree | None:
    found = [tree for tree in trees if tree.field == field and path in tree.arrays]
    if len(found) > 1:
        raise StateError(f"{path}: the state of Optax has {field} for it {len(found)} times; take over one part of it at a time")
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
    count = _count(getattr(node, "count", None))
    for name in fields:
        value = getattr(node, name)
        if name in _FIELDS:
            leaves, structure = opened(value)
            arrays = {path: leaf for path, leaf in zip(structure.paths, leaves, strict=True) if hasattr(leaf, "dtype")}
            yield _Tree(name, arrays, count)
        elif name.startswith("inner"):
            yield from _trees(value)


def _counts(node: Any) -> Iterator[int]:
    """All counts of steps in a state of Optax."""
    if isinstance(node, Mapping):
        for child in node.values():
            yield from _counts(child)
    elif isinstance(node, (tuple, list)):
        own = _count(getattr(node, "count", None))
        if own is not None:
            yield own
        for child in node:
            yield from _counts(child)


def _count(value: Any) -> int | None:
    if callable(value) or value is None or getattr(value, "shape", ()) != ():
        return None
    return int(np.asarray(value))


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
    moments: dict[tuple[str, Path], tuple[Any, int]] = {}
    for record, leaf in zip(state.parameters, state.leaves(), strict=True):
        names = _names(leaf.rule, record.path)
        for name, slot in leaf.slots.items():
            field = names[name.rpartition(".")[2]]
            moments[field, record.path] = slot, int(leaf.step)
            for alias in record.aliases:
                moments[field, alias.path] = alias.view.apply(slot), int(leaf.step)
    used: set[tuple[str, Path]] = set()
    filled = _filled(opt_state, state, moments, used)
    first = {record.path for record in state.parameters if not record.frozen}
    for field, path in moments:
        if path in first and (field, path) not in used:
            raise StateError(f"{path}: the state has {field} for it, and that of Optax does not; take the same rule and parameters")
    return filled


def _filled(node: Any, state: State, moments: Mapping[tuple[str, Path], tuple[Any, int]], used: set[tuple[str, Path]]) -> Any:
    """A state of Optax with other moments and counts."""

    def inside(child: Any) -> Any:
        return _filled(child, state, moments, used)

    if isinstance(node, Mapping):
        kind: Any = type(node)
        return kind((key, inside(child)) for key, child in node.items())
    if not isinstance(node, (tuple, list)):
        return node
    fields = getattr(node, "_fields", None)
    if fields is None:
        return type(node)(map(inside, node))
    new: dict[str, Any] = {name: inside(getattr(node, name)) for name in fields if name.startswith("inner")}
    counts: dict[int, Path] = {}
    for name in fields:
        if name in _FIELDS:
            new[name] = _with_moments(name, getattr(node, name), moments, counts)
            used |= {(name, path) for path in opened(new[name])[1].paths}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise StateError(f"{first} is at step {one} and {second} at step {other}, and Optax keeps one count for both")
    count: Any = getattr(node, "count", None)
    if _count(count) is not None:
        # Without moments it is a schedule that counts.
        moving = any(name in _FIELDS for name in fields)
        new["count"] = converted(np.asarray(next(iter(counts), 0) if moving else int(state.step)), str(count.dtype), "jax", None)
    named: Any = node
    return named._replace(**new)


def _with_moments(field: str, tree: Any, moments: Mapping[tuple[str, Path], tuple[Any, int]], counts: dict[int, Path]) -> Any:
    """A tree of moments with those of a state; zeros where a parameter has not trained."""
    leaves, structure = opened(tree)
    new = []
    for path, leaf in zip(structure.paths, leaves, strict=True):
        if not hasattr(leaf, "dtype") or (field, path) not in moments:
            new.append(leaf)
            continue
        slot, count = moments[field, path]
        if tuple(slot.shape) != tuple(leaf.shape):
            raise ShapeError(f"{path}: {field} has shape {tuple(slot.shape)}, and in the state of Optax {tuple(leaf.shape)}")
        counts.setdefault(count, path)
        new.append(converted(slot, str(leaf.dtype), "jax", None))
    return structure.rebuild(tree, new)
