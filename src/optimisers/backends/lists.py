"""Kernels on lists of PyTorch tensors (`torch._foreach_*`): written down as a list of operations once a step, run wave by wave.

Knowing all operations beforehand, it writes into what nobody needs any more, and takes PyTorch's combined ones (`lerp`, `addcdiv`,
`add` with a factor), so that a wave makes few passes over memory.
"""

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from optimisers.backends.namespace import Namespace

__all__ = ["Recorder", "Tape", "Value"]

Tensors = list[torch.Tensor]
_torch: Any = torch  # whose stubs do not tell of functions on lists

_IN_PLACE = {"abs", "add", "addcdiv", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg", "pow", "sqrt", "sub", "tanh"}


class _Operation(NamedTuple):
    """One operation: a function on lists by name, or one of single tensors; its operands, and a factor that it takes."""

    function: str | Callable[..., Any]
    operands: tuple[Any, ...]
    factor: dict[str, float]


class Tape:
    """The operations of a kernel, in order. The first values are the inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """The real dtype of the arithmetic."""
        self.operations: list[_Operation | None] = []
        self.values: list[Value] = []

    def input(self, is_complex: bool) -> "Value":
        """A value that is there from the start."""
        return self._new(None, is_complex)

    def emit(self, function: str | Callable[..., Any], *operands: Any, complex: bool | None = None, **factor: float) -> "Value":  # noqa: A002
        """Write down an operation."""
        if complex is None:
            complex = any(isinstance(each, Value) and each.complex for each in operands)  # noqa: A001
        return self._new(_Operation(function, operands, factor), complex)

    def _new(self, operation: _Operation | None, is_complex: bool) -> "Value":
        value = Value(self, len(self.operations), is_complex)
        self.operations.append(operation)
        self.values.append(value)
        return value

    def program(self, outputs: Sequence["Value"], writable: Sequence["Value"]) -> "Operations":
        """What is needed for some outputs. Inputs may be written into where they are writable."""
        needed, last = {value.at for value in outputs}, {value.at: len(self.operations) for value in outputs}
        for at in reversed(range(len(self.operations))):
            operation = self.operations[at]
            if at in needed and operation is not None:
                for each in operation.operands:
                    if isinstance(each, Value):
                        needed.add(each.at)
                        last.setdefault(each.at, at)
        scratch = {value.at for value in writable}
        steps = []
        for at, operation in enumerate(self.operations):
            if operation is None or at not in needed:
                continue
            function, operands, factor = operation
            first = operands[0]
            own = isinstance(first, Value) and last[first.at] == at and (first.at in scratch or self._temporary(first))
            others = [each.at for each in operands[1:] if isinstance(each, Value)]
            kept = isinstance(first, Value) and (first.at in others or (self.values[at].complex != first.complex))
            steps.append((at, function, operands, factor, function in _IN_PLACE and own and not kept))
        return Operations(steps)

    def _temporary(self, value: "Value") -> bool:
        """Whether a value has memory of its own."""
        operation = self.operations[value.at]
        return operation is not None and isinstance(operation.function, str)


class Operations:
    """Operations to run, each with whether it writes into its first operand."""

    def __init__(self, steps: list[tuple[int, Any, tuple[Any, ...], dict[str, float], bool]]) -> None:
        self._steps = steps

    def run(self, inputs: dict[int, Tensors], chosen: np.ndarray) -> dict[int, Tensors]:
        """All values, from those of the inputs. Of a vector of numbers, one for each parameter, the chosen ones count."""
        values = dict(inputs)
        for at, function, operands, factor, in_place in self._steps:
            own = [
                values[each.at] if isinstance(each, Value) else each[chosen].tolist() if isinstance(each, np.ndarray) else each
                for each in operands
            ]
            if isinstance(function, str):
                made = getattr(_torch, f"_foreach_{function}_" if in_place else f"_foreach_{function}")(*own, **factor)
                values[at] = own[0] if in_place else list(made)
            else:
                count = len(chosen)
                values[at] = [function(*parts) for parts in zip(*(_each(part, count) for part in own), strict=True)]
        return values


def _each(part: Any, count: int) -> Sequence[Any]:
    return part if isinstance(part, list) else [part] * count


class Value:
    """A list of tensors to come. The other operand is another one, a number, or a vector with a number for each parameter."""

    __slots__ = ("at", "complex", "tape")
    __array_ufunc__ = None  # a vector of numbers on the left leaves it to the methods here

    def __init__(self, tape: Tape, at: int, is_complex: bool) -> None:
        self.tape = tape
        self.at = at
        self.complex = is_complex

    @property
    def _made_by(self) -> tuple[Any, tuple[Any, ...]]:
        operation = self.tape.operations[self.at]
        return (None, ()) if operation is None else (operation.function, operation.operands)

    def _scaled(self) -> tuple[Any, Any]:
        """The number and the value that this is the product of."""
        function, operands = self._made_by
        product = function == "mul" and not isinstance(operands[1], Value)
        return (operands[1], operands[0]) if product else (None, None)

    def __add__(self, other: Any) -> "Value":
        for x, y in ((self, other), (other, self)):
            number, inner = y._scaled() if isinstance(y, Value) else (None, None)
            if inner is None or not isinstance(x, Value):
                continue
            function, operands = inner._made_by
            if function == "sub" and operands[1] is x and isinstance(operands[0], Value) and _plain(number):
                return self.tape.emit("lerp", x, operands[0], number)
            if _plain(number):
                return self.tape.emit("add", x, inner, alpha=float(number))  # type: ignore[arg-type]
        return self.tape.emit("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Value":
        if isinstance(other, Value):
            number, inner = other._scaled()
            if _plain(number):
                return self.tape.emit("add", self, inner, alpha=-number)
            function, operands = other._made_by
            if function == "div" and isinstance(operands[0], Value) and isinstance(operands[1], Value):
                number, inner = operands[0]._scaled()
                if _plain(number):
                    return self.tape.emit("addcdiv", self, inner, operands[1], value=-number)
        return self.tape.emit("sub", self, other)

    def __rsub__(self, other: Any) -> "Value":
        return self.tape.emit("add", self.tape.emit("neg", self), other)

    def __mul__(self, other: Any) -> "Value":
        if not isinstance(other, Value):
            number, inner = self._scaled()
            if inner is not None:
                return self.tape.emit("mul", inner, number * other)
        return self.tape.emit("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Value":
        return self.tape.emit("div", self, other)

    def __rtruediv__(self, other: Any) -> "Value":
        return self.tape.emit(lambda x, y: y / x, self, other)

    def __pow__(self, other: Any) -> "Value":
        return self.tape.emit("pow", self, other)

    def __rpow__(self, other: Any) -> "Value":
        return self.tape.emit(lambda x, y: y**x, self, other)

    def __neg__(self) -> "Value":
        return self.tape.emit("neg", self)

    def _told(self, other: Any, function: Callable[..., Any]) -> "Value":
        return self.tape.emit(function, self, other, complex=False)

    __gt__ = partialmethod(_told, function=torch.gt)
    __ge__ = partialmethod(_told, function=torch.ge)
    __lt__ = partialmethod(_told, function=torch.lt)
    __le__ = partialmethod(_told, function=torch.le)
    __eq__ = partialmethod(_told, function=torch.eq)  # type: ignore[assignment]
    __ne__ = partialmethod(_told, function=torch.ne)  # type: ignore[assignment]
    __and__ = __rand__ = partialmethod(_told, function=lambda x, y: x & y)
    __or__ = __ror__ = partialmethod(_told, function=lambda x, y: x | y)
    __hash__ = None  # type: ignore[assignment]

    def __invert__(self) -> "Value":
        return self.tape.emit(torch.logical_not, self, complex=False)


def _plain(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


class Recorder(Namespace):
    """The functions for kernels, written down for lists; numbers that meet no list are NumPy's business."""

    def __init__(self, tape: Tape, single: Namespace) -> None:
        self._tape = tape
        self._single = single
        for name in ("sqrt", "exp", "log", "tanh"):
            setattr(self, name, self._function(name, name))
        self.abs = self._function("abs", "abs", complex=False)
        for name in ("isfinite", "real", "imag"):
            setattr(self, name, self._function(name, getattr(single, name), complex=False))
        for name in ("conj", "sign"):
            setattr(self, name, self._function(name, getattr(single, name)))

    def _function(self, name: str, function: Any, **options: Any) -> Callable[..., Any]:
        return lambda x: self._tape.emit(function, x, **options) if isinstance(x, Value) else getattr(np, name)(x)

    def abs2(self, x: Any) -> Any:
        """|x|², real."""
        if not isinstance(x, Value):
            return x * x
        return self._tape.emit(self._single.abs2, x, complex=False) if x.complex else self._tape.emit("mul", x, x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y."""
        if not any(isinstance(each, Value) for each in (condition, x, y)):
            return np.where(condition, x, y)
        if not isinstance(condition, (Value, np.ndarray)):
            return x if condition else y
        return self._tape.emit(self._chosen, condition, x, y)

    def _chosen(self, condition: Any, x: Any, y: Any) -> torch.Tensor:
        device = next(each.device for each in (condition, x, y) if isinstance(each, torch.Tensor))
        dtype = next((each.dtype for each in (x, y) if isinstance(each, torch.Tensor)), self._tape.dtype)
        a, b = (torch.as_tensor(each, dtype=dtype, device=device) for each in (x, y))
        return torch.where(torch.as_tensor(condition, device=device), a, b)

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller of two."""
        return self._extreme("minimum", x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger of two."""
        return self._extreme("maximum", x, y)

    def _extreme(self, name: str, x: Any, y: Any) -> Any:
        if not isinstance(x, Value):
            x, y = y, x
        return self._tape.emit(name, x, y) if isinstance(x, Value) else getattr(np, name)(x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        """x within [low, high]; both parts of a complex x."""
        if isinstance(x, Value) and x.complex:
            return self._tape.emit(self._single.clip, x, low, high)
        return self.minimum(self.maximum(x, low), high)

    def normal(self, like: Any, key: tuple[Any, ...]) -> Any:
        """Gaussian numbers in the shape and dtype of each tensor, told by its key alone."""
        return self._tape.emit(lambda x, *key: self._single.normal(x, key), like, *key)

    def round_at_random(self, x: Any, bits: int, key: tuple[Any, ...]) -> Any:
        """Real numbers rounded at random to a neighbour with so many bits of precision, told by the key alone."""
        return self._tape.emit(lambda x, *key: self._single.round_at_random(x, bits, key), x, *key)
