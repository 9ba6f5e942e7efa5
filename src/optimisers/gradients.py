"""Gradients gathered by parameter, and their norm."""

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from optimisers.backends.array_api import wide
from optimisers.backends.arrays import compute_dtype, library_of, namespace_of
from optimisers.backends.base import check_gradient, check_parameter
from optimisers.errors import GradientError, suggest, where
from optimisers.model.layout import Layout, Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import Opened
from optimisers.model.ties import SAME, View, shape_through
from optimisers.model.torch_nodes import is_parameter
from optimisers.model.trees import opened
from optimisers.rules.values import is_traced
from optimisers.state import State, check_state

__all__ = [
    "gather",
    "global_norm",
]


# Gathering ------------------------------------------------------------------------------------------------------------


def gather(grads: Any, layout: Layout, model: Opened | None = None) -> list[Any]:
    """One gradient for each parameter, those of its occurrences added up; `None` where there is none, and for frozen ones.

    Without a model, gradients are told apart by path alone.

    **Raises** `GradientError` for gradients that do not belong to the model, `ShapeError` and `DtypeError` for those
    that do not fit.
    """
    parameters = layout.parameters
    if grads is not None:
        leaves = None if model is None else model.structure.leaves_of(grads)
    elif model is not None and any(map(_keeps_gradient, model.leaves)):
        leaves = _left_behind(model.leaves)
    else:
        raise GradientError("update needs gradients: a tree like the model, or a mapping from paths to arrays")
    if model is not None and leaves is not None:
        gathered = list(model.pick(leaves))
        aliases = [(at, model.structure.paths[place], view, leaves[place]) for at, place, view in model.aliases]
    else:
        places = {*layout.index, *layout.excluded} if model is None else model.structure.places
        by_path = _by_path(grads, places, alone=model is None)
        gathered = [by_path.get(parameter.path) for parameter in parameters]
        aliases = [
            (at, each.path, each.view, by_path.get(each.path)) for at, record in enumerate(parameters) for each in record.aliases
        ]
    tied: dict[int, list[tuple[Path, View, Any]]] = {}
    for at, path, view, grad in aliases:
        tied.setdefault(at, [(parameters[at].path, SAME, gathered[at])]).append((path, view, grad))
    if grads is None and model is not None:
        _check_masks(model)
    for at, parts in tied.items():
        if model is not None:
            record = parameters[at]
            check_parameter(record.path, record.shape, record.dtype, record.library, model.arrays[at], record.device)
        gathered[at] = None if parameters[at].frozen else _summed(parameters[at], parts)
    for at in _silent(layout):
        gathered[at] = None
    return gathered


def _keeps_gradient(leaf: Any) -> bool:
    """Whether `backward` may leave a gradient with a leaf: what asks for one, or is a parameter of a module, which may ask."""
    return getattr(leaf, "requires_grad", False) or is_parameter(leaf)


def _left_behind(leaves: Sequence[Any]) -> list[Any]:
    """What `backward` has left in the `grad` of tensors that ask for it."""
    return [leaf.grad if getattr(leaf, "requires_grad", False) and leaf.is_leaf else None for leaf in leaves]


def _check_masks(model: Opened) -> None:
    """Check that masked places can be told from others: `backward` adds up what one object gets at all of its places."""
    for record in model.layout.parameters:
        if not record.masked or record.frozen:
            continue
        seen = {path: model.leaves[model.structure.places[path]] for path in record.paths}
        live = {id(leaf): path for path, leaf in seen.items() if path not in record.masked}
        for path in record.masked:
            if id(seen[path]) in live:
                raise GradientError(
                    f"{path} is masked and {live[id(seen[path])]} is not, but both are one Parameter, whose gradients PyTorch adds "
                    f"up before they can be told apart; take value_and_grad, or call detach() on the weight where {path} is used"
                )


def _silent(layout: Layout) -> list[int]:
    """The parameters whose gradient is not even looked at."""
    if "silent" not in layout.cache:
        layout.cache["silent"] = [
            at for at, record in enumerate(layout.parameters) if record.frozen or record.masked.issuperset(record.paths)
        ]
    return layout.cache["silent"]


def _by_path(grads: Any, places: Collection[Path], *, alone: bool) -> dict[Path, Any]:
    """Gradients by path, from a tree that lacks branches or from a mapping of paths."""
    if isinstance(grads, Mapping) and not isinstance(grads, dict):
        grads = dict(grads)
    leaves, structure = opened(grads)
    given = list(zip(structure.paths, leaves, strict=True))
    if isinstance(grads, Mapping) and not _is_tree(grads, structure.paths, places):
        given = [(Path(path), grad) for path, grad in grads.items()]
    if not given and not isinstance(grads, Mapping) and places:
        raise GradientError(
            f"the gradients are an empty {type(grads).__name__}; pass a tree like the model, or a mapping from paths to arrays"
        )
    found: dict[Path, Any] = {}
    branches: set[Path] | None = None
    for path, grad in given:
        if path in places:
            found[path] = grad
            continue
        if grad is None or (alone and library_of(grad) is None and not isinstance(grad, np.generic)):
            # Without the model, what is no array may be one of its own numbers and names.
            continue
        if branches is None:
            branches = {Path(each[:depth]) for each in places for depth in range(len(each))}
        if path in branches:
            raise GradientError(
                f'the gradients have {_kind(grad)} at "{where(path)}", where the model has a branch; pass a tree like it, or None'
            )
        raise GradientError(
            f'the gradients have something at "{where(path)}", the model has nothing there{suggest(str(path), map(str, places))}'
        )
    return found


def _is_tree(grads: Mapping[Any, Any], paths: list[Path], places: Collection[Path]) -> bool:
    """Whether a mapping is a tree: it has branches, or its keys are those of the model's own root."""
    if any(isinstance(key, Path) for key in grads):
        return False
    roots = {path[0] for path in places if path}
    flat = len(paths) == len(grads) and all(len(path) == 1 for path in paths)
    given = [key for key, grad in grads.items() if isinstance(grad, np.generic) or library_of(grad) is not None]
    return not flat or all(key in roots for key in given)


def _summed(parameter: Parameter, parts: list[tuple[Path, View, Any]]) -> Any:
    """The sum over occurrences; one object that stands at several of them counts once."""
    seen: set[int] = set()
    terms = []
    for path, view, grad in parts:
        if grad is None or path in parameter.masked or id(grad) in seen:
            continue
        seen.add(id(grad))
        check_gradient(path, shape_through(view, parameter.shape), parameter.dtype, parameter.library, grad, parameter.device)
        terms.append(view.undo(grad))
    if len(terms) > 1:
        terms = [_cast(term, compute_dtype(parameter.dtype)) for term in terms]
    return reduce(add, terms) if terms else None


def _cast(array: Any, dtype: str) -> Any:
    if isinstance(array, (np.ndarray, np.generic)):
        return array.astype(dtype, copy=False)
    library = namespace_of(array)
    return library.astype(array, getattr(library, dtype), copy=False)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def global_norm(grads: Any, state: State | None = None) -> Any:
    r"""The L2 norm of all gradients together, $\sqrt{\sum |g|^2}$, each parameter once. A float; in a trace of JAX, a scalar.

    **Arguments:**

    - `grads`: a tree or mapping of gradients; an object that stands at several places counts once.
    - `state`: with it, gradients of tied parameters are added up first, and frozen parameters and rows are left out.

    **Raises** as `update` does for gradients that do not belong to the state.

    Example:
        >>> import numpy as np, optimisers as op
        >>> op.global_norm({"a": np.array([3.0]), "b": np.array([4.0])})
        5.0
    """
    if state is None:
        leaves = {id(leaf): leaf for leaf in opened(grads)[0] if isinstance(leaf, np.generic) or library_of(leaf) is not None}
        return _root(sum(_square(leaf) for leaf in leaves.values()))
    check_state(state, "global_norm")
    total: Any = 0.0
    for parameter, grad in zip(state.parameters, gather(grads, state.layout), strict=True):
        if grad is not None:
            check_gradient(parameter.path, parameter.shape, parameter.dtype, parameter.library, grad, parameter.device)
            rows = parameter.live_rows
            total += _square(grad) if rows is None else sum(_square(grad[start:stop]) for start, stop in rows)
    return _root(total)


def _root(total: Any) -> Any:
    return namespace_of(total).sqrt(total) if is_traced(total) else float(np.sqrt(total))


def _square(array: Any) -> Any:
    if isinstance(array, (np.ndarray, np.generic)):
        flat = wide(np.asarray(array)).reshape(-1)
        return float(np.vdot(flat, flat).real)
    library = namespace_of(array)
    total = library.sum(library.abs(wide(array)) ** 2)
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    return total if is_traced(total) else float(total)
