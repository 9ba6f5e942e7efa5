"""The state as a JAX pytree: slots, counts and numbers are its leaves, all else is static."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from optimisers.rules.base import Rule
from optimisers.rules.numbers import Foreign, SplitRules, join, split
from optimisers.rules.values import is_traced

__all__ = ["placed", "register"]


@cache
def register(cls: type) -> None:
    """Make states known to JAX. Their key paths read like those of the model: `.encoder.weight.mu`."""
    _jax().tree_util.register_pytree_with_keys(cls, _with_keys, lambda static, leaves: _unflatten(cls, static, leaves), _flatten)


def _flatten(state: Any) -> tuple[list[Any], Any]:
    parts = state.split_rules
    slots = [slot for own in state.slots for slot in own or ()]
    memory = [(name, key, value) for name, own in state.memory.items() for key, value in own.items()]
    static = (
        state.layout,
        parts.forms,
        parts.counts,
        tuple([None if own is None else len(own) for own in state.slots]),
        len(state.counters),
        state.detached,
        # What is true or false is static: it decides what may happen, and not how much.
        tuple([(name, key, value if isinstance(value, bool) else None) for name, key, value in memory]),
    )
    kept = [value.value if isinstance(value, Foreign) else value for *_, value in memory if not isinstance(value, bool)]
    # The type of a plain number is weak; what rules keep comes out of a step with a type of its own, and so has to go in.
    plain = [*state.counters, state.step, *parts.numbers]
    if not state.from_leaves:
        plain, kept = [_array(value, state) for value in plain], [_array(value, state, dtype=type(value)) for value in kept]
    return [*slots, *plain, *kept], static


def _array(value: Any, state: Any, **options: Any) -> Any:
    """A plain number as an array, as it comes out of a step: there are those who take plain numbers for static."""
    if type(value) not in (int, float):
        return value
    array, sharding = _jax().numpy.asarray(value, **options), _jax().sharding
    mesh = _mesh(state)
    return array if mesh is None else _jax().device_put(array, sharding.NamedSharding(mesh, sharding.PartitionSpec()))


def _mesh(state: Any) -> Any:
    """The mesh that the arrays of a state are spread over, or at `setup` its parameters; `None` for one device."""
    sharding, slots = _jax().sharding, (slot for own in state.slots for slot in own or ())
    arrays = [each for each in (state.step, next(slots, None)) if hasattr(each, "dtype") and not is_traced(each)]
    found: list[Any] = [getattr(each, "sharding", None) for each in arrays] or [record.device for record in state.layout.parameters]
    meshes = [each.mesh for each in found if isinstance(each, sharding.NamedSharding)]
    # The mesh of a trace has no devices.
    return meshes[0] if meshes and isinstance(meshes[0], sharding.Mesh) else None


def placed(state: Any, device: Any) -> Any:
    """Where fresh slots go for a parameter that lay there at `setup`, now that the state may have moved to another mesh."""
    sharding = _jax().sharding
    mesh = _mesh(state) if isinstance(device, sharding.NamedSharding) else None
    return device if mesh is None else sharding.NamedSharding(mesh, device.spec)


def _unflatten(cls: type, static: Any, leaves: Iterable[Any]) -> Any:
    layout, forms, numbers, presence, counters, detached, memory = static
    left = iter(leaves)

    def take(count: int) -> tuple[Any, ...]:
        return tuple([next(left) for _ in range(count)])

    slots = tuple([None if count is None else take(count) for count in presence])
    counts, step = take(counters), next(left)
    rules = SplitRules(forms, numbers, take(sum(numbers)))
    kept: dict[str, dict[str, Any]] = {}
    for name, key, value in memory:
        new = next(left) if value is None else value
        kept.setdefault(name, {})[key] = Foreign(new) if value is None and isinstance(new, bool) else new
    state = cls(layout, rules, counts, step, slots, kept, detached)
    state.from_leaves = True
    return state


def _jax() -> Any:
    import jax

    return jax


def _with_keys(state: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, static = _flatten(state)
    return [(_jax().tree_util.GetAttrKey(name), leaf) for name, leaf in zip(_names(state), leaves, strict=True)], static


def _names(state: Any) -> Iterator[str]:
    for record, own in zip(state.layout.parameters, state.slots, strict=True):
        names = state.layout.programs[record.group].slots
        yield from (f"{record.path}.{name}" if record.path else name for name, _ in names[: len(own or ())])
    yield from (f"counters[{at}]" for at in range(len(state.counters)))
    yield "step"
    for at, rule in enumerate(state.rules):
        yield from (f"rules[{at}].{name}" for name in _numbers(rule))
    for name, own in state.memory.items():
        yield from (f"memory.{name}.{key}" for key, value in own.items() if not isinstance(value, bool))


def _numbers(rule: Rule) -> Iterator[str]:
    """The names of a rule's numbers, in the order of `split`."""
    many = len(rule.members) > 1
    for at, member in enumerate(rule.members):
        form, numbers = split(member)
        named = join(form, [str(at) for at in range(len(numbers))])
        for name, value in named.hyperparameters.items():
            before = f"members[{at}].{name}" if many else name
            was = form.hyperparameters[name]
            if isinstance(value, tuple) and isinstance(was, tuple):
                yield from (f"{before}[{k}]" for k, (new, old) in enumerate(zip(value, was, strict=True)) if new is not old)
            elif value is not was:
                yield before
