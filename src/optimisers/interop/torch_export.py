"""States given back to PyTorch, in mid-training: as an optimiser of its own, or as the state dict of one."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from optimisers.backends.base import check_parameter
from optimisers.errors import HyperparameterError, StateError
from optimisers.interop.torch_groups import name_of
from optimisers.interop.torch_kinds import KINDS, Kind
from optimisers.model.paths import Path
from optimisers.model.reading import open_with
from optimisers.rules.adam import AMSGrad
from optimisers.rules.adam_variants import NAdam
from optimisers.rules.adaptive import AdaGrad
from optimisers.rules.base import Rule
from optimisers.rules.decay import WeightDecay
from optimisers.rules.descent import Descent, Momentum, Nesterov
from optimisers.state import State, check_state, check_unspent

__all__ = ["to_state_dict", "to_torch"]


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
        >>> from optimisers.interop.torch_export import to_torch
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
        >>> from optimisers.interop.torch_export import to_state_dict
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
    check_unspent(state)
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
        own = _state_of(path, leaf.slots, int(leaf.step), KINDS[first], tensor, options)
        if own:
            states[tensor] = own
    return first, groups, states


_PLAIN: Mapping[type, str] = {Descent: "SGD", Momentum: "SGD", Nesterov: "SGD", AMSGrad: "Adam"}


def _options(rule: Rule) -> tuple[str, dict[str, Any]]:
    """The name of the class that steps as a rule does, and its options."""
    *before, last = rule.members or (rule,)
    name = _PLAIN.get(type(last)) or next((name for name, kind in KINDS.items() if kind.rule is type(last)), None)
    options = dict(last.hyperparameters)
    coupled = name is not None and not options.get("decoupled_weight_decay") and name not in ("AdamW", "Lion")
    alone = not before or (len(before) == 1 and isinstance(before[0], WeightDecay) and coupled)
    if name is None or not alone or options.pop("cautious", False) or (before and options.get("weight_decay")):
        raise HyperparameterError(
            f"no optimiser of PyTorch steps as {rule!r}; state.replace(rule) keeps the moments under a rule that one does step as, "
            "and a norm is clipped there by torch.nn.utils.clip_grad_norm_"
        )
    if before:
        options["weight_decay"] = before[0].hyperparameters["weight_decay"]
    if isinstance(last, Nesterov):
        options["nesterov"] = True
    if isinstance(last, AMSGrad):
        options["amsgrad"] = True
    return name, options


def _state_of(
    path: Path, slots: Mapping[str, Any], count: int, kind: Kind, tensor: Any, options: Mapping[str, Any]
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
