"""Fine-tune an Equinox transformer with a tied embedding: freeze its trunk, thaw it from the top, then give it a new head."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optimisers as op
from optimisers.demo.corpus import Ids, read

WIDTH, HEADS, BLOCKS, SEQUENCES, LENGTH = 64, 4, 2, 16, 32
SIZES = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
KINDS = (str.isspace, str.islower, str.isupper, str.isdigit, lambda character: True)  # the first that holds


class Block(eqx.Module):
    look: eqx.nn.Linear
    join: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        layers = [eqx.nn.Linear(*sizes, use_bias=False, key=each) for sizes, each in zip(SIZES, keys, strict=True)]
        self.look, self.join, self.up, self.down = layers

    def __call__(self, x: jax.Array) -> jax.Array:
        seen = jax.vmap(self.look)(normed(x)).reshape(len(x), HEADS, -1)
        found = jax.nn.dot_product_attention(*jnp.split(seen, 3, axis=-1), is_causal=True)
        x = x + jax.vmap(self.join)(found.reshape(x.shape))
        return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(normed(x))))


class Transformer(eqx.Module):
    embed: jax.Array
    places: jax.Array
    blocks: list[Block]
    head: jax.Array
    kinds: eqx.nn.Linear

    def __init__(self, alphabet: int, key: jax.Array) -> None:
        embed, places, kinds, *blocks = jax.random.split(key, 3 + BLOCKS)
        self.embed = self.head = 0.1 * jax.random.normal(embed, (alphabet, WIDTH))  # this is all it takes to tie them
        self.places = 0.1 * jax.random.normal(places, (LENGTH, WIDTH))
        self.blocks = [Block(each) for each in blocks]
        self.kinds = eqx.nn.Linear(WIDTH, len(KINDS), key=kinds)

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
    model = Transformer(len(corpus.alphabet), jax.random.key(0))
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(5e-3, betas=(0.9, 0.99)))
    state = op.setup(rule, model, frozen="kinds")  # asleep, the new head costs nothing

    def next_character(model: Transformer, rows: jax.Array) -> jax.Array:
        scores = jax.vmap(model)(rows[:, :-1]) @ model.head.T
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()

    def next_kind(model: Transformer, rows: jax.Array) -> jax.Array:
        scores = jax.vmap(jax.vmap(model.kinds))(jax.vmap(model)(rows[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(scores, kind_of[rows[:, 1:]]).mean()

    traces, phases = 0, []

    @eqx.filter_jit
    def step(state: op.State, model: Transformer, loss: Callable[..., Any], rows: jax.Array) -> tuple[op.State, Transformer, Any]:
        nonlocal traces
        traces += 1
        value, grads = op.value_and_grad(loss, state)(model, rows)  # of what is live; a tie has one gradient, summed
        return *op.update(state, model, grads), value

    def train(name: str, state: op.State, model: Transformer, text: Ids, loss: Callable[..., Any]) -> tuple[op.State, Transformer]:
        losses, before = [], traces
        for _ in range(steps):
            starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
            rows = jnp.asarray(text[starts[:, None] + np.arange(LENGTH + 1)])
            state, model, value = step(state, model, loss, rows)
            losses.append(float(value))
        phases.append(Phase(name, losses, traces - before, state, op.trainables(model)))
        print(f"{name}: loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}, compilations: {traces - before}")
        branches = {"embed": "embed", "kinds": "kinds.weight"} | {f"blocks.{at}": f"blocks.{at}.up.weight" for at in range(BLOCKS)}
        print("  steps taken:", ", ".join(f"{name} {state[path].step}" for name, path in branches.items()))
        return state, model

    state, model = train("pretrain", state, model, corpus.first, next_character)
    state, model = train("trunk frozen", state.freeze("blocks"), model, corpus.second, next_character)
    state, model = train("last block thawed", state.thaw(f"blocks.{BLOCKS - 1}"), model, corpus.second, next_character)
    state, model = train("all thawed", state.thaw("blocks"), model, corpus.second, next_character)

    # The old head parts from the embedding and stays as it is; all else goes on, with the moments and counts it has.
    state, model = op.update(state.untie("head"), model, {})  # no gradients, no step
    state, model = train("new head", state.freeze("head").thaw("kinds"), model, corpus.second, next_kind)
    print(op.summary(state))
    return phases


if __name__ == "__main__":
    main()
