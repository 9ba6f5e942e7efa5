"""An answer, held against the known right one: right, wrong with the number, an error, or none."""

import math
from typing import Any

from compare.cases import Case, Raises

__all__ = ["ERROR", "NONE", "RIGHT", "WRONG", "differing", "judged", "shown"]

RIGHT, WRONG, ERROR, NONE = "right", "wrong", "error", "none"


def judged(case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    """What became of a case: the outcome, what was found or the error, and how it was done."""
    if "error" in answer:
        named = isinstance(case.right, Raises) and all(word in answer["text"] for word in case.right.words)
        kept = {"outcome": RIGHT if named else ERROR, "error": answer["error"]}
    elif "found" in answer:
        kept = {"outcome": WRONG if _misses(case, answer["found"]) else RIGHT, "found": _rounded(answer["found"])}
    else:
        return {"outcome": NONE}
    how = {name: answer[name] for name in ("by hand", "note") if answer.get(name)}
    return kept | how


def _misses(case: Case, found: Any) -> bool:
    if isinstance(case.right, Raises):
        return True
    return any(differing(found.get(name), value, case.tolerance) for name, value in case.right.items())


def differing(found: Any, right: Any, tolerance: float) -> bool:
    """Whether two values differ: numbers, words, lists of them."""
    if isinstance(right, list):
        if not isinstance(found, list) or len(found) != len(right):
            return True
        return any(differing(a, b, tolerance) for a, b in zip(found, right, strict=True))
    if isinstance(right, str) or not isinstance(found, (int, float)):
        return found != right
    return not math.isclose(found, right, rel_tol=tolerance, abs_tol=tolerance)


def shown(value: Any) -> str:
    """A value as it is printed."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
