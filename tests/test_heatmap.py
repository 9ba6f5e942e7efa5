"""Heat maps: the picture as pixels, and the page in a real browser."""

import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.monitoring.lines import Sample
from optimisers.monitoring.page import page as page_of
from optimisers.monitoring.scales import edges_of, scale_of
from tests.browser import browser, page

__all__ = ["browser", "page"]

ODD = '</script><b>&amp;"$x_1$'
BROKEN, FROZEN = (255, 23, 68), (185, 190, 199)


def recording(parameters: int = 8, samples: int = 12) -> op.Recording:
    """Half of the parameters are frozen for half of the time; one value is NaN; one parameter takes no step at times."""
    rng = np.random.default_rng(0)
    paths = (*(f"layers.{at}.weight" for at in range(parameters - 1)), ODD)
    found = op.Recording()
    for at in range(samples):
        frozen = (np.arange(parameters) < parameters // 2) & (at < samples // 2)
        values = np.array([rng.lognormal(0, 2, parameters), rng.lognormal(-7, 1, parameters), np.full(parameters, 1e-3 * (at + 1))])
        values[0, -2] = np.nan if at == samples - 1 else values[0, -2]
        known = np.tile(~frozen, (3, 1))
        known[:, -1] = at % 3 != 2
        found.add(Sample(10 * (at + 1), 1.7e9 + at, paths, values, known, frozen))
    return found


def pixels(file: "Path | BytesIO") -> np.ndarray:
    """A picture as an array of rows, columns and colours."""
    from matplotlib.image import imread

    return np.rint(np.asarray(imread(file))[..., :3] * 255).astype(int)


def share(image: np.ndarray, colour: tuple[int, ...], within: int = 2) -> float:
    """The share of pixels that have a colour."""
    return float((np.abs(image - np.array(colour)).max(axis=-1) <= within).mean())


# A picture ------------------------------------------------------------------------------------------------------------


def test_a_picture_shows_values_frozen_spans_and_what_is_not_finite(tmp_path: Path) -> None:
    recording().plot(tmp_path / "run.png", "grad_norm")
    image = pixels(tmp_path / "run.png")
    assert share(image, FROZEN) > 0.1
    assert 0.001 < share(image, BROKEN) < 0.05
    recording().plot(tmp_path / "run.png", "lr")
    assert share(pixels(tmp_path / "run.png"), BROKEN) == 0


def test_one_broken_value_among_thousands_of_rows_is_seen(tmp_path: Path) -> None:
    many = recording(3000, 40)
    many.plot(tmp_path / "run.png", "grad_norm")
    image = pixels(tmp_path / "run.png")
    assert image.shape[0] < 2500
    assert share(image, BROKEN, within=40) > 0


@pytest.mark.parametrize("quantity", ["grad_norm", "update_ratio", "lr"])
@pytest.mark.parametrize("name", ["run.png", "run.html", "RUN.PNG"])
def test_the_smallest_recording_can_be_drawn(tmp_path: Path, quantity: str, name: str) -> None:
    one = np.array([3.0])
    monitor = op.Monitor(every=1)
    monitor.update_(op.setup(op.Descent(0.0), one), one, np.array([0.0]))
    monitor.recording.plot(tmp_path / name, quantity)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_recording_without_any_number_can_be_drawn(tmp_path: Path) -> None:
    paths = ("a", "b")
    nothing = Sample(1, 0.0, paths, np.full((3, 2), np.nan), np.zeros((3, 2), bool), np.ones(2, bool))
    op.Recording([nothing]).plot(tmp_path / "run.png")
    op.Recording([nothing]).plot(tmp_path / "run.html")
    assert share(pixels(tmp_path / "run.png"), FROZEN) > 0.3


def test_a_gap_between_samples_stays_empty() -> None:
    left, right = edges_of(np.array([10, 20, 30, 100, 200, 300]))
    assert left.tolist() == [5, 15, 25, 65, 150, 250]
    assert right[2] == 35
    assert (left[1:] >= right[:-1]).all()
    assert edges_of(np.array([7]))[0].tolist() == [6.5]


def test_scales_are_logarithmic_but_for_rates_that_hardly_differ() -> None:
    found = recording()
    assert scale_of(found.columns, "grad_norm").logarithmic
    assert scale_of(found.columns, "lr") == (0.0, pytest.approx(0.012), False)


def test_errors_name_the_remedy_and_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.png"
    file.write_text("old")
    with pytest.raises(op.errors.StateError, match=r"\.png or an \.html"):
        recording().plot(tmp_path / "run.pdf")
    with pytest.raises(op.errors.StateError, match="nothing is recorded"):
        op.Recording().plot(file)
    with pytest.raises(op.errors.StateError, match="grad_norm"):
        recording().plot(file, "gradient")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        recording().plot(file)
    assert file.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["run.png"]
    recording().plot(tmp_path / "run.html")
    with pytest.raises(FileNotFoundError):
        recording().plot(tmp_path / "missing" / "run.html")


# A page ---------------------------------------------------------------------------------------------------------------


def shown(page: Any, found: op.Recording, quantity: str = "grad_norm") -> Any:
    """The page of a recording, drawn."""
    page.set_content(page_of(found.columns, quantity))
    page.wait_for_selector("body[data-ready]")
    return page


def hover(page: Any, row: int, sample: int) -> str:
    """What the page tells of a cell."""
    place = page.evaluate(
        """([row, sample]) => { const box = canvas.getBoundingClientRect(); return [
            box.left + plot.x + (data.steps[sample] - view.x0) / (view.x1 - view.x0) * plot.width,
            box.top + plot.y + (row + 0.5 - view.y0) / (view.y1 - view.y0) * plot.height]; }""",
        [row, sample],
    )
    page.mouse.move(*place)
    return page.inner_text("#tip") if page.is_visible("#tip") else ""


def colours(page: Any) -> np.ndarray:
    """The pixels of the map."""
    url, left, top, width, height = page.evaluate(
        """() => [canvas.toDataURL(), ...[plot.x, plot.y, plot.width, plot.height].map(
            each => Math.round(each * window.devicePixelRatio))]"""
    )
    return pixels(BytesIO(b64decode(url.partition(",")[2])))[top : top + height, left : left + width]


def test_a_page_tells_path_step_and_values(page: Any) -> None:
    found = recording()
    shown(page, found)
    assert page.inner_text("h1") == "gradient norm by parameter and step"
    for row, sample in ((5, 1), (0, 11), (7, 4)):
        text = hover(page, row, sample)
        path, step, *numbers = text.splitlines()
        assert path == found.paths[row]
        assert step == f"step {found.steps[sample]}"
        values = [float(line.split()[-1]) for line in numbers]
        assert values == pytest.approx([each[sample, row] for each in (found.grad_norm, found.update_ratio, found.lr)], rel=1e-4)
    assert "frozen" in hover(page, 0, 0)
    assert hover(page, 0, 0).splitlines()[-1].endswith("–")
    assert "NaN" in hover(page, 6, 11)


def test_names_are_text_on_a_page(page: Any) -> None:
    shown(page, recording())
    assert hover(page, 7, 0).splitlines()[0] == ODD
    assert page.locator("body b").count() == 1  # the name that is told
    assert "<b>&amp;" not in page_of(recording().columns, "lr")


def test_a_page_shows_what_is_frozen_and_what_is_not_finite(page: Any) -> None:
    shown(page, recording())
    image = colours(page)
    height, width = image.shape[:2]
    asleep = image[: height // 2 - 4, : width // 2 - 4]
    assert share(asleep, FROZEN) + share(asleep, (154, 161, 173)) == pytest.approx(1.0)
    assert share(image, BROKEN) == pytest.approx(1 / 96, rel=0.2)
    page.check("input[value=lr]", force=True)
    assert page.inner_text("h1") == "learning rate by parameter and step"
    assert share(colours(page), BROKEN) == 0


def test_dark_pages_are_dark(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    shown(page, recording())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert share(colours(page), FROZEN) == 0


def test_names_can_be_filtered_and_spans_enlarged(page: Any) -> None:
    shown(page, recording())
    page.fill("#filter", "LAYERS.3")
    assert page.evaluate("rows.map(row => data.paths[row])") == ["layers.3.weight"]
    page.fill("#filter", "no such name")
    assert page.evaluate("rows.length") == 0
    page.fill("#filter", "")
    hover(page, 2, 2)
    page.mouse.down()
    hover(page, 4, 6)
    page.mouse.up()
    view = page.evaluate("view")
    assert (view["y0"], view["y1"]) == (2, 5)
    assert 25 < view["x0"] < 35
    assert 65 < view["x1"] < 75
    assert hover(page, 3, 4).splitlines()[0] == "layers.3.weight"
    page.dblclick("#map", position={"x": 400, "y": 40})
    assert page.evaluate("view.y1") == 8


def test_a_large_page_is_small_and_quick(page: Any) -> None:
    found = recording(2000, 250)
    # Three numbers for each of half a million cells, of 16 digits to the base of two: far below what their texts take.
    assert len(page_of(found.columns, "grad_norm")) < 4_500_000
    shown(page, found)
    assert share(colours(page), BROKEN) > 0
    assert page.evaluate("() => { const start = performance.now(); draw(); return performance.now() - start; }") < 5000
