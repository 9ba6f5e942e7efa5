"""The models that are measured: trees of float32 arrays of given shapes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import optimisers as op

__all__ = ["FULL", "QUICK", "Sizes", "arrays_of", "filled", "freeze_share", "nbytes", "parameters_of_gpt2", "shapes_of"]

Tree = Any


@dataclass(frozen=True)
class Sizes:
    """How large each case is."""

    vocabulary: int
    width: int
    blocks: int
    many: tuple[int, int]
    """(b): how many arrays, of how many elements."""
    some: tuple[int, int]
    """(c)."""
    single: int
    """(d): the elements of one array."""
    few: tuple[int, int]
    """(e)."""
    setup: tuple[int, int]
    """The parameters of a model and of one ten times as large."""


FULL = Sizes(50_257, 768, 12, many=(2_000, 256), some=(300, 768), single=30_000_000, few=(10, 64), setup=(10_000, 100_000))
QUICK = Sizes(203, 12, 2, many=(40, 256), some=(12, 768), single=50_000, few=(10, 64), setup=(100, 1_000))


def shapes_of(case: str, sizes: Sizes) -> Tree:
    """The shapes of a case, as a tree."""
    if case == "a":
        return parameters_of_gpt2(sizes)
    if case == "d":
        return {"weight": (sizes.single,)}
    count, length = {"b": sizes.many, "c": sizes.some, "e": sizes.few}[case]
    return {f"layer{at}": (length,) for at in range(count)}


def parameters_of_gpt2(sizes: Sizes) -> Tree:
    """The shapes of GPT-2 with its output tied to its embedding: 124 million elements in 148 arrays at full size."""
    width = sizes.width

    def linear(inner: int, outer: int) -> Tree:
        return {"weight": (inner, outer), "bias": (outer,)}

    def norm() -> Tree:
        return {"weight": (width,), "bias": (width,)}

    def block() -> Tree:
        return {
            "ln_1": norm(),
            "attn": {"c_attn": linear(width, 3 * width), "c_proj": linear(width, width)},
            "ln_2": norm(),
            "mlp": {"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width)},
        }

    return {
        "wte": {"weight": (sizes.vocabulary, width)},
        "wpe": {"weight": (1_024, width)},
        "h": [block() for _ in range(sizes.blocks)],
        "ln_f": norm(),
    }


def filled(shapes: Tree, seed: int, scale: float) -> Tree:
    """A tree of arrays of these shapes, drawn from a normal distribution."""
    rng = np.random.default_rng(seed)

    def fill(node: Tree) -> Tree:
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        if isinstance(node, list):
            return [fill(child) for child in node]
        array = rng.standard_normal(node, dtype=np.float32)
        array *= np.float32(scale)
        return array

    return fill(shapes)


def arrays_of(tree: Tree, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tree with their dotted paths, in the order in which they stand."""
    if isinstance(tree, np.ndarray):
        yield prefix, tree
        return
    for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from arrays_of(child, f"{prefix}.{key}" if prefix else str(key))


def nbytes(tree: Tree) -> int:
    """The bytes of all arrays of a tree."""
    return sum(array.nbytes for _, array in arrays_of(tree))


def freeze_share(state: op.State, share: float) -> op.State:
    """Freeze a share of all elements, in the order of the state: whole parameters, and rows of the one where it ends."""
    left = round(share * sum(record.size for record in state.parameters))
    whole: list[str] = []
    for record in state.parameters:
        if record.size > left:
            rows = left * record.shape[0] // record.size
            state = state.freeze(whole) if whole else state
            return state.freeze(str(record.path), rows=slice(rows)) if rows else state
        whole.append(str(record.path))
        left -= record.size
    return state.freeze(whole)
