"""Rules that differ by parameter: learning rates by depth, no decay where none is wanted."""

from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers import select
from optimisers.errors import HyperparameterError, OptimiserError, PathError, StateError
from optimisers.schedules import Linear, Scaled
from tests.conftest import leaf, train


def _layer() -> dict[str, np.ndarray]:
    return {"weight": np.ones((2, 2)), "bias": np.ones(2)}


def _model() -> dict[str, Any]:
    return {"embed": np.ones((3, 2)), "layers": [_layer(), _layer()], "norm": np.ones(2), "head": _layer()}


def _rates(rule: Any, model: Any, **options: Any) -> dict[str, Any]:
    return {str(each.path): each.rule.hyperparameters["lr"] for each in op.setup(rule, model, **options).leaves()}


# Layerwise ------------------------------------------------------------------------------------------------------------


def test_rates_fall_from_the_head_to_the_embedding() -> None:
    model = _model()
    expected = {"embed": 0.125, "head.bias": 1.0, "head.weight": 1.0, "norm": 1.0}
    expected |= {f"layers.{at}.{name}": 0.25 * 2**at for at in (0, 1) for name in ("weight", "bias")}
    assert _rates(op.layerwise(op.Adam(1.0), model, decay=0.5), model) == expected
    assert set(_rates(op.layerwise(op.Adam(0.5), model, decay=1.0), model).values()) == {0.5}


def test_the_steps_have_the_scaled_rates() -> None:
    model = {"tok": np.zeros(1), "blocks": [np.zeros(1), np.zeros(1)], "out": np.zeros(1)}
    grads = {"tok": np.ones(1), "blocks": [np.ones(1), np.ones(1)], "out": np.ones(1)}
    _, new = train(op.layerwise(op.Descent(1.0), model, decay=0.5), model, grads)
    assert [new["tok"][0], new["blocks"][0][0], new["blocks"][1][0], new["out"][0]] == [-0.125, -0.25, -0.5, -1.0]


@pytest.mark.parametrize(
    ("path", "depth"),
    [
        (("blocks", 3, "attn", "weight"), 4),
        (("h", 0, "mlp"), 1),
        (("encoder", "layer", 3, "attention", 1, "weight"), 4),
        (("encoder", "layer", "3", "attention", "1"), 4),
        ((2, "weight"), 3),
        (("transformer", "wte", "weight"), 0),
        (("transformer", "wpe"), 0),
        (("tok_embeddings", "weight"), 0),
        (("embed_tokens",), 0),
        (("word_embeddings",), 0),
        (("tokenEmbedding",), 0),
        (("inputEmbedding",), 0),
        (("pos",), 0),
        (("pos_embed",), 0),
        (("position_table",), 0),
        (("patch_proj",), 0),
        (("cls_token",), 0),
        (("lm_head", "weight"), None),
        (("classifier", "bias"), None),
        (("post_norm",), None),
        (("composer",), None),
        (("remember",), None),
        (("closure",), None),
    ],
    ids=str,
)
def test_depth_is_read_from_the_path(path: tuple[Any, ...], depth: int | None) -> None:
    tree: Any = np.ones(1)
    for key in reversed(path):
        tree = {key: tree}
    model = {"model": tree, "top": {"layers": {9: np.ones(1)}}}
    rates = _rates(op.layerwise(op.Descent(1.0), model, decay=0.5), model)
    # What has no depth lies above all that have one.
    assert rates.pop("top.layers.9") == (0.5 if depth is None else 1.0)
    assert list(rates.values()) == [1.0 if depth is None else 0.5 ** (10 - depth)]


def test_depth_does_not_shift_when_something_is_frozen_or_left_out() -> None:
    model = _model()
    rule = op.layerwise(op.Adam(1.0), model, decay=0.5)
    whole = _rates(rule, model)
    assert _rates(rule, model, frozen="layers.1") == whole
    assert _rates(rule, model, trainable="layers.0") == {path: rate for path, rate in whole.items() if path.startswith("layers.0")}


def test_a_model_without_layers_has_two_levels() -> None:
    model = {"embed": np.ones(2), "head": np.ones(2)}
    assert _rates(op.layerwise(op.Adam(1.0), model, decay=0.5), model) == {"embed": 0.5, "head": 1.0}
    with pytest.raises(StateError, match="no path of the model has the number of a layer in it"):
        op.layerwise(op.Adam(1.0), np.ones(2), decay=0.5)


@pytest.mark.parametrize("keys", [("Dense_0", "Dense_1"), ("layer_0", "layer_1"), ("layers.0.weight", "layers.1.weight")])
def test_numbers_within_a_key_are_read(keys: tuple[str, str]) -> None:
    model = {"embed": np.ones(1), **{key: np.ones(1) for key in keys}, "head": np.ones(1)}
    state = op.setup(op.layerwise(op.Descent(1.0), model, decay=0.5), model)
    rates = [leaf(state, (key,)).rule.hyperparameters["lr"] for key in ("embed", *keys, "head")]
    assert rates == [0.125, 0.25, 0.5, 1.0]


def test_the_last_layer_has_the_whole_rate_where_nothing_lies_above() -> None:
    model = [np.ones(1) for _ in range(3)]
    assert _rates(op.layerwise(op.Descent(1.0), model, decay=0.5), model) == {"0": 0.25, "1": 0.5, "2": 1.0}


def test_what_two_selectors_claim_is_an_error_here_too() -> None:
    w = np.ones(2)
    model, rules = {"a": w, "b": w}, {"a": op.AdamW(0.1), "b": op.AdamW(0.2)}
    with pytest.raises(StateError, match="a and b are one parameter"):
        op.setup(op.no_decay(rules, ndim=1), model)
    with pytest.raises(StateError, match="never reached"):
        op.setup(op.no_decay({"**": op.AdamW(), "a": op.AdamW(0.5)}, ndim=1), {"a": np.ones(1), "b": np.ones(1)})


def test_a_function_of_a_users_own_may_have_a_check() -> None:
    class Chooser:
        def __call__(self, record: op.Parameter) -> op.Rule:
            return op.Descent()

        def check(self) -> None: ...

    assert leaf(op.setup(Chooser(), {"a": np.ones(1)}), "a").rule == op.Descent()


def test_a_state_takes_rules_by_layer_amid_training() -> None:
    model = _model()
    state = op.setup(op.AdamW(1.0), model)
    state, _ = op.update(state, model, model)
    other = state.replace(op.no_decay(op.layerwise(op.AdamW(1.0), model, decay=0.5), ndim=1))
    assert leaf(other, "layers.0.bias").rule == op.AdamW(0.25, weight_decay=0.0)
    assert leaf(other, "layers.0.bias").slots["mu"] is leaf(state, "layers.0.bias").slots["mu"]
    assert repr(op.layerwise(op.Adam(), model)).startswith("layerwise(Adam(")


@pytest.mark.parametrize("order", [("decoder", "embed"), ("embed", "tail")])
def test_a_tied_parameter_lies_as_deep_as_the_lowest_of_its_places(order: tuple[str, str]) -> None:
    # Whichever of them comes first in the model.
    table = np.ones((3, 2))
    model = {"layers": [np.ones(1)], **dict.fromkeys(order, table)}
    state = op.setup(op.layerwise(op.Descent(1.0), model, decay=0.5), model)
    assert leaf(state, "embed").rule.hyperparameters["lr"] == 0.5


def test_a_schedule_is_scaled_and_remains_a_value() -> None:
    model = _model()
    rate = Linear(1.0, 0.0, 4)
    rates = _rates(op.layerwise(op.Adam(rate), model, decay=0.5), model)
    assert rates["layers.0.bias"] == Scaled(rate, 0.25)
    assert rates["layers.0.bias"](2) == 0.125
    # One rule for each depth, not for each parameter.
    state = op.setup(op.layerwise(op.Adam(rate), model, decay=0.5), model)
    assert len(state.rules) == 4
    rates = _rates(op.layerwise(op.Adam(lambda step: 0.5**step), model, decay=0.5), model)
    assert rates["layers.0.bias"](1) == 0.125


def test_depth_may_be_a_function() -> None:
    model = {"stem": np.ones(1), "stage1": np.ones(1), "stage2": np.ones(1), "fc": np.ones(1)}
    depths = {"stem": 0, "stage1": 1, "stage2": 2, "fc": None}
    rule = op.layerwise(op.Adam(1.0), model, decay=0.5, depth=lambda record: depths[record.name])
    assert _rates(rule, model) == {"stem": 0.125, "stage1": 0.25, "stage2": 0.5, "fc": 1.0}


def test_a_function_or_a_mapping_of_rules_may_be_scaled() -> None:
    model = _model()
    made = op.layerwise(lambda record: op.Adam(1.0) if record.ndim > 1 else op.Descent(0.5), model, decay=0.5)
    state = op.setup(made, model)
    assert leaf(state, "layers.0.weight").rule == op.Adam(0.25)
    assert leaf(state, "layers.0.bias").rule == op.Descent(0.125)
    state = op.setup(op.layerwise({"**.bias": op.Descent(0.5), "**": op.Adam(1.0)}, model, decay=0.5), model)
    assert leaf(state, "layers.0.weight").rule == op.Adam(0.25)
    assert leaf(state, "layers.0.bias").rule == op.Descent(0.125)


def test_of_several_rates_in_a_chain_the_last_is_scaled_and_once() -> None:
    model = {"layers": [np.zeros(1)], "head": np.zeros(1)}
    grads = {"layers": [np.ones(1)], "head": np.ones(1)}
    for rule in (
        op.Chain(op.ClipNorm(9.0), op.Descent(0.5), op.Descent(1.0), op.WeightDecay(0.0)),
        op.Chain(op.Descent(0.5), op.Lookahead(9)),
        op.Chain(op.Adam(0.5), op.Average()),
    ):
        state, new = train(op.layerwise(rule, model, decay=0.5), model, grads)
        assert [round(new["layers"][0][0], 6), round(new["head"][0], 6)] == [-0.25, -0.5]
        assert leaf(state, "head").rule == rule


def test_the_rule_that_takes_the_place_of_another_is_scaled_too() -> None:
    model = _model()
    muon = op.Muon(1.0, fallback=op.AdamW(0.5))
    for rule in (muon, op.Chain(op.ClipNorm(1.0), muon), lambda record: muon):
        rates = _rates(op.layerwise(rule, model, decay=0.5), model)
        assert (rates["layers.0.weight"], rates["layers.0.bias"]) == (0.25, 0.125)
        assert (rates["head.weight"], rates["head.bias"]) == (1.0, 0.5)
    state = op.setup(op.layerwise(op.Adafactor(1.0), model, decay=0.5), model)
    assert set(leaf(state, "layers.0.weight").slots) == {"row", "column"}
    assert set(leaf(state, "layers.0.bias").slots) == {"nu"}


@pytest.mark.parametrize("decay", [0, -0.5, 1.5, float("nan"), float("inf"), "half", None, True])
def test_a_decay_out_of_range_is_an_error(decay: Any) -> None:
    with pytest.raises(HyperparameterError, match=r"layerwise\(decay=.*\): decay must lie in \(0, 1\]"):
        op.layerwise(op.Adam(), _model(), decay=decay)


def test_what_cannot_be_scaled_is_an_error() -> None:
    model = _model()
    with pytest.raises(HyperparameterError, match=r"WeightDecay.* has no learning rate"):
        op.setup(op.layerwise(op.WeightDecay(), model), model)
    with pytest.raises(StateError, match=r"embed: a depth is a whole number or None, not 'low'"):
        op.layerwise(op.Adam(), model, depth=lambda record: "low")  # type: ignore[return-value, arg-type]
    with pytest.raises(StateError, match="has depth 4, above all layers of the model that layerwise was given"):
        op.setup(op.layerwise(op.Adam(), model), model | {"layers": [_layer() for _ in range(4)]})
    # What rules estimate for the whole tree is one estimate.
    for whole in (op.Prodigy(), op.ScheduleFree()):
        with pytest.raises(StateError, match="decide for the whole tree"):
            op.setup(op.layerwise(whole, model), model)


# No decay -------------------------------------------------------------------------------------------------------------


def _decays(rule: Any, model: Any) -> dict[str, float]:
    return {str(each.path): each.rule.hyperparameters["weight_decay"] for each in op.setup(rule, model).leaves()}


def test_selected_parameters_have_no_decay() -> None:
    model = _model()
    for rule, spared in (
        (op.no_decay(op.AdamW(), "**.bias"), {"layers.0.bias", "layers.1.bias", "head.bias"}),
        (
            op.no_decay(op.AdamW(), "**.bias", "norm", "embed"),
            {"layers.0.bias", "layers.1.bias", "head.bias", "norm", "embed"},
        ),
        (op.no_decay(op.AdamW(), ndim=1), {"layers.0.bias", "layers.1.bias", "head.bias", "norm"}),
        (op.no_decay(op.AdamW(), "embed", ndim=1), {"layers.0.bias", "layers.1.bias", "head.bias", "norm", "embed"}),
        (op.no_decay(op.AdamW(), select.name("norm") | select.path("head")), {"norm", "head.bias", "head.weight"}),
        (op.no_decay(op.AdamW(), lambda record: record.name == "norm"), {"norm"}),
        (op.no_decay(op.AdamW(), ndim=2), set(map(str, op.setup(op.Adam(), model)))),
        (op.no_decay(op.AdamW(), ndim=0), set()),
    ):
        assert _decays(rule, model) == {str(path): 0.0 if str(path) in spared else 0.01 for path in op.setup(op.Adam(), model)}


def test_every_decay_of_a_chain_is_taken_away() -> None:
    model = _model()
    rule = op.Chain(op.ClipNorm(), op.SGD(weight_decay=0.1), op.SignDecay(0.2))
    state = op.setup(op.no_decay(rule, "norm"), model)
    assert leaf(state, "norm").rule == op.Chain(op.ClipNorm(), op.SGD(weight_decay=0.0), op.SignDecay(0.0))
    assert leaf(state, "embed").rule == rule


def test_the_rule_that_takes_the_place_of_another_loses_its_decay() -> None:
    model = _model()
    muon = op.Muon(weight_decay=0.3, fallback=op.AdamW(weight_decay=0.2))
    for rule in (muon, op.Chain(op.ClipNorm(), muon)):
        decays = _decays(op.no_decay(rule, "**.bias"), model)
        assert (decays["head.weight"], decays["norm"], decays["head.bias"]) == (0.3, 0.2, 0.0)


def test_a_function_or_a_mapping_may_lose_its_decay() -> None:
    model = _model()
    mapping = {"embed": op.SGD(weight_decay=0.5), "**": op.AdamW()}
    for rule in (mapping, lambda record: mapping["embed"] if record.name == "embed" else mapping["**"]):
        decays = _decays(op.no_decay(rule, ndim=1), model)
        assert (decays["embed"], decays["head.weight"], decays["norm"]) == (0.5, 0.01, 0.0)


def test_both_may_be_nested_in_either_order() -> None:
    model = _model()
    muon = op.Muon(1.0, weight_decay=0.3, fallback=op.AdamW(1.0))
    for rule in (op.AdamW(1.0), op.Chain(op.ClipGlobalNorm(1.0), muon), {"embed": op.SGD(1.0), "**": op.AdamW(1.0)}):
        one = op.setup(op.no_decay(op.layerwise(rule, model, decay=0.5), ndim=1), model)
        two = op.setup(op.layerwise(op.no_decay(rule, ndim=1), model, decay=0.5), model)
        assert one == two
        assert leaf(one, "layers.0.bias").rule.hyperparameters["lr"] == 0.25
        assert leaf(one, "layers.0.bias").rule.hyperparameters["weight_decay"] == 0.0


def test_frozen_parameters_are_selected_like_others() -> None:
    model = _model()
    state = op.setup(op.no_decay(op.AdamW(), "layers.0"), model, frozen="layers")
    assert leaf(state.thaw(), "layers.0.weight").rule.hyperparameters["weight_decay"] == 0.0


def test_a_selector_that_matches_nothing_is_an_error_with_the_nearest() -> None:
    model = _model()
    with pytest.raises(PathError, match=r'no parameter matches "\*\*\.bais"; did you mean "\*\*\.bias"'):
        op.setup(op.no_decay(op.AdamW(), "norm", "**.bais", ndim=1), model)
    for make in (lambda rule: op.no_decay(rule, ndim=1), lambda rule: op.layerwise(rule, model)):
        with pytest.raises(PathError, match='no parameter matches "hed"; did you mean "head"'):
            op.setup(make({"hed": op.AdamW(), "**": op.AdamW()}), model)
        with pytest.raises(StateError, match='no selector of the rules matches it; add one, such as "\\*\\*"'):
            op.setup(make({"head": op.AdamW()}), model)


def test_a_rule_without_decay_where_it_should_go_is_an_error() -> None:
    model = _model()
    with pytest.raises(HyperparameterError, match=r"head.bias: Adam.* has no weight_decay to leave out; take a rule that has"):
        op.setup(op.no_decay(op.Adam(), ndim=1), model)
    # Where it is not selected, nothing is asked of it.
    op.setup(op.no_decay({"embed": op.Adam(), "**": op.AdamW()}, ndim=1), model)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: op.no_decay(op.AdamW()),
        lambda model: op.no_decay(op.AdamW(), ndim=-1),
        lambda model: op.no_decay(op.AdamW(), ndim="1"),  # type: ignore[arg-type]
        lambda model: op.no_decay(op.AdamW(), ndim=True),
        lambda model: op.no_decay(op.AdamW(), 0.5),  # type: ignore[arg-type]
        lambda model: op.setup(op.layerwise(op.no_decay(op.AdamW(), "**.bais"), model), model),
        lambda model: op.no_decay(op.AdamW, "**.bias"),
        lambda model: op.no_decay(model, op.AdamW(), "**.bias"),  # type: ignore[arg-type]
        lambda model: op.layerwise(model, op.AdamW()),
        lambda model: op.layerwise(op.AdamW, model),
        lambda model: op.layerwise(None, model),  # type: ignore[arg-type]
        lambda model: op.layerwise(op.AdamW(), {}),
        lambda model: op.layerwise({"**": op.AdamW}, model),  # type: ignore[dict-item]
        lambda model: op.setup(op.layerwise(lambda record: None, model), model),  # type: ignore[arg-type, return-value]
        lambda model: op.setup(op.no_decay(lambda record: 3, ndim=1), model),  # type: ignore[arg-type, return-value]
    ],
    ids=range(15),
)
def test_bad_arguments_are_errors_of_the_library(make: Any) -> None:
    with pytest.raises(OptimiserError):
        make(_model())


@pytest.mark.parametrize(
    "name", ["cls.predictions.weight", "cls_head.w", "token_classifier.weight", "tokens_out", "lm_head.weight"]
)
def test_heads_lie_on_top_whatever_else_their_names_speak_of(name: str) -> None:
    model: dict[str, Any] = {}
    node = model
    *above, last = name.split(".")
    for key in above:
        node = node.setdefault(key, {})
    node[last] = np.ones(2)
    model |= {"layers": [np.ones(2), np.ones(2)], "cls_token": np.ones(2)}
    state = op.setup(op.layerwise(op.Descent(1.0), model, decay=0.5), model)
    assert {str(path): leaf(state, str(path)).rule.hyperparameters["lr"] for path in state} == {
        name: 1.0,
        "layers.1": 0.5,
        "layers.0": 0.25,
        "cls_token": 0.125,
    }
