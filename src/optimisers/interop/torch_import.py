"""Optimisers of PyTorch taken over in mid-training, with their moments, counts and groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optimisers.assignment import assign
from optimisers.errors import HyperparameterError, ModelError, PathError, ShapeError, StateError, suggest
from optimisers.interop.torch_groups import name_of
from optimisers.interop.torch_kinds import KINDS, Kind, check_dict
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import parameters_of
from optimisers.model.torch_nodes import without_shells
from optimisers.model.trees import opened
from optimisers.rules.adam import Adam, AdamW, AMSGrad
from optimisers.rules.adaptive import AdaGrad
from optimisers.rules.base import Rule
from optimisers.rules.chain import Chain
from optimisers.rules.decay import WeightDecay
from optimisers.rules.lion import Lion
from optimisers.rules.program import Program
from optimisers.slots import slot_dtypes
from optimisers.state import State, check_step, new_state

__all__ = ["from_torch"]


_CAUTIOUS = {"cautious_factor": 1.0, "caution": False, "corrected_weight_decay": False}
"""Further entries in groups of Lion, and the value with which they mean nothing."""


# From PyTorch ---------------------------------------------------------------------------------------------------------


def from_torch(
    optimizer: Any,
    module: Any,
    *,
    kind: "str | type | None" = None,
    names: Sequence[str] | None = None,
    step: int | None = None,
) -> State:
    """Take over an optimiser of PyTorch: the state that goes on where it stands.

    Every parameter keeps its moments (copied), its count and the hyperparameters of its group. Parameters that have not stepped yet
    start at zero; those that the optimiser does not have are left out, as by `setup(trainable=…)`. The optimiser is not changed.

    SGD, Adamax and Rprop go on bit for bit on the CPU, in the compiled pass; the others round in another order, which tells in the
    last few bits. A learning rate that is a tensor counts as the number it holds. Moments in half precision become float32.

    **Arguments:**

    - `optimizer`: a `torch.optim` SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam or Rprop, or a Lion of any
      package; or its state dict, as `torch.load(…, weights_only=True)` gives it.
    - `module`: the model that it trains.
    - `kind`: the name of the optimiser, or its class, where the dict does not tell (that of an AdamW before PyTorch 2.6) or the
      class is one of your own that steps as one of those.
    - `names`: for a state dict, the names of the parameters in the optimiser's order. By default the `param_names` that are in the
      dict; or else, if there is one group, the order of `module.parameters()`.
    - `step`: the count of the state, which schedules read, and of parameters of which PyTorch keeps none (SGD, Lion). By
      default the greatest count of a parameter.

    **Raises** `HyperparameterError` for an optimiser that has no counterpart, or one that maximises; `StateError` for parameters
    that do not match the module; `PathError` for names that it lacks; `ShapeError` for moments of another shape. Each names the
    path.

    Example:
        >>> import torch, optimisers as op
        >>> from optimisers.interop.torch_import import from_torch
        >>> module = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        >>> module(torch.ones(3)).sum().backward()
        >>> optimizer.step()
        >>> from_torch(optimizer, module)
        State(step=1, 2 parameters, AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01))
    """
    check_step(step, "from_torch")
    found = parameters_of(module)
    records = [record for record, _ in found]
    own, groups, form = _read(optimizer, module, found, kind, names)
    ours, theirs = [], []
    for at, record in enumerate(records):
        if at in own:
            ours.append(record)
            theirs.append((found[at][1], own[at]))
    excluded = frozenset(path for at, record in enumerate(records) if at not in own for path in record.paths)
    rules = _rules(form, groups)
    chosen = {record.path: rules[id(entry.group)] for record, (_, entry) in zip(ours, theirs, strict=True)}
    different, numbers = assign(lambda record: chosen[record.path], ours)
    ours = [record._replace(group=group) for record, group in zip(ours, numbers, strict=True)]
    state = new_state(ours, different, excluded, idle=range(len(ours)))
    slots: list[Any] = []
    counts: list[int] = []
    for parameter, (array, entry) in zip(state.parameters, theirs, strict=True):
        count, kept = _leaf(
            parameter,
            array,
            entry.state,
            form,
            state.layout.programs[parameter.group],
            step,
            _number(entry.group.get("initial_accumulator_value", 0.0)),
        )
        counts.append(count)
        slots.append(kept)
    parameters = [parameter._replace(counter=at) for at, parameter in enumerate(state.parameters)]
    return state.arranged(parameters, slots, counters=counts or (0,), step=max(counts, default=0) if step is None else step)


class _Entry(NamedTuple):
    """What an optimiser has for one parameter."""

    group: Mapping[str, Any]
    state: Mapping[str, Any]


def _read(
    optimizer: Any, module: Any, found: Sequence[tuple[Parameter, Any]], kind: Any, names: Sequence[str] | None
) -> tuple[dict[int, _Entry], Sequence[Mapping[str, Any]], Kind]:
    """The entries by the numbers of their parameters, the groups, and the kind."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if names is not None:
            raise StateError("names are for a state dict; an optimiser knows its parameters itself")
        groups, states = optimizer.param_groups, optimizer.state
        form = _kind_named(kind) if kind is not None else _kind_of(type(optimizer))
        places = _by_object(groups, module, found)
    elif isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
        groups, states = optimizer["param_groups"], optimizer["state"]
        check_dict(optimizer)
        form = _kind_named(kind) if kind is not None else _kind_told_by(groups)
        places = _by_order(groups, module, found, names)
    else:
        inner = [key for key, each in optimizer.items() if isinstance(each, Mapping)] if isinstance(optimizer, Mapping) else []
        hint = f"; it has {', '.join(map(repr, inner[:5]))}" if inner else ""
        raise ModelError(
            "from_torch takes an optimiser of torch.optim or its state dict, then the module, and not "
            f"{type(optimizer).__name__}{hint}"
        )
    own: dict[int, _Entry] = {}
    keys = [(group, key) for group in groups for key in group["params"]]
    for at, (group, key) in zip(places, keys, strict=True):
        if at is None:
            continue
        if at in own:
            raise StateError(f"{found[at][0].path} stands in the optimiser twice; it is one parameter and has one state")
        own[at] = _Entry(group, states.get(key, {}))
    return own, groups, form


def _by_object(groups: Any, module: Any, found: Sequence[tuple[Parameter, Any]]) -> Iterator[int]:
    """The numbers of the parameters that an optimiser holds."""
    known = _Known(module, found)
    for number, group in enumerate(groups):
        for position, tensor in enumerate(group["params"]):
            at = known.number(tensor)
            if at is None:
                name = (group.get("param_names") or {position: f"number {position} of group {number}"})[position]
                raise StateError(
                    f"the optimiser trains a parameter that the module does not hold: {name}, of shape {tuple(tensor.shape)}; "
                    "give the module that it was made for, or its state dict"
                )
            yield at


class _Known:
    """The parameters of a module, told by their tensors."""

    def __init__(self, module: Any, found: Sequence[tuple[Parameter, Any]]) -> None:
        leaves, structure = opened(module)
        self._numbers = {id(array): at for at, (_, array) in enumerate(found)}
        self._places = {id(leaf): path for path, leaf in zip(structure.paths, leaves, strict=True)}
        self._canonical = {path: record.path for record, _ in found for path in record.paths}

    def number(self, tensor: Any) -> int | None:
        """The number of a parameter; `None` for a tensor that is none.

        **Raises** `StateError` for a further view of a parameter.
        """
        at, path = self._numbers.get(id(tensor)), self._places.get(id(tensor))
        if at is None and path is not None and path in self._canonical:
            raise StateError(
                f"{path} and {self._canonical[path]} lie in the same memory, so they are one parameter here, and the optimiser has "
                f"{path} apart; give the module one Parameter at both places"
            )
        return at


def _by_order(
    groups: Any, module: Any, found: Sequence[tuple[Parameter, Any]], names: Sequence[str] | None
) -> Sequence[int | None]:
    """The numbers of the parameters that a state dict speaks of; `None` for a parameter of the module that cannot train."""
    count = sum(len(group["params"]) for group in groups)
    if names is None and groups and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is not None:
        if len(names) != count:
            raise StateError(f"the state dict has {count} parameters, but {len(names)} names are given")
        return list(map(_finder(found), names))
    if len(groups) > 1:
        raise StateError(
            f"the state dict has {len(groups)} groups and no names, so the order of its parameters need not be that of the module; "
            "give them with names=…, in the order in which the optimiser was given them"
        )
    tensors = list(module.parameters()) if isinstance(module, torch.nn.Module) else [array for _, array in found]
    asking = [tensor for tensor in tensors if tensor.requires_grad]
    if count not in (len(tensors), len(asking)):
        also = f", of which {len(asking)} ask for a gradient" if len(asking) < len(tensors) else ""
        raise StateError(
            f"the state dict has {count} parameters, and the module {len(tensors)}{also}; give the names of those that the "
            "optimiser was given, in their order, with names=…"
        )
    chosen = tensors if count == len(tensors) else asking
    known = _Known(module, found)
    return [known.number(tensor) for tensor in chosen]


def _finder(found: Sequence[tuple[Parameter, Any]]) -> Callable[[str], int]:
    """The function from PyTorch's name of a parameter to its number, with or without the shells around modules."""
    numbers = {name_of(path): at for at, (record, _) in enumerate(found) for path in record.paths}

    def find(name: str) -> int:
        if not isinstance(name, str):
            raise StateError(f"names of parameters are texts, and not {name!r}")
        for each in map(name_of, (Path(tuple(name.split("."))), *without_shells(Path(tuple(name.split(".")))))):
            if each in numbers:
                return numbers[each]
        raise PathError(f'the optimiser has a parameter "{name}", the module has none there{suggest(name, numbers)}')

    return find


# Kinds and rules ------------------------------------------------------------------------------------------------------


def _kind_named(kind: Any) -> Kind:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if name not in KINDS:
        raise HyperparameterError(f'no rule steps as "{name}"{suggest(name, KINDS)}')
    return KINDS[name]


def _kind_of(cls: type) -> Kind:
    """The kind of a class: one of `torch.optim`, one that steps as it does, or a Lion."""
    for base in cls.__mro__:
        if base.__name__ == "Lion" or (base.__name__ in KINDS and base.__module__.startswith("torch.optim.")):
            return KINDS[base.__name__]
        if "step" in vars(base):
            break
    raise HyperparameterError(
        f"from_torch does not know how {cls.__module__}.{cls.__qualname__} steps; if it does as one of {', '.join(KINDS)}, say "
        "which with kind=…"
    )


def _kind_told_by(groups: Sequence[Mapping[str, Any]]) -> Kind:
    keys = groups[0].keys() if groups else frozenset[str]()
    name = next((name for name, kind in KINDS.items() if kind.marks <= keys), None)
    if name is None:
        raise HyperparameterError(
            f"the groups of the state dict ({', '.join(sorted(keys - {'params', 'param_names'}))}) are those of no optimiser that "
            f"is known: {', '.join(KINDS)}"
        )
    if name == "AdamW" and not all("decoupled_weight_decay" in group for group in groups):
        raise HyperparameterError(
            'the state dict may be that of an Adam or of an AdamW; say which with kind="Adam" or kind="AdamW"'
        )
    if name == "AdamW" and not groups[0]["decoupled_weight_decay"]:
        name = "Adam"
    return KINDS[name]


def _rules(form: Kind, groups: Sequence[Mapping[str, Any]]) -> dict[int, Rule]:
    """The rule of each group, by its identity."""
    decays = any(_number(group.get("weight_decay", 0.0)) for group in groups)
    return {id(group): _rule(form, group, decays) for group in groups}


def _rule(form: Kind, group: Mapping[str, Any], decays: bool) -> Rule:
    if group.get("maximize"):
        raise HyperparameterError("the optimiser maximises (maximize=True), which no rule does; minimise the negative loss")
    if "lr" not in group:
        raise HyperparameterError("a group of the optimiser has no lr; give the optimiser's state_dict() as it is")
    decoupled = form.rule is AdamW if form.rule not in (Adam, AdamW) else group.get("decoupled_weight_decay", form.rule is AdamW)
    rule: Callable[..., Rule] = form.rule
    if rule in (Adam, AdamW):
        rule = AdamW if decoupled else AMSGrad if group.get("amsgrad") else Adam
    if rule is Lion:
        for name, usual in _CAUTIOUS.items():
            if group.get(name, usual) != usual:
                raise HyperparameterError(f"the optimiser is a Lion with {name}={group[name]!r}, which the rule Lion does not have")
    fields = rule.__dataclass_fields__  # type: ignore[attr-defined]  # every rule is a dataclass
    made = rule(**{name: _number(group[name]) for name in fields if name in group})
    # Groups with and without decay share one program, and so take their steps together.
    if rule in (Adam, AMSGrad) and decays:
        return Chain(WeightDecay(_number(group.get("weight_decay", 0.0))), made)
    return made


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise HyperparameterError(f"a hyperparameter of the optimiser is a tensor of shape {tuple(value.shape)}, and no number")
    return value.item() if isinstance(value, torch.Tensor) else value


# Slots ----------------------------------------------------------------------------------------------------------------


def _leaf(
    parameter: Parameter, array: Any, state: Mapping[str, Any], form: Kind, program: Program, step: int | None, initial: float
) -> tuple[int, tuple[Any, ...] | None]:
    """The count of a parameter and its slots, `None` before its first step."""
    if form.counted:
        count = _count(parameter, state)
    else:
        # Without a buffer, the next step is as a first one.
        begun = all(state.get(form.slots[name]) is not None for name, _ in program.slots)
        count = 0 if not begun or not state else 1 if step is None else step
    if form.rule is AdaGrad and count == 0 and "sum" in state:
        # It is there from the start, and need not be what the group says, which the rule adds at the first step.
        own = state["sum"].detach() - initial
        return 0, (own,) if own.any() else None
    if count == 0:
        return 0, None
    kept = []
    for (name, slot), dtype in zip(program.slots, slot_dtypes(parameter, program), strict=True):
        theirs = form.slots[name]
        own = state.get(theirs)
        if not isinstance(own, torch.Tensor):
            raise StateError(f"{parameter.path}: the optimiser has stepped, but its state has no {theirs}")
        if tuple(own.shape) != parameter.shape:
            raise ShapeError(
                f"{parameter.path}: {theirs} has shape {tuple(own.shape)}, the parameter {parameter.shape}; the optimiser was made "
                "for another model, or another order of parameters"
            )
        if own.is_complex() and slot.real:
            raise StateError(
                f"{parameter.path}: for complex parameters PyTorch keeps squares of the real and the imaginary part, and the rules "
                "here one of the absolute value; set its state up anew"
            )
        # As it lies in memory, the parameter is; so a step goes through both in one order.
        made = torch.empty_like(array, dtype=getattr(torch, dtype), requires_grad=False)
        kept.append(made.copy_(own.detach()))
    return count, tuple(kept)


def _count(parameter: Parameter, state: Mapping[str, Any]) -> int:
    count = state.get("step", 0)
    if isinstance(count, torch.Tensor):
        count = count.item() if count.numel() == 1 else count.tolist()
    if not isinstance(count, (int, float)) or not 0 <= count < 2**53 or count != int(count):
        raise StateError(f"{parameter.path}: the optimiser's count of steps is {count!r}, which is no whole number")
    return int(count)
