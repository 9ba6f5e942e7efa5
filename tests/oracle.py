"""The oracle of the property-based test: independent parameters in float64, each rule written out as its source defines it.

It knows nothing of models, paths, ties or backends, and shares no code with the library: a flat dict from name to parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Member", "Oracle", "Parameter", "Rule", "slot_names"]

Array: TypeAlias = np.ndarray
Out: TypeAlias = tuple[Array, dict[str, Array]]

SLOTS: dict[str, tuple[str, ...]] = {
    "Momentum": ("velocity",),
    "Nesterov": ("velocity",),
    "Adam": ("mu", "nu"),
    "AdamW": ("mu", "nu"),
    "AccumGrad": ("total",),
}
GATES = ("AccumGrad", "SkipNonFinite")
TREE_WIDE = (*GATES, "ClipGlobalNorm")
"""The members that decide something for all parameters at once."""


@dataclass(frozen=True)
class Member:
    """One part of a rule: its kind and its hyperparameters; those that are functions are schedules of the step."""

    kind: str
    hyper: Mapping[str, Any]

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its state arrays."""
        if self.kind == "SGD":
            return ("velocity",) if self.hyper["momentum"] else ()
        return SLOTS.get(self.kind, ())

    @property
    def counts(self) -> bool:
        """Whether its steps depend on how many there were, beside what its slots hold."""
        if self.kind == "SGD" and self.slots:
            dampening = self.hyper["dampening"]
            return bool(dampening(0) if callable(dampening) else dampening)
        return self.kind in ("Adam", "AdamW")


Rule: TypeAlias = tuple[Member, ...]


def _carried(old: Rule, slots: Mapping[str, Array], new: Rule) -> dict[str, Array]:
    """The slots that go on under another rule, by their new names: in the same member, or in one that takes its place."""
    left = {(member, key.rpartition(".")[2]): slots[key] for member, key in _places(old) if key in slots}
    stay = {member for member, _ in _places(new)} | set(_prefixes(new))
    found = {}
    for member, key in _places(new):
        plain = key.rpartition(".")[2]
        place = (member, plain)
        if place not in left:
            place = next((each for each in left if each[1] == plain and each[0] not in stay), place)
        if place in left:
            found[key] = left.pop(place)
    return found


def _places(rule: Rule) -> list[tuple[str, str]]:
    return [(member, key) for member, keys in zip(_prefixes(rule), slot_names(rule), strict=True) for key in keys]


def _prefixes(rule: Rule) -> list[str]:
    kinds = [member.kind.lower() for member in rule]
    return [kind + (f"_{kinds[: at + 1].count(kind)}" if kind in kinds[:at] else "") for at, kind in enumerate(kinds)]


def slot_names(rule: Rule) -> list[list[str]]:
    """For each member the public names of its slots: one that several members have carries the name of its member."""
    every = [name for member in rule for name in member.slots]
    seen: dict[str, int] = {}
    names = []
    for member in rule:
        seen[member.kind] = seen.get(member.kind, 0) + 1
        prefix = member.kind.lower() + (f"_{seen[member.kind]}" if seen[member.kind] > 1 else "")
        names.append([name if every.count(name) == 1 else f"{prefix}.{name}" for name in member.slots])
    return names


@dataclass
class Parameter:
    """A parameter that stands alone. `slots` is `None` where it never trained or was dropped."""

    value: Array
    rule: Rule
    slots: dict[str, Array] | None = None
    count: int = 0
    frozen: bool = False
    frozen_rows: Array = field(default_factory=lambda: np.zeros(0, bool))

    @property
    def live(self) -> Any:
        """The index of what trains."""
        return ~self.frozen_rows if self.frozen_rows.any() else ...

    def fresh(self) -> dict[str, Array]:
        """Slots at zero."""
        return {name: np.zeros(self.value.shape) for names in slot_names(self.rule) for name in names}

    def looked_at(self, look: Callable[[Array], Array]) -> "Parameter":
        """A copy, seen through a view."""
        value = look(self.value).copy()
        slots = None if self.slots is None else {name: look(slot).copy() for name, slot in self.slots.items()}
        rows = self.frozen_rows.copy() if self.frozen_rows.any() else np.zeros(value.shape[:1] or (0,), bool)
        return replace(self, value=value, slots=slots, frozen_rows=rows)


class RefusedError(Exception):
    """What the oracle says no to, the library has to refuse as well."""


@dataclass
class Oracle:
    """All parameters by name, the number of steps taken, and what gates remember."""

    parameters: dict[str, Parameter]
    step: int = 0
    filled: int = 0
    skipped: int = 0

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]

    def holds(self, kind: str) -> bool:
        """Whether any parameter's rule has a member of this kind."""
        return any(member.kind == kind for each in self.parameters.values() for member in each.rule)

    # Surgery ----------------------------------------------------------------------------------------------------------

    def freeze(self, names: Iterable[str]) -> None:
        """Freeze parameters whole."""
        for name in names:
            self[name].frozen = True

    def freeze_rows(self, name: str, rows: Array) -> None:
        """Freeze some rows, given as a boolean vector."""
        each = self[name]
        each.frozen_rows = each.frozen_rows | rows

    def thaw(self, names: Iterable[str]) -> None:
        """Thaw parameters, all their rows."""
        for name in names:
            each = self[name]
            each.frozen, each.frozen_rows = False, np.zeros_like(each.frozen_rows)
            each.slots = each.fresh() if each.slots is None else each.slots

    def thaw_rows(self, name: str, rows: Array) -> None:
        """Thaw some rows; of a parameter that is frozen whole, the others stay frozen."""
        each = self[name]
        before = np.ones_like(each.frozen_rows) if each.frozen else each.frozen_rows
        each.frozen, each.frozen_rows = False, before & ~rows
        each.slots = each.fresh() if each.slots is None else each.slots

    def reset(self, names: Iterable[str]) -> None:
        """Slots and counts at zero; when all start afresh, so do the gates."""
        chosen = set(names)
        for name in chosen:
            each = self[name]
            each.count = 0
            each.slots = None if each.slots is None else each.fresh()
        if chosen == self.parameters.keys():
            self.filled = self.skipped = 0

    def drop(self, names: Iterable[str]) -> None:
        """Free the slots of frozen parameters."""
        chosen = list(names)
        if not all(self[name].frozen for name in chosen):
            raise RefusedError("a live parameter needs its slots")
        for name in chosen:
            self[name].slots, self[name].count = None, 0

    def set_rules(self, rules: Mapping[str, Rule]) -> None:
        """New hyperparameters: all else stays."""
        self._check_gates({name: rules.get(name, each.rule) for name, each in self.parameters.items()})
        for name, rule in rules.items():
            self[name].rule = rule
        self._forget()

    def replace(self, names: Iterable[str], rule: Rule) -> None:
        """Another rule. Slots of the same name stay, and the count with them.

        But when a member whose steps depend on the count has none of its own slots, the count and all such members start afresh.
        """
        chosen = set(names)
        self._check_gates({name: rule if name in chosen else each.rule for name, each in self.parameters.items()})
        for name in chosen:
            each = self[name]
            old = _carried(each.rule, each.slots or {}, rule)
            each.rule = rule
            fresh = each.fresh()
            moments = [names for names, member in zip(slot_names(rule), rule, strict=True) if member.counts]
            if any(old.keys().isdisjoint(names) for names in moments):
                each.count = 0
                old = {key: slot for key, slot in old.items() if not any(key in names for names in moments)}
            if each.slots is not None:
                each.slots = {key: old.get(key, zero) for key, zero in fresh.items()}
        self._forget()

    def _check_gates(self, rules: Mapping[str, Rule]) -> None:
        gates = [member for rule in rules.values() for member in rule if member.kind in GATES]
        if any(one != other for one in gates for other in gates if one.kind == other.kind):
            raise RefusedError("a gate is one for all parameters")

    def _forget(self) -> None:
        """What a gate remembers goes with the last of its kind."""
        self.filled = self.filled if self.holds("AccumGrad") else 0
        self.skipped = self.skipped if self.holds("SkipNonFinite") else 0

    def without(self, names: Iterable[str]) -> None:
        """Take parameters out."""
        for name in names:
            del self.parameters[name]
        self._forget()

    # A step -----------------------------------------------------------------------------------------------------------

    def update(self, grads: Mapping[str, Array]) -> set[str]:
        """One step from the summed gradients of the parameters that have one; returns who moved."""
        passes = {
            name: _Pass(self[name], np.asarray(grads[name], np.float64)[self[name].live], self.step)
            for name in grads
            if not self[name].frozen
        }
        with np.errstate(all="ignore"):
            while waiting := [each for each in passes.values() if each.advance() is not None]:
                self._decide(waiting)
            moved = {name for name, each in passes.items() if each.open}
            for each in passes.values():
                each.finish()
        self.step += bool(moved)
        return moved

    def _decide(self, waiting: "list[_Pass]") -> None:
        """The next decision for all parameters: of a kind that none of them has yet to reach."""
        kinds = dict.fromkeys(each.front.kind for each in waiting)
        ahead = {member.kind for each in waiting for member in each.ahead}
        kind = next(kind for kind in kinds if kind not in ahead)
        here = [each for each in waiting if each.front.kind == kind]
        if kind == "ClipGlobalNorm":
            total = math.sqrt(sum(float(np.sum(each.grad**2)) for each in here))
            for each in here:
                each.give(each.grad * _shortened(total, each.hyper["max_norm"]))
        elif kind == "SkipNonFinite":
            fine = all(np.isfinite(each.grad).all() for each in here)
            self.skipped += not fine
            for each in here:
                each.give(each.grad, go_on=fine)
        else:
            self.filled += 1
            calls, fires = self.filled, self.filled >= here[0].hyper["n"]
            self.filled = 0 if fires else self.filled
            for each in here:
                total = each.slots["total"] + each.grad
                each.give(total / calls, {"total": np.zeros_like(total) if fires else total}, go_on=fires)


class _Pass:
    """The way of one gradient through the members of its rule."""

    def __init__(self, parameter: Parameter, grad: Array, step: int) -> None:
        self.parameter = parameter
        self.grad = grad
        self.step = step
        self.at = 0
        self.open = True
        self.names = slot_names(parameter.rule)
        self.new: dict[str, Array] = {}

    @property
    def front(self) -> Member:
        """The member that comes next."""
        return self.parameter.rule[self.at]

    @property
    def ahead(self) -> Sequence[Member]:
        """Those after it."""
        return self.parameter.rule[self.at + 1 :]

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyperparameters of the next member at this step."""

        def now(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(now, value))
            return value(self.step) if callable(value) else value

        return {name: now(value) for name, value in self.front.hyper.items()}

    @property
    def slots(self) -> dict[str, Array]:
        """The live part of the slots of the next member, by their short names."""
        own = self.parameter.slots
        assert own is not None
        return {short: own[long][self.parameter.live] for short, long in zip(self.front.slots, self.names[self.at], strict=True)}

    def advance(self) -> Member | None:
        """Pass the members that look at this parameter alone; returns the one that does not, if any."""
        while self.open and self.at < len(self.parameter.rule):
            if self.front.kind in TREE_WIDE:
                return self.front
            value = self.parameter.value[self.parameter.live]
            self.give(*FORMULAS[self.front.kind](self.grad, value, self.slots, self.hyper, self.parameter.count + 1))
        return None

    def give(self, grad: Array, slots: Mapping[str, Array] | None = None, *, go_on: bool = True) -> None:
        """What the next member returns."""
        for short, value in (slots or {}).items():
            self.new[self.names[self.at][self.front.slots.index(short)]] = value
        self.grad, self.open, self.at = grad, go_on, self.at + 1

    def finish(self) -> None:
        """Write the new slots, and take the step where the gates were open."""
        parameter = self.parameter
        for name, value in self.new.items():
            assert parameter.slots is not None
            parameter.slots[name][parameter.live] = value
        if self.open:
            parameter.value[parameter.live] -= self.grad
            parameter.count += 1


# Formulas: from gradient, parameter, slots, hyperparameters and the number of the step, to what is subtracted and the new slots


def _shortened(norm: float, limit: float) -> float:
    return 1.0 if norm <= limit else limit / norm


def _descent(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    return h["lr"] * g, {}


def _momentum(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    velocity = h["momentum"] * slots["velocity"] + g
    return h["lr"] * velocity, {"velocity": velocity}


def _nesterov(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    velocity = h["momentum"] * slots["velocity"] + g
    return h["lr"] * (g + h["momentum"] * velocity), {"velocity": velocity}


def _sgd(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    g = g + h["weight_decay"] * p
    if not slots:
        return h["lr"] * g, {}
    kept = h["momentum"] * slots["velocity"]
    velocity = kept + g if t == 1 else kept + (1 - h["dampening"]) * g
    return h["lr"] * (g + h["momentum"] * velocity if h["nesterov"] else velocity), {"velocity": velocity}


def _adam(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    first, second = h["betas"]
    mu = first * slots["mu"] + (1 - first) * g
    nu = second * slots["nu"] + (1 - second) * g**2
    root = np.sqrt(nu) / math.sqrt(1 - second**t)
    return h["lr"] / (1 - first**t) * mu / (root + h["eps"]), {"mu": mu, "nu": nu}


def _adamw(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    # PyTorch shrinks the parameter by 1 - lr·λ before the step of Adam.
    step, moments = _adam(g, p, slots, h, t)
    return p - (p * (1 - h["lr"] * h["weight_decay"]) - step), moments


def _weight_decay(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    return g + h["weight_decay"] * p, {}


def _sign_decay(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    return g + h["weight_decay"] * np.sign(p), {}


def _clip_grad(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    return np.clip(g, -h["clip_value"], h["clip_value"]), {}


def _clip_norm(g: Array, p: Array, slots: dict[str, Array], h: dict[str, Any], t: int) -> Out:
    return g * _shortened(math.sqrt(float(np.sum(g**2))), h["max_norm"]), {}


FORMULAS: dict[str, Callable[[Array, Array, dict[str, Array], dict[str, Any], int], Out]] = {
    "Descent": _descent,
    "Momentum": _momentum,
    "Nesterov": _nesterov,
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "WeightDecay": _weight_decay,
    "SignDecay": _sign_decay,
    "ClipGrad": _clip_grad,
    "ClipNorm": _clip_norm,
}
