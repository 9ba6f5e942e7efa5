"""Which occurrences are one parameter: the same object, or the same memory seen through a transpose or a reshape."""

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from optimisers.backends.arrays import Memory, library_of, memory_of, namespace_of
from optimisers.errors import TieError
from optimisers.model.paths import Path

__all__ = ["SAME", "View", "find_ties", "named_view", "rows_through", "same_memory", "shape_through"]


Step = tuple[str, tuple[int, ...], tuple[int, ...]]
"""One step of a view: `("permute", order, ())` or `("reshape", from, to)`."""


class View(NamedTuple):
    """How an alias is seen from its parameter: permutations of the axes and reshapes, one after another.

    >>> import numpy as np
    >>> view = named_view("transpose", (2, 3), (3, 2))
    >>> view.apply(np.zeros((2, 3))).shape, str(view)
    ((3, 2), 'transposed')
    """

    steps: tuple[Step, ...] = ()

    def apply(self, array: Any) -> Any:
        """The alias, from the parameter's array."""
        for kind, first, second in self.steps:
            array = _permuted(array, first) if kind == "permute" else _reshaped(array, second)
        return array

    def undo(self, array: Any) -> Any:
        """An array of the alias's shape (its gradient), as seen from the parameter."""
        return self.inverse.apply(array)

    @property
    def inverse(self) -> "View":
        """How the parameter is seen from the alias."""
        return View(
            tuple(
                (kind, _inverse(first), ()) if kind == "permute" else (kind, second, first)
                for kind, first, second in reversed(self.steps)
            )
        )

    def then(self, other: "View") -> "View":
        """This view, and another one of what it shows."""
        steps = list(self.steps)
        for step in other.steps:
            if steps and step[0] == steps[-1][0] == "permute":
                steps[-1] = ("permute", tuple(steps[-1][1][axis] for axis in step[1]), ())
            elif steps and step[0] == steps[-1][0]:
                steps[-1] = ("reshape", steps[-1][1], step[2])
            else:
                steps.append(step)
            if steps[-1][1] == (steps[-1][2] or tuple(range(len(steps[-1][1])))):
                steps.pop()
        return View(tuple(steps))

    def __str__(self) -> str:
        if not self.steps:
            return "same"
        return "reshaped" if any(step[0] == "reshape" for step in self.steps) else "transposed"


SAME = View()


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.argsort(order))


def _permuted(array: Any, order: tuple[int, ...]) -> Any:
    # What is no array (a traced box of an autodiff package) has NumPy's methods.
    return array.transpose(order) if library_of(array) in (None, "numpy") else namespace_of(array).permute_dims(array, order)


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    return array.reshape(shape) if library_of(array) in (None, "numpy") else namespace_of(array).reshape(array, shape)


def shape_through(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an alias of a parameter of this shape."""
    return shape if view == SAME else view.apply(np.empty(shape, np.bool_)).shape


def rows_through(view: View) -> bool:
    """Whether the rows of a parameter are the rows of the alias too."""
    return all(first[:1] == ((0,) if kind == "permute" else second[:1]) for kind, first, second in view.steps)


def named_view(name: str | None, parameter: tuple[int, ...], alias: tuple[int, ...]) -> View | None:
    """The view of a name (`None` for same, `"transpose"`, `"reshape"`), or `None` where the shapes do not allow it."""
    if name is None and parameter == alias:
        return SAME
    if name == "transpose" and parameter[::-1] == alias:
        return SAME.then(View((("permute", tuple(range(len(parameter)))[::-1], ()),)))
    if name == "reshape" and np.prod(parameter, dtype=np.int64) == np.prod(alias, dtype=np.int64):
        return SAME.then(View((("reshape", parameter, alias),)))
    return None


def find_ties(paths: Sequence[Path], arrays: Sequence[Any]) -> list[list[tuple[int, View]]]:
    """Group occurrences into parameters, in order of first appearance: for each, its occurrences and their views from the first.

    **Raises** `TieError` when two arrays share only a part of their memory.
    """
    groups: dict[int, list[int]] = {}
    for at, array in enumerate(arrays):
        groups.setdefault(id(array), []).append(at)
    # Arrays that own their memory, all of them, share none.
    shared = any(getattr(array, "base", array) is not None for array in arrays)
    alone: list[list[_Seen]] = []
    located: list[_Seen] = []
    for occurrences in groups.values():
        array = arrays[occurrences[0]]
        memory = memory_of(array, library_of(array) or "") if shared else None
        seen = _Seen(occurrences, array, memory)
        if memory is None or 0 in memory.shape:
            alone.append([seen])
        else:
            _check_self_overlap(paths[occurrences[0]], memory)
            located.append(seen._replace(bounds=memory.bounds))
    parameters = [_described(cluster) for cluster in (*alone, *_by_memory(paths, located))]
    return sorted(parameters, key=lambda group: group[0][0])


class _Seen(NamedTuple):
    """An array object, the occurrences where it stands, and where it lies."""

    occurrences: list[int]
    array: Any
    memory: Memory | None
    bounds: tuple[int, int] = (0, 0)


def _by_memory(paths: Sequence[Path], located: list[_Seen]) -> list[list[_Seen]]:
    """Group arrays that see the same memory, in one sweep over the addresses."""
    clusters: list[list[_Seen]] = []
    reaching: list[tuple[int, list[_Seen]]] = []
    for seen in sorted(located, key=attrgetter("bounds")):
        low, high = seen.bounds
        reaching = [(end, cluster) for end, cluster in reaching if end > low]
        for _, cluster in reaching:
            other = cluster[0]
            if seen.array.dtype == other.array.dtype and _view(_memory(other), _memory(seen)) is not None:
                cluster.append(seen)
                break
            if _memory(seen).overlaps(_memory(other)):
                first, second = sorted((other.occurrences[0], seen.occurrences[0]))
                raise TieError(
                    f"{paths[first]} and {paths[second]} share a part of their memory, so one cannot be updated without the "
                    "other; copy one of them, or hold the whole array and slice it inside the model"
                )
        else:
            clusters.append([seen])
            reaching.append((high, clusters[-1]))
    return clusters


def _memory(seen: _Seen) -> Memory:
    assert seen.memory is not None
    return seen.memory


def _described(cluster: list[_Seen]) -> list[tuple[int, View]]:
    if len(cluster) == 1:
        return [(at, SAME) for at in cluster[0].occurrences]
    first = min(cluster, key=lambda seen: seen.occurrences[0])
    views = [SAME if seen is first else _view(_memory(first), _memory(seen)) or SAME for seen in cluster]
    return sorted(((at, view) for seen, view in zip(cluster, views, strict=True) for at in seen.occurrences), key=itemgetter(0))


def _check_self_overlap(path: Path, memory: Memory) -> None:
    if memory.overlaps_itself:
        raise TieError(f"{path}: several elements of this array share one place in memory (it was broadcast); copy it")


def same_memory(parameter: Any, alias: Any, view: View) -> bool:
    """Whether an alias still is the parameter, seen through the view."""
    if parameter is alias:
        return True
    library = library_of(parameter)
    a, b = (
        memory_of(each, library or "") if library_of(each) == library and library else None
        for each in (view.apply(parameter), alias)
    )
    return a is not None and a == b


def _view(a: Memory, b: Memory) -> View | None:
    """The view that leads from one array to another which lies in exactly the same memory, or `None`."""
    if a == b:
        return SAME
    if a.itemsize != b.itemsize or a.bounds != b.bounds:
        return None
    moved = _transposition(a, b)
    if moved is not None:
        return View((("permute", moved, ()),))
    if a.address != b.address or a.runs != b.runs:
        return None
    ordered = [tuple(each.shape[axis] for axis in each.order) for each in (a, b)]
    steps: list[Step] = [("permute", a.order, ()), ("reshape", ordered[0], ordered[1]), ("permute", _inverse(b.order), ())]
    return SAME.then(View(tuple(steps)))


def _transposition(a: Memory, b: Memory) -> tuple[int, ...] | None:
    if sorted(zip(a.shape, a.strides, strict=True)) != sorted(zip(b.shape, b.strides, strict=True)):
        return None
    free = list(range(len(a.shape)))
    order = []
    for size, stride in zip(b.shape, b.strides, strict=True):
        axis = next(axis for axis in free if (a.shape[axis], a.strides[axis]) == (size, stride))
        free.remove(axis)
        order.append(axis)
    return tuple(order)
