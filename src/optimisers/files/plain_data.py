"""What a run keeps beside its state (epoch, place in the data, random numbers), as plain data, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from optimisers.backends.conversion import to_numpy
from optimisers.errors import StateError
from optimisers.files.tensors import DTYPES

__all__ = ["as_data", "from_data"]

_ARRAY, _TUPLE = "/array", "/tuple"


def as_data(value: Any, keep: Callable[[Any], str], where: str = "extra") -> Any:
    """Nested mappings, sequences, numbers, texts and arrays as plain data. `keep` stores an array and returns a name for it.

    **Raises** `StateError` for anything else, naming where it stands.

    >>> as_data({"epoch": 3, "rates": (0.1, 0.2)}, keep=str)
    {'epoch': 3, 'rates': {'/tuple': [0.1, 0.2]}}
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in (_ARRAY, _TUPLE):
                raise StateError(f"{where}: {key!r} cannot be a key in a file; use other strings")
        return {key: as_data(each, keep, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [as_data(each, keep, f"{where}[{at}]") for at, each in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = _readable(value, where)
        return array.item() if array.shape == () and array.dtype.kind != "c" else {_ARRAY: keep(array)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise StateError(f"{where} is a {type(value).__name__}; a file holds mappings, lists, numbers, texts and arrays")


def _readable(array: Any, where: str) -> np.ndarray:
    try:
        found = to_numpy(array)
    except Exception as error:  # each array library has its own
        raise StateError(
            f"{where} is an array whose values cannot be read ({type(error).__name__}); keep its data instead"
        ) from error
    masked = isinstance(array, np.ma.MaskedArray)
    if found.dtype.name not in DTYPES or masked:
        raise StateError(f"{where} is an array of {'masked values' if masked else found.dtype.name}, which no file holds")
    return found


def from_data(data: Any, array: Callable[[str], Any]) -> Any:
    """What `as_data` was given.

    **Arguments:** `array`: from the name of an array to it.
    """
    if isinstance(data, Mapping) and _ARRAY in data:
        return array(data[_ARRAY])
    if isinstance(data, Mapping) and _TUPLE in data:
        return tuple([from_data(each, array) for each in data[_TUPLE]])
    if isinstance(data, Mapping):
        return {key: from_data(each, array) for key, each in data.items()}
    return [from_data(each, array) for each in data] if isinstance(data, list) else data
