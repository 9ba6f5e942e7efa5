"""What a backend is, the batch that it runs, and the checks that every batch has to pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from optimisers.backends.arrays import device_of, dtype_name, library_of, trainable_dtype
from optimisers.backends.rows import Runs
from optimisers.errors import DtypeError, GradientError, ModelError, ShapeError, UnknownNameError, where
from optimisers.rules.program import Program
from optimisers.rules.values import is_traced

__all__ = [
    "Backend",
    "Batch",
    "Scalars",
    "check",
    "check_gradient",
    "check_parameter",
    "columns_of",
]

_KNOWN = 64


class Scalars(SimpleNamespace):
    """The scalars of a step, as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(f"a kernel asks for h.{name}; the scalars of its rule are {', '.join(vars(self)) or 'none'}")


@dataclass(slots=True)
class Batch:
    """Parameters that one program updates in one call: same backend, same dtypes, same device."""

    program: Program
    paths: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    dtype: str
    slot_dtypes: tuple[str, ...]
    library: str
    device: Any
    params: list[Any]
    grads: list[Any]
    slots: list[tuple[Any, ...]]
    live_rows: Sequence[Runs | None]
    """For each parameter the rows that train, or `None` for all of them."""
    in_place: bool
    kept: dict[Any, Any]
    """What the backend keeps between steps for this batch, whatever the arrays."""
    addresses: dict[Any, Any]
    """What the backend keeps between steps for these very slots."""
    scalars: list[dict[str, Sequence[Any]]] = field(default_factory=list)
    """For each member, its scalars by name, one value a row of the table."""
    row: Sequence[int] = ()
    """For each parameter, its row of the table."""
    outcomes: dict[int, list[tuple[Any, tuple[Any, ...]]]] = field(default_factory=dict)
    """For members that act on the whole tree: what came out for each parameter, the step and the slots."""
    gates: list[tuple[int, Any]] = field(default_factory=list)
    """Members whose gate is known only when the traced program runs, each with the scalar that opens it."""
    prepared: Any = None
    watched: Any = None
    """Where `run` is to add up on its way, for each parameter, the squares of the gradient, of the step and of the parameter before
    it: an array of three rows, which a backend makes when it is asked to watch and can."""

    @property
    def rows(self) -> int:
        """The rows of the table of scalars."""
        return int(max(self.row, default=0)) + 1

    def h(self, member: int, at: int) -> Scalars:
        """The scalars of one member for one parameter, as a kernel receives them."""
        row = self.row[at]
        return Scalars(**{name: _plain(values[row]) for name, values in self.scalars[member].items()})

    def know(self, key: Any, value: Any) -> None:
        """Keep something about these very slots. Plans may differ at each step, so only little is kept."""
        if len(self.addresses) >= _KNOWN:
            self.addresses.clear()
        self.addresses[key] = value


def columns_of(values: dict[str, Any], rows: int) -> dict[str, Any]:
    """Every scalar as a column with one value a row."""
    if rows == 1:
        return {name: [value.item() if isinstance(value, (np.ndarray, np.generic)) else value] for name, value in values.items()}
    return {name: value if isinstance(value, np.ndarray) else [value] * rows for name, value in values.items()}


def _plain(value: Any) -> Any:
    # A NumPy scalar of float64 would promote float32 arrays.
    return value.item() if isinstance(value, np.generic) else value


class Backend(Protocol):
    """What a backend module has."""

    row_by_row: bool
    """Whether scalars may be traced: then they are worked out for each row alone, else for all rows in one vector, and what a
    member derives from its sums over one parameter is part of `run`."""

    def zeros(self, shape: tuple[int, ...], dtype: str, library: str, device: Any) -> Any:
        """A fresh slot."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Check the arrays of a batch, raising before anything changed, and bring them into the form that `run` needs."""
        ...

    def sums(self, batch: Batch, member: int) -> Sequence[Any]:
        """What `measure` of one member adds up to, for each of its sums an array over the parameters."""
        ...

    def derive(self, batch: Batch, member: int, totals: Sequence[Any]) -> None:
        """Add the scalars that a member derives from sums: numbers for all rows of the table alike, or one for each."""
        ...

    def reached(self, batch: Batch, member: int) -> Sequence[tuple[Any, Any, tuple[Any, ...]]]:
        """For each parameter what reaches one member: the gradient, the parameter and the member's slots."""
        ...

    def watch(self, batch: Batch, length: int) -> bool:
        """Make the coming `run` of so many members add up `watched`; `False` where it cannot do so on its way."""
        ...

    def run(self, batch: Batch, length: int, *, step: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """Run the first members, and subtract the outcome where `step`; returns the new parameters and slots."""
        ...


def check(batch: Batch) -> None:
    """Check every parameter and gradient of a batch against its record.

    **Raises** `ModelError`, `GradientError`, `ShapeError` or `DtypeError`, naming the path.
    """
    for path, shape, param, grad in zip(batch.paths, batch.shapes, batch.params, batch.grads, strict=True):
        check_parameter(path, shape, batch.dtype, batch.library, param, batch.device)
        check_gradient(path, shape, batch.dtype, batch.library, grad, batch.device)


def check_parameter(path: Any, shape: tuple[int, ...], dtype: str, library: str, param: Any, device: Any = None) -> None:
    """Check that a model still holds the parameter that the state knows."""
    remedy = "call adapt(state, model) for the changed model"
    found = library_of(param)
    if found is None:
        raise ModelError(f"{where(path)}: the state has a parameter here, but the model holds {_kind(param)}; {remedy}")
    if found != library and library == "numpy" and is_traced(param):
        raise ModelError(
            f"{where(path)}: the state was made for a NumPy array, and jax.jit makes one of JAX of it; make the model of JAX "
            "arrays before setup: jax.tree.map(jnp.asarray, model)"
        )
    if found != library:
        raise ModelError(f"{where(path)}: the state was made for a {library} array, but the model holds a {found} array; {remedy}")
    if tuple(param.shape) != shape:
        raise ModelError(f"{where(path)}: the state was made for shape {shape}, but the model holds {tuple(param.shape)}; {remedy}")
    if dtype_name(param) != dtype:
        raise ModelError(f"{where(path)}: the state was made for {dtype}, but the model holds {dtype_name(param)}; {remedy}")
    if library == "torch" and device is not None and device_of(param, library) != device:
        raise ModelError(
            f"{where(path)}: the state was made on {device}, but the model is on {device_of(param, library)}; {remedy}"
        )


def check_gradient(path: Any, shape: tuple[int, ...], dtype: str, library: str, grad: Any, device: Any = None) -> None:
    """Check that a gradient can serve a parameter."""
    found = "numpy" if isinstance(grad, np.generic) else library_of(grad)
    if getattr(getattr(grad, "dtype", None), "names", None) == ("float0",):
        raise DtypeError(f"{where(path)}: the gradient is float0, JAX's for what has no derivative; pass None for it")
    if found is None:
        raise GradientError(f"{where(path)}: the gradient is {_kind(grad)}, not an array; pass an array or None")
    if found != library:
        raise GradientError(f"{where(path)}: the gradient is a {found} array, the parameter a {library} array; convert it")
    if tuple(grad.shape) != shape:
        raise ShapeError(f"{where(path)}: the gradient has shape {tuple(grad.shape)}, the parameter {shape}; they must be equal")
    if str(getattr(grad, "layout", "torch.strided")) != "torch.strided":
        raise GradientError(
            f"{where(path)}: the gradient is sparse; make it dense, as with Embedding(sparse=False) or grad.to_dense()"
        )
    if library == "torch" and device is not None and device_of(grad, library) != device:
        raise GradientError(f"{where(path)}: the gradient is on {device_of(grad, library)}, the parameter on {device}; move it")
    name = dtype_name(grad)
    if not trainable_dtype(name):
        raise DtypeError(f"{where(path)}: the gradient has dtype {name}; a gradient is floating or complex, convert it")
    if name.startswith("complex") and not dtype.startswith("complex"):
        raise DtypeError(f"{where(path)}: the gradient is {name}, the parameter {dtype}; take the real part of the gradient")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
