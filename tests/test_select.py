"""Which parameters a selector means."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers import select
from optimisers.errors import PathError
from optimisers.model.select import as_selector, matching
from tests.conftest import leaf


@dataclass
class Linear:
    weight: Any
    bias: Any


@dataclass
class Special(Linear):
    scale: Any


def _model() -> dict[str, Any]:
    shared = np.ones((3, 2))
    return {
        "embed": shared,
        "body": [Linear(np.ones((2, 2)), np.ones(2)), Special(np.ones((2, 2)), np.ones(2), np.ones(()))],
        "head": {"weight": shared.T, "bias": np.ones(3)},
    }


STATE = op.setup(op.Adam(), _model())
ALL = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.1.scale", "embed", "head.bias"]
BIASES = ["body.0.bias", "body.1.bias", "head.bias"]


def _chosen(wish: Any) -> list[str]:
    return [str(STATE.parameters[at].path) for at in matching(STATE.parameters, wish)]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("**", ALL),
        ("", ALL),
        ("body.1", ALL[2:5]),
        (("body", 1), ALL[2:5]),
        (op.Path("body.1"), ALL[2:5]),
        ("body.*.weight", ["body.0.weight", "body.1.weight"]),
        ("**.weight", ["body.0.weight", "body.1.weight", "embed"]),
        ("head", ["embed", "head.bias"]),
        (Linear, ALL[:5]),
        (Special, ALL[2:5]),
        (list, ALL[:5]),
        (lambda parameter: parameter.size > 4, ["embed"]),
        (["embed", "**.bias"], ["body.0.bias", "body.1.bias", "embed", "head.bias"]),
        ({"embed"}, ["embed"]),
        (["embed", [Special, "embed"]], ["body.1.weight", "body.1.bias", "body.1.scale", "embed"]),
        (select.name("bias"), BIASES),
        (select.name("bias", "scale"), ["body.0.bias", "body.1.bias", "body.1.scale", "head.bias"]),
        (select.name("weight"), ["body.0.weight", "body.1.weight", "embed"]),
        (select.within(Special, dict), ALL),
        (select.within(Special), ALL[2:5]),
        (select.ndim(0), ["body.1.scale"]),
        (select.ndim(2), ["body.0.weight", "body.1.weight", "embed"]),
        (select.where(lambda parameter: bool(parameter.aliases)), ["embed"]),
        (select.path("body") & ~select.name("bias"), ["body.0.weight", "body.1.weight", "body.1.scale"]),
        (select.path("body") & select.ndim(1), ["body.0.bias", "body.1.bias"]),
        (select.ndim(0) | select.path("embed"), ["body.1.scale", "embed"]),
        (select.ndim(0) | "embed", ["body.1.scale", "embed"]),
        (select.path("body") & Special & (lambda parameter: parameter.ndim == 2), ["body.1.weight"]),
        (~select.path("body"), ["embed", "head.bias"]),
        (~(select.path("body") | select.name("bias")), ["embed"]),
        (~~select.ndim(0), ["body.1.scale"]),
    ],
)
def test_selectors(wish: Any, expected: list[str]) -> None:
    assert _chosen(wish) == expected


def test_selectors_are_shown_as_they_are_written() -> None:
    assert repr(select.path("a.*") & ~select.name("b")) == 'path("a.*") & ~name("b")'
    assert repr(select.name("b", 0)) == 'name("b", 0)'
    assert repr(~(select.ndim(1) | Linear)) == "~(ndim(1) | within(Linear))"
    assert repr(as_selector(["a", Linear])) == '[path("a"), within(Linear)]'
    assert repr(select.path(("a", 0))) == 'path("a.0")'

    def is_small(parameter: op.Parameter) -> bool:
        return parameter.size < 3

    assert repr(select.where(is_small)).endswith("is_small)")


def test_and_binds_tighter_than_or_when_shown() -> None:
    assert repr((select.ndim(1) | Linear) & "a") == '(ndim(1) | within(Linear)) & path("a")'
    assert repr(~(select.ndim(1) & Linear)) == "~(ndim(1) & within(Linear))"


@pytest.mark.parametrize("wish", [None, 1.5, True, b"bytes", object()])
def test_what_selects_nothing_is_an_error(wish: Any) -> None:
    with pytest.raises(PathError, match="selects nothing: give a path"):
        _chosen(wish)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("bodi", 'no parameter matches "bodi"; did you mean "body"'),
        ("body.*.wieght", r'"body\.\*\.wieght"; did you mean "body\.\*\.weight"'),
        ("**.baias", r'did you mean "\*\*\.bias"'),
        (("head", "weigth"), r'"head\.weigth"; did you mean "head\.weight"'),
        ("body.7", 'no parameter matches "body.7"'),
        ("xyz", 'no parameter matches "xyz"; there are "body.0.bias"'),
        (int, r"no parameter matches within\(int\)"),
        (select.ndim(7), r"no parameter matches ndim\(7\)"),
        ([], r"no parameter matches \[\]"),
        (lambda parameter: False, "no parameter matches where"),
        (0, 'no parameter matches "0"'),
    ],
)
def test_a_selector_without_a_match_is_an_error_with_the_nearest(wish: Any, message: str) -> None:
    with pytest.raises(PathError, match=message):
        _chosen(wish)


def test_a_model_that_is_a_list_is_selected_by_number() -> None:
    state = op.setup(op.Adam(), [np.ones(1), np.ones(2)])
    assert [str(each.path) for each in state.freeze(1).leaves() if each.frozen] == ["1"]


def test_there_is_nothing_to_select_in_an_empty_state() -> None:
    with pytest.warns(op.errors.OptimiserWarning):
        state = op.setup(op.Adam(), {})
    with pytest.raises(PathError, match="the state has no parameters"):
        state.freeze("a")


def test_a_function_of_the_model_is_an_error_that_says_what_it_is_given() -> None:
    state = op.setup(op.Adam(), {"blocks": [np.ones(2)]})
    with pytest.raises(PathError, match=r'the record of each parameter .* which has no "blocks", and not the model'):
        state.freeze(lambda model: model.blocks[0])
    with pytest.raises(AttributeError, match="other"):
        state.freeze(lambda parameter: ("").other)  # type: ignore[attr-defined]


def _is_frozen(record: op.Parameter) -> bool:
    return record.frozen


def test_a_selector_is_a_value() -> None:
    for one, other in (
        (select.path("a.b"), select.path("a.*")),
        (select.path(("a", 0)), select.path("a.b")),
        (select.name("bias") | select.ndim(1), select.ndim(1) | select.name("bias")),
        (~select.within(dict), select.within(dict)),
        (select.path("*") & ~select.path("b"), select.path("*")),
        (select.where(_is_frozen), select.ndim(2)),
    ):
        for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert (again == one, repr(again)) == (True, repr(one))
            assert again.selects(op.setup(op.Adam(), {"a": {"b": np.ones(2)}}).parameters[0]) == one.selects(
                op.setup(op.Adam(), {"a": {"b": np.ones(2)}}).parameters[0]
            )
        assert one != other
    assert len({select.path("a"), select.path("a"), select.name("a")}) == 2


def test_thousands_of_selectors_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    selects = select.Selector.selects
    monkeypatch.setattr(select.Selector, "selects", lambda self, record: asked.append(record) or selects(self, record))
    model = {f"p{at}": np.ones(1) for at in range(300)}
    rules = {name: op.SGD(float(at + 1)) for at, name in enumerate(model)}
    state = op.setup({**rules, "**": op.Adam()}, {**model, "rest": np.ones(1)})
    assert [each.rule for each in state.leaves()][:300] == [rules[str(path)] for path in list(state)[:300]]
    assert len(asked) < 2_000
    # The order counts all the same.
    first = op.setup({"p*": op.Adam(), "**": op.SGD(0.1)}, {**model, "rest": np.ones(1)})
    assert leaf(first, "p7").rule == op.Adam()
    with pytest.raises(op.errors.StateError, match="'p7' is never reached"):
        op.setup({"p*": op.Adam(), "p7": op.SGD(0.1)}, model)
