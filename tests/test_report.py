"""Tables of a state."""

import io

import numpy as np
import pytest
from rich.console import Console

import optimisers as op
from optimisers.text import size_of
from tests.conftest import Backend, train


def _state(backend: Backend) -> op.State:
    w = backend.array(np.ones((4, 3)), "float32")
    model = {"embed": w, "head": w, "b": backend.array([1.0]), "body[red]": backend.array([1.0]), "s": backend.array(1.0)}
    state = op.setup({"b": op.Descent(0.1), "**": op.Adam(0.1)}, model).freeze("s").freeze("embed", rows=[0, 1]).mask("head")
    return train(state, model, {"embed": backend.array(np.ones((4, 3)), "float32")})[0]


def test_the_summary_says_what_the_state_holds(backend: Backend) -> None:
    made = op.summary(_state(backend))
    rows = {row[0]: row[1:] for row in made.rows}
    assert rows["embed"][:2] == ("4 × 3", "float32")
    assert rows["embed"][3:] == ("1", "96 B", "2 of 4 rows frozen, tied: head, masked: head")
    assert rows["s"] == ("scalar", "float64", "B", "0", "16 B", "frozen")
    assert rows["b"][2:] == ("A", "0", "0 B", "")
    assert made.rules == (("A", "Descent(lr=0.1)"), ("B", "Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08)"))
    assert made.total == "4 parameters, 15 elements, 1 of them frozen; 128 B of state"


def test_the_summary_prints_as_a_table() -> None:
    from tests.conftest import BACKENDS

    made = op.summary(_state(BACKENDS[0]))
    text = str(made)
    lines = text.splitlines()
    assert all(heading in lines[0] for heading in made.headings)
    # What looks like markup in a name is shown as it is, and no row is broken.
    assert sum("body[red]" in line for line in lines) == 1
    for row in made.rows:
        assert any(all(cell in line for cell in row) for line in lines)
    assert lines[-1].strip() == made.total
    assert "\x1b" not in text
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(made)
    assert "body[red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_values_that_result_are_shown_for_every_parameter() -> None:
    model = {
        "embed": np.ones((4, 2)),
        "layers": [{"w": np.ones((2, 2)), "b": np.ones(2)} for _ in range(2)],
        "head": np.ones((2, 3)),
    }
    rule = op.no_decay(op.layerwise(op.AdamW(op.schedules.Linear(1.0, 0.0, 4)), model, decay=0.5), ndim=1)
    state = op.setup(rule, model)
    state, model = op.update(state, model, model)
    made = op.summary(state)
    columns = {row[0]: dict(zip(made.headings, row, strict=True)) for row in made.rows}
    assert {name: (row["lr"], row["weight_decay"]) for name, row in columns.items()} == {
        "embed": ("0.09375", "0.01"),
        "layers.0.w": ("0.1875", "0.01"),
        "layers.0.b": ("0.1875", "0"),
        "layers.1.w": ("0.375", "0.01"),
        "layers.1.b": ("0.375", "0"),
        "head": ("0.75", "0.01"),
    }
    assert made.rules == (("A", "AdamW(lr=…, betas=(0.9, 0.999), eps=1e-08, weight_decay=…)"),)


def test_a_schedule_has_a_column_with_its_value() -> None:
    made = op.summary(op.setup(op.Chain(op.ClipNorm(1.0), op.Descent(op.schedules.Linear(1.0, 0.0, 4))), np.ones(2)))
    assert made.headings[4:6] == ("lr", "steps")
    assert made.rows[0][4] == "1"
    assert made.rules == (("A", "Chain(ClipNorm(max_norm=1.0), Descent(lr=Linear(start=1.0, stop=0.0, steps=4)))"),)


def test_views_are_named() -> None:
    w = np.ones((2, 3))
    made = op.summary(op.setup(op.Adam(), {"a": w, "b": w.T, "c": w.reshape(6)}))
    assert made.rows[0][-1] == "tied: b (transposed), tied: c (reshaped)"
    assert op.summary(op.setup(op.Adam(), w)).rows[0][0] == "(the model)"


def test_the_summary_of_nothing() -> None:
    with pytest.warns(op.errors.OptimiserWarning):
        state = op.setup(op.Adam(), {})
    assert op.summary(state).total == "0 parameters, 0 elements; 0 B of state"
    assert "0 parameters" in str(op.summary(state))


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**40, "3072.0 GiB")],
)
def test_sizes_are_shown_in_units(size: int, shown: str) -> None:
    assert size_of(size) == shown
