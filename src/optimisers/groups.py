"""Rules that differ by parameter: learning rates by depth, and no decay where none is wanted.

Each function returns what `setup` takes for a rule: a function from a parameter's record to its rule. They can be nested.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from optimisers.errors import HyperparameterError, StateError
from optimisers.model.layout import Parameter
from optimisers.model.reading import parameters_of
from optimisers.model.select import Selectable, as_selector
from optimisers.rules.base import Rule
from optimisers.schedules import Scaled

__all__ = ["layerwise", "no_decay"]

RuleFor: TypeAlias = Rule | Callable[[Parameter], Rule]

_FIRST = ("emb", "wte", "wpe", "tok", "pos", "patch", "cls")


def layerwise(rule: RuleFor, model: Any, *, decay: float = 0.75, depth: Callable[[Parameter], int | None] | None = None) -> RuleFor:
    """Learning rates that fall from the head to the embeddings: `lr` times decay^(top - depth).

    The depth of a parameter is 1 + the first whole number in its path (`layers.3.weight` has depth 4); what has none lies at depth
    0 where its path speaks of an embedding (`emb`, `tok`, `pos`, `patch`, …), and on top of all layers otherwise. It
    comes from the whole model, so it does not shift when something is frozen.

    **Arguments:**

    - `rule`: a rule, or a function from a record to a rule.
    - `model`: the model.
    - `decay`: the factor from one layer to the one below, in (0, 1].
    - `depth`: a function from a record to its depth, or to `None` for the top.

    **Raises** `HyperparameterError` for a decay out of range, or a rule without a learning rate.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"embed": np.ones(2), "layers": [{"w": np.ones(2)}, {"w": np.ones(2)}], "head": np.ones(2)}
        >>> state = op.setup(op.layerwise(op.Adam(1.0), model, decay=0.5), model)
        >>> {str(path): state[path].rule.lr for path in state}
        {'embed': 0.125, 'head': 1.0, 'layers.0.w': 0.25, 'layers.1.w': 0.5}

    Source: Howard and Ruder (2018); Clark et al. (2020).
    """
    if not 0 < decay <= 1:
        raise HyperparameterError(f"layerwise(decay={decay!r}): decay must lie in (0, 1]")
    find = depth or _depth
    depths = [find(record) for record, _ in parameters_of(model)]
    top = 1 + max((each for each in depths if each is not None), default=0)

    def choose(record: Parameter) -> Rule:
        own, at = _rule(rule, record), find(record)
        factor = decay ** (top - (top if at is None else at))
        if "lr" not in own.hyperparameters:
            raise HyperparameterError(f"{own!r} has no learning rate")
        return _scaled(own, factor)

    return choose


def _scaled(rule: Rule, factor: float) -> Rule:
    lr = rule.hyperparameters["lr"]
    return rule.adjusted(lr=Scaled(lr, factor) if callable(lr) else lr * factor)


def _depth(record: Parameter) -> int | None:
    for key in record.path:
        if isinstance(key, int):
            return key + 1
    return 0 if any(mark in str(key).lower() for key in record.path for mark in _FIRST) else None


def no_decay(rule: RuleFor, *selectors: Selectable, ndim: int | None = None) -> RuleFor:
    """The rule, with a weight decay of 0 for the selected parameters.

    **Arguments:**

    - `rule`: a rule, or a function from a record to a rule.
    - `*selectors`: paths, globs, types, predicates.
    - `ndim`: all parameters with at most this many axes, too.

    **Raises** `HyperparameterError` at `setup` when the rule has no weight decay.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"weight": np.ones((2, 2)), "bias": np.ones(2)}
        >>> op.setup(op.no_decay(op.AdamW(1e-3), "**.bias"), model)["bias"].rule.weight_decay
        0.0
    """
    if not selectors and ndim is None:
        raise StateError('no_decay selects nothing; give it selectors, such as "**.bias", or ndim=1')
    chosen = [as_selector(each) for each in selectors]

    def choose(record: Parameter) -> Rule:
        own = _rule(rule, record)
        small = ndim is not None and record.ndim <= ndim
        return own.adjusted(weight_decay=0.0) if small or any(each.selects(record) for each in chosen) else own

    return choose


def _rule(rule: RuleFor, record: Parameter) -> Rule:
    return rule if isinstance(rule, Rule) else rule(record)
