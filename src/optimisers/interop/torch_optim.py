"""PyTorch: a module, a rule and their state as a `torch.optim.Optimizer`, for loops, schedulers and trainers that expect one."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import Any

import torch

from optimisers.assignment import RuleFor
from optimisers.backends.arrays import device_of
from optimisers.errors import HyperparameterError, ModelError, StateError
from optimisers.model.layout import Layout, Parameter, slot_dtypes
from optimisers.model.paths import Path
from optimisers.model.select import Selectable, matching
from optimisers.model.ties import SAME, View, rows_through, shape_through
from optimisers.model.trees import opened
from optimisers.report import Summary, summary
from optimisers.rules.base import Rule, member_names
from optimisers.setup import setup
from optimisers.state import State
from optimisers.update import update_

__all__ = ["Optimizer"]

# As on PyTorch's own methods: torch.compile calls them, and does not look into them.
_whole: Any = torch._disable_dynamo  # type: ignore[attr-defined]

_TAKEN = ("params", "param_names")
_VERSION = 1
_PARTS = {"version", "state", "param_groups", "frozen", "frozen_rows", "masked", "ties", "own", "step", "memory"}
_SHOWN = 12


class Optimizer(torch.optim.Optimizer):
    """A rule of this library in the place of an optimizer of PyTorch.

    There is one entry of `param_groups` for each rule, in the order in which the module first needs them, and it stays: freezing
    moves nothing between groups. Besides `params` and `param_names` (as in `state_dict`) it has the hyperparameters of its rule:
    `lr`, `betas`, `weight_decay`, … What a scheduler or you write there holds from the next step on, and keeps all moments. In a
    chain, a name that two members have carries the member's (`adamw.weight_decay`), but for the last learning rate, which is `lr`.
    Of a hyperparameter that follows a schedule of this library, a group shows the value at the next step.

    The state itself is `op_state`, a `State`; `freeze`, `thaw`, `mask`, `unmask` and `adjust` are its methods, in place.
    The gradients are those that `backward` leaves behind. What is frozen ignores them, and so does what asks for none.

    `state_dict()` is by name, so it loads into a module that registers its parameters in another order, is compiled or wrapped
    for data parallelism. It holds plain values and the tensors of the state themselves, as PyTorch's does; `torch.load` reads it
    with `weights_only=True`. Schedules are code, and come from the rule that the optimizer is made with.

    **Arguments:**

    - `module`: the `torch.nn.Module` to train. Its buffers are no parameters.
    - `rule`: a rule, a mapping from selectors to rules, or a function from a `Parameter` to a rule.
    - `frozen`: a selector; these parameters start frozen.
    - `trainable`: a selector; other parameters of the module are none of the optimizer's business.
    - `sync_requires_grad`: whether freezing and thawing set `requires_grad`, too, so that `backward` skips what is frozen. Use it
      with a `GradScaler`, which looks at all gradients there are.

    **Raises** `ModelError` for what is no module, `StateError` for one without parameters, and as `setup` does.

    Example:
        >>> import torch, optimisers as op
        >>> from optimisers.interop.torch_optim import Optimizer
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = Optimizer(model, op.AdamW(1e-2), frozen="0")
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        >>> for step in range(10):
        ...     if step == 5:
        ...         optimizer.thaw("0.weight")
        ...     loss = model(torch.ones(3, 4)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> {str(leaf.path): leaf.step for leaf in optimizer.op_state.leaves()}
        {'0.weight': 5, '0.bias': 0, '2.weight': 10, '2.bias': 10}
    """

    def __init__(
        self,
        module: torch.nn.Module,
        rule: RuleFor,
        *,
        frozen: "Selectable | None" = None,
        trainable: "Selectable | None" = None,
        sync_requires_grad: bool = False,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ModelError(
                f"Optimizer takes a torch.nn.Module, not {type(module).__name__}; it finds the parameters and their names itself"
            )
        if next(module.parameters(), None) is None:
            raise StateError("the module has no parameters to optimise")
        state = setup(rule, module, frozen=frozen, trainable=trainable)
        self.module = module
        self.sync_requires_grad = sync_requires_grad
        self._tensors = _tensors(module, state.layout)
        self._kept: _Kept | None = None
        groups = [self._group(state, at) for at in range(len(state.rules))]
        common = set.intersection(*(set(group) for group in groups)) - {*_TAKEN}
        super().__init__(groups, {name: value for name, value in groups[0].items() if name in common})
        seen = [{key: group[key] for key in _keys(rule)} for group, rule in zip(groups, state.rules, strict=True)]
        owner = {record.path: record.group for record in state.parameters}
        moving = {at for at, rule in enumerate(state.rules) if any(map(_moves, _raw(rule).values()))}
        self._kept = _Kept(state, list(state.rules), owner, seen, moving)
        self._objects: Sequence[Any] = ()
        if frozen is not None:
            self._sync(matching(state.parameters, frozen))

    def _group(self, state: State, at: int) -> dict[str, Any]:
        """An entry of `param_groups`. Places that are tied by their memory alone have a tensor each."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for record in state.parameters:
            for path in record.paths if record.group == at else ():
                found.setdefault(id(self._tensors[path]), (_name(path), self._tensors[path]))
        names, tensors = zip(*found.values(), strict=True)
        return {"params": list(tensors), "param_names": list(names), **_values(state.rules[at], state.step)}

    # Stepping ---------------------------------------------------------------------------------------------------------

    @_whole
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that `backward` has left behind.

        **Arguments:** `closure`: computes the loss and its gradients anew. **Returns** the loss, if there is a closure.

        **Raises** `ModelError` when the module holds other parameters than those that the optimizer was made for;
        `HyperparameterError` for a value in `param_groups` that is out of range. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_module()
        self._read_groups()
        kept = self._inner
        with torch.no_grad():
            kept.state, model = update_(kept.state, self.module)
            if model is not self.module:
                for path, tensor in _tensors(model, kept.state.layout).items():
                    if tensor is not self._tensors[path]:
                        self._tensors[path].copy_(tensor)
        for at in tuple(kept.moving):
            self._show(at)
        return loss

    def _check_module(self) -> None:
        """Check that the module holds the parameters of the optimizer.

        **Raises** `ModelError`, naming one that it does not.
        """
        if self._objects and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._objects)):
            return
        self._objects = ()
        remedy = "make a new Optimizer for the changed module"
        leaves, structure = opened(self.module)
        found = dict(zip(structure.paths, leaves, strict=True))
        for path, tensor in self._tensors.items():
            if path not in found:
                raise ModelError(f"{path}: the optimizer has a parameter here, and the module has none any more; {remedy}")
            if found[path] is not tensor:
                raise ModelError(f"{path}: the module holds another Parameter than the one that the optimizer has; {remedy}")
        modules = list(self.module.modules())
        self._dicts = [own for each in modules for own in (each._parameters, each._modules) if own]
        self._objects = [child for own in self._dicts for child in own.values()]

    def _read_groups(self) -> None:
        """Carry what was written to `param_groups` into the state.

        **Raises** `HyperparameterError` for a value that does not fit, naming the group.
        """
        kept = self._inner
        if len(self.param_groups) != len(kept.seen):
            raise StateError(
                f"the optimizer has {len(kept.seen)} groups, and param_groups now has {len(self.param_groups)}; {_ADD}"
            )
        written: dict[int, dict[str, Any]] = {}
        for at, (group, seen) in enumerate(zip(self.param_groups, kept.seen, strict=True)):
            if any(group[key] != value for key, value in seen.items()):
                plain = {key: _plain(group[key]) for key in seen}
                written[at] = {key: value for key, value in plain.items() if value != seen[key]}
        if not any(written.values()):
            return
        groups, own = list(kept.rules), list(kept.state.rules)
        for at, changes in written.items():
            try:
                groups[at] = _adjusted(kept.rules[at], changes)
                for apart, numbers in self._parts()[at].items():
                    left = {key: value for key, value in changes.items() if key not in apart}
                    for number in numbers:
                        same = not apart and kept.state.rules[number] is kept.rules[at]
                        own[number] = groups[at] if same else _adjusted(own[number], left)
            except HyperparameterError as error:
                raise HyperparameterError(f"param_groups[{at}]: {error}") from None
        kept.state, kept.rules = _with_rules(kept.state, own), groups
        for at, changes in written.items():
            kept.seen[at].update(changes)
            if at in kept.moving or any(map(_moves, changes.values())):
                self._show(at)

    def _parts(self) -> "list[dict[frozenset[str], set[int]]]":
        """For each group the numbers of the state's, by the hyperparameters that do not follow the group."""
        kept = self._inner
        if kept.parts is None or kept.parts[0] is not kept.state.layout:
            parts: list[dict[frozenset[str], set[int]]] = [{} for _ in kept.rules]
            for record in kept.state.parameters:
                apart = frozenset(kept.own.get(record.path, ()))
                parts[kept.owner[record.path]].setdefault(apart, set()).add(record.group)
            kept.parts = kept.state.layout, parts
        return kept.parts[1]

    def _show(self, at: int) -> None:
        """Write the hyperparameters of a rule, at the step that comes next, into its group."""
        kept, group = self._inner, self.param_groups[at]
        raw = _raw(kept.rules[at])
        values = _now(raw, kept.state.step)
        group.update({key: value for key, value in values.items() if _plain(group[key]) != value})
        kept.seen[at] = values
        (kept.moving.add if any(map(_moves, raw.values())) else kept.moving.discard)(at)

    @property
    def _inner(self) -> "_Kept":
        assert self._kept is not None
        return self._kept

    # The state --------------------------------------------------------------------------------------------------------

    @property
    def op_state(self) -> State:
        """The `State`: rules, slots, counts, what is frozen. The next step writes into its slots."""
        self._read_groups()
        return self._inner.state

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """For each tensor its slots by name, and its step count: a view made anew each time, where nothing can be put."""
        leaves = self._kept.state.leaves() if self._kept else ()
        return {self._tensors[leaf.path]: {**leaf.slots, "step": leaf.step} for leaf in leaves if leaf.slots}

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        # PyTorch's own constructor puts an empty one here.
        if value:
            raise StateError("the state of this optimizer is op_state; load_state_dict changes it")

    def freeze(self, selector: "Selectable", *, rows: Any = None) -> None:
        """Freeze parameters, or some of their rows, as `State.freeze` does. They keep their moments and count."""
        self._change(lambda state: state.freeze(selector, rows=rows))
        if rows is None:
            self._sync(matching(self._inner.state.parameters, selector))

    def thaw(self, selector: "Selectable" = "**", *, rows: Any = None) -> None:
        """Thaw parameters, or some of their rows, as `State.thaw` does. They go on with the moments and the count they had."""
        self._change(lambda state: state.thaw(selector, rows=rows))
        self._sync(matching(self._inner.state.parameters, selector))

    def mask(self, selector: "Selectable") -> None:
        """Let occurrences no longer contribute to the gradient of their parameter, as `State.mask` does.

        **Raises** `StateError` where one `Parameter` object stands at a selected place and at others, since `backward` has added
        up its gradient before the optimizer sees it.
        """
        masked = self.op_state.mask(selector)
        for record in masked.parameters:
            live = {id(self._tensors[path]): path for path in record.paths if path not in record.masked}
            for path in record.masked:
                other = live.get(id(self._tensors[path]))
                if other is not None:
                    raise StateError(
                        f"{path} and {other} are one Parameter, whose gradient PyTorch adds up before the optimizer sees it; "
                        f"detach it in the forward pass of {path}, or use value_and_grad, which knows masks"
                    )
        self._inner.state = masked

    def unmask(self, selector: "Selectable" = "**") -> None:
        """Let occurrences contribute again, as `State.unmask` does."""
        self._change(lambda state: state.unmask(selector))

    def adjust(self, selector: "Selectable" = "**", /, **hyperparameters: Any) -> None:
        """Change hyperparameters and keep everything else, as `State.adjust` does.

        What is changed for a whole group shows in `param_groups`. What is changed for a part of one no longer follows the group,
        until it is changed for all of it.
        """
        kept = self._inner
        before = self.op_state
        after = before.adjust(selector, **hyperparameters)
        rules, own = list(kept.rules), {path: dict(values) for path, values in kept.own.items()}
        raw = [[_raw(rule) for rule in state.rules] for state in (before, after)]
        members: list[list[tuple[Path, Any, Any]]] = [[] for _ in rules]
        for old, new in zip(before.parameters, after.parameters, strict=True):
            members[kept.owner[new.path]].append((new.path, raw[0][old.group], raw[1][new.group]))
        for at, group in enumerate(members):
            for key in _keys(rules[at]):
                moved = {path: new[key] for path, old, new in group if old[key] != new[key]}
                first = group[0][2][key]
                if moved and all(new[key] == first for _, _, new in group):
                    rules[at] = _adjusted(rules[at], {key: first})
                    for path, _, _ in group:
                        own.get(path, {}).pop(key, None)
                else:
                    for path, value in moved.items():
                        own.setdefault(path, {})[key] = value
        kept.state, kept.rules, kept.parts = after, rules, None
        kept.own = {path: values for path, values in own.items() if values}
        for at in range(len(rules)):
            self._show(at)

    def summary(self) -> Summary:
        """A table of the state, as `summary` makes one: `print(optimizer.summary())`."""
        return summary(self.op_state)

    def _change(self, change: Callable[[State], State]) -> None:
        self._inner.state = change(self.op_state)

    def _sync(self, chosen: Iterable[int]) -> None:
        """Let parameters ask for a gradient if and only if they train. Gradients of frozen ones go."""
        for at in chosen if self.sync_requires_grad else ():
            record = self._inner.state.parameters[at]
            for path in record.paths:
                self._tensors[path].requires_grad_(not record.frozen)
                if record.frozen:
                    self._tensors[path].grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not for you: the groups follow from the rule.

        **Raises** `StateError`.
        """
        if self._kept is not None:
            raise StateError(_ADD)
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        groups = [
            f"  {at}: {len(group['params'])} parameter{'s' * (len(group['params']) != 1)}, {rule!r}"
            for at, (group, rule) in enumerate(zip(self.param_groups, self._inner.rules, strict=True))
        ]
        return "\n".join([f"Optimizer({self._inner.state!r}", *groups, ")"])

    # Files and copies -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the optimizer has learnt, by name. The tensors are those of the state, so the next step writes into them.

        - `state`: for each parameter its slots, and `step`; `ties`: its other names; `own`: hyperparameters that do not follow
          its group; `frozen`, `frozen_rows`, `masked`.
        - `param_groups`: for each group the names under `params`, the hyperparameters, and what schedulers keep there.
        - `step`, `memory`: the count that schedules read, and what rules keep for the whole tree.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state, kept = self.op_state, self._inner
        records = [(_name(record.path), record) for record in state.parameters]
        groups = []
        for at, (group, rule) in enumerate(zip(self.param_groups, kept.rules, strict=True)):
            names = [name for name, record in records if kept.owner[record.path] == at]
            rest = {key: value for key, value in group.items() if key not in _TAKEN}
            moving = [key for key, value in _raw(rule).items() if _moves(value)]
            groups.append({**rest, "params": names, "rule": _form(rule), "schedules": moving})
        found: dict[str, Any] = {
            "version": _VERSION,
            "state": {name: {**leaf.slots, "step": leaf.step} for (name, _), leaf in zip(records, state.leaves(), strict=True)},
            "param_groups": groups,
            "frozen": [name for name, record in records if record.frozen],
            "frozen_rows": {name: [list(run) for run in record.frozen_rows] for name, record in records if record.frozen_rows},
            "masked": [_name(path) for _, record in records for path in sorted(record.masked, key=str)],
            "ties": {name: [_name(alias.path) for alias in record.aliases] for name, record in records if record.aliases},
            "own": {_name(path): _now(values, state.step) for path, values in kept.own.items()},
            "step": state.step,
            "memory": {name: dict(values) for name, values in state.memory.items()},
        }
        for hook in self._optimizer_state_dict_post_hooks.values():
            found = hook(self, found) or found
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: parameters are matched by name, in any order.

        What follows a schedule here and did there goes on following it. The tensors are copied to where the parameters lie now.

        **Raises** `StateError` for one that does not fit, with all that is missing, unexpected or of another shape by name. Nothing
        has changed then.
        """
        given = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, given) or given
        kept = self._inner
        loaded = _Loading(kept, self._tensors, given)
        order, before = loaded.order, kept.state
        # Schedulers go by the position of a group, so it is that of the file. Those who hold the list see the new order.
        self.param_groups[:] = [self.param_groups[at] for at in order]
        kept.owner = {path: order.index(at) for path, at in kept.owner.items()}
        kept.state, kept.rules, kept.own, kept.parts = loaded.state, loaded.rules, loaded.own, None
        for at, rest in enumerate(loaded.rest):
            self.param_groups[at].update(rest)
            self._show(at)
        pairs = zip(before.parameters, kept.state.parameters, strict=True)
        self._sync(at for at, (old, new) in enumerate(pairs) if old.frozen != new.frozen)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # As with PyTorch's own, hooks stay behind, and so does what schedulers put around `step`.
        self._read_groups()
        names = ("defaults", "param_groups", "module", "sync_requires_grad", "_tensors")
        return {**{name: getattr(self, name) for name in names}, "_kept": replace(self._inner, parts=None), "_objects": ()}


_ADD = "groups follow from the rules, so none can be added; make a new Optimizer with a mapping from selectors to rules"


@dataclass
class _Kept:
    """What changes in an optimizer. It is an object of its own since trainers put shells around optimizers that share it."""

    state: State
    rules: list[Rule]
    """Of each group."""
    owner: dict[Path, int]
    """The group of each parameter."""
    seen: list[dict[str, Any]]
    """Of each group the hyperparameters that were last read from or written to `param_groups`."""
    moving: set[int]
    """The groups of which some hyperparameter follows a schedule."""
    own: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """Hyperparameters that do not follow the group."""
    parts: tuple[Layout, list[dict[frozenset[str], set[int]]]] | None = None


def _tensors(module: Any, layout: Layout) -> dict[Path, torch.Tensor]:
    """The tensor at each place of a parameter."""
    leaves, structure = opened(module)
    return {path: leaf for path, leaf in zip(structure.paths, leaves, strict=True) if path in layout.index}


def _name(path: Path) -> str:
    """The name of a place in `state_dict`."""
    return ".".join(map(str, path))


# Hyperparameters ------------------------------------------------------------------------------------------------------


def _keys(rule: Rule) -> dict[str, tuple[str, str]]:
    """The keys that the hyperparameters of a rule have in a group: for each the member of the chain and the name there."""
    places = [
        (member, name)
        for member, each in zip(member_names(rule.members), rule.members, strict=True)
        for name, value in each.hyperparameters.items()
        if not isinstance(value, Rule)
    ]
    counts = Counter(name for _, name in places)
    rate = next((place for place in reversed(places) if place[1] == "lr"), None)
    alone = {place for place in places if (counts[place[1]] == 1 or place == rate) and place[1] not in _TAKEN}
    return {place[1] if place in alone else ".".join(place): place for place in places}


def _raw(rule: Rule) -> dict[str, Any]:
    """The hyperparameters of a rule by key; schedules as they are."""
    members = dict(zip(member_names(rule.members), rule.members, strict=True))
    return {key: members[member].hyperparameters[name] for key, (member, name) in _keys(rule).items()}


def _values(rule: Rule, step: int) -> dict[str, Any]:
    """The hyperparameters of a rule by key, at a step."""
    return _now(_raw(rule), step)


def _now(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    return {key: _plain(_at(value, step)) for key, value in values.items()}


def _at(value: Any, step: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(part, step) for part in value)
    return value(step) if callable(value) else value


def _moves(value: Any) -> bool:
    return any(map(_moves, value)) if isinstance(value, tuple) else callable(value)


def _plain(value: Any) -> Any:
    """A hyperparameter as Python's numbers: schedulers may write tensors and lists."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


def _adjusted(rule: Rule, changes: Mapping[str, Any]) -> Rule:
    """A rule with other values of its hyperparameters, by key."""
    keys, nested = _keys(rule), defaultdict[str, dict[str, Any]](dict)
    for key, value in changes.items():
        member, name = keys[key]
        nested[member][name] = value
    return rule.adjusted(**nested) if nested else rule


def _form(rule: Rule) -> str:
    names = [type(member).__name__ for member in rule.members]
    return names[0] if rule.members == (rule,) else f"Chain({', '.join(names)})"


def _with_rules(state: State, rules: Sequence[Rule]) -> State:
    """A state whose rules have other numbers."""
    if any(member.memory for program in state.layout.programs for member in program.members):
        # It is checked whether those that decide for the whole tree are still equal.
        return state._next(state.parameters, state.slots, rules=rules)
    new = state.evolved(rules=tuple(rules))
    new.addresses = state.addresses
    return new


# Loading --------------------------------------------------------------------------------------------------------------


class _Loading:
    """A state dict read into what an optimizer keeps. It raises before anything has changed."""

    def __init__(self, kept: _Kept, tensors: Mapping[Path, torch.Tensor], given: Mapping[str, Any]) -> None:
        self._kept = kept
        self._tensors = tensors
        self._given = given
        self._paths = {_name(path): path for path in tensors}
        self._check_form()
        self._check_names()
        self.order = self._find_order(kept.owner)
        self.rules, self.rest = self._read_groups()
        _report({word: list(self._misfits(word)) for word in ("missing", "unexpected", "reshaped")})
        self.own = {self._record(name).path: self._read_own(name) for name in given["own"]}
        self.state = self._read_state(kept.owner)

    def _check_form(self) -> None:
        missing = sorted(_PARTS - self._given.keys())
        if missing:
            hint = "; torch.optim's own goes by position, and cannot be matched by name" if "version" in missing else ""
            raise StateError(f"this is no state dict of this class: it lacks {', '.join(missing)}{hint}")
        if self._given["version"] > _VERSION:
            raise StateError(f"the state dict is of version {self._given['version']}, and this library reads {_VERSION}; update it")

    def _record(self, name: str) -> Parameter:
        state = self._kept.state
        return state.parameters[state.layout.index[self._paths[name]]]

    def _check_names(self) -> None:
        """Check that the names and the ties are those of the module."""
        ties = self._given["ties"]
        saved = {name: {name, *ties.get(name, ())} for name in self._given["state"]}
        names, here = set().union(*saved.values()), {*self._paths}
        _report({"missing": sorted(here - names), "unexpected": sorted(names - here)})
        for name, tied in saved.items():
            places = set(map(_name, self._record(name).paths))
            if tied != places:
                texts = [" and ".join(sorted(some)) if len(some) > 1 else f"{name} alone" for some in (tied, places)]
                raise StateError(f"the state dict has {texts[0]} as one parameter, the module has {texts[1]}; make them alike")

    def _misfits(self, word: str) -> Iterator[str]:
        """The slots that are missing, unexpected or of another shape or dtype."""
        for name, entry in self._given["state"].items():
            record, view = self._record(name), self._view(name)
            program = self._kept.state.layout.programs[record.group]
            slots, given = dict(program.slots), {key: value for key, value in entry.items() if key != "step"}
            dtypes = dict(zip(slots, slot_dtypes(record, program), strict=True))
            shape = shape_through(view, record.shape)
            if word == "missing" and given:
                yield from (f"{name}.{slot}" for slot, kind in slots.items() if slot not in given and not kind.start)
            if word == "unexpected":
                yield from (f"{name}.{slot}" for slot in given if slot not in slots)
            for slot in [name for name in slots if name in given] if word == "reshaped" else ():
                shaped = slots[slot].shape
                wanted, found = tuple(shaped(shape) if shaped else shape), tuple(given[slot].shape)
                kind = str(given[slot].dtype).rpartition(".")[2]
                if (found, kind) != (wanted, dtypes[slot]):
                    yield f"{name}.{slot} is {kind}{list(found)}, here {dtypes[slot]}{list(wanted)}"

    def _view(self, name: str) -> View:
        """How the name that a parameter has in the file is seen from the one that it has here."""
        path, record = self._paths[name], self._record(name)
        return next((alias.view for alias in record.aliases if alias.path == path), SAME)

    def _find_order(self, owner: Mapping[Path, int]) -> list[int]:
        """For each group of the file the group here."""
        here = defaultdict[int, set[Path]](set)
        for path, at in owner.items():
            here[at].add(path)
        order = []
        for at, group in enumerate(self._given["param_groups"]):
            members = {self._record(name).path for name in group["params"]}
            match = next((number for number, paths in here.items() if paths == members), None)
            if match is None:
                name = group["params"][0]
                raise StateError(
                    f"group {at} of the state dict, with {name}, has {len(members)} parameters, and here {name} is in a group of "
                    f"{len(here[owner[self._record(name).path]])}; give the optimizer the rules that the other had"
                )
            order.append(match)
        if sorted(order) != list(range(len(here))):
            raise StateError(f"the state dict has {len(order)} groups, and the optimizer has {len(here)}")
        return order

    def _read_groups(self) -> tuple[list[Rule], list[dict[str, Any]]]:
        """The rules of the groups, in the order of the file, and what else there is in them."""
        rules, rests = [], []
        for at, group in zip(self.order, self._given["param_groups"], strict=True):
            rule = self._kept.rules[at]
            if group["rule"] != _form(rule):
                raise StateError(f"the state dict is of {group['rule']}, and {group['params'][0]} has {_form(rule)} here")
            values = {
                key: group[key]
                for key, old in _raw(rule).items()
                if key in group and not (key in group["schedules"] and _moves(old)) and group[key] != old
            }
            rules.append(_adjusted(rule, values))
            known = {*_keys(rule), "params", "param_names", "rule", "schedules"}
            rests.append({key: value for key, value in group.items() if key not in known})
        return rules, rests

    def _read_own(self, name: str) -> dict[str, Any]:
        """The hyperparameters of a parameter that do not follow its group; schedules are those that it has here."""
        old = self._kept.own.get(self._record(name).path, {})
        return {key: old[key] if _moves(old.get(key)) else value for key, value in self._given["own"][name].items()}

    def _read_state(self, owner: Mapping[Path, int]) -> State:
        old, given = self._kept.state, self._given
        names = {self._record(name).path: name for name in given["state"]}
        frozen, masked = set(given["frozen"]), {self._paths[name] for name in given["masked"]}
        rules: list[Rule] = []
        kinds: list[tuple[int, dict[str, Any]]] = []
        parameters, slots, counters = [], [], []
        for record in old.parameters:
            name, at = names[record.path], self.order.index(owner[record.path])
            kind = at, self.own.get(record.path, {})
            if kind not in kinds:
                kinds.append(kind)
                rules.append(_adjusted(self.rules[at], kind[1]))
            rows = tuple((start, stop) for start, stop in given["frozen_rows"].get(name, ()))
            view = self._view(name)
            if rows and not (rows_through(view) and rows[-1][1] <= record.shape[0]):
                raise StateError(
                    f"{name}: rows of it are frozen, and they are no rows of {record.path} here; thaw them before saving"
                )
            parameters.append(
                record._replace(
                    group=kinds.index(kind),
                    counter=len(counters),
                    frozen=name in frozen,
                    frozen_rows=rows,
                    masked=frozenset(masked & {*record.paths}),
                    device=device_of(self._tensors[record.path], "torch"),
                )
            )
            counters.append(given["state"][name]["step"])
            slots.append(self._slots(name, record, view))
        state = old._next(parameters, slots, rules=rules, counters=counters, memory=given["memory"])
        return state.evolved(step=given["step"])

    def _slots(self, name: str, record: Parameter, view: View) -> tuple[Any, ...] | None:
        """Copies of the slots of a parameter, where it lies and as it is seen here."""
        kinds, entry = self._kept.state.layout.programs[record.group].slots, self._given["state"][name]
        if not any(slot in entry for slot, _ in kinds):
            return None if kinds else ()
        if view != SAME and any(kind.shape for _, kind in kinds):
            raise StateError(
                f"{name} is {record.path} here, seen {view}, and its slots cannot be turned; register it in the same order"
            )
        device = self._tensors[record.path].device
        return tuple(
            [view.undo(entry[slot].detach()).to(device, copy=True).contiguous() if slot in entry else None for slot, _ in kinds]
        )


def _report(problems: Mapping[str, Sequence[str]]) -> None:
    """Raise `StateError` for what does not fit, if anything."""
    shown = [
        f"{word}: {', '.join(some[:_SHOWN])}" + (f" and {len(some) - _SHOWN} more" if len(some) > _SHOWN else "")
        for word, some in problems.items()
        if some
    ]
    if shown:
        raise StateError(f"the state dict does not fit the module; {'; '.join(shown)}")
