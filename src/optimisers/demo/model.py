"""The model: a causal convolutional network over characters, in NumPy, whose head is its embedding transposed."""

from typing import Any

import numpy as np
from autograd import numpy as traced_numpy
from autograd.extend import defvjp, primitive
from autograd.tracer import getval
from numpy.typing import NDArray

from optimisers.demo.corpus import Ids

__all__ = ["CONTEXT", "generate", "loss", "new_model"]

# Its functions are made when it is imported, so type checkers do not know them.
anp: Any = traced_numpy

WIDTH, HIDDEN = 64, 256
TAPS = 4
"""How many characters each layer looks at."""
DILATIONS = (1, 4, 16)
"""How far they are apart, in each layer."""
CONTEXT = 1 + (TAPS - 1) * sum(DILATIONS)
"""How many characters the model sees."""


def new_model(alphabet: int, random: np.random.Generator) -> dict[str, Any]:
    """A fresh model for an alphabet of that many characters: a dict of float32 arrays.

    `head.weight` is a view of `embed`, which is all it takes to tie them.
    """

    def normal(*shape: int, scale: float) -> NDArray[np.float32]:
        return scale * random.standard_normal(shape, np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    def zeros(size: int) -> NDArray[np.float32]:
        return np.zeros(size, np.float32)

    embed = normal(alphabet, WIDTH, scale=0.1)
    return {
        "embed": embed,
        "layers": [
            {
                "norm": ones(WIDTH),
                "mix": {"weight": normal(TAPS * WIDTH, HIDDEN, scale=(TAPS * WIDTH) ** -0.5), "bias": zeros(HIDDEN)},
                "out": normal(HIDDEN, WIDTH, scale=0.5 * HIDDEN**-0.5),
            }
            for _ in DILATIONS
        ],
        "head": {"norm": ones(WIDTH), "weight": embed.T, "bias": zeros(alphabet)},
    }


def loss(model: Any, inputs: Ids, targets: Ids) -> Any:
    """The mean cross-entropy, in nats per character, of targets given inputs, both (sequences, characters)."""
    scores = _scores(model, inputs)
    # The largest score is taken off lest the exponential overflow. It cancels out, so it needs no gradient.
    scores = scores - getval(scores).max(axis=-1, keepdims=True)
    chosen = anp.sum(scores * _one_hot(targets, scores.shape[-1]), axis=-1)
    return anp.mean(anp.log(anp.sum(anp.exp(scores), axis=-1)) - chosen)


def generate(model: Any, prompt: Ids, length: int, random: np.random.Generator, temperature: float) -> Ids:
    """The prompt, continued by that many characters. The lower the temperature, the safer the choices."""
    ids = list(prompt)
    for _ in range(length):
        scores = _scores(model, np.array([ids[-CONTEXT:]]))[-1].astype(np.float64) / temperature
        shares = np.exp(scores - scores.max())
        ids.append(random.choice(len(shares), p=shares / shares.sum()))
    return np.array(ids, np.intp)


def _scores(model: Any, inputs: Ids) -> Any:
    """The logits of the next character, (sequences · characters, alphabet)."""
    hidden = _one_hot(inputs, model["embed"].shape[0]) @ model["embed"]
    for layer, dilation in zip(model["layers"], DILATIONS, strict=True):
        seen = _windows(_normalised(hidden, layer["norm"]), len(inputs), dilation)
        active = seen @ layer["mix"]["weight"] + layer["mix"]["bias"]
        active = active * (active > 0)
        hidden = hidden + (active * active) @ layer["out"]
    head = model["head"]
    return _normalised(hidden, head["norm"]) @ head["weight"] + head["bias"]


def _one_hot(ids: Ids, size: int) -> NDArray[np.float32]:
    # A product with these is a lookup whose gradient is another product, where that of an index is a slow scatter.
    return np.eye(size, dtype=np.float32)[ids.reshape(-1)]


def _normalised(x: Any, gain: Any) -> Any:
    return x * gain / anp.sqrt(anp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


@primitive
def _windows(x: NDArray[np.float32], sequences: int, dilation: int) -> NDArray[np.float32]:
    """Beside each character those that stand 1, 2, … dilations before it in its sequence; zeros before its start."""
    rows = x.reshape(sequences, -1, x.shape[-1])
    length = rows.shape[1]
    seen = np.zeros((sequences, length, TAPS, x.shape[-1]), x.dtype)
    for tap in range(TAPS):
        back = min(tap * dilation, length)
        seen[:, back:, tap] = rows[:, : length - back]
    return seen.reshape(len(x), -1)


def _windows_gradient(seen: NDArray[np.float32], x: NDArray[np.float32], sequences: int, dilation: int) -> Any:
    def gradient(outer: NDArray[np.float32]) -> NDArray[np.float32]:
        outer = outer.reshape(sequences, -1, TAPS, x.shape[-1])
        length = outer.shape[1]
        inner = outer[:, :, 0].copy()
        for tap in range(1, TAPS):
            back = min(tap * dilation, length)
            inner[:, : length - back] += outer[:, back:, tap]
        return inner.reshape(x.shape)

    return gradient


# The gradient that slices would get by themselves adds one element at a time.
defvjp(_windows, _windows_gradient, argnums=(0,))
