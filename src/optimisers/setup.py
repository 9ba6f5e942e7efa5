"""Making a state: which parameters a model has, which rule each gets, which are frozen or tied."""

from collections.abc import Iterable, Sequence
from typing import Any
from warnings import warn

from optimisers.assignment import RuleFor, assign, check_kind
from optimisers.backends.arrays import itemsize_of, library_of, trainable_dtype
from optimisers.errors import DtypeError, OptimiserWarning, PathError
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import parameters_of, parted
from optimisers.model.select import Selectable, matching
from optimisers.model.torch_nodes import is_idle
from optimisers.model.trees import opened
from optimisers.state import State, new_state

__all__ = ["setup", "trainables"]


def setup(
    rule: RuleFor,
    model: Any,
    *,
    trainable: "Selectable | None" = None,
    frozen: "Selectable | None" = None,
    ties: Iterable[tuple[Any, ...]] = (),
    state_dtype: Any = None,
) -> State:
    """Make the state of a model's training: finds its parameters and its ties, and gives each parameter a rule and slots.

    Parameters are the floating and complex arrays of the model. Several occurrences of one array, or of its transpose or
    reshape in the same memory, are one parameter. Everything else in the model (integers, Python's numbers, NumPy's
    scalars, functions, strings) passes through: a number that is to train is an array without dimensions, `np.asarray(1.0)`.

    **Arguments:**

    - `rule`: a rule; or a mapping selector -> rule, of which the first match wins; or a function from a `Parameter` to a rule.
    - `model`: any tree of arrays.
    - `trainable`: a selector; other arrays are no parameters at all.
    - `frozen`: a selector; these parameters start frozen, with all that is tied to them, and get no slots until they are thawed.
    - `ties`: further ties, which identity cannot show: (alias, path) or (alias, path, view), see `State.tie`.
    - `state_dtype`: the dtype of slots, in place of the parameter's (of float32, for half precision).

    **Returns** a `State`. Warns when the model has no trainable parameter.

    **Raises** `PathError` for a selector that matches nothing, `StateError` for a parameter that no selector matches, that two
    rules claim through two of its paths, or that its rule cannot train, `HyperparameterError` for what is no rule, `DtypeError` for
    a `state_dtype` that is none, `TieError` for arrays that overlap in part, `ModelError` for a model that refers to itself.

    Example:
        >>> import numpy as np, optimisers as op
        >>> table = np.ones((4, 3))
        >>> model = {"embed": table, "head": {"weight": table.T, "bias": np.zeros(4)}}
        >>> state = op.setup({"**.bias": op.Descent(0.1), "**": op.AdamW(1e-3)}, model)
        >>> [str(path) for path in state], dict(state["embed"].ties)
        (['embed', 'head.bias'], {Path('head.weight'): 'transposed'})
    """
    check_kind(rule, "setup")
    found = parameters_of(model)
    found, excluded = (found, frozenset[Any]()) if trainable is None else parted(found, trainable)
    records = [record for record, _ in found]
    if not records:
        warn(
            f"the model has no trainable parameter (no floating or complex array){_unopened(model)}", OptimiserWarning, stacklevel=2
        )
    rules, groups = assign(rule, records)
    ties = _checked(ties)
    sleeping = _all_tied(set() if frozen is None else set(matching(records, frozen)), records, ties)
    wish = None if state_dtype is None else _dtype(state_dtype)
    records = [
        record._replace(group=group, frozen=at in sleeping, state_dtype=wish)
        for at, (record, group) in enumerate(zip(records, groups, strict=True))
    ]
    arrays = {record.path: array for record, array in found}
    state = new_state(records, rules, excluded, {at for at, record in enumerate(records) if is_idle(arrays[record.path])})
    for tie in ties:
        state = state.tie(tie[0], tie[1], view=tie[2] if len(tie) == 3 else None)
    if any(program.started for program in state.layout.programs):
        state = state.with_started([arrays[path] for path in state], [at for at, own in enumerate(state.slots) if own is not None])
    return state


def trainables(model: Any) -> dict[str, Any]:
    """The parameters of a model, each once: a flat mapping from canonical path, spelled, to array.

    **Raises** as `setup` does for models that cannot be read.

    Example:
        >>> import numpy as np, optimisers as op
        >>> w = np.ones(2)
        >>> list(op.trainables({"a": w, "b": {"same": w, "other": np.zeros(3)}}))
        ['a', 'b.other']
    """
    return {str(record.path): array for record, array in parameters_of(model)}


def _unopened(model: Any) -> str:
    """What a model without parameters holds that may be a container."""
    kinds = {type(leaf).__name__ for leaf in opened(model)[0] if library_of(leaf) is None and hasattr(leaf, "__dict__")}
    return f"; it holds {', '.join(sorted(kinds))}, which optimisers.register can open" if kinds else ""


def _checked(ties: Any) -> list[tuple[Any, ...]]:
    if isinstance(ties, str) or not isinstance(ties, Iterable):
        raise PathError(f"ties is a list of (alias, path) or (alias, path, view), not {ties!r}")
    found = list(ties)
    for tie in found:
        if not isinstance(tie, (tuple, list)) or len(tie) not in (2, 3):
            raise PathError(f"a tie is (alias, path) or (alias, path, view), not {tie!r}")
    return found


def _all_tied(chosen: set[int], records: Sequence[Parameter], ties: list[tuple[Any, ...]]) -> set[int]:
    """The numbers of some parameters, and of those that are about to be one with them."""
    at = {path: number for number, record in enumerate(records) for path in record.paths} if ties else {}
    pairs = [{at[each] for each in (Path(alias), Path(path)) if each in at} for alias, path, *_ in ties]
    while more := set().union(*(pair for pair in pairs if chosen & pair)) - chosen:
        chosen = chosen | more
    return chosen


def _dtype(wish: Any) -> str:
    """The name of a dtype given as a name, as NumPy's, as PyTorch's or as Python's `float`."""
    given = "float64" if wish is float else wish
    name = (
        given
        if isinstance(given, str)
        else getattr(given, "name", None) or getattr(given, "__name__", str(given).rpartition(".")[2])
    )
    if not isinstance(name, str) or not trainable_dtype(name) or name.startswith("c") or itemsize_of(name) is None:
        raise DtypeError(f"state_dtype={wish!r} is no floating dtype")
    return name
