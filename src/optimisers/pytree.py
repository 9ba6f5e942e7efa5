"""The state as a JAX pytree: slots, counts and numbers are its leaves, all else is static."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from optimisers.rules.base import Rule
from optimisers.rules.numbers import join, split

__all__ = ["as_arrays", "register"]


@cache
def register(cls: type) -> None:
    """Make states known to JAX. Their key paths read like those of the model: `.encoder.weight.mu`."""
    import jax

    jax.tree_util.register_pytree_with_keys(cls, _with_keys, lambda static, leaves: _unflatten(cls, static, leaves), _flatten)


def as_arrays(memory: dict[str, Any]) -> dict[str, Any]:
    """Numbers as arrays: what goes into a traced step has to have the very types of what comes out."""
    import jax.numpy as jnp

    return {name: jnp.asarray(value, dtype=type(value)) if type(value) in (int, float) else value for name, value in memory.items()}


def _flatten(state: Any) -> tuple[list[Any], Any]:
    parts = [split(rule) for rule in state.rules]
    numbers = [number for _, own in parts for number in own]
    slots = [slot for own in state.slots for slot in own or ()]
    static = (
        state.layout,
        tuple([form for form, _ in parts]),
        tuple([len(own) for _, own in parts]),
        tuple([None if own is None else len(own) for own in state.slots]),
        len(state.counters),
        state.detached,
        # What is true or false is static: it decides what may happen, and not how much.
        tuple(
            [
                (name, tuple([(key, value if isinstance(value, bool) else None) for key, value in own.items()]))
                for name, own in state.memory.items()
            ]
        ),
    )
    memory = [value for own in state.memory.values() for value in own.values() if not isinstance(value, bool)]
    return [*slots, *state.counters, state.step, *numbers, *memory], static


def _unflatten(cls: type, static: Any, leaves: Iterable[Any]) -> Any:
    layout, forms, numbers, presence, counters, detached, memory = static
    left = iter(leaves)

    def take(count: int) -> tuple[Any, ...]:
        return tuple([next(left) for _ in range(count)])

    slots = tuple([None if count is None else take(count) for count in presence])
    counts, step = take(counters), next(left)
    rules = tuple([join(form, take(count)) for form, count in zip(forms, numbers, strict=True)])
    kept = {name: {key: next(left) if value is None else value for key, value in own} for name, own in memory}
    return cls(layout, rules, counts, step, slots, kept, detached)


def _with_keys(state: Any) -> tuple[list[tuple[Any, Any]], Any]:
    import jax

    leaves, static = _flatten(state)
    return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(_names(state), leaves, strict=True)], static


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
