"""PyTorch: a module, a rule and their state as a `torch.optim.Optimizer`, for loops, schedulers and trainers that expect one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any

import torch

from optimisers.assignment import RuleFor
from optimisers.errors import HyperparameterError, ModelError, OptimiserError, StateError
from optimisers.interop.torch_groups import ADD, RESERVED, Groups
from optimisers.interop.torch_state_dict import Loaded, written
from optimisers.model.layout import Layout
from optimisers.model.paths import Path
from optimisers.model.reading import open_with
from optimisers.model.select import Selectable
from optimisers.model.trees import opened
from optimisers.report import Summary, summary
from optimisers.setup import setup
from optimisers.state import State, check_state, check_unspent
from optimisers.update import update_

__all__ = ["Optimizer"]

# As on PyTorch's own methods: torch.compile calls them, and does not look into them.
_untraced: Any = torch._disable_dynamo  # type: ignore[attr-defined]


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
    - `rule`: a rule, a mapping from selectors to rules, or a function from a `Parameter` to a rule; or, to go on with, a `State` of
      the module, such as one from `from_torch`.
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
        rule: "RuleFor | State" = None,  # type: ignore[assignment]  # so that what is missing gets an error of ours
        *,
        frozen: "Selectable | None" = None,
        trainable: "Selectable | None" = None,
        sync_requires_grad: bool = False,
        **hyperparameters: Any,
    ) -> None:
        if hyperparameters:
            name = next(iter(hyperparameters))
            raise HyperparameterError(
                f"{name} belongs to the rule: Optimizer(module, optimisers.AdamW({name}={hyperparameters[name]!r}))"
            )
        _check_arguments(module, rule)
        if isinstance(rule, State):
            _check_state(rule, frozen, trainable)
        state = rule if isinstance(rule, State) else setup(rule, module, frozen=frozen, trainable=trainable)
        open_with(state.layout, module)
        self.module = module
        self.sync_requires_grad = sync_requires_grad
        self._tensors = _tensors(module, state.layout)
        self._kept: _Kept | None = None
        groups = Groups.of(state, self._tensors)
        entries = groups.entries(state, self._tensors)
        common = set.intersection(*(set(entry) for entry in entries)) - {*RESERVED}
        super().__init__(entries, {name: value for name, value in entries[0].items() if name in common})
        self._kept = _Kept(state, groups)
        self._known: tuple[Sequence[dict[str, Any]], Sequence[Any]] = (), ()
        self._sync(at for at, record in enumerate(state.parameters) if record.frozen)

    # Stepping ---------------------------------------------------------------------------------------------------------

    @_untraced
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
        kept = self._inner
        kept.state = kept.groups.read(self.param_groups, kept.state)
        with torch.no_grad():
            kept.state, model = update_(kept.state, self.module)
            if model is not self.module:
                for path, tensor in _tensors(model, kept.state.layout).items():
                    if tensor is not self._tensors[path]:
                        self._tensors[path].copy_(tensor)
        for at in tuple(kept.groups.moving):
            kept.groups.show(self.param_groups, at, kept.state.step)
        return loss

    def _check_module(self) -> None:
        """Check that the module holds the parameters of the optimizer.

        **Raises** `ModelError`, naming one that it does not.
        """
        registries, objects = self._known
        if objects and all(map(is_, chain.from_iterable(map(dict.values, registries)), objects)):
            return
        self._known = (), ()
        remedy = "make a new one for the changed module: Optimizer(module, adapt(optimizer.op_state, module)[0])"
        leaves, structure = opened(self.module)
        found = dict(zip(structure.paths, leaves, strict=True))
        for path, tensor in self._tensors.items():
            if path not in found:
                raise ModelError(f"{path}: the optimizer has a parameter here, and the module has none any more; {remedy}")
            if found[path] is not tensor:
                raise ModelError(f"{path}: the module holds another Parameter than the one that the optimizer has; {remedy}")
        modules = list(self.module.modules())
        registries = [own for each in modules for own in (each._parameters, each._modules) if own]
        self._known = registries, [child for own in registries for child in own.values()]

    @property
    def _inner(self) -> "_Kept":
        assert self._kept is not None
        return self._kept

    # The state --------------------------------------------------------------------------------------------------------

    @property
    def op_state(self) -> State:
        """The `State`: rules, slots, counts, what is frozen. The next step writes into its slots."""
        kept = self._inner
        kept.state = kept.groups.read(self.param_groups, kept.state)
        return kept.state

    @property
    def state(self) -> dict[Any, Mapping[str, Any]]:
        """For each tensor its slots by name, and its step count: to look at, made anew each time. Entries cannot be changed."""
        leaves = self._kept.state.leaves() if self._kept else ()
        return {self._tensors[leaf.path]: MappingProxyType({**leaf.slots, "step": leaf.step}) for leaf in leaves if leaf.slots}

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        # PyTorch's own constructor puts an empty one here.
        if value:
            raise StateError("the state of this optimizer is op_state; load_state_dict changes it")

    def freeze(self, selector: "Selectable", *, rows: Any = None) -> None:
        """Freeze parameters, or some of their rows, as `State.freeze` does. They keep their moments and count."""
        self._change(lambda state: state.freeze(selector, rows=rows))

    def thaw(self, selector: "Selectable" = "**", *, rows: Any = None) -> None:
        """Thaw parameters, or some of their rows, as `State.thaw` does. They go on with the moments and the count they had."""
        self._change(lambda state: state.thaw(selector, rows=rows))

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
                        f"{path} and {other} are one Parameter, whose gradients PyTorch adds up before they can be told apart; "
                        f"call detach() on the weight where {path} is used instead, or take value_and_grad and update_"
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
        kept.state = before.adjust(selector, **hyperparameters)
        kept.groups.adjusted(before, kept.state)
        for at in range(len(self.param_groups)):
            kept.groups.show(self.param_groups, at, kept.state.step)

    def follow(self, plan: Callable[[State], State]) -> None:
        """Freeze and thaw as a plan says, such as `Unfreezing`; call it before each step.

        **Raises** `StateError` for a plan that returns the state of other parameters or rules; `adapt` is for a new optimizer.
        """
        after = plan(self.op_state)
        check_state(after, "what follows a plan")
        facts = [
            [(each.paths, each.shape, each.dtype, state.rules[each.group].key) for each in state.parameters]
            for state in (self.op_state, after)
        ]
        if facts[0] != facts[1]:
            raise StateError(
                "the state that came out is of other parameters or rules; make a new optimizer of it: Optimizer(module, state)"
            )
        self._change(lambda _: after)

    def reset(self, selector: "Selectable" = "**") -> None:
        """Start parameters afresh, as `State.reset` does: without moments, at count 0. What is frozen stays so.

        **Raises** `PathError` when nothing matches.
        """
        self._change(lambda state: state.reset(selector))

    def drop(self, selector: "Selectable" = "**") -> None:
        """Free the slots of frozen parameters, as `State.drop` does. Once thawed they start afresh.

        **Raises** `PathError` when nothing matches, `StateError` for one that is live.
        """
        self._change(lambda state: state.drop(selector))

    def allocate(self) -> None:
        """Give every parameter its slots now, which otherwise happens at its first step.

        Checkpointers that read into the tensors that are there (`torch.distributed.checkpoint`) find only what has slots.
        """
        state = self.op_state
        arrays = open_with(state.layout, self.module).arrays
        self._inner.state = state.with_started(arrays, [at for at, own in enumerate(state.slots) if own is None])

    def summary(self) -> Summary:
        """A table of the state, as `summary` makes one: `print(optimizer.summary())`."""
        return summary(self.op_state)

    def _change(self, change: Callable[[State], State]) -> None:
        before = self.op_state
        self._inner.state = after = change(before)
        pairs = zip(before.parameters, after.parameters, strict=True)
        self._sync([at for at, (old, new) in enumerate(pairs) if old.frozen != new.frozen])

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
            raise StateError(ADD)
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        with suppress(OptimiserError):  # step tells what is wrong in param_groups
            self._inner.state = self.op_state
        groups = [
            f"  {at}: {len(group['params'])} parameter{'s' * (len(group['params']) != 1)}, {rule!r}{self._inner.groups.apart(at)}"
            for at, (group, rule) in enumerate(zip(self.param_groups, self._inner.groups.rules, strict=False))
        ]
        return "\n".join([f"Optimizer({self._inner.state!r}", *groups, ")"])

    # Files and copies -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the optimizer has learnt, by name. The tensors are those of the state, so the next step writes into them.

        - `state`: for each parameter its slots, and `step`.
        - `document`, in JSON: `frozen`, `frozen_rows`, `masked`; `ties`: other names of parameters; `own`: hyperparameters that do
          not follow the group.
        - `param_groups`: for each group the names under `params`, the hyperparameters, and what schedulers keep there.
        - `step`, `memory`: the count that schedules read, and what rules keep for the whole tree.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found = written(self.op_state, self._inner.groups, self.param_groups)
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
        loaded = Loaded(self.op_state, kept.groups, self._tensors, given)
        # Schedulers go by the position of a group, so it is that of the file. Those who hold the list see the new order.
        self.param_groups[:] = [self.param_groups[at] for at in loaded.order]
        kept.groups.reordered(loaded.order, loaded.rules, loaded.own)
        self._change(lambda state: loaded.state)
        for at, rest in enumerate(loaded.rest):
            self.param_groups[at].update(rest)
            kept.groups.show(self.param_groups, at, kept.state.step)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # As with PyTorch's own, hooks stay behind, and so does what schedulers put around `step`.
        _ = self.op_state
        names = ("defaults", "param_groups", "module", "sync_requires_grad", "_tensors", "_kept")
        return {**{name: getattr(self, name) for name in names}, "_known": ((), ())}


@dataclass
class _Kept:
    """What changes in an optimizer. It is an object of its own since trainers put shells around optimizers that share it."""

    state: State
    groups: Groups


def _check_state(state: State, frozen: Any, trainable: Any) -> None:
    if frozen is not None or trainable is not None:
        raise StateError("a state itself tells what is frozen and what trains; call its freeze or thaw before")
    check_unspent(state)
    for path in state.detached:
        raise StateError(f"{path} was untied, and has a Parameter of its own only after the next update_; take that step first")


def _check_arguments(module: Any, rule: Any) -> None:
    if isinstance(rule, torch.nn.Module) and not isinstance(module, torch.nn.Module):
        raise ModelError("Optimizer takes the module first, then the rule")
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"Optimizer takes a torch.nn.Module, not {type(module).__name__}; it finds the parameters and their names itself"
        )
    if rule is None:
        raise HyperparameterError("Optimizer takes a module and a rule: Optimizer(module, optimisers.AdamW(1e-3))")
    if next(module.parameters(), None) is None:
        raise StateError("the module has no parameters to optimise")


def _tensors(module: Any, layout: Layout) -> dict[Path, torch.Tensor]:
    """The tensor at each place of a parameter."""
    leaves, structure = opened(module)
    return {path: leaf for path, leaf in zip(structure.paths, leaves, strict=True) if path in layout.index}
