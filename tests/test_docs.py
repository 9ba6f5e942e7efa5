"""The site of the documentation: it builds without a warning, has every public name, and says what the code says."""

import ast
import html
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from playwright.sync_api import Page

import optimisers as op
from tests.browser import browser, page

__all__ = ["browser", "page"]  # fixtures

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "optimisers"

# Modules whose public names are the library's. Others are its inside.
PUBLIC = [
    "optimisers",
    "optimisers.errors",
    "optimisers.schedules",
    "optimisers.select",
    "optimisers.interop.convert",
    "optimisers.interop.flax",
    "optimisers.interop.optax",
    "optimisers.interop.optax_states",
    "optimisers.interop.torch_checkpoints",
    "optimisers.interop.torch_export",
    "optimisers.interop.torch_import",
    "optimisers.interop.torch_optim",
]


def module(name: str) -> ModuleType:
    return op.select if name == "optimisers.select" else importlib.import_module(name)


NAMES = [
    (name, each, getattr(module(name), each))
    for name in PUBLIC
    for each in module(name).__all__
    if not inspect.ismodule(getattr(module(name), each))
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: links and anchors that lead nowhere, pages that are in no menu."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path):
    found = set[str]()
    for file in (site / "reference").glob("*.html"):
        found |= set(re.findall(r'<h\d id="(optimisers\.[\w.]+)"', file.read_text()))
    assert {f"{name}.{each}" for name, each, _ in NAMES} <= found


def test_the_page_of_examples_shows_them_whole(site: Path):
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "examples.html").read_text()))
    for file in (ROOT / "examples").glob("[a-z]*.py"):
        missing = [line for line in file.read_text().splitlines() if line.strip() not in shown]
        assert not missing, (file.name, missing[:1])


def test_the_reference_has_every_public_method_of_what_people_hold(site: Path):
    text = "".join(file.read_text() for file in (site / "reference").glob("*.html"))
    inside = {"evolved", "with_frozen", "with_started", "arranged"}  # public to the other rooms alone
    for kind in (op.State, op.Leaf, op.Monitor, op.Recording, op.Unfreezing, op.schedules.Schedule, op.Path):
        for name, value in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod)) and name not in inside:
                assert f'id="optimisers.{"schedules." if kind is op.schedules.Schedule else ""}{kind.__name__}.{name}"' in text, (
                    name
                )


@pytest.mark.parametrize(("name", "each", "value"), [pytest.param(*each, id=each[1]) for each in NAMES])
def test_a_public_name_is_documented(name: str, each: str, value: Any):
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    text = inspect.getdoc(value) or ""
    assert text
    first = text.split("\n\n")[0]
    assert first.rstrip()[-1] in ".:$", first
    if isinstance(value, type) and issubclass(value, op.Rule) and value.__module__.startswith("optimisers.rules"):
        assert ">>>" in text
        assert value in (op.Rule, op.Chain) or "Source:" in text
        assert value in (op.Rule, op.Chain) or "**Arguments:**" in text or not value.__annotations__
    if inspect.isfunction(value) and name == "optimisers":
        assert ">>>" in text or "Example: see" in text or value is op.rule  # whose example is that of `Rule`


def test_the_table_of_rules_has_every_rule_with_its_source(site: Path):
    table = (site / "rules.html").read_text().partition('<div class="formulas">')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>.*?</tr>", table.partition("</thead>")[2], re.DOTALL)
    found = {re.search(r"<code>(\w+)</code>", row)[1]: row for row in rows}  # type: ignore[index]
    every = {each for each in vars(op).values() if isinstance(each, type) and issubclass(each, op.Rule) and each is not op.Rule}
    assert {each.__name__ for each in every} == set(found)
    assert [name for name, row in found.items() if "<td></td>" in row] == ["Chain"]


def test_formulas_are_rendered_and_no_source_of_one_is_left(site: Path):
    for file in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script).*?</\1>", "", file.read_text(), flags=re.DOTALL)
        assert not re.search(r"\\(frac|sqrt|mathrm|leftarrow|hat|beta|mu|nu|lambda)\b", text), file.name
        assert 'class="arithmatex"' not in text, file.name
        assert "merror" not in text, file.name


def test_pages_load_nothing_from_elsewhere_and_miss_nothing(site: Path, page: Page):
    for name in ("index.html", "rules.html", "guides/looking.html", "reference/rules.html", "benchmarks.html"):
        page.goto((site / name).as_uri())
        page.wait_for_load_state("networkidle")
        assert page.evaluate("() => [...document.images].every(image => image.complete && image.naturalWidth > 0)")


def test_the_search_finds_a_name_in_pages_that_are_read_from_files(site: Path, page: Page):
    page.goto((site / "guides" / "ties.html").as_uri())
    page.wait_for_load_state("networkidle")
    page.locator("input[name=query]").press_sequentially("unfreezing")
    found = page.locator(".md-search-result__item").first
    found.wait_for()
    assert "Unfreezing" in found.inner_text()


def test_formulas_have_a_font_with_heights_of_its_own(site: Path, page: Page):
    page.goto((site / "rules.html").as_uri())
    assert page.evaluate("async () => (await document.fonts.load('16px \"STIX Two Math subset\"')).length") == 1
    heights = page.evaluate(
        "() => [...document.querySelectorAll('.formulas math')].map(each => each.getBoundingClientRect().height)"
    )
    assert len(heights) > 50
    assert all(0 < height < 80 for height in heights)


def test_imports_run_downward_through_the_rooms_of_the_picture():
    rooms = runpy.run_path(str(DOCS / "_build" / "house.py"))["ROOMS"]
    level = {name: -at for at, row in enumerate(rooms) for *_, names in row for name in names.split()}
    files = {file: file.relative_to(SOURCE).with_suffix("").parts[0] for file in SOURCE.rglob("*.py") if file.name != "__init__.py"}
    assert set(files.values()) == set(level)
    for file, room in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "optimisers":
                inner = (node.module or "").split(".")[1:2] or [each.name for each in node.names]
                for other in inner:
                    assert level.get(other, -9) <= level[room], f"{file.name} imports {other}, which stands above it"
