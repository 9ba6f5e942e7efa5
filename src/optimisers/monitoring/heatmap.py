"""Heat maps of a recording: parameters by steps, as a picture (PNG, with Matplotlib) or a page (HTML, which needs nothing else)."""

import io
import math
import os
from pathlib import Path as File
from typing import TYPE_CHECKING

import numpy as np

from optimisers.errors import StateError
from optimisers.files.replacing import replacing
from optimisers.monitoring.scales import TITLES, Columns, edges_of, scale_of
from optimisers.text import path_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_FROZEN, _BROKEN, _COLOURS = "#b9bec7", "#ff1744", "viridis"
_LABELS = 60
_WIDTH = 1500
_LONGEST = 48


def draw(columns: Columns, file: "str | os.PathLike[str]", quantity: str) -> None:
    """Draw a quantity of a recording into a file; its ending tells how."""
    ending = File(file).suffix.lower()
    if ending == ".png":
        content = _png(columns, quantity)
    elif ending in (".html", ".htm"):
        from optimisers.monitoring.page import page

        content = page(columns, quantity).encode()
    else:
        raise StateError(f"{os.fspath(file)}: a heat map is drawn into a .png or an .html; give the file one of these endings")
    with replacing(file) as draft:
        File(draft).write_bytes(content)


# A picture ------------------------------------------------------------------------------------------------------------


def _png(columns: Columns, quantity: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a heat map as PNG needs Matplotlib: pip install matplotlib; one as .html does not") from error
    rows = len(columns.paths)
    figure = Figure(figsize=(11, min(14.0, max(2.6, 1.7 + 0.19 * rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _cells(axes, columns, quantity)
    _names(axes, columns.paths)
    axes.set_xlabel("step")
    axes.spines[:].set_visible(False)
    axes.set_title(f"{TITLES[quantity]} by parameter and step", loc="left")
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=130)
    return found.getvalue()


def _cells(axes: "Axes", columns: Columns, quantity: str) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize, to_rgba
    from matplotlib.patches import Patch

    values, known, frozen = columns.values[quantity], columns.known[quantity], columns.frozen
    broken = known & ~np.isfinite(values)
    scale = scale_of(columns, quantity)
    colours = ScalarMappable(LogNorm(scale.low, scale.high) if scale.logarithmic else Normalize(scale.low, scale.high), _COLOURS)
    left, right = edges_of(columns.steps)
    # An image with columns of equal width, whatever the steps between samples: a mesh of so many cells takes long.
    middles = left[0] + (right[-1] - left[0]) * (np.arange(_WIDTH) + 0.5) / _WIDTH
    sample = np.minimum(np.searchsorted(right, middles, side="right"), len(left) - 1)
    image = np.zeros((len(values), _WIDTH, 4), np.uint8)
    numbers = np.where(broken | ~known, scale.low, np.maximum(values, scale.low))
    image[:] = np.asarray(colormaps[_COLOURS](colours.norm(numbers), bytes=True))[:, sample]
    for where, colour in ((~known, "white"), (frozen & ~known, _FROZEN), (broken, _BROKEN)):
        image[where[:, sample]] = np.multiply(to_rgba(colour), 255).astype(np.uint8)
    image[:, middles < left[sample]] = 255
    axes.imshow(image, extent=(left[0], right[-1], len(values) - 0.5, -0.5), aspect="auto", interpolation="nearest")
    bar = axes.figure.colorbar(colours, ax=axes, pad=0.01, fraction=0.03, aspect=30)
    bar.outline.set_visible(False)
    # Markers have a size of their own, so that none is lost among thousands of rows.
    rows, at = np.nonzero(broken)
    axes.scatter(columns.steps[at], rows, s=5, marker="s", color=_BROKEN, linewidths=0, zorder=3)
    legend = [(frozen, _FROZEN, _FROZEN, "frozen"), (broken, _BROKEN, _BROKEN, "NaN or infinite")]
    legend.append((~(known | frozen), "white", "#999999", "nothing recorded"))
    handles = [Patch(facecolor=face, edgecolor=edge, label=label) for where, face, edge, label in legend if where.any()]
    if handles:
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.2)


def _names(axes: "Axes", paths: tuple[str, ...]) -> None:
    """The names of rows; of many, every so many-th."""
    every = math.ceil(len(paths) / _LABELS)
    labels = [_shortened(path_text(path)) for path in paths[::every]]
    axes.set_yticks(range(0, len(paths), every), labels, fontsize=7)
    axes.tick_params(axis="y", length=2)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)


def _shortened(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
