"""The optimisers of PyTorch that step as rules do, their names for slots, and the form of their state dicts."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from optimisers.errors import StateError
from optimisers.rules.adam import Adam, AdamW
from optimisers.rules.adam_variants import AdaMax, NAdam, RAdam
from optimisers.rules.adaptive import AdaDelta, AdaGrad, RMSProp, Rprop
from optimisers.rules.base import Rule
from optimisers.rules.descent import SGD
from optimisers.rules.lion import Lion

__all__ = ["KINDS", "Kind", "check_dict"]


class Kind(NamedTuple):
    """A class of optimisers: the rule with the same hyperparameters, and the names that PyTorch has for its slots."""

    rule: Callable[..., Rule]
    slots: Mapping[str, str]
    marks: frozenset[str]
    """The entries of its groups by which it is known."""
    counted: bool = True


_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}


_PEAK = {**_MOMENTS, "peak": "max_exp_avg_sq"}


# Where a dict could be of several kinds, the first counts.
KINDS: Mapping[str, Kind] = {
    "SGD": Kind(SGD, {"velocity": "momentum_buffer"}, frozenset(("momentum", "dampening", "nesterov")), counted=False),
    "RMSprop": Kind(
        RMSProp, {"nu": "square_avg", "mu": "grad_avg", "scaled_velocity": "momentum_buffer"}, frozenset(("alpha", "centered"))
    ),
    "Adagrad": Kind(AdaGrad, {"total": "sum"}, frozenset(("lr_decay", "initial_accumulator_value"))),
    "Adadelta": Kind(AdaDelta, {"nu": "square_avg", "delta": "acc_delta"}, frozenset(("rho",))),
    "Rprop": Kind(Rprop, {"previous": "prev", "size": "step_size"}, frozenset(("etas", "step_sizes"))),
    "NAdam": Kind(NAdam, _MOMENTS, frozenset(("betas", "momentum_decay"))),
    "AdamW": Kind(AdamW, _PEAK, frozenset(("betas", "eps", "amsgrad"))),
    "Adam": Kind(Adam, _PEAK, frozenset(("betas", "eps", "amsgrad"))),
    "RAdam": Kind(RAdam, _MOMENTS, frozenset(("betas", "eps", "decoupled_weight_decay"))),
    "Adamax": Kind(AdaMax, {"mu": "exp_avg", "largest": "exp_inf"}, frozenset(("betas", "eps"))),
    "Lion": Kind(Lion, {"mu": "exp_avg"}, frozenset(("betas", "weight_decay")), counted=False),
}


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
    named = [group.get("param_names", ()) for group in groups]
    if not all(isinstance(names, Sequence) and all(isinstance(name, str) for name in names) for names in named):
        raise StateError("the param_names of the state dict are no texts")
    unknown = states.keys() - {key for group in groups for key in group["params"]}
    if unknown:
        raise StateError(f"the state dict has a state for {min(unknown, key=str)!r}, which is in none of its groups")
