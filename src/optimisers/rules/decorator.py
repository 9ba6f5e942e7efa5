"""The decorator that makes a class a rule, and the checks of what a class may say."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

from optimisers.errors import HyperparameterError, suggest
from optimisers.rules.base import Rule, Slot

__all__ = ["rule"]

_Cls = TypeVar("_Cls", bound="type[Rule]")


@dataclass_transform(frozen_default=True)
def rule(cls: _Cls) -> _Cls:
    """Make a subclass of `Rule` a rule: a frozen dataclass whose arithmetic is static. See `Rule`.

    **Raises** `HyperparameterError` for a class that is none, naming what it lacks.
    """
    if not (isinstance(cls, type) and issubclass(cls, Rule)):
        raise HyperparameterError(f"{cls!r} is not a subclass of optimisers.Rule")
    for name in ("kernel", "measure", "measured", "apply", "apply_tree", "remember", "load", "store"):
        function = cls.__dict__.get(name)
        if callable(function) and not isinstance(function, (staticmethod, property)):
            setattr(cls, name, staticmethod(function))
    _check_arguments(cls)
    _check_scope(cls)
    _check_annotations(cls)
    if cls.kernel is None and cls.apply is None and cls.apply_tree is None and cls.members is Rule.members:
        raise HyperparameterError(f"the rule {cls.__name__} has neither a kernel nor an apply; define one of them")
    made = dataclasses.dataclass(frozen=True, repr=False)(cls)
    if "__init__" in made.__dict__ and "__wrapped__" not in vars(made.__init__) and made.members is Rule.members:
        made.__init__ = _with_known_names(made.__init__)
    return made


_ELSEWHERE = {
    "weight_decay": "; AdamW has it, and Chain(WeightDecay(…), …) adds it to any rule",
    "amsgrad": "; the rules AMSGrad and AdamW have it",
}
_OTHER_NAMES = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas", "b1": "betas", "b2": "betas", "wd": "weight_decay"}


def _with_known_names(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that names the nearest hyperparameter for one that it does not know."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        for name in kwargs:
            if name not in names:
                hint = f'; it is called "{_OTHER_NAMES[name]}" here' if _OTHER_NAMES.get(name) in names else suggest(name, names)
                hint = _ELSEWHERE.get(name, hint)
                raise HyperparameterError(f'{type(self).__name__} has no hyperparameter "{name}"{hint}')
        init(self, *args, **kwargs)

    return checked


def _check_arguments(cls: type[Rule]) -> None:
    """Check the arguments of what a rule says: a kernel and its like are functions of elements, not methods."""
    slots, memory = cls.slots, cls.memory
    elements = ["xp", "g", "p", "h", *(slots if isinstance(slots, Mapping) else ())]
    arguments: dict[str, list[str]] = {
        "kernel": elements,
        "measure": elements,
        "measured": ["xp", "h", *(f"sum_{at + 1}" for at in range(cls.sums))],
        "apply": ["xp", "g", "p", "h", "slots"],
        "scalars": ["self", "step", *(memory if isinstance(memory, Mapping) else ())],
    }
    if isinstance(memory, Mapping):
        arguments["remember"] = ["h", *memory]
    for name, wanted in arguments.items():
        function = cls.__dict__.get(name)
        if isinstance(function, property) or not callable(function) or (wanted is elements and not isinstance(slots, Mapping)):
            continue
        names = list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
        plain = [each for each in names if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        needed = [each for each in plain if each.default is each.empty]
        fits = len(plain) < len(names) or len(needed) <= len(wanted) <= len(plain)
        if not fits or (wanted[0] != "self" and names[0].name == "self"):
            no_self = "" if wanted[0] == "self" else ", and no self"
            raise HyperparameterError(
                f"{cls.__name__}.{name} takes ({', '.join(each.name for each in names)}); "
                f"{'with its slots ' if wanted is elements else ''}it takes ({', '.join(wanted)}){no_self}"
            )


def _check_scope(cls: type[Rule]) -> None:
    """Check that what a rule decides can be decided in its scope."""
    if cls.scope not in (None, "leaf", "tree") and not isinstance(cls.scope, property):
        raise HyperparameterError(f'{cls.__name__}.scope is {cls.scope!r}; a scope is "leaf" or "tree"')
    if cls.measure is not None and not isinstance(cls.measure, property) and cls.scope not in ("leaf", "tree"):
        raise HyperparameterError(f'{cls.__name__} measures, so it says over what: scope = "leaf" or "tree"')
    if cls.apply_tree is not None and not isinstance(cls.apply_tree, property) and cls.scope != "tree":
        raise HyperparameterError(f'{cls.__name__} acts on the whole tree, so it says scope = "tree"')
    if cls.scope == "leaf" and (cls.gate or cls.memory):
        raise HyperparameterError(f'{cls.__name__} has a gate or a memory, and those are for the whole tree: scope = "tree"')
    if cls.measure is not None and cls.measured is None:
        raise HyperparameterError(f"{cls.__name__} measures, so it says what follows from the sums: measured(xp, h, *sums)")
    slots = cls.__dict__.get("slots", {})
    if isinstance(slots, (list, tuple, set, str)):
        raise HyperparameterError(f"{cls.__name__}.slots is {slots!r}; slots are named with their kind: slots = {{'mu': LIKE}}")
    for name, kind in slots.items() if isinstance(slots, Mapping) else ():
        if not isinstance(kind, Slot):
            raise HyperparameterError(
                f"{cls.__name__}.slots: {name} is {kind!r}, and not a kind such as LIKE, REAL, COPY or Slot(…)"
            )
    if cls.apply is None and isinstance(slots, Mapping) and any(slot.shape for slot in slots.values()):
        raise HyperparameterError(
            f"{cls.__name__} has slots of another shape than the parameter, which a kernel cannot fill; write apply"
        )


def _check_annotations(cls: type[Rule]) -> None:
    """Check that numbers in the class are annotated: without that, they are no hyperparameters."""
    for name, value in vars(cls).items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not name.startswith("_") and name not in vars(Rule) and name not in cls.__annotations__:
            raise HyperparameterError(
                f"{cls.__name__}.{name} has no annotation, so it is no hyperparameter; write {name}: Hyper = {value!r}"
            )
