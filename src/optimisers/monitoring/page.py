"""A recording as a page of HTML that needs nothing else: the values, packed, and a script that draws them."""

import base64
import json
import zlib
from importlib import resources
from typing import Any

import numpy as np

from optimisers.monitoring.scales import TITLES, Columns, edges_of, scale_of
from optimisers.text import path_text

__all__ = ["page"]

_UNKNOWN, _NAN = np.uint32(0xFFFFFFFF), np.uint32(0x7FC00000)


def page(columns: Columns, quantity: str) -> str:
    """The page; a quantity is shown first, and others can be chosen."""
    left, right = edges_of(columns.steps)
    data: dict[str, Any] = {
        "paths": list(map(path_text, columns.paths)),
        "steps": columns.steps.tolist(),
        "left": left.tolist(),
        "right": right.tolist(),
        "shown": quantity,
        "frozen": _packed(columns.frozen.astype(np.uint8)),
        "quantities": {
            name: {"title": title, **scale_of(columns, name)._asdict(), "values": _packed_floats(columns, name)}
            for name, title in TITLES.items()
        },
    }
    template = resources.files("optimisers.monitoring").joinpath("page.html").read_text("utf-8")
    return template.replace("{{data}}", _harmless(json.dumps(data)))


def _harmless(text: str) -> str:
    """JSON that may stand in a script: no name can end it."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _packed_floats(columns: Columns, name: str) -> str:
    """The values as float32 with 16 of its 23 binary digits, byte by byte so that they compress, rows after rows."""
    values, known = columns.values[name], columns.known[name]
    limit = float(np.finfo(np.float32).max) / 2
    with np.errstate(all="ignore"):
        small = np.where(np.isfinite(values), np.clip(values, -limit, limit), values).astype(np.float32)
    bits = small.view(np.uint32)
    bits = np.where(np.isfinite(small), (bits + np.uint32(0x40)) & np.uint32(0xFFFFFF80), bits)
    bits = np.where(np.isnan(small), _NAN, bits)
    bits = np.where(known, bits, _UNKNOWN).astype("<u4")
    return _packed(bits.reshape(-1, 1).view(np.uint8).T)


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 6)).decode()
