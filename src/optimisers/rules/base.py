"""What a rule is: hyperparameters, slots, scalars of a step, and the arithmetic of one element."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, TypeAlias, Union, get_args, get_origin

import numpy as np

from optimisers.errors import HyperparameterError, suggest
from optimisers.rules.values import is_number, is_traced

__all__ = [
    "ABOVE_ZERO",
    "COPY",
    "LIKE",
    "REAL",
    "Hyper",
    "Rule",
    "Slot",
    "member_names",
    "named",
    "static",
]

Hyper: TypeAlias = Any
"""A hyperparameter: a number, or a schedule, which is any function of the state's step (counted from 0).

To a type checker it is anything, so that rules can calculate with it; a rule checks it when it is made.
"""


def _itself(parameter: Any) -> Any:
    return parameter


@dataclasses.dataclass(frozen=True)
class Slot:
    """The kind of a state array: its dtype and shape, from those of the parameter. Slots start at zero.

    - `real`: the real dtype even where the parameter is complex.
    - `start`: a function from the parameter to what the slot starts as, in place of zeros. It is called at `setup`, or at the
      first step that finds no slot.
    - `wide`: at least float32, whatever `state_dtype` says.
    - `dtype`: exactly this dtype.
    - `shape`: a function from the parameter's shape to the slot's; the same shape by default.
    """

    real: bool = False
    start: Callable[[Any], Any] | None = None
    wide: bool = False
    dtype: str | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


LIKE = Slot()
REAL = Slot(real=True)
COPY = Slot(start=_itself)

ABOVE_ZERO = (math.ulp(0.0), math.inf, False)
"""The range of a number that is not zero."""

# Inclusive lower bound, upper bound, whether the upper bound itself is allowed.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "lr": (0.0, math.inf, False),
    "betas": (0.0, 1.0, False),
    "eps": (0.0, math.inf, False),
    "weight_decay": (0.0, math.inf, False),
    "momentum": (0.0, math.inf, False),
    "dampening": (-math.inf, math.inf, False),
}


class Rule:
    """An update rule and its hyperparameters: an immutable value.

    A rule of your own is a class under the decorator `rule` that says:

    - its hyperparameters, as fields: numbers (or schedules) are data, which `adjust` changes freely;
      `bool`, `str`, `None` and other rules are static, since they shape the computation;
    - `slots`: the name and kind (`LIKE`, `REAL`, `COPY`, or a `Slot`) of each state array. Slots start at zero, as a copy of the
      parameter, or as what a function makes of it;
    - `scalars(self, step)`: the numbers of this step, for all elements alike, as a `dict`. `step` is the parameter's
      own count, 1 at its first step. It must be plain arithmetic: it also runs on arrays and tracers;
    - `kernel(xp, g, p, h, *slots)`: one element. `g` is the gradient (in a chain, what the rule before returned), `p`
      the parameter, `h` the scalars as attributes, `xp` a namespace of functions (`sqrt`, `abs2`, `where`, …). It
      returns what is subtracted from `p`, then the new value of each slot. Constants belong in `scalars`.

    And, where one element does not tell enough:

    - `measure(xp, g, p, h, *slots)`: what one element adds to one or more sums, over the parameter (`scope = "leaf"`) or
      over all live parameters (`scope = "tree"`), a tuple where the class says `sums = 2` or more;
      `measured(xp, h, *sums)` turns the sums into further scalars;
    - `gate = True`: the scalar `open` tells whether what follows in the chain, and the step itself, takes place;
    - `memory`: numbers that the rule keeps for the whole tree, passed to `scalars` by name; `remember(h, **memory)`
      returns their next values;
    - `apply(xp, g, p, h, slots)`: in place of `kernel`, on whole arrays, returning the step and a tuple of new slots;
    - `apply_tree(h, grads, params, slots, **memory)`: in place of `kernel`, on all live parameters at once: mappings from
      path to array, and to a tuple of slots. It returns the steps, the new slots and the new memory;
    - `refuses(self, shape, dtype)`: the reason why a parameter cannot be trained by this rule, or `None`;
    - `rule_for(self, shape, dtype)`: the rule that takes this one's place for such a parameter;
    - `ranges`: for a hyperparameter its least value, its upper bound, and whether it may be the bound itself;
    - `options`: the names of numbers that are static nevertheless, such as a number of iterations;
    - `switches`: the names of numbers of which zero is static: with it, the rule has another kernel or other slots;
    - `keyed = True`: a scalar `key`, which tells parameters apart, for random numbers;
    - `load(xp, p, h, slot)`: the parameter that the chain acts on, in place of the one in the model. Its new value is kept in
      the rule's only slot;
    - `store(xp, p, h)`: what goes into the model in place of the outcome;
    - `rank`: above 0 for a part that has to stand at the end of a chain, after all of a lower rank;
    - `individual`: for a rule with `memory`, the hyperparameters in which parameters may differ all the same;
    - `unsaved`: the reason why a file cannot hold its state, and what to do instead.

    Example:
        >>> import numpy as np
        >>> import optimisers as op
        >>> @op.rule
        ... class SignDescent(op.Rule):
        ...     lr: op.Hyper = 0.1
        ...     def scalars(self, step):
        ...         return {"lr": self.lr}
        ...     def kernel(xp, g, p, h):
        ...         return h.lr * xp.sign(g)
        >>> model = {"w": np.array([1.0, 2.0])}
        >>> state, model = op.update(op.setup(SignDescent(), model), model, {"w": np.array([5.0, -5.0])})
        >>> model["w"]
        array([0.9, 2.1])
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    scope: ClassVar[str | None] = None
    sums: ClassVar[int] = 1
    gate: ClassVar[bool] = False
    memory: ClassVar[Mapping[str, float]] = {}
    ranges: ClassVar[Mapping[str, tuple[float, float, bool]]] = {}
    switches: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 0
    keyed: ClassVar[bool] = False
    load: ClassVar[Callable[..., Any] | None] = None
    store: ClassVar[Callable[..., Any] | None] = None
    individual: ClassVar[tuple[str, ...]] = ()
    unsaved: ClassVar[str | None] = None
    kernel: ClassVar[Callable[..., Any] | None] = None
    measure: ClassVar[Callable[..., Any] | None] = None
    measured: ClassVar[Callable[..., Any] | None] = None
    apply: ClassVar[Callable[..., Any] | None] = None
    apply_tree: ClassVar[Callable[..., Any] | None] = None
    remember: ClassVar[Callable[..., Any] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "__dataclass_fields__" not in vars(cls):
            raise HyperparameterError(f"{cls.__name__} is no rule yet; put the decorator @optimisers.rule on the class")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in _fields(self):
            value = _plain(getattr(self, field.name))
            usual = field.default
            if field.type is not int and (usual is dataclasses.MISSING or all(isinstance(part, float) for part in _parts(usual))):
                value = _floats(value)
            object.__setattr__(self, field.name, value)
            if not _fits(value, field):
                raise HyperparameterError(f"{type(self).__name__}({field.name}={value!r}): {field.name} is {_kind(field)}")
            self._check(field.name, value)

    def _check(self, name: str, value: Any) -> None:
        parts = value if isinstance(value, tuple) else (value,)
        bounds = self.ranges.get(name) or _RANGES.get(name)
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, (int, float)):
                continue
            here = f"{type(self).__name__}({name}={value!r})"
            if math.isnan(part):
                raise HyperparameterError(f"{here}: {name} is not a number; give a finite value")
            below = bounds and (part < bounds[0] or part == -math.inf)
            if bounds and (below or not (part < bounds[1] or (bounds[2] and part == bounds[1]))):
                least = 0.0 if bounds[0] == math.ulp(0.0) else bounds[0]
                left, right = "(" if bounds[0] in (-math.inf, math.ulp(0.0)) else "[", "]" if bounds[2] else ")"
                raise HyperparameterError(f"{here}: {name} must lie in {left}{least:g}, {bounds[1]:g}{right}")

    def _check_whole(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, float) and not value.is_integer():
            raise HyperparameterError(f"{type(self).__name__}({name}={value!r}): {name} is a whole number")

    def __repr__(self) -> str:
        # Options are shown where they are not as usual.
        usual = {field.name: field.default for field in _fields(self)}
        shown = [
            f"{name}={_show(value)}"
            for name, value in self.hyperparameters.items()
            if _is_number_or_schedule(value) or any(map(is_number, _parts(value))) or value != usual[name]
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Every field and its value, by name."""
        return {field.name: getattr(self, field.name) for field in _fields(self)}

    @property
    def key(self) -> Any:
        """What stands for the rule in a dict: itself, or its identity where a schedule of its own cannot be hashed."""
        try:
            hash(self)
        except TypeError:
            return id(self)
        return self

    @property
    def rate(self) -> tuple[str, Any] | None:
        """The learning rate, a number or a schedule, with the name of its member: in a chain, the last that there is."""
        members = [*zip(member_names(self.members), self.members, strict=True)]
        found = ((name, each.hyperparameters["lr"]) for name, each in reversed(members) if "lr" in each.hyperparameters)
        return next(found, None)

    @property
    def counts(self) -> bool:
        """Whether the parameter's own count matters to this rule: some of its scalars depend on it."""
        rule = self.at(0)
        return any(rule.scalars(1, **self.memory) != rule.scalars(step, **self.memory) for step in (2, 1000))

    @property
    def members(self) -> "tuple[Rule, ...]":
        """The rules that this one consists of, in order: itself, or the members of a chain."""
        return (self,)

    def adjusted(self, **changes: Any) -> Self:
        """This rule with other values of its hyperparameters: `adjusted(lr=0.1)`, or `adjusted(adam={"lr": 0.1})`.

        **Raises** `HyperparameterError` for a name that the rule lacks, a value out of range, or a static option, since
        that changes the shape of the state (`State.replace` does that).
        """
        mine = self.hyperparameters
        me = type(self).__name__.lower()
        if isinstance(changes.get(me), Mapping):
            own = named(me, changes.pop(me))
            changes = {**changes, **own}
        elif me in changes and me not in mine:
            named(me, changes[me])
        for name in changes:
            if name not in mine:
                raise HyperparameterError(f'{type(self).__name__} has no hyperparameter "{name}"{suggest(name, mine)}')
        if any(getattr(part, "ndim", 0) for value in mine.values() for part in _parts(value)):
            raise HyperparameterError(
                f"{type(self).__name__}: these are the numbers of an ensemble; adjust them where they are numbers: "
                "jax.vmap(lambda state: state.adjust(…))(state)"
            )
        changed = dataclasses.replace(self, **changes)  # type: ignore[type-var]
        for name, value in changes.items():
            if static(mine[name]) != static(_plain(value)) or (name in self.options and mine[name] != value):
                raise HyperparameterError(
                    f"{type(self).__name__}.{name} is {mine[name]!r}, and {value!r} would change the computation "
                    "and not only a number in it; use state.replace(selector, rule)"
                )
        if (changed.kernel, changed.apply, dict(changed.slots)) != (self.kernel, self.apply, dict(self.slots)):
            raise HyperparameterError(f"{changed!r} has other slots than {self!r}; use state.replace(selector, rule)")
        return changed

    def at(self, step: Any) -> Self:
        """This rule with each schedule replaced by its value at a step."""
        mine = self.hyperparameters
        if not any(callable(part) for value in mine.values() for part in _parts(value)):
            return self
        values = {name: _at(value, step) for name, value in mine.items()}
        for name, value in values.items():
            if callable(mine[name]) and (callable(value) or not _is_number_or_schedule(value, 0.0)):
                raise HyperparameterError(
                    f"the schedule for {type(self).__name__}.{name} returned {value!r} at step {step}, not a number"
                )
            self._check(name, value)
        return self.with_values(values)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy whose fields hold anything at all (arrays, tracers), unchecked."""
        copy = object.__new__(type(self))
        for name, value in values.items():
            object.__setattr__(copy, name, value)
        return copy

    def scalars(self, step: Any, **memory: Any) -> dict[str, Any]:
        """The numbers of one step, for all elements alike."""
        return {}

    def rule_for(self, shape: tuple[int, ...], dtype: str) -> "Rule":
        """The rule that trains a parameter of this shape and dtype: this one, unless it knows a better."""
        return self

    def refuses(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """Why a parameter of this shape and dtype cannot be trained by this rule, or `None`."""
        return None


def _fields(rule: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(rule)


def member_names(members: Iterable[Rule]) -> list[str]:
    """The names of the members of a chain: their classes', numbered where one occurs again: `adam`, `adam_2`."""
    seen: dict[str, int] = {}
    names = []
    for member in members:
        name = type(member).__name__.lower()
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def named(member: str, given: Any) -> Mapping[str, Any]:
    """The hyperparameters of one member, as `adjusted(adam={"lr": 0.1})` gives them.

    **Raises** `HyperparameterError` for anything but a mapping of names.
    """
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise HyperparameterError(f'"{member}" is a rule; give its hyperparameters by name, {member}={{"…": …}}, and not {given!r}')


def static(value: Any) -> Any:
    """The part of a hyperparameter that shapes the computation: the value itself, or `None` for data."""
    if isinstance(value, tuple):
        return tuple(static(part) for part in value)
    if value is None or isinstance(value, (bool, str, Rule)):
        return value if value is not None else "None"
    return None


def _is_number_or_schedule(value: Any, like: Any = None) -> bool:
    """Whether a value is a number or a schedule, or as many of them as another value holds."""
    if isinstance(like, tuple) or (like is None and isinstance(value, tuple)):
        return (
            isinstance(value, tuple)
            and (like is None or len(value) == len(like))
            and all(_is_number_or_schedule(part, 0.0) for part in value)
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or (callable(value) and not isinstance(value, (Rule, type))) or getattr(value, "shape", None) == ()


def _fits(value: Any, field: "dataclasses.Field[Any]") -> bool:
    """Whether a value is of the kind that the default and the annotation of its field ask for."""
    usual = field.default
    if usual is not dataclasses.MISSING and _is_number_or_schedule(usual):
        return _is_number_or_schedule(value, like=usual) and (field.type is not int or _is_of(value, int))
    return field.type is Any or _is_of(value, field.type)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Any:
        return _is_number_or_schedule(value, 0.0)
    if kind is int:
        return (isinstance(value, int) and not isinstance(value, bool)) or getattr(value, "shape", None) == ()
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple and ... not in get_args(kind):
        kinds = get_args(kind)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is_of, value, kinds))
    checked = isinstance(kind, type) and (kind in (bool, str, NoneType) or issubclass(kind, Rule))
    return not checked or isinstance(value, kind)


def _kind(field: "dataclasses.Field[Any]") -> str:
    usual = field.default
    if isinstance(usual, tuple):
        return f"{len(usual)} numbers or schedules"
    if field.type is int:
        return "a whole number"
    if usual is not dataclasses.MISSING and _is_number_or_schedule(usual):
        return "a number or a schedule"
    kinds = get_args(field.type) or (field.type,)
    words = {Any: "a number or a schedule", bool: "True or False", str: "a string", NoneType: "None", Rule: "a rule"}
    return " or ".join(words.get(each, str(each)) for each in kinds)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    elif not isinstance(value, Rule):
        yield value


def _at(value: Any, step: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(part, step) for part in value)
    return value(step) if callable(value) and not isinstance(value, Rule) else value


def _plain(value: Any) -> Any:
    """Scalars of array libraries as Python numbers: they would promote arrays of narrower types. A tracer stays."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(part) for part in value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.shape == ()):
        return value.item()
    if getattr(value, "weak_type", True) is False and value.shape == () and not is_traced(value):
        # An array of JAX with a type of its own. As a number, in the digits of its type.
        return type(value.item())(str(np.asarray(value)))
    return value


def _floats(value: Any) -> Any:
    """Whole numbers as floats: `lr=1` is as good as `lr=1.0`, and of the same type."""
    if isinstance(value, tuple):
        return tuple(_floats(part) for part in value)
    return float(value) if type(value) is int else value


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_show(part) for part in value)})"
    if getattr(value, "shape", None) == () and hasattr(value, "__array__") and not is_traced(value):
        return str(np.asarray(value))
    return getattr(value, "__qualname__", None) or repr(value)
