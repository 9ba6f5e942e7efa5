"""Optimisers of PyTorch taken over in mid-training, with their moments, counts and groups; and states given back to PyTorch."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from optimisers.assignment import assign
from optimisers.backends.base import check_parameter
from optimisers.errors import HyperparameterError, ModelError, PathError, ShapeError, StateError, suggest
from optimisers.interop.torch_groups import name_of
from optimisers.model.layout import Parameter, slot_dtypes
from optimisers.model.paths import Path
from optimisers.model.reading import open_with, parameters_of
from optimisers.model.trees import opened
from optimisers.rules.adam import Adam, AdamW, AMSGrad
from optimisers.rules.adam_variants import AdaMax, NAdam, RAdam
from optimisers.rules.adaptive import AdaDelta, AdaGrad, RMSProp, Rprop
from optimisers.rules.base import Rule
from optimisers.rules.chain import Chain
from optimisers.rules.decay import WeightDecay
from optimisers.rules.descent import SGD, Descent, Momentum, Nesterov
from optimisers.rules.lion import Lion
from optimisers.rules.program import Program
from optimisers.state import State, check_state, check_step, new_state

__all__ = ["from_torch", "to_state_dict", "to_torch"]


class _Kind(NamedTuple):
    """A class of optimisers: the rule with the same hyperparameters, and the names that PyTorch has for its slots."""

    rule: Callable[..., Rule]
    slots: Mapping[str, str]
    marks: frozenset[str]
    """The entries of its groups by which it is known."""
    counted: bool = True


_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_PEAK = {**_MOMENTS, "peak": "max_exp_avg_sq"}

# Where a dict could be of several kinds, the first counts.
_KINDS: Mapping[str, _Kind] = {
    "SGD": _Kind(SGD, {"velocity": "momentum_buffer"}, frozenset(("momentum", "dampening", "nesterov")), counted=False),
    "RMSprop": _Kind(
        RMSProp, {"nu": "square_avg", "mu": "grad_avg", "scaled_velocity": "momentum_buffer"}, frozenset(("alpha", "centered"))
    ),
    "Adagrad": _Kind(AdaGrad, {"total": "sum"}, frozenset(("lr_decay", "initial_accumulator_value"))),
    "Adadelta": _Kind(AdaDelta, {"nu": "square_avg", "delta": "acc_delta"}, frozenset(("rho",))),
    "Rprop": _Kind(Rprop, {"previous": "prev", "size": "step_size"}, frozenset(("etas", "step_sizes"))),
    "NAdam": _Kind(NAdam, _MOMENTS, frozenset(("betas", "momentum_decay"))),
    "AdamW": _Kind(AdamW, _PEAK, frozenset(("betas", "eps", "amsgrad"))),
    "Adam": _Kind(Adam, _PEAK, frozenset(("betas", "eps", "amsgrad"))),
    "RAdam": _Kind(RAdam, _MOMENTS, frozenset(("betas", "eps", "decoupled_weight_decay"))),
    "Adamax": _Kind(AdaMax, {"mu": "exp_avg", "largest": "exp_inf"}, frozenset(("betas", "eps"))),
    "Lion": _Kind(Lion, {"mu": "exp_avg"}, frozenset(("betas", "weight_decay")), counted=False),
}
_CAUTIOUS = {"cautious_factor": 1.0, "caution": False, "corrected_weight_decay": False}
"""Further entries in groups of Lion, and the value with which they mean nothing."""
_SHELLS = ("_orig_mod", "module")


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
    state = state._next(parameters, slots, counters=counts or (0,))
    return state.evolved(step=max(counts, default=0) if step is None else step)


class _Entry(NamedTuple):
    """What an optimiser has for one parameter."""

    group: Mapping[str, Any]
    state: Mapping[str, Any]


def _read(
    optimizer: Any, module: Any, found: Sequence[tuple[Parameter, Any]], kind: Any, names: Sequence[str] | None
) -> tuple[dict[int, _Entry], Sequence[Mapping[str, Any]], _Kind]:
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


def check_dict(optimizer: Any) -> None:
    """Check the form of a state dict.

    **Raises** `StateError`.
    """
    given = optimizer if isinstance(optimizer, Mapping) else {}
    groups: Any = given.get("param_groups")
    states: Any = given.get("state")
    fine = isinstance(groups, Sequence) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), Sequence)
        and not isinstance(group["params"], str)
        and all(isinstance(key, Hashable) for key in group["params"])
        for group in groups
    )
    if not fine or not isinstance(states, Mapping) or not all(isinstance(each, Mapping) for each in states.values()):
        raise StateError("this is no state dict of an optimiser: it has groups with params, and for each of these a mapping")
    named = [name for group in groups for name in group.get("param_names", ())]
    if not all(isinstance(name, str) for name in named):
        raise StateError("the param_names of the state dict are no texts")
    unknown = states.keys() - {key for group in groups for key in group["params"]}
    if unknown:
        raise StateError(f"the state dict has a state for {min(unknown, key=str)!r}, which is in none of its groups")


def _by_object(groups: Any, module: Any, found: Sequence[tuple[Parameter, Any]]) -> Iterator[int]:
    """The numbers of the parameters that an optimiser holds."""
    known = {id(array): at for at, (_, array) in enumerate(found)}
    leaves, structure = opened(module)
    places = {id(leaf): path for path, leaf in zip(structure.paths, leaves, strict=True)}
    seen_as = {path: record.path for record, _ in found for path in record.paths}
    for number, group in enumerate(groups):
        for position, tensor in enumerate(group["params"]):
            _check_apart(tensor, known, places, seen_as)
            at = known.get(id(tensor))
            if at is None:
                name = (group.get("param_names") or {position: f"number {position} of group {number}"})[position]
                raise StateError(
                    f"the optimiser trains a parameter that the module does not hold: {name}, of shape {tuple(tensor.shape)}; "
                    "give the module that it was made for, or its state dict"
                )
            yield at


def _check_apart(tensor: Any, known: Mapping[int, int], places: Mapping[int, Path], seen_as: Mapping[Path, Path]) -> None:
    """Check that a tensor of an optimiser is no further view of a parameter.

    **Raises** `StateError`.
    """
    path = places.get(id(tensor))
    if id(tensor) not in known and path is not None and path in seen_as:
        raise StateError(
            f"{path} and {seen_as[path]} lie in the same memory, so they are one parameter here, and the optimiser has "
            f"{path} apart; give the module one Parameter at both places"
        )


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
    known = {id(array): at for at, (_, array) in enumerate(found)}
    tensors = list(module.parameters()) if isinstance(module, torch.nn.Module) else [array for _, array in found]
    asking = [tensor for tensor in tensors if tensor.requires_grad]
    if count not in (len(tensors), len(asking)):
        also = f", of which {len(asking)} ask for a gradient" if len(asking) < len(tensors) else ""
        raise StateError(
            f"the state dict has {count} parameters, and the module {len(tensors)}{also}; give the names of those that the "
            "optimiser was given, in their order, with names=…"
        )
    chosen = tensors if count == len(tensors) else asking
    leaves, structure = opened(module)
    places = {id(leaf): path for path, leaf in zip(structure.paths, leaves, strict=True)}
    seen_as = {path: record.path for record, _ in found for path in record.paths}
    for tensor in chosen:
        _check_apart(tensor, known, places, seen_as)
    return [known.get(id(tensor)) for tensor in chosen]


def _finder(found: Sequence[tuple[Parameter, Any]]) -> Callable[[str], int]:
    """The function from PyTorch's name of a parameter to its number, with or without the shells around modules."""
    numbers = {name_of(path): at for at, (record, _) in enumerate(found) for path in record.paths}

    def find(name: str) -> int:
        bare = ".".join(part for part in name.split(".") if part != _SHELLS[0])
        for each in (name, bare, bare.removeprefix(f"{_SHELLS[1]}.")):
            if each in numbers:
                return numbers[each]
        raise PathError(f'the optimiser has a parameter "{name}", the module has none there{suggest(name, numbers)}')

    return find


# Kinds and rules ------------------------------------------------------------------------------------------------------


def _kind_named(kind: Any) -> _Kind:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if name not in _KINDS:
        raise HyperparameterError(f'no rule steps as "{name}"{suggest(name, _KINDS)}')
    return _KINDS[name]


def _kind_of(cls: type) -> _Kind:
    """The kind of a class: one of `torch.optim`, one that steps as it does, or a Lion."""
    for base in cls.__mro__:
        if base.__name__ == "Lion" or (base.__name__ in _KINDS and base.__module__.startswith("torch.optim.")):
            return _KINDS[base.__name__]
        if "step" in vars(base):
            break
    raise HyperparameterError(
        f"from_torch does not know how {cls.__module__}.{cls.__qualname__} steps; if it does as one of {', '.join(_KINDS)}, say "
        "which with kind=…"
    )


def _kind_told_by(groups: Sequence[Mapping[str, Any]]) -> _Kind:
    keys = groups[0].keys() if groups else frozenset[str]()
    name = next((name for name, kind in _KINDS.items() if kind.marks <= keys), None)
    if name is None:
        raise HyperparameterError(
            f"the groups of the state dict ({', '.join(sorted(keys - {'params', 'param_names'}))}) are those of no optimiser that "
            f"is known: {', '.join(_KINDS)}"
        )
    if name == "AdamW" and not all("decoupled_weight_decay" in group for group in groups):
        raise HyperparameterError(
            'the state dict may be that of an Adam or of an AdamW; say which with kind="Adam" or kind="AdamW"'
        )
    if name == "AdamW" and not groups[0]["decoupled_weight_decay"]:
        name = "Adam"
    return _KINDS[name]


def _rules(form: _Kind, groups: Sequence[Mapping[str, Any]]) -> dict[int, Rule]:
    """The rule of each group, by its identity."""
    decays = any(_number(group.get("weight_decay", 0.0)) for group in groups)
    return {id(group): _rule(form, group, decays) for group in groups}


def _rule(form: _Kind, group: Mapping[str, Any], decays: bool) -> Rule:
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
    parameter: Parameter, array: Any, state: Mapping[str, Any], form: _Kind, program: Program, step: int | None, initial: float
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


# To PyTorch -----------------------------------------------------------------------------------------------------------


def to_torch(state: State, module: Any, optimizer: "Callable[..., Any] | None" = None, **options: Any) -> torch.optim.Optimizer:
    """Give a state back to PyTorch: an optimiser of the class that steps as the rules do, with moments (copied) and counts.

    Parameters with the same rule are one group. The parameters are named, so the optimiser's state dict holds `param_names`.
    A schedule stands at its value of now; a scheduler of PyTorch can go on from there.

    **Arguments:**

    - `state`, `module`: the state and its model.
    - `optimizer`: a class in place of the one in `torch.optim`. Lion needs it, as PyTorch has none.
    - `**options`: for the class, such as `fused=True`.

    **Raises** `HyperparameterError` for a rule that PyTorch does not have; `StateError` for what its optimisers cannot express:
    rules of several classes, frozen rows, masks, frozen parameters that ask for a gradient.

    Example:
        >>> import torch, optimisers as op
        >>> from optimisers.interop.torch_import import to_torch
        >>> module = torch.nn.Linear(3, 2)
        >>> module(torch.ones(3)).sum().backward()
        >>> state, module = op.update_(op.setup(op.SGD(0.1, momentum=0.9), module), module)
        >>> optimizer = to_torch(state, module)
        >>> type(optimizer).__name__, optimizer.param_groups[0]["momentum"]
        ('SGD', 0.9)
    """
    name, groups, states = _written(state, module)
    cls = getattr(torch.optim, name, None) if optimizer is None else optimizer
    if cls is None:
        raise HyperparameterError(f"torch.optim has no {name}; give to_torch the class that is to step, as its third argument")
    made = cls(groups, **options)
    # What steps on the device keeps its count there.
    there = bool(options.get("fused") or options.get("capturable"))
    for tensor, own in states.items():
        made.state[tensor] = {
            key: value.to(tensor.device) if there and key in ("step", "mu_product") else value for key, value in own.items()
        }
    return made


def to_state_dict(state: State, module: Any) -> dict[str, Any]:
    """The state dict of `to_torch(state, module)`, for a `load_state_dict` elsewhere: that of any Lion, too.

    Its parameters stand in the order of the model, group by group, with their names.

    **Raises** as `to_torch` does.

    Example:
        >>> import torch, optimisers as op
        >>> from optimisers.interop.torch_import import to_state_dict
        >>> module = torch.nn.Linear(3, 2)
        >>> to_state_dict(op.setup(op.Adam(), module), module)["param_groups"][0]["param_names"]
        ['weight', 'bias']
    """
    name, groups, states = _written(state, module)
    made = torch.optim.Optimizer(groups, {}) if not hasattr(torch.optim, name) else getattr(torch.optim, name)(groups)
    made.state.update(states)
    return made.state_dict()


def _written(state: State, module: Any) -> tuple[str, list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """The name of the class, its groups, and the state of each parameter."""
    check_state(state, "to_torch")
    if not len(state):
        raise StateError("the state has no parameters, and an optimiser of PyTorch needs some")
    if state.detached:
        raise StateError(f"{next(iter(state.detached))} was untied and has no array of its own before the next step; take it first")
    named = [_options(rule.at(state.step)) for rule in state.rules]
    first = named[0][0]
    for rule, (name, _) in zip(state.rules, named, strict=True):
        if name != first:
            raise StateError(f"{state.rules[0]!r} and {rule!r} are {first} and {name} in PyTorch; an optimiser is of one class")
    groups = [{"params": [], **options} for _, options in named]
    states: dict[Any, dict[str, Any]] = {}
    for parameter, tensor, leaf in zip(state.parameters, open_with(state.layout, module).arrays, list(state.leaves()), strict=True):
        path = parameter.path
        check_parameter(path, parameter.shape, parameter.dtype, "torch", tensor, parameter.device)
        if parameter.frozen and tensor.requires_grad:
            raise StateError(f"{path} is frozen, which PyTorch tells by requires_grad; call requires_grad_(False) on the parameter")
        if parameter.frozen_rows or parameter.masked:
            raise StateError(
                f"{path} has {'frozen rows' if parameter.frozen_rows else 'masked places'}, which no optimiser of PyTorch knows"
            )
        options = groups[parameter.group]
        options["params"].append((name_of(path), tensor))
        own = _state_of(path, leaf.slots, int(leaf.step), _KINDS[first], tensor, options)
        if own:
            states[tensor] = own
    return first, groups, states


_PLAIN: Mapping[type, str] = {Descent: "SGD", Momentum: "SGD", Nesterov: "SGD", AMSGrad: "Adam"}


def _options(rule: Rule) -> tuple[str, dict[str, Any]]:
    """The name of the class that steps as a rule does, and its options."""
    *before, last = rule.members or (rule,)
    name = _PLAIN.get(type(last)) or next((name for name, kind in _KINDS.items() if kind.rule is type(last)), None)
    options = dict(last.hyperparameters)
    coupled = name is not None and not options.get("decoupled_weight_decay") and name not in ("AdamW", "Lion")
    alone = not before or (len(before) == 1 and isinstance(before[0], WeightDecay) and coupled)
    if name is None or not alone or options.pop("cautious", False) or (before and options.get("weight_decay")):
        raise HyperparameterError(f"no optimiser of PyTorch steps as {rule!r}")
    if before:
        options["weight_decay"] = before[0].hyperparameters["weight_decay"]
    if isinstance(last, Nesterov):
        options["nesterov"] = True
    if isinstance(last, AMSGrad):
        options["amsgrad"] = True
    return name, options


def _state_of(
    path: Path, slots: Mapping[str, Any], count: int, kind: _Kind, tensor: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What PyTorch keeps for one parameter; nothing before its first step, but for Adagrad's sum."""
    if count == 0 and kind.rule is AdaGrad:
        start = torch.full_like(tensor, options["initial_accumulator_value"], requires_grad=False)
        return {"step": torch.tensor(0.0), "sum": start + slots["total"] if slots else start}
    if count == 0:
        return {}
    own: dict[str, Any] = {}
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    if kind.counted:
        own["step"] = torch.tensor(float(count), dtype=dtype)
    if kind.rule is NAdam:
        own["mu_product"] = torch.tensor(_product(options["betas"][0], options["momentum_decay"], count), dtype=dtype)
    for name, slot in slots.items():
        plain = name.rpartition(".")[2]
        if tensor.is_complex() and not slot.is_complex():
            raise StateError(
                f"{path}: for complex parameters PyTorch keeps squares of the real and the imaginary part, and the state here one "
                "of the absolute value"
            )
        own[kind.slots[plain]] = torch.empty_like(tensor, requires_grad=False).copy_(slot)
    return own


@lru_cache(maxsize=64)
def _product(first: float, decay: float, count: int) -> float:
    r"""$\prod_{i \le t} \beta_1 (1 - \frac12 0.96^{i\psi})$, as PyTorch goes on with it."""
    product = 1.0
    for step in range(1, count + 1):
        product *= first * (1 - 0.5 * 0.96 ** (step * decay))
    return product
