"""The state of a model's training: for every parameter its rule, slots, step count and frozen flag, named by path."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

from optimisers import pytree
from optimisers.assignment import RuleFor, check_kind, check_selectors, chooser
from optimisers.backends.arrays import device_of
from optimisers.backends.conversion import copied
from optimisers.errors import HyperparameterError, ModelError, PathError, StateError, suggest, where
from optimisers.leaf import Leaf, line_of, same_leaf, same_value
from optimisers.model import rewrite
from optimisers.model.layout import Layout, Parameter
from optimisers.model.paths import Path, branches
from optimisers.model.select import Selectable, as_selector, matching
from optimisers.model.ties import SAME, View
from optimisers.rules.base import Rule, member_names
from optimisers.rules.numbers import SplitRules
from optimisers.rules.program import Program, program_of
from optimisers.slots import carried, check_rule, fresh_slots, with_started
from optimisers.text import letter_of

__all__ = ["State", "check_single", "check_state", "check_step", "check_unspent", "new_state"]

Slots = tuple[tuple[Any, ...] | None, ...]
_LINES = 24


class State:
    """The state of a model's training: a persistent value.

    `setup` makes one. Each method returns a new state that shares every array with the old one; nothing is written in
    place, except by `update_`, which may write into the slots of the state it is given.

    - `state.step`: the number of steps taken, which schedules read. Each parameter has its own count besides, for bias correction.
    - `state.parameters`: the record of every parameter.
    - `state.memory`: what rules keep for the whole tree, by member and name.
    - `state[path]`: the `Leaf` of a parameter, or the state of a branch with its paths made relative.
    - `len(state)`, `iter(state)`, `path in state`: over canonical paths.

    Where a method takes a selector: a path (which stands for all that is below it), a glob, a type of an enclosing node, a
    function of the record, a combination from `optimisers.select`, or a list of these.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"encoder": {"w": np.ones(3)}, "head": {"w": np.ones(2)}}
        >>> state = op.setup(op.Adam(1e-3), model).freeze("encoder")
        >>> state
        State(step=0, 2 parameters, 1 frozen, Adam(lr=0.001, betas=(0.9, 0.999), eps=1e-08))
        >>> state["encoder.w"].frozen
        True
    """

    __slots__ = (
        "__weakref__",
        "_rules",
        "addresses",
        "counters",
        "detached",
        "from_leaves",
        "layout",
        "memory",
        "slots",
        "spent",
        "step",
    )

    def __init__(
        self,
        layout: Layout,
        rules: tuple[Rule, ...] | SplitRules,
        counters: tuple[Any, ...],
        step: Any,
        slots: Slots,
        memory: Mapping[str, Mapping[str, Any]],
        detached: frozenset[Path] = frozenset(),
        addresses: dict[Any, Any] | None = None,
    ) -> None:
        self.layout = layout
        self._rules = rules
        self.counters = counters
        self.step = step
        self.slots = slots
        self.memory = memory
        # Places that were untied: the model still holds the shared array there, and the next step gives them one of their own.
        self.detached = detached
        # Whether update_ has written into the slots, or was interrupted, so that they no longer go with the counts.
        self.spent = False
        # Whether JAX put it together of leaves, which then come out as they are.
        self.from_leaves = False
        # What backends keep about these very slot arrays; it goes on to the next state as long as the arrays do.
        self.addresses = {} if addresses is None else addresses
        if "jax" in layout.libraries:
            pytree.register(State)

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each group."""
        # A compiled loop hands states on without ever looking at their rules.
        if isinstance(self._rules, SplitRules):
            self._rules = self._rules.joined()
        return self._rules

    @property
    def split_rules(self) -> SplitRules:
        """The rules, their numbers apart."""
        return self._rules if isinstance(self._rules, SplitRules) else SplitRules.of(self._rules)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The record of every parameter, in traversal order; places that were untied come last."""
        return self.layout.parameters

    def __len__(self) -> int:
        return len(self.layout.parameters)

    def __iter__(self) -> Iterator[Path]:
        return (parameter.path for parameter in self.layout.parameters)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, (str, int, tuple)) and Path(path) in self.layout.index

    def __getitem__(self, path: "str | int | tuple[Any, ...]") -> "Leaf | State":
        key = Path(path)
        at = self.layout.index.get(key)
        return self._branch(key) if at is None else self.leaf(at)

    def leaf(self, at: int) -> Leaf:
        """The leaf of a parameter by its number in `parameters`."""
        parameter = self.layout.parameters[at]
        names = (name for name, _ in self.layout.programs[parameter.group].slots)
        return Leaf(
            path=parameter.path,
            shape=parameter.shape,
            dtype=parameter.dtype,
            rule=self.rules[parameter.group],
            slots=MappingProxyType(
                {name: slot for name, slot in zip(names, self.slots[at] or (), strict=False) if slot is not None}
            ),
            step=self.counters[parameter.counter],
            frozen=parameter.frozen,
            frozen_rows=parameter.frozen_rows,
            ties=MappingProxyType({alias.path: str(alias.view) for alias in parameter.aliases}),
            masked=parameter.masked,
        )

    def leaves(self) -> Iterator[Leaf]:
        """Every leaf, in traversal order."""
        return map(self.leaf, range(len(self)))

    def _branch(self, branch: Path) -> "State":
        """The state of a branch. A tie that crosses its edge is dropped."""
        parameters, slots, rules = [], [], list(self.rules)
        for at, parameter in enumerate(self.layout.parameters):
            seen = rewrite.below(parameter, branch)
            if seen is None:
                continue
            alone, own = seen[0], self.slots[at]
            if seen[1] != SAME:
                alone, own, rule = self._elsewhere(at, seen[1], alone)
                alone = alone._replace(group=len(rules))
                rules.append(rule)
            parameters.append(alone)
            slots.append(own)
        if not parameters:
            raise PathError(f'the state has nothing at "{branch}"{suggest(str(branch), branches(self.layout.index))}')
        excluded, detached = (
            frozenset(path.below(branch) for path in paths if path.startswith(branch))
            for paths in (self.layout.excluded, self.detached)
        )
        counters = (*self.counters, 0)
        return self.arranged(parameters, slots, rules=rules, counters=counters, excluded=excluded, detached=detached)

    # Who trains -------------------------------------------------------------------------------------------------------

    def freeze(self, selector: "Selectable", *, rows: Any = None) -> "State":
        """Freeze parameters: they do not move, whatever their gradient, and keep their slots and count.

        Of a tied parameter every occurrence freezes.

        **Arguments:**

        - `selector`: which parameters.
        - `rows`: a boolean mask, a slice or a list of numbers: only these rows freeze, beside those that are frozen
          already. They go along axis 0 of the parameter as it stands at its canonical path.

        **Raises** `PathError` when nothing matches; `ShapeError` for rows that do not fit.
        """
        chosen = self._matching(selector)
        if rows is None:
            return self._with(chosen, lambda parameter: parameter._replace(frozen=True))
        return self._with(chosen, lambda parameter: rewrite.with_rows(parameter, rows, frozen=True))

    def thaw(self, selector: "Selectable" = "**", *, rows: Any = None) -> "State":
        """Thaw parameters: they train again, with the slots and count they had. One that never trained starts fresh, at zero.

        **Arguments:**

        - `selector`: which parameters; all by default.
        - `rows`: only these rows, the others stay as they are. Without it, all rows thaw.

        **Raises** `PathError` when nothing matches; `ShapeError` for rows that do not fit.
        """
        chosen = self._matching(selector)
        if rows is None:
            return self._with(chosen, lambda parameter: parameter._replace(frozen=False, frozen_rows=()))
        return self._with(chosen, lambda parameter: rewrite.with_rows(parameter, rows, frozen=False))

    def mask(self, selector: "Selectable") -> "State":
        """Let occurrences no longer contribute to the gradient of their parameter, which trains on from its others.

        **Raises** `PathError` when nothing matches.
        """
        return self._with_masks(selector, lambda masked, paths: masked | paths)

    def unmask(self, selector: "Selectable" = "**") -> "State":
        """Let occurrences contribute again. All of them by default.

        **Raises** `PathError` when nothing matches.
        """
        return self._with_masks(selector, lambda masked, paths: masked - paths)

    def with_frozen(self, changes: Mapping[int, bool]) -> "State":
        """A state in which some parameters, by their numbers, are frozen or live; which rows of them are frozen stays."""
        return self._with(changes, lambda parameter: parameter._replace(frozen=changes[self.layout.index[parameter.path]]))

    # Ties -------------------------------------------------------------------------------------------------------------

    def tie(self, alias: "str | tuple[Any, ...]", path: "str | tuple[Any, ...]", *, view: str | None = None) -> "State":
        """Make two parameters one: from the next step on both places hold the same values and their gradients are added.

        The slots and count of the parameter at `path` stay; those of the other go. The two have to hold the same values at the
        next step.

        **Arguments:**

        - `alias`: the place that becomes another occurrence.
        - `path`: the canonical path of the parameter that stays.
        - `view`: how the alias is seen from there: `None` (the same), `"transpose"` (all axes reversed) or `"reshape"`.

        **Raises** `PathError` for an unknown path, `TieError` for shapes or dtypes that do not fit, or places that are
        tied already.
        """
        goes, stays = self._at(alias), self._at(path)
        merged = rewrite.tied(self.layout.parameters[goes], Path(alias), self.layout.parameters[stays], Path(path), view)
        parameters = [merged if at == stays else each for at, each in enumerate(self.layout.parameters) if at != goes]
        slots = [each for at, each in enumerate(self.slots) if at != goes]
        return self.arranged(parameters, slots)

    def untie(self, path: "str | tuple[Any, ...]") -> "State":
        """Make an occurrence a parameter of its own, with a copy of the slots, the count, the rule and the frozen flag.

        The next `update` or `update_` gives the model an array of its own there.

        **Raises** `PathError` for an unknown path, `TieError` where nothing is tied.
        """
        at, key = self._at(path), Path(path)
        rest, alone, view = rewrite.untied(self.layout.parameters[at], key)
        parameters = list(self.layout.parameters)
        parameters[at] = rest
        alone, slots, rule = self._elsewhere(at, view, alone)
        same = rule is self.rules[alone.group]
        return self.arranged(
            [*parameters, alone if same else alone._replace(group=len(self.rules))],
            [*self.slots, slots],
            rules=self.rules if same else [*self.rules, rule],
            counters=(*self.counters, 0),
            detached=self.detached | {key},
        )

    def _elsewhere(self, at: int, view: View, alone: Parameter) -> tuple[Parameter, Any, Rule]:
        """The record of an occurrence on its own, its slots as seen from there (copies), and its rule.

        Slots of another shape than the parameter, such as means of rows, cannot be seen so, and start afresh.
        """
        whole, slots, rule = self.layout.parameters[at], self.slots[at], self.rules[alone.group]
        own = rule if view == SAME else rule.rule_for(alone.shape, alone.dtype)
        check_rule(own, alone)
        if slots is None:
            return alone, None, own
        shaped = any(slot is not None and tuple(slot.shape) not in (whole.shape, ()) for slot in slots)
        if own is not rule or (view != SAME and shaped):
            return alone._replace(counter=len(self.counters)), self._fresh(alone, program_of(own)), own
        seen = [slot if slot is None or tuple(slot.shape) != whole.shape else view.apply(slot) for slot in slots]
        return alone, tuple([slot if slot is None else copied(slot) for slot in seen]), own

    # Rules ------------------------------------------------------------------------------------------------------------

    def adjust(self, selector: "Selectable" = "**", /, **hyperparameters: Any) -> "State":
        """Change hyperparameters and keep everything else: moments, counts, flags.

        **Arguments:**

        - `selector`: which parameters; all by default.
        - `**hyperparameters`: new values, numbers or schedules. A schedule reads `state.step`; to begin it now, give
          `schedule.starting_at(state.step)`. In a chain, every member that has the name takes it; a mapping under the name of a
          member, such as `adam={"lr": 0.1}`, speaks to that member alone. Selected parameters whose rule lacks the name are
          left alone.

        **Raises** `PathError` when nothing matches; `HyperparameterError` for a name that no selected rule has, or a value out
        of range.

        Example:
            >>> import numpy as np, optimisers as op
            >>> state = op.setup(op.AdamW(1e-3), {"w": np.ones((2, 2)), "bias": np.ones(2)})
            >>> state.adjust("**.bias", weight_decay=0.0)["bias"].rule.weight_decay
            0.0
        """
        chosen = self._matching(selector)
        groups = sorted({self.layout.parameters[at].group for at in chosen})
        known = {group: {*self.rules[group].hyperparameters, *member_names(self.rules[group].members)} for group in groups}
        for name in hyperparameters:
            if not any(name in names for names in known.values()):
                # A member of a chain is named where a mapping is given for it.
                there = {each for group in groups for each in self.rules[group].hyperparameters}
                names = set().union(*known.values()) if isinstance(hyperparameters[name], Mapping) else there
                raise HyperparameterError(f'no selected rule has a hyperparameter "{name}"{suggest(name, names)}')
        rules = {
            group: self.rules[group].adjusted(**{name: value for name, value in hyperparameters.items() if name in known[group]})
            for group in groups
        }
        return self._with_rules(chosen, rules)

    def replace(self, selector: "Selectable | RuleFor", rule: "RuleFor | None" = None) -> "State":
        """Give parameters another rule. Slots that both rules have under one name are kept, and the count with them.

        Other slots start afresh. A new part of a chain that needs the count from its beginning, as the moments of Adam do,
        sets it back to zero, and then all such parts start afresh.

        `replace(rule)` replaces the rule of all parameters. For the rule, anything serves that `setup` takes: a mapping from
        selectors to rules, a function of the record, `layerwise(…)`.

        **Raises** `PathError` when nothing matches; `StateError` when the rule cannot train a parameter.

        Example:
            >>> import numpy as np, optimisers as op
            >>> state = op.setup(op.Adam(), np.ones(2))
            >>> state, _ = op.update(state, np.ones(2), np.ones(2))
            >>> leaf = state.replace(op.Chain(op.Adam(), op.Average(0.9)))[""]
            >>> leaf.step, leaf.slots["mu"]
            (1, array([0.1, 0.1]))
        """
        if rule is None:
            selector, rule = "**", selector  # type: ignore[assignment]
        if isinstance(selector, Rule):
            raise HyperparameterError("replace takes a rule, or a selector and a rule, in this order")
        check_kind(rule, "replace")
        check_single(self)
        chosen, choose = self._matching(selector), chooser(rule)  # type: ignore[arg-type]
        check_selectors(rule, [self.layout.parameters[at] for at in chosen])  # type: ignore[arg-type]
        rules, parameters = list(self.rules), list(self.layout.parameters)
        counters, slots = list(self.counters), list(self.slots)
        groups: dict[Any, int] = {}
        for at in chosen:
            own = choose(parameters[at])
            check_rule(own, parameters[at])
            program = program_of(own)
            if own.key not in groups:
                groups[own.key] = len(rules)
                rules.append(own)
            kept = carried(self.layout.programs[parameters[at].group], self.slots[at], program)
            begun = _begun(own, kept)
            kept = kept if begun is None else begun
            counter = parameters[at].counter if begun is None else len(counters)
            parameters[at] = parameters[at]._replace(group=groups[own.key], counter=counter)
            if slots[at] is not None:
                new = self._fresh(parameters[at], program, slots[at])
                slots[at] = tuple([new if old is None else old for old, new in zip(kept, new, strict=True)])
        return self.arranged(parameters, slots, rules=rules, counters=(*counters, 0))

    # Slots ------------------------------------------------------------------------------------------------------------

    def reset(self, selector: "Selectable" = "**") -> "State":
        """Start parameters afresh: slots at zero, count at zero.

        All of them by default; then what rules keep for the tree starts afresh, too. The step that schedules read stays;
        `schedule.starting_at(state.step)` begins one anew.

        **Raises** `PathError` when nothing matches.
        """
        check_single(self)
        chosen = self._matching(selector)
        parameters, slots = list(self.layout.parameters), list(self.slots)
        for at in chosen:
            parameters[at] = parameters[at]._replace(counter=len(self.counters))
            if slots[at] is not None:
                slots[at] = self._fresh(parameters[at], self.layout.programs[parameters[at].group], slots[at])
        memory = {} if len(chosen) == len(parameters) else self.memory
        return self.arranged(parameters, slots, counters=(*self.counters, 0), memory=memory)

    def drop(self, selector: "Selectable" = "**") -> "State":
        """Free the slots of frozen parameters; when thawed, they start fresh. By default those of all that are frozen.

        **Raises** `PathError` when nothing matches; `StateError` when a selected parameter is live.
        """
        check_single(self)
        chosen = self._matching(selector)
        parameters, slots = list(self.layout.parameters), list(self.slots)
        if selector == "**":
            chosen = [at for at in chosen if parameters[at].frozen]
        for at in chosen:
            if not parameters[at].frozen:
                raise StateError(
                    f"{where(parameters[at].path)} is live, and a live parameter needs its slots; freeze it first, or reset it"
                )
            parameters[at] = parameters[at]._replace(counter=len(self.counters))
            slots[at] = None
        return self.arranged(parameters, slots, counters=(*self.counters, 0))

    # Working ----------------------------------------------------------------------------------------------------------

    def arranged(
        self,
        parameters: Iterable[Parameter],
        slots: Sequence[Any],
        *,
        rules: Sequence[Rule] | None = None,
        counters: Sequence[Any] | None = None,
        excluded: frozenset[Path] | None = None,
        detached: frozenset[Path] | None = None,
        memory: Mapping[str, Mapping[str, Any]] | None = None,
        step: Any = None,
    ) -> "State":
        """A state with other contents, its groups and counters put in order.

        None of them is unused, and no counter is shared by frozen and live parameters.
        """
        check_unspent(self)
        rules = self.rules if rules is None else rules
        counters = self.counters if counters is None else counters
        groups: dict[int, int] = {}
        counts: dict[Any, int] = {}
        used: list[Any] = []
        tidy = []
        for parameter in parameters:
            value = counters[parameter.counter]
            key = (value if isinstance(value, int) else ("at", parameter.counter), parameter.frozen)
            if key not in counts:
                counts[key] = len(used)
                used.append(value)
            group = groups.setdefault(parameter.group, len(groups))
            if group != parameter.group or counts[key] != parameter.counter:
                parameter = parameter._replace(group=group, counter=counts[key])
            tidy.append(parameter)
        kept = tuple(rules[group] for group in groups) or tuple(rules[:1])
        layout = Layout.of(tidy, map(program_of, kept), self.layout.excluded if excluded is None else excluded)
        alone = {parameter.path for parameter in tidy}
        detached = (self.detached if detached is None else detached) & alone
        kept_memory = _memory(kept, self.memory if memory is None else memory)
        return State(layout, kept, tuple(used), self.step if step is None else step, tuple(slots), kept_memory, detached)

    def _fresh(self, parameter: Parameter, program: Program, old: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Fresh slots, beside those that there were, or there are for other parameters.

        **Raises** `StateError` for an ensemble, whose slots have one axis more than can be told here.
        """
        check_single(self)
        if parameter.library == "jax":
            seen = [slot for slot in old or () if slot is not None and tuple(slot.shape) == parameter.shape]
            device = device_of(seen[0], "jax") if seen else parameter.device
            parameter = parameter._replace(device=device if device is None else pytree.placed(self, device))
        return fresh_slots(parameter, program)

    def with_started(self, arrays: Sequence[Any], chosen: Iterable[int]) -> "State":
        """A state in which the slots of some parameters are there. Itself when none was missing.

        **Arguments:** `arrays`: of all parameters; `chosen`: the parameters to look at.
        """
        made = {}
        for at in chosen:
            parameter, slots = self.layout.parameters[at], self.slots[at]
            program = self.layout.programs[parameter.group]
            new = with_started(self._fresh(parameter, program) if slots is None else slots, arrays[at], parameter, program)
            if new is not slots:
                made[at] = new
        return self.evolved(slots=tuple([made.get(at, slots) for at, slots in enumerate(self.slots)])) if made else self

    def evolved(self, **attributes: Any) -> "State":
        """A state with some of its attributes (`slots`, `memory`, …) exchanged, unchecked."""
        check_unspent(self)
        names = ("layout", "rules", "counters", "step", "slots", "memory", "detached")
        return State(**{name: attributes.get(name, getattr(self, name)) for name in names})

    def _at(self, path: "str | tuple[Any, ...]") -> int:
        at = self.layout.index.get(Path(path))
        if at is None:
            names = {str(each) for parameter in self.layout.parameters for each in parameter.paths}
            raise PathError(f'no parameter stands at "{Path(path)}"{suggest(str(Path(path)), names)}')
        return at

    def _matching(self, selector: "Selectable") -> list[int]:
        return matching(self.layout.parameters, selector, self.layout.excluded)

    def _with(self, chosen: Iterable[int], change: Callable[[Parameter], Parameter]) -> "State":
        parameters, slots = list(self.layout.parameters), list(self.slots)
        for at in chosen:
            parameters[at] = parameter = change(parameters[at])
            if slots[at] is None and not parameter.frozen:
                slots[at] = self._fresh(parameter, self.layout.programs[parameter.group])
        return self.arranged(parameters, slots)

    def _with_masks(self, selector: "Selectable", combine: Callable[[frozenset[Path], set[Path]], frozenset[Path]]) -> "State":
        self._matching(selector)
        wish = as_selector(selector)
        parameters = [
            parameter._replace(
                masked=frozenset(combine(parameter.masked, {each.path for each in parameter.occurrences if wish.selects(each)}))
            )
            for parameter in self.layout.parameters
        ]
        return self.arranged(parameters, self.slots)

    def _with_rules(self, chosen: Sequence[int], rules: Mapping[int, Rule]) -> "State":
        """Change the rule of the chosen members of some groups; a group that is chosen whole keeps its number."""
        members: dict[int, int] = {}
        for parameter in self.layout.parameters:
            members[parameter.group] = members.get(parameter.group, 0) + 1
        hit: dict[int, int] = {}
        for at in chosen:
            group = self.layout.parameters[at].group
            hit[group] = hit.get(group, 0) + 1
        new_rules, moved = list(self.rules), {}
        for group, rule in rules.items():
            if hit[group] == members[group]:
                new_rules[group] = rule
            elif rule != self.rules[group]:
                moved[group] = len(new_rules)
                new_rules.append(rule)
        parameters = list(self.layout.parameters)
        for at in chosen:
            group = parameters[at].group
            if group in moved:
                parameters[at] = parameters[at]._replace(group=moved[group])
        return self.arranged(parameters, self.slots, rules=new_rules)

    # A value ----------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        frozen = sum(parameter.frozen for parameter in self.layout.parameters)
        shown = [f"step={self.step}", f"{len(self)} parameter{'s' * (len(self) != 1)}"]
        shown += [f"{frozen} frozen"] if frozen else []
        partly = sum(bool(parameter.frozen_rows) and not parameter.frozen for parameter in self.layout.parameters)
        shown += [f"{partly} partly frozen"] if partly else []
        shown.append(repr(self.rules[0]) if len(self.rules) == 1 else f"{len(self.rules)} rules")
        return f"State({', '.join(shown)})"

    def __str__(self) -> str:
        leaves = list(self.leaves())
        shown = leaves[:_LINES]
        rules = {leaf.rule.key: repr(leaf.rule) for leaf in shown} if len(self.rules) > 1 else {}
        letters = {key: letter_of(at) for at, key in enumerate(rules)}
        lines = [line_of(leaf, letters.get(leaf.rule.key, "")) for leaf in shown]
        columns = [column for column in zip(*lines, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        body = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in zip(*columns, strict=True)
        ]
        body += [f"… and {len(leaves) - _LINES} more"] if len(leaves) > _LINES else []
        body += [f"{letters[key]} = {text}" for key, text in rules.items()]
        body += [self.memory_line] if self.memory_line else []
        return "\n".join([repr(self), *(f"  {line}".rstrip() for line in body)])

    def _repr_html_(self) -> str:
        from optimisers.html_tree import tree

        return tree(self.leaves(), f"State at step {self.step}", self.memory_line)

    @property
    def memory_line(self) -> str:
        """The numbers of `memory` in a line: `skipnonfinite: skipped=1`."""
        shown = {
            name: ", ".join(
                f"{key}={value}" for key, value in own.items() if getattr(value, "shape", ()) == () and value is not None
            )
            for name, own in self.memory.items()
        }
        return "; ".join(f"{name}: {text}" for name, text in shown.items() if text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        if self is other:
            return True
        same = len(self) == len(other) and same_value(self.step, other.step) and same_value(self.memory, other.memory)
        return same and all(same_leaf(a, b) for a, b in zip(_by_path(self), _by_path(other), strict=True))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays

    def __reduce__(self) -> tuple[Any, ...]:
        check_unspent(self)
        return _restored, (
            self.layout.parameters,
            self.layout.excluded,
            self.rules,
            self.counters,
            self.step,
            self.slots,
            dict(self.memory),
            self.detached,
        )


def check_state(value: Any, caller: str) -> None:
    """Check that a function was given a state.

    **Raises** `ModelError`.
    """
    if not isinstance(value, State):
        if isinstance(getattr(value, "op_state", None), State):
            hint = "give its op_state"
        elif isinstance(value, tuple) and any(isinstance(each, State) for each in value[:1]):
            hint = "give the first in it, as in state, model = update(state, model, grads)"
        else:
            hint = "mind the order of the arguments"
        raise ModelError(f"{caller} takes a State, as setup makes one, and not {type(value).__name__}; {hint}")


def check_single(state: State, where: str = "") -> None:
    """Check that a state is that of one model.

    **Raises** `StateError` for that of an ensemble.
    """
    if getattr(state.step, "shape", ()) != ():
        raise StateError(
            f"{where}this is the state of an ensemble, with an axis for its members in front; do it inside of jax.vmap, or take "
            "one member: jax.tree.map(lambda leaf: leaf[at], state)"
        )


def check_step(step: Any, caller: str) -> None:
    """Check that a number can be the count of a state, or is `None`.

    **Raises** `StateError`.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise StateError(f"{caller}(step={step!r}): a count of steps is a whole number, 0 or more")


def check_unspent(state: State, where: str = "") -> None:
    """Check that the slots of a state still go with its counts.

    **Raises** `StateError`.
    """
    if state.spent:
        raise StateError(
            f"{where}update_ has written into the slots of this state; use the state that it returned, or a saved one if it was "
            "interrupted"
        )


def new_state(
    parameters: Sequence[Parameter], rules: Sequence[Rule], excluded: frozenset[Path] = frozenset(), idle: Collection[int] = ()
) -> State:
    """The state of parameters that have not trained yet; frozen ones get no slots, idle ones not before their first gradient.

    **Raises** `StateError` when a rule cannot train its parameter.
    """
    for parameter in parameters:
        check_rule(rules[parameter.group], parameter)
    programs = [program_of(rule) for rule in rules]
    slots = [
        None if parameter.frozen or at in idle else fresh_slots(parameter, programs[parameter.group])
        for at, parameter in enumerate(parameters)
    ]
    layout = Layout(tuple(parameters), tuple(programs), excluded)
    return State(layout, tuple(rules), (0,), 0, tuple(slots), {}).arranged(parameters, slots)


def _restored(
    parameters: Any, excluded: Any, rules: Any, counters: Any, step: Any, slots: Any, memory: Any, detached: Any
) -> State:
    layout = Layout.of(parameters, map(program_of, rules), excluded)
    return State(layout, rules, counters, step, slots, memory, detached)


def _memory(rules: Sequence[Rule], old: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The memory of the rules: one for all groups, since what it decides is decided for the whole tree."""
    memory: dict[str, dict[str, Any]] = {}
    owners: dict[str, Rule] = {}
    for rule in rules:
        for member, form in zip(rule.members, program_of(rule).members, strict=True):
            if not form.memory:
                continue
            first = owners.setdefault(form.name, member)
            if first.with_values({**first.hyperparameters, **dict.fromkeys(first.individual)}) != member.with_values(
                {**member.hyperparameters, **dict.fromkeys(member.individual)}
            ):
                but = f", but for {', '.join(first.individual)}" if first.individual else ""
                raise StateError(
                    f"{first!r} and {member!r} decide for the whole tree, so they have to be equal for all parameters{but}; "
                    "give all parameters the same"
                )
            memory[form.name] = dict(old.get(form.name) or form.memory)
    _check_order(rules)
    return memory


def _check_order(rules: Sequence[Rule]) -> None:
    """Check that parts which decide for the whole tree stand in one order in all rules.

    **Raises** `StateError`.
    """
    pairs: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        names = [form.name for form in program_of(rule).members if form.gate or form.memory]
        for first, second in combinations(names, 2):
            other = pairs.get((second, first))
            if other is not None:
                raise StateError(
                    f"{first} and {second} decide for the whole tree, and stand in one order in {rule!r} and in the other in "
                    f"{other!r}; put them in the same order"
                )
            pairs[first, second] = rule


def _begun(rule: Rule, kept: list[Any]) -> list[Any] | None:
    """The slots that stay when a part of a chain needs the count from its beginning: none of those that need it too.

    `None` when every part that the count matters to has a slot that goes on.
    """
    program = program_of(rule)
    counting = [
        range(span.start, span.stop)
        for member, form, span in zip(rule.members, program.members, program.spans, strict=True)
        if not form.gate and any(not slot.start for _, slot in form.slots) and member.counts
    ]
    if not any(all(kept[at] is None for at in span) for span in counting):
        return None
    return [None if any(at in span for span in counting) else slot for at, slot in enumerate(kept)]


def _by_path(state: State) -> list[Leaf]:
    return sorted(state.leaves(), key=lambda leaf: str(leaf.path))
