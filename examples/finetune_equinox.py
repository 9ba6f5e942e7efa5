"""Fine-tune an Equinox transformer with a tied embedding: freeze its trunk, thaw it from the top, then give it a new head."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optimisers as op
from optimisers.demo.corpus import Ids, read

WIDTH, HEADS, BLOCKS, SEQUENCES, LENGTH = 64, 4, 2, 16, 64
KINDS = (str.isspace, str.islower, str.isupper, str.isdigit)  # what else a character may be is a fifth kind


class Block(eqx.Module):
    """Each character looks at those before it, then thinks."""

    before: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.before = (eqx.nn.RMSNorm(WIDTH, use_bias=False), eqx.nn.RMSNorm(WIDTH, use_bias=False))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=two)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.before[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.before[1])(x))


class Language(eqx.Module):
    """A transformer over characters with two heads: its own embedding, and one for the kind of a character."""

    embed: jax.Array
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: jax.Array
    kinds: eqx.nn.Linear

    def __init__(self, alphabet: int, key: jax.Array) -> None:
        embed, places, kinds, *blocks = jax.random.split(key, 3 + BLOCKS)
        self.embed = self.head = 0.1 * jax.random.normal(embed, (alphabet, WIDTH))  # this is all it takes to tie them
        self.places = 0.1 * jax.random.normal(places, (LENGTH, WIDTH))
        self.blocks = [Block(each) for each in blocks]
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.kinds = eqx.nn.Linear(WIDTH, len(KINDS) + 1, key=kinds)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed[ids] + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x)


class Phase(NamedTuple):
    """What a phase came to: the held-out loss before and after it, how often its step was traced, what it left."""

    name: str
    before: float
    after: float
    traces: int
    state: op.State
    weights: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> list[Phase]:
    """Run all phases and print what each came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each phase (default: 100)")
    steps = parser.parse_args(argv).steps

    corpus, random = read(), np.random.default_rng(0)
    kind_of = jnp.asarray([[*(kind(each) for kind in KINDS), True].index(True) for each in corpus.alphabet])
    model = Language(len(corpus.alphabet), jax.random.key(0))
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(3e-3, betas=(0.9, 0.99)))
    state = op.setup(op.no_decay(rule, ndim=1), model, frozen="kinds")  # asleep, the new head costs nothing

    @eqx.filter_jit
    def next_character(model: Language, rows: jax.Array) -> jax.Array:
        scores = jax.vmap(model)(rows[:, :-1]) @ model.head.T
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()

    @eqx.filter_jit
    def next_kind(model: Language, rows: jax.Array) -> jax.Array:
        scores = jax.vmap(jax.vmap(model.kinds))(jax.vmap(model)(rows[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(scores, kind_of[rows[:, 1:]]).mean()

    traces, phases = 0, []

    @eqx.filter_jit
    def step(state: op.State, model: Language, loss: Any, rows: jax.Array) -> tuple[op.State, Language]:
        nonlocal traces
        traces += 1
        _, grads = op.value_and_grad(loss, state)(model, rows)  # of what is live alone; a tie has one gradient, summed
        return op.update(state, model, grads)

    def train(name: str, state: op.State, text: Ids, loss: Any = next_character) -> tuple[op.State, Language]:
        held_out, trained, compiled = batch(corpus.held_out, np.random.default_rng(1)), model, traces
        for _ in range(steps):
            state, trained = step(state, trained, loss, batch(text, random))
        before, after = (float(loss(each, held_out)) for each in (model, trained))
        phases.append(Phase(name, before, after, traces - compiled, state, op.trainables(trained)))
        report(phases[-1])
        return state, trained

    state, model = train("pretrain", state, corpus.first)
    state, model = train("trunk frozen", state.freeze("blocks"), corpus.second)
    state, model = train("last block thawed", state.thaw(f"blocks.{BLOCKS - 1}"), corpus.second)
    state, model = train("all thawed", state.thaw("blocks"), corpus.second)
    # The old head stays as it is, apart from the embedding. All others go on with the moments and counts that they have.
    state, model = train("new head", state.untie("head").freeze("head").thaw("kinds"), corpus.second, next_kind)
    print(op.summary(state))
    return phases


def batch(text: Ids, random: np.random.Generator) -> jax.Array:
    """Random rows of a text."""
    starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
    return jnp.asarray(text[starts[:, None] + np.arange(LENGTH + 1)])


def report(phase: Phase) -> None:
    """Print a phase, and how many steps the parameters of each branch have taken."""
    print(f"{phase.name}: held-out loss {phase.before:.3f} -> {phase.after:.3f}, step compiled {phase.traces} time(s)")
    counts = {str(leaf.path): f"{leaf.step}{' (frozen)' if leaf.frozen else ''}" for leaf in phase.state.leaves()}
    branches = {".".join(path.split(".")[:2]) if path.startswith("blocks") else path.split(".")[0]: at for path, at in counts.items()}
    print("  steps taken:", ", ".join(f"{branch} {count}" for branch, count in branches.items()))


if __name__ == "__main__":
    main()
