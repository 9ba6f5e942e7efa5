"""Flat views of a model, to differentiate with respect to: the live parameters by name, or all of them in one vector."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optimisers.backends.arrays import dtype_name, library_of, namespace_of
from optimisers.errors import GradientError, ShapeError, suggest
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import open_with, parameters_of
from optimisers.model.ties import SAME, View
from optimisers.model.trees import opened
from optimisers.state import State, check_state

__all__ = ["destructure", "partition"]


def partition(state: State, model: Any) -> tuple[dict[str, Any], Callable[[Mapping[Any, Any]], Any]]:
    """Split a model into its live parameters and a function that puts them back.

    Differentiate a loss with respect to the first: frozen parameters cost no gradient, and the gradient of a tied parameter comes
    out summed. The gradients go into `update` as they are.

    **Arguments:**

    - `state`: the state that tells which parameters are live.
    - `model`: the model.

    **Returns** `(params, rebuild)`: a flat mapping from path, spelled, to array, each live parameter once, by its first occurrence
    that is not masked; and a function from such a mapping to the model with every tie in place. Masked occurrences
    keep the array that the model holds now, so no gradient comes from them.

    **Raises** `ModelError` when the model is not the state's; `rebuild` raises `GradientError` for missing or unknown names,
    `ShapeError` for an array of another shape.

    Example:
        >>> import numpy as np, optimisers as op
        >>> w = np.ones(2)
        >>> model = {"a": w, "b": w, "c": np.zeros(3)}
        >>> params, rebuild = op.partition(op.setup(op.Adam(), model).freeze("c"), model)
        >>> list(params), rebuild({"a": w + 1})["b"]
        (['a'], array([2., 2.]))
    """
    check_state(state, "partition")
    view = open_with(state.layout, model)
    roots = {path[0] for path in view.structure.paths if path}
    seen_from: dict[int, list[tuple[Path, int, View]]] = {}
    for owner, place, how in view.aliases:
        seen_from.setdefault(owner, []).append((view.structure.paths[place], place, how))
    sources: dict[str, _Source] = {}
    for at, parameter in enumerate(state.parameters):
        seen = [(parameter.path, view.canonical[at], SAME), *seen_from.get(at, ())]
        seen = [each for each in seen if each[0] not in parameter.masked]
        if seen and not parameter.frozen:
            sources[_name(seen[0][0], roots)] = _Source(seen[0][2], [each[1:] for each in seen])
    params = {name: view.leaves[source.places[0][0]] for name, source in sources.items()}

    def rebuild(new: Mapping[Any, Any]) -> Any:
        new = {str(name): array for name, array in new.items()}
        unknown = [name for name in new if name not in sources]
        if unknown:
            raise GradientError(f'"{unknown[0]}" is no live parameter{suggest(unknown[0], sources)}')
        missing = [name for name in sources if name not in new]
        if missing:
            raise GradientError(f'the mapping lacks the live parameter "{missing[0]}"')
        for name, array in new.items():
            shape = getattr(array, "shape", None)
            if shape is None or tuple(shape) != tuple(params[name].shape):
                found = f"a {type(array).__name__}" if shape is None else f"of shape {list(shape)}"
                raise ShapeError(f'"{name}" is {found}, and the parameter of shape {list(params[name].shape)}')
        leaves = list(view.leaves)
        for name, source in sources.items():
            array = source.view.undo(new[name])
            for place, how in source.places:
                leaves[place] = how.apply(array)
        return view.rebuild(leaves)

    return params, rebuild


class _Source(NamedTuple):
    """Of a live parameter how its named occurrence is seen from it, and the places and views of all that are not masked."""

    view: View
    places: list[tuple[int, View]]


def _name(path: Path, roots: set[Any]) -> str:
    """The spelling of a path; with more quotes than it needs where it would read as another key of the model's root."""
    spelled = str(path)
    return spelled if spelled not in roots or path == (spelled,) else path.quoted


def destructure(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The parameters of a model as one vector, and the function that makes the model from such a vector.

    Each parameter is in the vector once, in traversal order; rebuilding restores its ties and dtypes. The dtype of the vector is
    the common one.

    **Raises** `ShapeError` when a vector of another length is given to the function; as `setup` for models that cannot be read.

    Example:
        >>> import numpy as np, optimisers as op
        >>> w = np.array([1.0, 2.0])
        >>> flat, rebuild = op.destructure((w, w, np.array([3.0])))
        >>> flat, rebuild(flat * 10)
        (array([1., 2., 3.]), (array([10., 20.]), array([10., 20.]), array([30.])))
    """
    found = parameters_of(model)
    leaves, structure = opened(model)
    flat = _joined([array for _, array in found])
    total = sum(record.size for record, _ in found)

    def rebuild(vector: Any) -> Any:
        if not hasattr(vector, "shape") or tuple(vector.shape) != (total,):
            given = f"has shape {tuple(vector.shape)}" if hasattr(vector, "shape") else f"is a {type(vector).__name__}"
            raise ShapeError(f"the model has {total} elements, but the vector {given}")
        new, at = list(leaves), 0
        for record, array in found:
            part = _like(vector[at : at + record.size], record, array)
            at += record.size
            for path, view, _ in record.places:
                new[structure.places[path]] = view.apply(part)
        return structure.rebuild(model, new)

    return flat, rebuild


def _joined(arrays: Sequence[Any]) -> Any:
    if not arrays:
        return np.zeros(0)
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate([array.reshape(-1) for array in arrays])
    library = namespace_of(*arrays[:1])
    return library.concat([library.reshape(array, (-1,)) for array in arrays])


def _like(part: Any, record: Parameter, array: Any) -> Any:
    if library_of(part) in (None, "numpy"):
        part = part.reshape(record.shape)
        if isinstance(part, np.ndarray) and np.iscomplexobj(part) and not np.iscomplexobj(array):
            part = part.real
        return part if part.dtype == array.dtype else part.astype(array.dtype)
    library = namespace_of(part)
    return library.astype(library.reshape(part, record.shape), getattr(library, dtype_name(array)), copy=False)
