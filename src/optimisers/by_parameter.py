"""Rules that differ by parameter: learning rates by depth, and no decay where none is wanted.

Each function returns what `setup` takes for a rule: a function from a parameter's record to its rule. They can be nested.
"""

from collections.abc import Callable, Sequence
from re import compile as pattern
from typing import Any

from optimisers.assignment import RuleFor, RuleOf, check_kind, check_selectors, chooser
from optimisers.errors import HyperparameterError, StateError
from optimisers.model.layout import Parameter
from optimisers.model.reading import parameters_of
from optimisers.model.select import Selectable, as_selector, matching
from optimisers.rules.base import Rule
from optimisers.schedules import Scaled

__all__ = ["depths_of", "layerwise", "no_decay"]

_FIRST = pattern(r"(^|[^a-z])(emb|wte|wpe|tok|patch|(pos|cls)($|[^a-z])|posit)")
"""A word, within a key, that speaks of an embedding."""
_LAST = pattern(r"(^|[^a-z])(head|classif|predict|logit)|_out($|[^a-z])")
"""A word that speaks of what stands on top, whatever else does."""
_NUMBER = pattern(r"(?:^|[._])(\d+)(?=$|[._])")
_HUMP = pattern(r"(?<=[a-z0-9])(?=[A-Z])")


def layerwise(rule: RuleFor, model: Any, *, decay: float = 0.75, depth: Callable[[Parameter], int | None] | None = None) -> RuleOf:
    """Learning rates that fall from the head to the embeddings: `lr` times decay^(top - depth).

    The depth of a parameter is 1 + the first whole number in its path (`layers.3.weight` and `Dense_3.kernel` have depth 4); what
    has none lies at depth 0 where its path speaks of an embedding (`emb`, `tok`, `pos`, `cls`, `patch`, …) and not of a head
    (`head`, `classif…`, `predict…`, `logit…`), and on top of all layers otherwise. Where blocks are numbered within stages, as in
    a ResNet, say with `depth` how deep they lie. A tied parameter lies at the least depth of its paths. What is on top has the
    whole learning rate. Depths come from the whole model, so they do not shift when something is frozen.

    In a chain the last learning rate is scaled, since it is the one that the whole step is proportional to.

    **Arguments:**

    - `rule`: a rule, a mapping from selectors to rules, or a function from a record to a rule.
    - `model`: the model.
    - `decay`: the factor from one layer to the one below, in (0, 1].
    - `depth`: a function from a record to its depth, or to `None` for the top.

    **Raises** `HyperparameterError` for a decay out of range, or (at `setup`) a rule without a learning rate; `StateError` for a
    depth that is no whole number; `PathError` for a selector that matches nothing.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"embed": np.ones(2), "layers": [{"w": np.ones(2)}, {"w": np.ones(2)}], "head": np.ones(2)}
        >>> state = op.setup(op.layerwise(op.Adam(1.0), model, decay=0.5), model)
        >>> {str(path): state[path].rule.lr for path in state}
        {'embed': 0.125, 'head': 1.0, 'layers.0.w': 0.25, 'layers.1.w': 0.5}

    Source: Howard and Ruder (2018); Clark et al. (2020).
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise HyperparameterError(f"layerwise(decay={decay!r}): decay must lie in (0, 1]")
    check_kind(rule, "layerwise")
    records = [record for record, _ in parameters_of(model)]
    if not records:
        raise StateError(f"layerwise takes the model second, and {type(model).__name__} has no parameters")
    check_selectors(rule, records)

    depths = depths_of(records, depth)
    top = max(at for at in depths if at is not None) + (None in depths)

    choose_rule = chooser(rule)

    def choose(record: Parameter) -> Rule:
        own, at = choose_rule(record), _checked_depth(record, depth)
        if at is not None and at > top:
            raise StateError(
                f"{record.path} has depth {at}, above all layers of the model that layerwise was given; give it this one"
            )
        return _scaled(own, decay ** (top - (top if at is None else at)))

    return RuleOf(choose, lambda records: check_selectors(rule, records), f"layerwise({rule!r}, decay={decay})")


def depths_of(records: Sequence[Parameter], depth: Callable[[Parameter], int | None] | None) -> list[int | None]:
    """How deep each parameter lies, as a function of the user tells it, or `depth_of`.

    **Raises** `StateError` for a depth that is no whole number, or where none can be told.
    """
    depths = [_checked_depth(record, depth) for record in records]
    if all(each is None for each in depths):
        raise StateError("no path of the model has the number of a layer in it; say with depth=… how deep each parameter lies")
    return depths


def _checked_depth(record: Parameter, depth: Callable[[Parameter], int | None] | None) -> int | None:
    found = (depth or depth_of)(record)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise StateError(f"{record.path}: a depth is a whole number or None, not {found!r}")
    return found


def _scaled(rule: Rule, factor: float) -> Rule:
    if rule.rate is None:
        raise HyperparameterError(f"{rule!r} has no learning rate")
    name, lr = rule.rate
    return rule.adjusted(**{name: {"lr": Scaled(lr, factor) if callable(lr) else lr * factor}})


def depth_of(record: Parameter) -> int | None:
    """How deep a parameter lies, as `layerwise` tells it by its paths; `None` for what is on top of all layers."""
    depths = [_depth_of(path) for path in record.paths]
    return min((each for each in depths if each is not None), default=None)


def _depth_of(path: Any) -> int | None:
    for key in path:
        # A list in a module has keys that are strings, Flax writes Dense_0, and a flat dict "layers.0.weight".
        found = [str(key)] if isinstance(key, int) else _NUMBER.findall(str(key))
        if found:
            return int(found[0]) + 1
    # tokenEmbedding is read as token_embedding.
    words = [_HUMP.sub("_", str(key)).lower() for key in path]
    return 0 if any(map(_FIRST.search, words)) and not any(map(_LAST.search, words)) else None


def no_decay(rule: RuleFor, *selectors: Selectable, ndim: int | None = None) -> RuleOf:
    """The rule, with a weight decay of 0 for the selected parameters.

    **Arguments:**

    - `rule`: a rule, a mapping from selectors to rules, or a function from a record to a rule.
    - `*selectors`: paths, globs, types, predicates.
    - `ndim`: all parameters with at most this many axes, too.

    **Raises** `HyperparameterError` or `StateError` for something else; at `setup`, `PathError` for a selector that matches
    nothing, `HyperparameterError` when the rule of a selected parameter has no weight decay.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"weight": np.ones((2, 2)), "bias": np.ones(2)}
        >>> op.setup(op.no_decay(op.AdamW(1e-3), "**.bias"), model)["bias"].rule.weight_decay
        0.0
    """
    check_kind(rule, "no_decay")
    if not selectors and ndim is None:
        raise StateError('no_decay selects nothing; give it selectors, such as "**.bias", or ndim=1')
    if ndim is not None and (isinstance(ndim, bool) or not isinstance(ndim, int) or ndim < 0):
        raise StateError(f"no_decay(ndim={ndim!r}): ndim is a number of axes, such as 1")
    chosen = [as_selector(each) for each in selectors]

    choose_rule = chooser(rule)

    def choose(record: Parameter) -> Rule:
        own = choose_rule(record)
        small = ndim is not None and record.ndim <= ndim
        if not small and not any(each.selects(record) for each in chosen):
            return own
        if "weight_decay" not in own.hyperparameters:
            raise HyperparameterError(
                f"{record.path}: {own!r} has no weight_decay to leave out; take a rule that has, such as AdamW, or select less"
            )
        return own.adjusted(weight_decay=0.0)

    def check(records: Sequence[Parameter]) -> None:
        for each in selectors:
            matching(records, each)
        check_selectors(rule, records)

    return RuleOf(choose, check, f"no_decay({rule!r})")
