"""What a value is that somebody gives: a number, something traced, something of Optax."""

from typing import Any

__all__ = ["FROM_OPTAX", "is_number", "is_of_optax", "is_traced"]


FROM_OPTAX = "from optimisers.interop.optax import from_optax, and give from_optax(…)"


def is_of_optax(value: Any) -> bool:
    """Whether a value looks like a gradient transformation of Optax."""
    return not isinstance(value, type) and callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def is_traced(value: Any) -> bool:
    """Whether a value stands for one that only a traced program will know."""
    return "Tracer" in type(value).__name__


def is_number(value: Any) -> bool:
    """Whether a value is a number, or numbers in an array: one of its own, or one for each member of an ensemble."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or (hasattr(value, "dtype") and hasattr(value, "shape"))
