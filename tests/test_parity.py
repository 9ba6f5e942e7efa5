"""Every rule has the numbers of its reference, and the table in the docs says so."""

import numpy as np
import pytest

import optimisers as op
from tests import parity
from tests.conftest import BACKENDS, EPS, Backend, rule_classes, train, wide

RUNS = [
    pytest.param(case, backend, dtype, id=f"{case.subject.__name__}-{at}-{dtype}-{backend}")
    for at, case in enumerate(parity.CASES)
    for dtype in case.dtypes
    for backend in BACKENDS
    if dtype in backend.dtypes
]
"""Every case in every setting that it is for. The number is its place in the list."""


@pytest.mark.parametrize(("case", "backend", "dtype"), RUNS)
def test_numbers_are_those_of_the_reference(case: parity.Comparison, backend: Backend, dtype: str) -> None:
    found = case.deviation(backend, dtype)
    assert found <= case.tolerance(dtype)
    # The last bits differ from machine to machine.
    least = 1.0 if isinstance(case, parity.Statistic) else EPS["float64" if parity.is_double(dtype) else "float32"]
    assert found <= 10 * max(least, parity.noted(case, backend, dtype)), "run python -m tests.parity and see what has changed"


def test_the_table_has_the_rules_references_options_and_backends_that_there_are() -> None:
    head, rows = parity.written()
    assert head == parity.header(), "run python -m tests.parity"
    assert [(row.rule, row.reference, row.options) for row in rows] == [
        (row.rule, row.reference, row.options) for row in parity.rows()
    ], "run python -m tests.parity"


def test_every_rule_has_a_reference() -> None:
    assert {case.subject for case in parity.CASES} == {*rule_classes(), op.Chain}


@pytest.mark.parametrize("cls", rule_classes(), ids=lambda cls: cls.__name__)
def test_every_option_of_a_rule_is_compared(cls: type[op.Rule]) -> None:
    names = {name for case in parity.CASES if case.subject is cls for name in case.changed}
    # A fallback is another rule, with a reference of its own.
    assert names == cls().hyperparameters.keys() - {"fallback"}


OPTIONS = dict.fromkeys(
    (case.subject, name)
    for case in parity.CASES
    if isinstance(case, parity.Case) and case.subject is not op.Chain
    for name in case.changed
    if name != "fallback"
)


@pytest.mark.parametrize(("cls", "name"), OPTIONS, ids=lambda each: getattr(each, "__name__", each))
def test_every_option_that_is_compared_matters_in_some_case(cls: type[op.Rule], name: str) -> None:
    cases = [each for each in parity.CASES if isinstance(each, parity.Case) and each.subject is cls and name in each.changed]
    assert any(_matters(case, name) for case in cases)


def _matters(case: parity.Case, name: str) -> bool:
    """Whether the outcome is another one without the option."""
    dtype = next(each for each in ("float64", "complex128", *case.dtypes) if each in case.dtypes)
    start, gradients = case.data(dtype)
    try:
        rules = case.rule, case.without(name)
    except op.errors.HyperparameterError:
        return False  # another option asks for it
    ends = []
    for rule in rules:
        state, model = train(rule, {key: array.copy() for key, array in start.items()}, *gradients)
        ends.append(case.outcome(state, model))
    return any(float(np.abs(wide(ends[0][key]) - wide(ends[1][key])).max()) > 10 * case.tolerance(dtype) for key in start)


@pytest.mark.parametrize(
    "cls", dict.fromkeys(case.subject for case in parity.CASES if isinstance(case, parity.Case)), ids=lambda cls: cls.__name__
)
def test_parameters_move_far_enough_to_compare(cls: type[op.Rule]) -> None:
    moves = []
    for case in parity.CASES:
        if case.subject is cls and isinstance(case, parity.Case):
            start, end = case.data("float64")[0], parity.true_end(case, "float64")
            moves.append(min(np.abs(end[name] - start[name]).max() for name in start))
    assert max(moves) > 0.01


def test_a_deviation_is_seen() -> None:
    right = next(case for case in parity.CASES if case.subject is op.Adam)
    assert isinstance(right, parity.Case)
    wrong = parity.Case(op.Adam(1.001e-3), right.reference)
    assert 1e-6 < wrong.deviation(BACKENDS[0], "float64") < 1e-3
