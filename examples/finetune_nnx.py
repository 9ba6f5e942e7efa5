"""Fine-tune a Flax NNX transformer with a tied embedding: freeze its trunk, thaw it from the top, then give it a new head."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optimisers as op
from optimisers.demo.corpus import Ids, read

WIDTH, HEADS, BLOCKS, SEQUENCES, LENGTH = 64, 4, 2, 16, 32
SIZES = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
KINDS = (str.isspace, str.islower, str.isupper, str.isdigit, lambda character: True)  # the first that holds


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.look, self.join, self.up, self.down = (nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in SIZES)

    def __call__(self, x: jax.Array) -> jax.Array:
        seen = self.look(normed(x)).reshape(*x.shape[:-1], HEADS, -1)
        found = jax.nn.dot_product_attention(*jnp.split(seen, 3, axis=-1), is_causal=True)
        x = x + self.join(found.reshape(x.shape))
        return x + self.down(jax.nn.relu(self.up(normed(x))))


class Transformer(nnx.Module):
    def __init__(self, alphabet: int, rngs: nnx.Rngs) -> None:
        self.embed = self.head = nnx.Param(0.1 * rngs.params.normal((alphabet, WIDTH)))  # this is all it takes to tie them
        self.places = nnx.Param(0.1 * rngs.params.normal((LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.kinds = nnx.Linear(WIDTH, len(KINDS), rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed[ids] + self.places
        for block in self.blocks:
            x = block(x)
        return normed(x)


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


class Phase(NamedTuple):
    name: str
    losses: list[float]
    traces: int
    state: op.State
    weights: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> list[Phase]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of each of the five phases (default: 50)")
    steps = parser.parse_args(argv).steps

    corpus, random = read(), np.random.default_rng(0)
    kind_of = jnp.asarray([[kind(each) for kind in KINDS].index(True) for each in corpus.alphabet])
    model = Transformer(len(corpus.alphabet), nnx.Rngs(0))
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(5e-3, betas=(0.9, 0.99)))
    state = op.setup(rule, model, frozen="kinds")  # asleep, the new head costs nothing

    def next_character(model: Transformer, rows: jax.Array) -> jax.Array:
        scores = model(rows[:, :-1]) @ model.head.T
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()

    def next_kind(model: Transformer, rows: jax.Array) -> jax.Array:
        scores = model.kinds(model(rows[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(scores, kind_of[rows[:, 1:]]).mean()

    traces, phases = 0, []

    @partial(nnx.jit, static_argnums=2)
    def step(state: op.State, model: Transformer, loss: Callable[..., Any], rows: jax.Array) -> tuple[op.State, Any]:
        nonlocal traces
        traces += 1
        value, grads = op.value_and_grad(loss, state)(model, rows)  # of what is live; a tie has one gradient, summed
        state, new = op.update(state, model, grads)
        nnx.update(model, nnx.state(new))  # the model of NNX changes in place
        return state, value

    def train(name: str, state: op.State, model: Transformer, text: Ids, loss: Callable[..., Any]) -> op.State:
        losses, before = [], traces
        for _ in range(steps):
            starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
            rows = jnp.asarray(text[starts[:, None] + np.arange(LENGTH + 1)])
            state, value = step(state, model, loss, rows)
            losses.append(float(value))
        phases.append(Phase(name, losses, traces - before, state, op.trainables(model)))
        print(f"{name}: loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}, compilations: {traces - before}")
        branches = {"embed": "embed", "kinds": "kinds.kernel"} | {f"blocks.{at}": f"blocks.{at}.up.kernel" for at in range(BLOCKS)}
        print("  steps taken:", ", ".join(f"{name} {state[path].step}" for name, path in branches.items()))
        return state

    state = train("pretrain", state, model, corpus.first, next_character)
    state = train("trunk frozen", state.freeze("blocks"), model, corpus.second, next_character)
    state = train("last block thawed", state.thaw(f"blocks.{BLOCKS - 1}"), model, corpus.second, next_character)
    state = train("all thawed", state.thaw("blocks"), model, corpus.second, next_character)

    # The old head parts from the embedding and stays as it is; all else goes on, with the moments and counts it has.
    state, model = op.update(state.untie("head"), model, {})  # no gradients, no step
    state = train("new head", state.freeze("head").thaw("kinds"), model, corpus.second, next_kind)
    print(op.summary(state))
    return phases


if __name__ == "__main__":
    main()
