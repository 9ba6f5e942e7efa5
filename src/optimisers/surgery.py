"""A state for a model that has changed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from optimisers.assignment import RuleFor, check_kind, chooser
from optimisers.backends.conversion import converted, copied
from optimisers.errors import OptimiserError, PathError, ShapeError, StateError
from optimisers.model.layout import Alias, Parameter
from optimisers.model.paths import Path
from optimisers.model.reading import equal_values, parameters_of, parted
from optimisers.model.renaming import Rename, check_targets, renamer
from optimisers.model.rewrite import rows_seen
from optimisers.model.select import Selectable, as_selector, matching
from optimisers.model.ties import SAME, View, rows_through, shape_through
from optimisers.model.torch_nodes import is_idle, is_module
from optimisers.rules.base import Rule
from optimisers.rules.numbers import join, split
from optimisers.rules.program import program_of
from optimisers.rules.values import is_traced
from optimisers.slots import carried, check_rule, fresh_slots, slot_dtypes, with_started
from optimisers.state import State, check_single, check_state, check_unspent
from optimisers.text import path_text

__all__ = ["Adapted", "Adapting", "adapt"]

_POLICIES = ("keep", "pad", "truncate")


@dataclass(frozen=True)
class Adapted:
    """What became of each parameter when a state was adapted. `print` shows all but what was simply kept.

    - `kept`: the paths of parameters that go on as they are, under the old name or a new one.
    - `renamed`: from the old path to the new one.
    - `resized`: the paths of parameters that keep a part of their slots, each with the old shape and the new one.
    - `converted`: the paths of parameters of another dtype or library, with what they were and what they are.
    - `fresh`: the paths of parameters that start afresh, each with the reason.
    - `dropped`: the old paths of parameters whose state is not used any more.
    - `tied`: further parameters that became places of one: from the path to that whose state stays.
    - `untied`: places that became parameters of their own: from the path to that which they were tied to.
    """

    kept: tuple[Path, ...] = ()
    renamed: Mapping[Path, Path] = field(default_factory=dict)
    resized: Mapping[Path, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    converted: Mapping[Path, tuple[str, str]] = field(default_factory=dict)
    fresh: Mapping[Path, str] = field(default_factory=dict)
    dropped: tuple[Path, ...] = ()
    tied: Mapping[Path, Path] = field(default_factory=dict)
    untied: Mapping[Path, Path] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON; paths are spelled."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {str(path): plain(each) for path, each in value.items()}
            if isinstance(value, Path):
                return str(value)
            return [plain(each) for each in value] if isinstance(value, tuple) else value

        return {name: plain(value) for name, value in vars(self).items()}

    def __str__(self) -> str:
        counts = [f"{len(value)} {name}" for name, value in vars(self).items() if value]
        lines = [(name, *cells) for name, value in vars(self).items() if name != "kept" for cells in _lines(value)]
        widths = [max(len(line[at]) for line in lines) for at in range(2)] if lines else []
        rows = [f"  {line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]}".rstrip() for line in lines]
        return "\n".join([", ".join(counts) or "nothing to adapt", *rows])


def _lines(value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(path_text(path), "") for path in value]
    return [(path_text(path), _cell(each)) for path, each in value.items()]


def _cell(value: Any) -> str:
    if isinstance(value, Path):
        return f"-> {value}"
    if isinstance(value, tuple):
        return " -> ".join(str(list(part)) if isinstance(part, tuple) else str(part) for part in value)
    return str(value)


def adapt(
    state: State,
    model: Any,
    *,
    rename: Rename = None,
    resize: "str | Mapping[Selectable, str] | None" = None,
    rule: "RuleFor | None" = None,
    trainable: "Selectable | None" = None,
) -> tuple[State, Adapted]:
    """The state for a model that has changed: parameters that are still there keep their slots, count, rule and frozen flag.

    They are found by name. Ties are looked for again; where arrays do not keep them (those of JAX through `jit`, views of NumPy
    through copies), places that were tied and hold the same values still are. Slots follow their parameter into another dtype,
    another array library, and onto other devices. What is new starts afresh, live.

    The new state shares slots with the old one, as with the methods of `State`. Where two parameters go on from one, each has
    slots of its own.

    **Arguments:**

    - `state`: the state of the old model. It stays as it is.
    - `model`: the new model.
    - `rename`: from old names to new ones: a mapping from branches to branches, such as `{"encoder": "backbone.encoder"}` or
      `{"": "backbone"}`; its keys may also be compiled regular expressions over spelled paths, with the replacement as
      `re.sub` takes it; or a function from a path to a path. `None` drops. All change at once: `{"layers.1": "layers.2",
      "layers.2": "layers.3"}` makes room for a layer.
    - `resize`: what to do with the slots of a parameter whose shape has changed: `"keep"` what both shapes have, from the
      first element of each axis on; `"pad"` does so only where no axis has become shorter, `"truncate"` only where none has become
      longer. A policy for all, or a mapping from selectors to policies. The rest starts as it does in a fresh parameter. The count
      stays, so that bias is corrected as for the old elements; of a rule like Adam the first steps of new ones may be a few times
      the usual, since their moments are young. By default,
      and where a policy does not serve, the parameter starts afresh.
    - `rule`: the rule of new parameters, and of old ones of a shape that their own cannot train, as `setup` takes it. By default
      the one of the state, if it has only one.
    - `trainable`: a selector, as for `setup`: what are parameters from now on. By default what was left out so far stays left out.

    **Returns** the new state and an `Adapted` that says what became of each parameter.

    **Raises** `PathError` for names that match nothing, or two old parameters that get one name; `StateError` when a new parameter
    lacks a rule, or frozen rows are no rows any more; `ShapeError` for a policy that is none, `HyperparameterError` for what is no
    rule; and as `setup` does for a model that cannot be read.

    Example:
        >>> import numpy as np, optimisers as op
        >>> model = {"trunk": np.ones(3), "head": np.ones((3, 10))}
        >>> state, model = op.update(op.setup(op.Adam(), model), model, model)
        >>> model = {"body": {"trunk": model["trunk"]}, "head": np.ones((3, 4))}
        >>> state, report = op.adapt(state, model, rename={"trunk": "body.trunk"})
        >>> print(report)
        1 kept, 1 renamed, 1 fresh
          renamed  trunk  -> body.trunk
          fresh    head   shape [3, 10] -> [3, 4]
        >>> {str(leaf.path): leaf.step for leaf in state.leaves()}
        {'body.trunk': 1, 'head': 0}
    """
    check_state(state, "adapt")
    check_unspent(state)
    found = parameters_of(model)
    adapting = Adapting(state, found, rename, resize, rule, trainable=trainable)
    paths = [*state.layout.index, *state.layout.excluded]
    check_targets(rename, adapting.new_name, paths, {path for record, _ in found for path in record.paths})
    return adapting.done()


class _Source(NamedTuple):
    """Where the state of a place comes from: the number of the old parameter, its place there, and how it was seen."""

    at: int
    path: Path
    view: View


class Adapting:
    """One call of `adapt`, for the parameters of a model and their arrays.

    With `values`, those of the old parameters by path, the model is about to get these, and no slot of the old state is shared.
    """

    def __init__(
        self,
        state: State,
        found: Sequence[tuple[Parameter, Any]],
        rename: Rename,
        resize: Any,
        rule: "RuleFor | None",
        *,
        values: "Mapping[Path, Any] | None" = None,
        trainable: "Selectable | None" = None,
    ) -> None:
        check_single(state)
        self.old = state
        self.values = values
        self.carried: list[tuple[Parameter, Any]] = []
        """The new parameters that go on, each with its value: the old one, where it is given, turned and resized like the slots."""
        self.rule = rule
        if rule is not None:
            check_kind(rule, "adapt")
        self.new_name = renamer(rename, [*state.layout.index, *state.layout.excluded])
        self.sources = self._find_sources()
        found, self.excluded = self._left_out(found) if trainable is None else parted(found, trainable)
        self.found = [self._rooted(*each) for each in self._with_old_ties(found)]
        self.policy = _policies(resize, [record for record, _ in self.found])
        self.rules: list[Rule] = list(state.rules)
        self.groups = {each.key: at for at, each in enumerate(state.rules)}
        """The number of each rule among them."""
        self.users: dict[int, Path] = {}
        """For each old parameter the first new one that goes on from it."""
        self.merged: set[int] = set()
        self.report: dict[str, Any] = {name: {} for name in ("renamed", "resized", "converted", "fresh", "tied", "untied")}
        self.kept: list[Path] = []

    def _left_out(self, found: Sequence[tuple[Parameter, Any]]) -> tuple[list[tuple[Parameter, Any]], frozenset[Path]]:
        """Without what did not train so far, and the new names of that."""
        excluded = frozenset(path for path in map(self.new_name, self.old.layout.excluded) if path is not None)
        for path in excluded & self.sources.keys():
            raise PathError(f"rename: {self.sources[path].path} and what did not train would both be called {path}")
        return [each for each in found if not excluded.issuperset(each[0].paths)], excluded

    def _find_sources(self) -> dict[Path, _Source]:
        """For each place of the new model where its state comes from."""
        sources: dict[Path, _Source] = {}
        for at, record in enumerate(self.old.parameters):
            for path, view, _ in record.places:
                new = self.new_name(path)
                if new is None:
                    continue
                other = sources.setdefault(new, _Source(at, path, view))
                if other.at != at:
                    raise PathError(
                        f"rename: {other.path} and {path} would both be called {new}; give them names of their own, or None to one "
                        "that goes"
                    )
        return sources

    def _with_old_ties(self, found: list[tuple[Parameter, Any]]) -> list[tuple[Parameter, Any]]:
        """Arrays that were one parameter and still hold the same values are one again.

        `jit` makes an array of each place, and so do copies and pickles of NumPy's views. Modules of PyTorch keep their ties.
        """
        first: dict[int, int] = {}
        for number, (record, _) in enumerate(found):
            for _, source in self._hits(record)[:1]:
                # Where the old canonical place still is, it stays the canonical one, and its rows are rows.
                if source.at not in first or source.path == self.old.parameters[source.at].path:
                    first[source.at] = number
        merged: list[tuple[Parameter, Any] | None] = list(found)
        for number, (record, array) in enumerate(found):
            hit = next(iter(self._hits(record)), None)
            if hit is None or any(map(is_module, record.owners)):
                continue
            other = first[hit[1].at]
            stays = merged[other]
            if other == number or stays is None:
                continue
            view = _seen(self._hits(stays[0])[0], stays[0]).inverse.then(_seen(hit, record))
            fits = stays[0].dtype == record.dtype and shape_through(view, stays[0].shape) == record.shape
            if fits and (self.values or equal_values(view.apply(stays[1]), array)):
                own = (Alias(each.path, view.then(each.view), each.owners) for each in record.aliases)
                aliases = (*stays[0].aliases, Alias(record.path, view, record.owners), *own)
                merged[other] = stays[0]._replace(aliases=aliases), stays[1]
                merged[number] = None
        return [each for each in merged if each is not None]

    def _rooted(self, record: Parameter, array: Any) -> tuple[Parameter, Any]:
        """A parameter as seen from its old canonical place, where that is still one of its places."""

        def was_canonical(path: Path) -> bool:
            return path in self.sources and self.sources[path].path == self.old.parameters[self.sources[path].at].path

        root = next((each for each in record.aliases if was_canonical(each.path)), None)
        if root is None or was_canonical(record.path):
            return record, array
        back = root.view.inverse
        others = [Alias(each.path, back.then(each.view), each.owners) for each in record.aliases if each is not root]
        seen = record._replace(
            path=root.path,
            owners=root.owners,
            shape=shape_through(root.view, record.shape),
            aliases=(Alias(record.path, back, record.owners), *others),
        )
        return seen, root.view.apply(array)

    def _hits(self, record: Parameter) -> list[tuple[Path, _Source]]:
        """The places of a new parameter that have a source."""
        return [(path, self.sources[path]) for path in record.paths if path in self.sources]

    def done(self) -> tuple[State, Adapted]:
        """The new state and the report."""
        records, slots = [], []
        for record, array in self.found:
            hits = self._hits(record)
            new, own = self._goes_on(record, array, hits) if hits else self._starts(record, array, None, "new")
            records.append(new)
            slots.append(own)
        dropped = tuple(self._dropped())
        counters, step, memory = self.old.counters, self.old.step, self.old.memory
        self._check_memory(records)
        if "jax" in self.old.layout.libraries and all(record.library != "jax" for record in records):
            self.rules = list(map(_plain_rule, self.rules))
            counters, step, memory = tuple(map(_plain, counters)), _plain(step), _plain(memory)
        state = self.old.arranged(
            records,
            slots,
            rules=self.rules,
            counters=(*counters, 0),
            excluded=self.excluded,
            detached=frozenset(),
            memory=memory,
            step=step,
        )
        self._check_detached(state)
        return state, Adapted(kept=tuple(self.kept), dropped=dropped, **self.report)

    def _dropped(self) -> Iterator[Path]:
        """What is not there any more: parameters, and places of others."""
        places = {path for record, _ in self.found for path in record.paths}
        for at, record in enumerate(self.old.parameters):
            if at not in self.users and at not in self.merged:
                yield record.path
            else:
                yield from (path for path in record.paths if self.new_name(path) not in places)

    def _check_memory(self, records: list[Parameter]) -> None:
        same = [record.path for record in records] == [record.path for record in self.old.parameters] and not self.report["fresh"]
        for name, values in self.old.memory.items():
            if not same and any(isinstance(value, (Mapping, tuple, list)) for value in values.values()):
                raise StateError(
                    f"{name} keeps one state for the whole tree, which cannot follow single parameters; take state.reset() before "
                    "adapt, or a rule that goes by parameter"
                )

    def _check_detached(self, state: State) -> None:
        for path in self.old.detached:
            new = self.new_name(path)
            if new is not None and new in state.layout.index and state.parameters[state.layout.index[new]].aliases:
                raise StateError(f"{path} was untied and gets an array of its own with the next update; take that step first")

    def _goes_on(self, record: Parameter, array: Any, hits: list[tuple[Path, _Source]]) -> tuple[Parameter, Any]:
        """The record and slots of a parameter that was there."""
        path, source = hits[0]
        for other, also in hits[1:]:
            if also.at != source.at:
                _check_one_wish(self.old.parameters[source.at], self.old.parameters[also.at])
                self._check_rows(record, hits[0], (other, also))
                self.report["tied"][other] = path
                self.merged.add(also.at)
        old, view = self.old.parameters[source.at], _seen(hits[0], record)
        first = self.users.setdefault(source.at, record.path)
        if first != record.path:
            self.report["untied"][path] = first
        if old.dtype.startswith("complex") and not record.dtype.startswith("complex"):
            return self._starts(record, array, old, f"{old.dtype} -> {record.dtype}, which holds no imaginary part")
        shape = shape_through(view, old.shape)
        policy = None if shape == record.shape else self.policy(record)
        if shape != record.shape and not _serves(policy, shape, record.shape):
            return self._starts(record, array, old, f"shape {list(shape)} -> {list(record.shape)}")
        value = self._value(record, array, old.path, view)
        self.carried.append((record, value))
        rule = self.old.rules[old.group]
        alike = shape == record.shape and view == SAME
        own = rule if alike and record.dtype == old.dtype else self._resolved(rule, old, record)
        if self.rule is not None and any(member.refuses(record.shape, record.dtype) for member in own.members):
            return self._starts(record, array, old, f"{own!r} cannot train it any more", value)
        check_rule(own, record)
        program = self.old.layout.programs[old.group]
        if not alike and program_of(own) != program:
            return self._starts(record, array, old, f"its rule is {own!r} now", value)
        if view != SAME and self.old.slots[source.at] and any(kind.shape for _, kind in program.slots):
            reason = f"it is seen {view} now, and slots of another shape than its own cannot be"
            return self._starts(record, array, old, reason, value)
        for old_path, new in self._moved(record, source.at):
            self.report["renamed"][old_path] = new
        new = record._replace(
            group=old.group if own is rule else self._group(own),
            counter=old.counter,
            frozen=old.frozen,
            frozen_rows=_rows(old, view, record),
            masked=self._masked(record),
            state_dtype=old.state_dtype,
        )
        slots = self._slots(source.at, view, new, value, first=first == record.path, asleep=is_idle(array))
        if shape == record.shape:
            self.kept.append(record.path)
        else:
            self.report["resized"][record.path] = shape, record.shape
        # Values that are given come from no array library.
        was, now = (old.library if self.values is None else record.library, old.dtype), (record.library, record.dtype)
        if was != now:
            texts = (f"{was[0]} {was[1]}", f"{now[0]} {now[1]}") if was[0] != now[0] else (was[1], now[1])
            self.report["converted"][record.path] = texts
        return new, slots

    def _value(self, record: Parameter, array: Any, old: Path, view: View) -> Any:
        """The value of a parameter: the old one, if it is given."""
        if not self.values or old not in self.values:
            return array
        seen = view.apply(self.values[old])
        if tuple(seen.shape) == record.shape:
            return converted(seen, record.dtype, record.library, record.device)
        return _overlaid(array, converted(seen, record.dtype, record.library, None), record)

    def _moved(self, record: Parameter, at: int) -> list[tuple[Path, Path]]:
        """The places of a parameter that have another name now."""
        return [(source.path, path) for path, source in self._hits(record) if source.at == at and source.path != path]

    def _masked(self, record: Parameter) -> frozenset[Path]:
        """The places whose gradients are masked, of all old parameters that are this one now."""
        masked = frozenset[Path]().union(*(self.old.parameters[source.at].masked for _, source in self._hits(record)))
        return frozenset(path for path in map(self.new_name, masked) if path is not None) & {*record.paths}

    def _check_rows(self, record: Parameter, stays: tuple[Path, _Source], goes: tuple[Path, _Source]) -> None:
        """Check that of two parameters that are one now, the second has no frozen rows that the first lacks.

        **Raises** `StateError`.
        """
        rows, others = (_rows(self.old.parameters[hit[1].at], _seen(hit, record), record) for hit in (stays, goes))
        if others and others != rows:
            raise StateError(
                f"rows of {goes[1].path} are frozen, which {stays[1].path} lacks, and the model has one parameter for both; "
                f"thaw them first, and freeze those of {stays[1].path}"
            )

    def _resolved(self, rule: Rule, old: Parameter, record: Parameter) -> Rule:
        """The rule for what a parameter is now. One that is given, and would choose this very rule for it before, chooses again."""
        new = rule.rule_for(record.shape, record.dtype)
        if self.rule is not None and record.dtype != old.dtype:
            with suppress(OptimiserError):  # it may be for new parameters alone
                choose = chooser(self.rule)
                new = choose(record) if choose(record._replace(dtype=old.dtype)).key == rule.key else new
        kinds = dict(program_of(rule).slots)
        return rule if any(kinds.get(name, kind) != kind for name, kind in program_of(new).slots) else new

    def _group(self, rule: Rule) -> int:
        if self.groups.setdefault(rule.key, len(self.rules)) == len(self.rules):
            self.rules.append(rule)
        return self.groups[rule.key]

    def _slots(self, at: int, view: View, record: Parameter, array: Any, *, first: bool, asleep: bool) -> tuple[Any, ...] | None:
        """The slots that go on, as the new parameter is seen; copies, unless they can be the old ones."""
        old, own = self.old.parameters[at], self.old.slots[at]
        if own is None:
            return None if record.frozen or asleep else self._fresh(record, array)
        before = self.old.layout.programs[old.group]
        program = before if record.group == old.group else program_of(self.rules[record.group])
        same_place = (record.library, record.device, record.dtype, record.shape) == (old.library, old.device, old.dtype, old.shape)
        if view == SAME and same_place and first and self.values is None:
            return own
        slots = []
        fresh: tuple[Any, ...] | None = None
        for slot, (_, kind), dtype in zip(carried(before, own, program), program.slots, slot_dtypes(record, program), strict=True):
            if slot is None:
                fresh = self._fresh(record, array) if fresh is None else fresh
                slots.append(fresh[len(slots)])
                continue
            whole = tuple(slot.shape) == old.shape
            seen = view.apply(slot) if whole else slot
            shape = tuple(kind.shape(record.shape)) if kind.shape else record.shape
            turned = whole or view == SAME
            if turned and tuple(seen.shape) == shape:
                slots.append(converted(seen, dtype, record.library, record.device))
                continue
            fresh = self._fresh(record, array) if fresh is None else fresh
            start = fresh[len(slots)]
            fits = turned and len(seen.shape) == len(shape)
            slots.append(_overlaid(start, converted(seen, dtype, record.library, None), record) if fits else start)
        return with_started(tuple(slots), array, record, program)

    def _fresh(self, record: Parameter, array: Any) -> tuple[Any, ...]:
        program = program_of(self.rules[record.group])
        return with_started(fresh_slots(record, program), array, record, program)

    def _starts(
        self, record: Parameter, array: Any, old: Parameter | None, reason: str, value: Any = None
    ) -> tuple[Parameter, Any]:
        """The record and slots of a parameter that starts afresh."""
        self.report["fresh"][record.path] = reason
        rule = self._rule_of_new(record) if old is None else self.old.rules[old.group].rule_for(record.shape, record.dtype)
        if old is not None and self.rule is not None and any(each.refuses(record.shape, record.dtype) for each in rule.members):
            rule = chooser(self.rule)(record)
        check_rule(rule, record)
        wishes = {each.state_dtype for each in self.old.parameters}
        wish = old.state_dtype if old is not None else wishes.pop() if len(wishes) == 1 else None
        new = record._replace(group=self._group(rule), counter=len(self.old.counters), state_dtype=wish)
        if old is not None:
            view = _seen(self._hits(record)[0], record)
            rows = _rows(old, view, record) if record.shape and rows_through(view) else ()
            new = new._replace(frozen=old.frozen, masked=self._masked(record), frozen_rows=rows)
        return new, None if new.frozen or is_idle(array) else self._fresh(new, array if value is None else value)

    def _rule_of_new(self, record: Parameter) -> Rule:
        if self.rule is not None:
            return chooser(self.rule)(record)
        rules = {rule.key: rule for rule in self.old.rules}
        if len(rules) != 1:
            raise StateError(f"{record.path} is new, and the state has {len(rules)} rules; say which is for new parameters: rule=…")
        return next(iter(rules.values())).rule_for(record.shape, record.dtype)


def _check_one_wish(stays: Parameter, goes: Parameter) -> None:
    """Check that of two parameters that are one now both are frozen, or both are live.

    **Raises** `StateError`.
    """
    if stays.frozen != goes.frozen:
        one, other = (stays.path, goes.path) if stays.frozen else (goes.path, stays.path)
        raise StateError(f"{one} is frozen and {other} is not, and the model has one parameter for both; freeze or thaw both first")


def _seen(hit: tuple[Path, _Source], record: Parameter) -> View:
    """How a new parameter is seen from the old one, through a place of both."""
    path, source = hit
    return source.view.then(record.view_at(path).inverse)


def _serves(policy: str | None, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether a policy carries slots of one shape into another."""
    if policy is None or len(old) != len(new):
        return False
    longer, shorter = (any(compare(b, a) for a, b in zip(old, new, strict=True)) for compare in (int.__gt__, int.__lt__))
    return not (policy == "pad" and shorter) and not (policy == "truncate" and longer)


def _policies(resize: Any, records: Sequence[Parameter]) -> Callable[[Parameter], str | None]:
    """The policy for each parameter whose shape has changed.

    **Raises** `ShapeError` for what is no policy, `PathError` for a selector that matches nothing.
    """
    wishes = resize if isinstance(resize, Mapping) else {"**": resize} if resize is not None else {}
    for policy in wishes.values():
        if policy not in _POLICIES:
            raise ShapeError(f"resize={policy!r}: a policy is one of {', '.join(map(repr, _POLICIES))}")
    if isinstance(resize, Mapping):
        for wish in resize:
            matching(records, wish)
    selectors = [(as_selector(wish), policy) for wish, policy in wishes.items()]
    return lambda record: next((policy for selector, policy in selectors if selector.selects(record)), None)


def _rows(old: Parameter, view: View, record: Parameter) -> tuple[tuple[int, int], ...]:
    """The frozen rows, as the new parameter has them."""
    size = record.shape[0] if record.shape else 0
    return tuple((start, min(stop, size)) for start, stop in rows_seen(old, record.path, view) if start < size)


def _overlaid(start: Any, old: Any, record: Parameter) -> Any:
    """A fresh slot, with what an old one has in the part that both shapes have."""
    part = tuple(slice(min(a, b)) for a, b in zip(start.shape, old.shape, strict=True))
    if record.library == "jax":
        return start.at[part].set(old[part])
    made = copied(start)
    made[part] = old[part]
    return made


def _plain(value: Any) -> Any:
    """Numbers of JAX as Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () and not is_traced(value) else value


def _plain_rule(rule: Rule) -> Rule:
    form, numbers = split(rule)
    return join(form, map(_plain, numbers)) if any(hasattr(number, "item") for number in numbers) else rule
