"""What a newcomer does wrong, and what the library says."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import optimisers as op
from optimisers.errors import (
    GradientError,
    HyperparameterError,
    ModelError,
    OptimiserWarning,
    PathError,
    ShapeError,
    StateError,
    TieError,
)
from tests.conftest import Backend


def test_a_state_that_update_has_written_into_is_refused() -> None:
    model = {"w": np.ones(2)}
    state = op.setup(op.Adam(), model)
    op.update_(state, model, model)
    with pytest.raises(StateError, match="use the state that it returned"):
        op.update_(state, model, model)
    with pytest.raises(StateError, match="use the state that it returned"):
        state.freeze("w")


def test_a_state_that_update_has_not_written_into_serves_again() -> None:
    model = {"w": np.ones(2)}
    for rule, step in ((op.Adam(), op.update), (op.Descent(), op.update_)):
        state = op.setup(rule, model)
        step(state, model, model)
        assert op.update(state, model, model)[0].step == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [("learning_rate", 'called "lr"'), ("beta1", 'called "betas"'), ("wieght_decay", 'mean "weight_decay"'), ("x", "there are")],
)
def test_an_unknown_hyperparameter_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(HyperparameterError, match=hint):
        op.AdamW(**{name: 0.1})  # type: ignore[arg-type]


def test_swapped_arguments_of_setup_are_told_apart() -> None:
    with pytest.raises(HyperparameterError, match="the rule comes first, then the model"):
        op.setup({"w": np.ones(50)}, op.Adam())  # type: ignore[dict-item]


def test_a_class_without_the_decorator_is_no_rule() -> None:
    class Plain(op.Rule):
        lr: op.Hyper = 0.1

    with pytest.raises(HyperparameterError, match="put the decorator"):
        Plain()


def test_a_hyperparameter_without_annotation_is_refused() -> None:
    class Plain(op.Rule):
        lr = 0.1

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    with pytest.raises(HyperparameterError, match="lr has no annotation"):
        op.rule(Plain)


def test_a_kernel_with_other_arguments_than_its_slots_is_refused() -> None:
    class Method(op.Rule):
        slots = {"mu": op.LIKE}

        def kernel(self: Any, xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    class Forgotten(op.Rule):
        slots = {"mu": op.LIKE}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    for kind in (Method, Forgotten):
        with pytest.raises(HyperparameterError, match=r"it takes \(xp, g, p, h, mu\), and no self"):
            op.rule(kind)


_MISTAKEN: dict[str, tuple[Any, str]] = {
    "nothing": (lambda xp, g, p, h, mu: None, "returned 1 values; it returns the step and its slots"),
    "no slot": (lambda xp, g, p, h, mu: g, "returned 1 values; it returns the step and its slots"),
    "none for a slot": (lambda xp, g, p, h, mu: (g, None), "the kernel of Mistaken returned None for mu"),
    "text": (lambda xp, g, p, h, mu: ("g", mu), "returned 'g' for the step"),
    "a shape": (lambda xp, g, p, h, mu: (g[:, None], mu), r"returned shape \[2, 1\] for the step, which is of shape \[2\]"),
    "a sum": (lambda xp, g, p, h, mu: (g / np.linalg.norm(g), mu), "other values than each alone.*apply"),
    "a mean": (lambda xp, g, p, h, mu: (g, mu + xp.mean(g)), "other values than each alone.*apply"),
    "a branch": (lambda xp, g, p, h, mu: (g if g > 0 else -g, mu), r"xp\.where\(condition, x, y\) chooses"),
    "a scalar": (lambda xp, g, p, h, mu: (h.rate * g, mu), "asks for h.rate; the scalars of its rule are lr"),
    "a function": (lambda xp, g, p, h, mu: (xp.sqr(g), mu), 'asks for xp.sqr, which xp lacks; did you mean "sqrt"'),
}


@pytest.mark.parametrize("mistake", _MISTAKEN)
def test_a_kernel_that_cannot_work_is_refused_before_any_step(mistake: str) -> None:
    function, message = _MISTAKEN[mistake]

    @op.rule
    class Mistaken(op.Rule):
        lr: op.Hyper = 0.1
        slots = {"mu": op.LIKE}
        kernel = function

        def scalars(self, step: Any) -> dict[str, Any]:
            return {"lr": self.lr}

    with pytest.raises(HyperparameterError, match=message):
        op.setup(op.Chain(op.ClipNorm(1.0), Mistaken()), {"w": np.ones(3)})


def test_a_measure_returns_as_many_sums_as_it_says() -> None:
    @op.rule
    class Mistaken(op.Rule):
        scope = "leaf"
        sums = 2

        def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return xp.abs2(g)

        def measured(xp: Any, h: Any, first: Any, second: Any) -> dict[str, Any]:
            return {"ratio": first / second}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return h.ratio * g

    with pytest.raises(HyperparameterError, match="measure of Mistaken returned 1 values, and it says sums = 2"):
        op.setup(Mistaken(), {"w": np.ones(3)})


@pytest.mark.parametrize("returned", [None, [0.1], {"lr": None}, {"lr": "0.1"}, {"lr": np.ones(3)}])
def test_scalars_that_are_none_are_refused(returned: Any) -> None:
    @op.rule
    class Mistaken(op.Rule):
        def scalars(self, step: Any) -> Any:
            return returned

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    with pytest.raises(HyperparameterError, match="scalars of Mistaken returned"):
        op.setup(Mistaken(), {"w": np.ones(3)})


@pytest.mark.parametrize("returned", [None, 1.0, (1.0, ()), (np.ones(2), (0.0,)), ("x", (0.0,))])
def test_apply_returns_a_step_and_slots(returned: Any) -> None:
    @op.rule
    class Mistaken(op.Rule):
        slots = {"mu": op.LIKE}

        def apply(xp: Any, g: Any, p: Any, h: Any, slots: Any) -> Any:
            return returned

    model = {"w": np.ones(3)}
    state = op.setup(Mistaken(), model)
    with pytest.raises(HyperparameterError, match="apply of mistaken return"):
        op.update(state, model, model)


def test_a_kernel_for_another_library_is_not_judged() -> None:
    @op.rule
    class Foreign(op.Rule):
        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g.at[...].set(g)

    model = {"w": jnp.ones(3)}
    _, model = op.update(op.setup(Foreign(), model), model, model)
    assert model["w"].tolist() == [0, 0, 0]


def test_what_a_rule_cannot_decide_is_refused() -> None:
    class Unscoped(op.Rule):
        def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    class Unmeasured(Unscoped):
        scope = "leaf"

    class LeafGate(Unmeasured):
        gate = True

    class OddSlot(op.Rule):
        slots = {"s": op.Slot(shape=lambda shape: (1,))}

        def kernel(xp: Any, g: Any, p: Any, h: Any, s: Any) -> Any:
            return g, s

    class ListedSlots(op.Rule):
        slots = ("mu",)  # type: ignore[assignment]

        def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any) -> Any:
            return g, mu

    for kind, message in (
        (Unscoped, "over what"),
        (Unmeasured, "what follows from the sums"),
        (LeafGate, "for the whole tree"),
        (OddSlot, "write apply"),
        (ListedSlots, "named with their kind"),
    ):
        with pytest.raises(HyperparameterError, match=message):
            op.rule(kind)


def test_an_infinite_norm_clips_nothing() -> None:
    model = {"w": np.ones(2)}
    for part in (op.ClipNorm(float("inf")), op.ClipGlobalNorm(float("inf"))):
        _, new = op.update(op.setup(op.Chain(part, op.Descent(0.1)), model), model, {"w": np.ones(2)})
        assert new["w"].tolist() == [0.9, 0.9]


def test_a_slice_that_selects_no_row_is_an_error() -> None:
    state = op.setup(op.Adam(), {"e": np.ones((3, 2))})
    with pytest.raises(ShapeError, match="selects no row"):
        state.freeze("e", rows=slice(3, 9))


def test_an_empty_list_is_no_tree_of_gradients() -> None:
    model = {"w": np.ones(2)}
    with pytest.raises(GradientError, match="empty list"):
        op.update(op.setup(op.Adam(), model), model, [])


def test_a_model_that_cannot_be_opened_is_named() -> None:
    class Closed:
        def __init__(self) -> None:
            self.name = "x"

    with pytest.warns(OptimiserWarning, match="it holds Closed, which optimisers.register can open"):
        op.setup(op.Adam(), Closed())


def test_views_of_one_buffer_are_parameters_of_their_own() -> None:
    buffer = bytearray(32)

    def view(at: int) -> np.ndarray:
        return np.frombuffer(buffer, np.float64, 2, 16 * at)

    view(0)[:], view(1)[:] = 1.0, 2.0
    model = {"a": view(0), "b": view(1)}
    # The gradients lie in the very memory that is written, seen through other objects.
    _, new = op.update_(op.setup(op.Descent(0.1), model), model, {"a": view(1), "b": view(0)})
    assert new["a"].tolist() == [0.8, 0.8]
    assert new["b"].tolist() == [1.9, 1.9]


def test_parameters_that_came_to_share_memory_are_an_error() -> None:
    base = np.ones(4)
    state = op.setup(op.Descent(0.1), {"a": np.ones(4), "b": np.ones((2, 2))})
    model = {"a": base, "b": base.reshape(2, 2)}
    with pytest.raises(TieError, match="a and b lie in the same memory now"):
        op.update_(state, model, model)
    assert base.tolist() == [1.0] * 4


def test_a_dict_keeps_its_own_order() -> None:
    for keys in ("ba", "ab"):
        model = {key: np.ones(1) for key in keys}
        _, new = op.update(op.setup(op.Descent(), model), model, model)
        assert "".join(new) == keys


def test_what_was_worked_out_from_old_arrays_is_forgotten() -> None:
    @dataclass
    class Layer:
        w: np.ndarray

        @functools.cached_property
        def double(self) -> np.ndarray:
            return 2 * self.w

    model = Layer(np.ones(1))
    assert model.double[0] == 2
    _, new = op.update(op.setup(op.Descent(0.5), model), model, {"w": np.ones(1)})
    assert new.double[0] == 1


def test_a_subclass_of_a_registered_type_opens_like_it() -> None:
    @op.register(trainable=["w"])
    @dataclass
    class Norm:
        w: np.ndarray
        mean: np.ndarray

    class Same(Norm):
        pass

    @dataclass
    class More(Norm):
        extra: np.ndarray

    @op.register(children=["w"])
    class Plain:
        def __init__(self) -> None:
            self.w, self.other = np.ones(1), np.ones(1)

    class Below(Plain):
        pass

    one = np.ones(1)
    assert list(op.trainables(Same(one, one + 1))) == ["w"]
    assert list(op.trainables(More(one, one + 1, one + 2))) == ["w", "extra"]
    assert list(op.trainables(Below())) == ["w"]


def test_reset_of_all_starts_the_window_of_accumulation_anew() -> None:
    model = {"w": np.ones(1)}
    state = op.setup(op.Chain(op.AccumGrad(2), op.Descent(1.0)), model)
    state, model = op.update(state, model, {"w": np.ones(1)})
    assert state.reset().memory["accumgrad"]["filled"] == 0


def test_a_schedule_that_cannot_be_hashed_serves() -> None:
    @dataclass
    class Half:
        start: float

        def __call__(self, step: int) -> float:
            return self.start / 2**step

    model = {"w": np.ones(1), "v": np.ones(1)}
    state = op.setup(op.Descent(Half(1.0)), model)
    for _ in range(2):
        state, model = op.update(state, model, {"w": np.ones(1)})
    assert model["w"][0] == -0.5
    assert "Half" in str(op.summary(state))


def test_any_mapping_of_paths_serves_for_gradients() -> None:
    from types import MappingProxyType

    model = {"a": {"w": np.ones(1)}}
    _, new = op.update(op.setup(op.Descent(0.5), model), model, MappingProxyType({"a.w": np.ones(1)}))
    assert new["a"]["w"][0] == 0.5


def test_the_norm_takes_gradients_of_arrays_that_do_not_train() -> None:
    model = {"a": np.ones(1), "b": np.ones(1)}
    state = op.setup(op.Adam(), model, trainable="a")
    assert op.global_norm({"a": np.array([3.0]), "b": np.array([4.0])}, state) == 3.0


def test_a_kernel_may_ask_for_a_name_with_a_default(backend: Backend) -> None:
    @op.rule
    class Asking(op.Rule):
        lr: op.Hyper = 0.5

        def scalars(self, step: Any) -> Any:
            return {"lr": self.lr}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return getattr(h, "scale", 1.0) * h.lr * g

    model = {"w": backend.array([1.0])}
    _, model = op.update(op.setup(Asking(), model), model, model)
    assert backend.read(model["w"]).tolist() == [0.5]


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_what_backends_keep_about_slots_stays_bounded(make: Any) -> None:
    model = {str(at): make(1) for at in range(8)}
    state = op.setup(op.Adam(), model)
    for pattern in range(1, 200):
        grads = {key: make(1) for at, key in enumerate(model) if pattern >> at & 1}
        state, model = op.update_(state, model, grads)
    assert len(state.addresses) <= 64


def test_the_public_names_are_what_dir_shows() -> None:
    assert set(dir(op)) == set(op.__all__)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"measure": lambda xp, g, p, h: g},
            r"Mistaken\.measure takes \(xp, g, p, h\); with its slots it takes \(xp, g, p, h, mu\)",
        ),
        ({"measured": lambda xp, h: {}}, r"Mistaken\.measured takes \(xp, h\); it takes \(xp, h, sum_1\), and no self"),
        ({"scalars": lambda self: {}}, r"Mistaken\.scalars takes \(self\); it takes \(self, step\)$"),
        ({"apply": lambda self, xp, g, p, h: g}, r"it takes \(xp, g, p, h, slots\), and no self"),
        (
            {"memory": {"best": 1.0}, "remember": lambda xp, h, n: {}},
            r"Mistaken\.remember takes \(xp, h, n\); it takes \(h, best\)",
        ),
        ({"scope": "leafs"}, r"""Mistaken\.scope is 'leafs'; a scope is "leaf" or "tree\""""),
    ],
)
def test_what_a_rule_says_has_the_arguments_that_it_is_called_with(said: dict[str, Any], message: str) -> None:
    kernel = {} if "apply" in said else {"kernel": lambda xp, g, p, h, mu: (g, mu)}
    with pytest.raises(HyperparameterError, match=message):
        op.rule(type("Mistaken", (op.Rule,), {"__annotations__": {}, "slots": {"mu": op.LIKE}, **kernel, **said}))


def test_arguments_with_defaults_and_those_by_name_are_arguments() -> None:
    @op.rule
    class Power(op.Rule):
        slots = {"mu": op.LIKE}

        def scalars(self, step: Any = 1) -> dict[str, Any]:
            return {"lr": 0.5 / step}

        def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any = None, factor: Any = 2.0) -> Any:
            return h.lr * factor * g, mu + g

    model = {"w": np.ones(2)}
    _, model = op.update(op.setup(Power(), model), model, {"w": np.ones(2)})
    assert model["w"].tolist() == [0.0, 0.0]


def test_what_follows_from_sums_is_told_by_name() -> None:
    @op.rule
    class Mistaken(op.Rule):
        scope = "leaf"

        def measure(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return xp.abs2(g)

        def measured(xp: Any, h: Any, total: Any) -> Any:
            return None

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g

    with pytest.raises(HyperparameterError, match="measured of Mistaken returned None; it returns further scalars by name"):
        op.setup(Mistaken(), {"w": np.ones(3)})


@pytest.mark.parametrize(
    ("start", "found"), [(lambda p: p[:, 0] * 0, r"shape \[3\]"), (lambda p: 0.0, "0.0"), (lambda p: None, "None")]
)
@pytest.mark.parametrize("make", [np.ones, torch.ones, jnp.ones])
def test_a_slot_that_starts_in_another_shape_is_refused(make: Any, start: Any, found: str) -> None:
    @op.rule
    class Mistaken(op.Rule):
        slots = {"mu": op.Slot(start=start)}

        def kernel(xp: Any, g: Any, p: Any, h: Any, mu: Any) -> Any:
            return g, mu + g

    with pytest.raises(ShapeError, match=rf"w: the slot mu starts as {found}; give it an array of shape \[3, 40\]"):
        op.setup(Mistaken(), {"w": make((3, 40))})


def test_a_state_is_asked_of_what_holds_one() -> None:
    from optimisers.interop.torch_optim import Optimizer

    with pytest.raises(ModelError, match="and not Optimizer; give its op_state"):
        op.summary(Optimizer(torch.nn.Linear(2, 2), op.Adam()))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [lambda state: state[None], lambda state: op.adapt(state, {"w": np.ones(2)}, rename={None: "w"})])
def test_what_is_no_path_is_told_so(call: Any) -> None:
    with pytest.raises(PathError, match="None is no path; a path is text"):
        call(op.setup(op.Adam(), {"w": np.ones(2)}))
