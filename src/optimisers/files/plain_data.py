"""What a run keeps beside its state (epoch, place in the data, random numbers), as plain data, and back."""

from collections.abc import Callable, Mapping
from typing import Any

from optimisers.errors import StateError
from optimisers.files.plain_rules import plain_value

__all__ = ["as_data", "from_data"]

_ARRAY = "/array"


def as_data(value: Any, keep: Callable[[Any], str], where: str = "extra") -> Any:
    """Nested mappings, sequences, numbers, texts and arrays as plain data. `keep` stores an array and returns a name for it.

    **Raises** `StateError` for anything else, naming where it stands.

    >>> as_data({"epoch": 3, "rates": (0.1, 0.2)}, keep=str)
    {'epoch': 3, 'rates': [0.1, 0.2]}
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _ARRAY:
                raise StateError(f"{where}: {key!r} cannot be a key in a file; use other strings")
        return {key: as_data(each, keep, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(each, keep, f"{where}[{at}]") for at, each in enumerate(value)]
    value = plain_value(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return {_ARRAY: keep(value)}
    raise StateError(f"{where} is a {type(value).__name__}; a file holds mappings, lists, numbers, texts and arrays")


def from_data(data: Any, array: Callable[[str], Any]) -> Any:
    """What `as_data` was given, its sequences as lists.

    **Arguments:** `array`: from the name of an array to it.
    """
    if isinstance(data, Mapping):
        return array(data[_ARRAY]) if _ARRAY in data else {key: from_data(each, array) for key, each in data.items()}
    return [from_data(each, array) for each in data] if isinstance(data, list) else data
