"""The inputs, and the values that are known to be right."""

from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "FAMILIES", "Case", "Raises", "by_hand"]

FAMILIES = ("Ties", "Freezing", "Missing gradients", "Rules", "State and files", "JAX", "PyTorch")


@dataclass(frozen=True)
class Raises:
    """The right answer is an error whose text holds these words."""

    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """An input, in words, and its right answer: named values, or an error."""

    name: str
    family: str
    text: str
    right: "dict[str, Any] | Raises"
    tolerance: float = 1e-5


def by_hand(function: Any) -> Any:
    """Mark a case whose library has no means of its own for it, so that its user writes them."""
    function.by_hand = True
    return function


_ = "Ties"
_TIES = [
    Case(
        "T1",
        _,
        "one array [1, 2] stands at two places, with gradients [3, 3] and [7, 7], beside c = [1, 2] with [10, 10]; descent, lr 0.1",
        {"w": [0, 1], "again": [0, 1], "c": [0, 1]},
    ),
    Case("T1b", _, "the same, and only the second place has a gradient: [7, 7]", {"w": [0.3, 1.3], "again": [0.3, 1.3]}),
    Case(
        "T2",
        _,
        "a 2×3 array and its transpose in one model; both gradients count",
        {"w": [[0.8, 1.6, 2.4], [3.7, 4.5, 5.3]], "transpose": [[0.8, 3.7], [1.6, 4.5], [2.4, 5.3]]},
    ),
    Case("T3", _, "clipping by value at 10 sees the sum of the two gradients 8 and 8; lr 1", {"w": [-10], "again": [-10]}),
    Case("T4", _, "two arrays of equal values are two parameters; gradients 1 and 10", {"a": [0.9], "b": [0]}),
    Case("T4b", _, "two arrays share half of their memory: an error that names both", Raises(("first", "second"))),
    Case(
        "T5", _, "two arrays are tied when the optimiser is there already; gradients 3 and 7 act as 10 on 1", {"a": [0], "b": [0]}
    ),
    Case("T6", _, "a parameter 0 is listed twice, with one gradient 1; Adam, lr 0.1", {"x": [-0.1], "count": 1}),
    Case(
        "T7",
        _,
        "an embedding that is the head, too: partial gradients 1.5 and 1.5, clipped to a global norm of 1; lr 1",
        {"norm": 3, "table": -1},
    ),
    Case("T8", _, "T1 after model and optimiser went through `pickle`", {"w": [0, 1], "again": [0, 1], "c": [0, 1]}),
    Case(
        "T9",
        _,
        "the model (w, w, z) as a flat vector: w once; the gradient of the rebuilt model sums both places",
        {"length": 3, "gradient": [10, 10, 1]},
    ),
]

_ = "Freezing"
_FREEZING = [
    Case(
        "F1",
        _,
        "y frozen for a step, then lr 0.2, y thawed, and a step",
        {"x": [0.9, 1], "y": [3, 4], "then x": [0.7, -1], "then y": [-17, -196]},
    ),
    Case(
        "F2a",
        _,
        "a parameter 1 takes a step and is frozen; the loop goes on for 3 steps",
        {"SGD with momentum": 0.9, "Adam": 0.9, "AdamW": 0.89},
    ),
    Case(
        "F2",
        _,
        "the same, and its gradient is there all the same: zeros",
        {"SGD with momentum": 0.9, "Adam": 0.9, "AdamW": 0.89},
    ),
    Case(
        "F3",
        _,
        "a frozen parameter y has a gradient of NaN; x has (3, 4), clipped to a global norm of 1",
        {"x": [-0.6, -0.8], "y": [1]},
    ),
    Case(
        "F4a",
        _,
        "y is frozen, and x's gradient (3, 4) is clipped to a global norm of 1, in a loop",
        {"x": [-0.6, -0.8], "y": [0, 0]},
    ),
    Case("F4", _, "the same, and y's gradient is there all the same: (0, 12)", {"x": [-0.6, -0.8], "y": [0, 0]}),
    Case(
        "F5",
        _,
        "a trains 10 steps of Adam, then b is thawed: b's step is its own first, a's its eleventh; lr 0.1, gradients 1",
        {"a": -1.1, "b": -0.1, "mu of a": 0.68619},
    ),
    Case("F6", _, "a parameter frozen from the start has no state; thawed, it starts at zero", {"bytes": 0, "first step": -0.1}),
    Case(
        "F7",
        _,
        "two steps of Adam, frozen for a third, saved, loaded, thawed: its moments and its count are back",
        {"mu": 0.19, "next step": -0.1},
    ),
    Case(
        "F8",
        _,
        "rows 1 and 2 of three rows of ones are frozen; AdamW with decay 0.1, 3 steps with gradient zero",
        {"rows": [0.970299, 1, 1]},
    ),
    Case("F9", _, "one array at two places, frozen through one of them", {"a": [1, 2], "b": [1, 2]}),
    Case("F10", _, "frozen and thawed 20 times between two steps of Adam: no trace of it", {"p": -0.2, "mu": 0.19}),
]

_ = "Missing gradients"
_MISSING = [
    Case("M1a", _, "Adam, gradient 1, then 0", {"mu": 0.09, "nu": 0.000999}),
    Case(
        "M1b",
        _,
        "Adam, gradient 1, then none: moments and count stay, and the next step is a full one",
        {"mu": 0.1, "nu": 0.001, "next step": -0.1},
    ),
    Case("M2a", _, "no gradient for a whole branch", {"branch": 1, "head": 0.9}),
    Case("M2b", _, "a gradient for a path that is not there, `heda`: an error that names it", Raises(("heda",))),
]

_ = "Rules"
_RULES = [
    Case("R1", _, "decay 0.1 on x = [1, 10, 100] with gradients [1, 2, 3]; lr 1", {"x": [-0.1, 7, 87]}),
    Case("R1b", _, "the same, gradients clipped at 2 first", {"x": [-0.1, 7, 88]}),
    Case("R2", _, "p = (1, 2), g = (0.5, −0.25), 3 steps of Adam", {"p": [0.7, 2.2999997]}),
    Case("R3", _, "gradients 3, 6 and 0 gathered, then one step with their mean", {"before": 1, "after": 0.7}),
    Case(
        "R3b",
        _,
        "two gathered, with decay 0.01: x = 1 and y = 2, gradients (33, 0), then (0, 444)",
        {"x": -0.651, "y": -20.202},
    ),
    Case(
        "R3c",
        _,
        "of four to gather three are there when the four is lowered to two: the next, 3, still fires, with the mean of all four",
        {"x": 0.7},
    ),
    Case("R4", _, "a bfloat16 model: 100 steps of 0.001 move a parameter from 1 to 0.9", {"p": 0.9}, 4e-3),
    Case("R5", _, "Adam on a float16 parameter, gradients 0 and 1e-8: nothing breaks", {"p": [1, 1]}),
    Case("R6", _, "a hyperparameter's name is misspelt, `learning_rat`: an error that names it", Raises(("learning_rat",))),
    Case("R6b", _, "a learning rate of −0.1: an error that names it", Raises(("-0.1",))),
    Case("R7", _, "Adam on a complex parameter, |p − (1 + i)|², 500 steps", {"real": 1, "imaginary": 1}, 0.01),
    Case("R9", _, "a parameter `bias` of shape (1,), a gradient of shape (3,): an error that names it", Raises(("bias",))),
]

_ = "State and files"
_FILES = [
    Case("S1", _, "Adam's state of p1 and p2 loaded into a model that lists p2 first", {"mu of p1": 0.1, "mu of p2": 0.5}),
    Case(
        "S1b",
        _,
        "the same, by means that know names, where a library has them beside its usual ones",
        {"mu of p1": 0.1, "mu of p2": 0.5},
    ),
    Case(
        "S2",
        _,
        "a state with a head of 10 classes, a model with 3: an error with its name and both shapes, at loading or at the step",
        Raises(("head", "10", "3")),
    ),
    Case(
        "S4",
        _,
        "parameters called `step`, `mu`, `a.b`, and `b` in `a`, saved and loaded: nothing collides",
        {"step": 0.1, "mu": 0.2, "a.b": 0.3, "b in a": 0.4},
    ),
    Case(
        "S5",
        _,
        "a transposed 2×4 array, saved and loaded, with its moments",
        {"p": [[0, 4], [1, 5], [2, 6], [3, 7]], "mu": [[0, 0.4], [0.1, 0.5], [0.2, 0.6], [0.3, 0.7]]},
    ),
    Case("S7", _, "a file that was cut in half: an error, no crash", Raises()),
    Case("S8", _, "killed while saving over an older file: the older file is whole", {"p": 1}),
    Case("S10", _, "float32 moments of a bfloat16 parameter, saved and loaded", {"dtype": "float32"}),
]

_ = "JAX"
_JAX = [
    Case(
        "J1",
        _,
        "one array at two places, 100 compiled steps that donate state and model; gradients 3 and 7, lr 0.01",
        {"w": -10, "again": -10},
        1e-3,
    ),
    Case(
        "J2",
        _,
        "a learning rate changed between steps, and one that follows a schedule: how often the step is compiled",
        {"adjusted": 1, "schedule": 1},
    ),
    Case("J3", _, "the state comes out of `scan` and `vmap` with its structure, dtypes and weak types", {"same": 1}),
    Case("J4", _, "a model sharded over 8 devices: sharding of the moments before and after a step", {"before": 1, "after": 1}),
    Case("J5", _, "99 % of a model frozen: less than a tenth of the compiled step's operations is left", {"fewer": 1}),
]

_ = "PyTorch"
_TORCH = [
    Case(
        "P1",
        _,
        "the learning rate after 4 epochs of five standard schedulers, from 0.1",
        {"StepLR": 1e-3, "LambdaLR": 6.25e-3, "OneCycleLR": 4e-7, "CosineAnnealingWarmRestarts": 0.1, "ReduceLROnPlateau": 1e-4},
        1e-9,
    ),
    Case("P2", _, "`GradScaler` skips a step: parameter and count stay", {"p": 1, "count": 0}),
    Case("P3", _, "`requires_grad=False`, and a `.grad` of before is still there", {"p": 1}),
    Case("P4", _, "`net.weight` was replaced after the optimiser was made: an error at the next step", Raises(("weight",))),
    Case("S6", _, "a state saved under `DataParallel` (`module.…`) loads into the plain model", {"weight": 0.9, "mu": 0.1}),
]

CASES = {case.name: case for case in (*_TIES, *_FREEZING, *_MISSING, *_RULES, *_FILES, *_JAX, *_TORCH)}
