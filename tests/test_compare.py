"""The table of what other libraries do: how it is judged and printed, and that what it says of this library and its peers is so."""

import json
import sys
from typing import Any

import pytest

from compare import contenders
from compare.__main__ import PAGE, RESULTS
from compare.cases import CASES, FAMILIES, Case, Raises
from compare.contenders import CONTENDERS, Contender, answer, answer_apart, has
from compare.outcomes import ERROR, NONE, RIGHT, WRONG, judged
from compare.page import counts, page, tables

RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))
OURS = [name for name, each in CONTENDERS.items() if each.array is not None]
HERE = ["torch.optim", "Optax", "Optax with masks"]
NUMBER = Case("N", "Ties", "a number", {"x": 1.0, "y": [1, 2]})
FAILS = Case("E", "Ties", "an error", Raises(("head", "10")))


def _cases(names: list[str]) -> Any:
    pairs = [(name, case) for name in names for case in CASES if has(CONTENDERS[name], case)]
    return pytest.mark.parametrize(("name", "case"), pairs, ids=[f"{name}-{case}" for name, case in pairs])


# Judging --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "found", "outcome"),
    [
        (NUMBER, {"found": {"x": 1.0000001, "y": [1, 2.0]}}, RIGHT),
        (NUMBER, {"found": {"x": 1.1, "y": [1, 2]}}, WRONG),
        (NUMBER, {"found": {"x": 1.0, "y": [1, 2, 3]}}, WRONG),
        (NUMBER, {"found": {"x": "nan", "y": [1, 2]}}, WRONG),
        (NUMBER, {"found": {"x": float("nan"), "y": [1, 2]}}, WRONG),
        (NUMBER, {"found": {"y": [1, 2]}}, WRONG),
        (NUMBER, {"error": "KeyError: x", "text": "x"}, ERROR),
        (NUMBER, {}, NONE),
        (FAILS, {"error": "ShapeError: head: 10", "text": "head: 10"}, RIGHT),
        (FAILS, {"error": "ShapeError: 10", "text": "10"}, ERROR),
        (FAILS, {"found": {}}, WRONG),
    ],
)
def test_an_answer_is_right_wrong_an_error_or_none(case: Case, found: Any, outcome: str) -> None:
    assert judged(case, found)["outcome"] == outcome


def test_a_hang_and_a_crash_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Contender("nobody", (), ())
    assert "the process ended with 1: KeyError: 'nobody'" in answer_apart(nobody, "T1")["error"]
    monkeypatch.setattr(contenders, "TIMEOUT", 0.01)
    assert "still running" in answer_apart(CONTENDERS[OURS[0]], "T1")["error"]


def test_a_case_runs_in_a_process_of_its_own() -> None:
    found = answer_apart(CONTENDERS["ours, NumPy"], "T1")
    assert judged(CASES["T1"], found)["outcome"] == RIGHT


def test_a_library_that_is_not_installed_is_missing() -> None:
    assert Contender("x", (), ("no_such_package", "numpy")).missing == ["no_such_package"]


# What it says ---------------------------------------------------------------------------------------------------------


@_cases(OURS)
@pytest.mark.filterwarnings("ignore:.*(DataParallel|GradScaler|lr_scheduler).*")
def test_this_library_is_right(name: str, case: str) -> None:
    found = judged(CASES[case], answer(CONTENDERS[name], case))
    assert found["outcome"] in (RIGHT, NONE), found
    assert found["outcome"] == RECORDED["results"][name][case]["outcome"]


@_cases(HERE)
@pytest.mark.filterwarnings("ignore")
def test_peers_do_what_the_table_says(name: str, case: str) -> None:
    who = CONTENDERS[name]
    if any(RECORDED["versions"][package] != number for package, number in who.versions.items()):
        pytest.skip("another version than that in the table")
    found, recorded = judged(CASES[case], answer(who, case)), RECORDED["results"][name][case]
    assert (found["outcome"], found.get("by hand")) == (recorded["outcome"], recorded.get("by hand"))


def test_every_case_of_every_contender_is_in_the_table() -> None:
    assert list(RECORDED["results"]) == [name for name in CONTENDERS if name not in RECORDED["left out"]]
    for name, found in RECORDED["results"].items():
        assert list(found) == list(CASES)
        for case, each in found.items():
            assert has(CONTENDERS[name], case) or each == {"outcome": NONE}


# The page -------------------------------------------------------------------------------------------------------------


def test_the_committed_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RECORDED)


def test_rows_have_a_cell_for_every_column() -> None:
    for block in page(RECORDED).split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1
    assert all(f"## {family}\n" in page(RECORDED) for family in FAMILIES)
    assert all(f"| **{case.name}** " in page(RECORDED) for case in CASES.values())


def test_cells_show_numbers_and_notes_show_errors() -> None:
    text = page(RECORDED)
    assert "**wrong**: w = [0.7, 1.7], again = [0.3, 1.3]" in text
    assert "`KeyError" in text
    for found in RECORDED["results"].values():
        assert sum(counts(found)) - counts(found)[1] == len(CASES)


def test_a_library_that_was_left_out_is_named_with_the_reason() -> None:
    results = RECORDED | {"left out": {"MLX": "mlx is not installed"}}
    results["results"] = {name: found for name, found in RECORDED["results"].items() if name != "MLX"}
    assert "MLX is left out: mlx is not installed." in page(results)
    assert "| MLX |" not in page(results)


def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout, width=400)
    for table in tables(RECORDED):
        console.print(table)
    out = capsys.readouterr().out
    assert all(family in out for family in FAMILIES)
    assert "wrong: w = [0.7, 1.7], again = [0.3, 1.3]" in out
