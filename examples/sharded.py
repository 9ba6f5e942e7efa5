"""Train over several devices with JAX: weights and moments sharded along their rows, batches along their examples.

Runs anywhere: without accelerators it makes eight devices of the CPU. The training loop does not know how many there are.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX is imported

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import optimisers as op

WIDTH, CLASSES = 64, 8
RULE = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(1e-2))


def init(key: Any) -> dict[str, Any]:
    """A model of two layers below a head."""
    keys = jax.random.split(key, 3)
    layers = [{"weight": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "bias": jnp.zeros(WIDTH)} for k in keys[:2]]
    return {"layers": layers, "head": jax.random.normal(keys[2], (WIDTH, CLASSES)) / WIDTH**0.5}


def loss(model: Any, x: Any, y: Any) -> Any:
    """The mean cross-entropy."""
    for layer in model["layers"]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ model["head"]), y[:, None], axis=1).mean()


def batch(key: Any, size: int) -> tuple[Any, Any]:
    """Points around the corners of a cube, and which corner it was."""
    corners = jnp.sign(jax.random.normal(jax.random.key(7), (CLASSES, WIDTH)))
    first, second = jax.random.split(key)
    y = jax.random.randint(first, (size,), 0, CLASSES)
    return corners[y] + 2 * jax.random.normal(second, (size, WIDTH)), y


@jax.jit
def step(state: op.State, model: Any, x: Any, y: Any) -> tuple[op.State, Any, Any]:
    """One step, on however many devices the arrays lie."""
    value, grads = op.value_and_grad(loss, state)(model, x, y)
    return *op.update(state, model, grads), value


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, save and restore with Orbax halfway, and go on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60, help="how many steps to take (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where to keep the checkpoint (default: a temporary folder)")
    options = parser.parse_args(argv)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    # The model is born where it is to lie, and the slots with it.
    model = jax.jit(init, out_shardings=rows)(jax.random.key(0))
    state = op.setup(RULE, model, frozen="layers.0")
    print(f"{jax.device_count()} devices; {op.summary(state)}")
    losses = []
    with ocp.StandardCheckpointer() as checkpointer, tempfile.TemporaryDirectory() as temporary:
        folder = (options.directory or Path(temporary)).absolute() / "halfway"
        for k in range(options.steps):
            if k == options.steps // 2:
                checkpointer.save(folder, (state, model), force=True)
                checkpointer.wait_until_finished()
                # As another process would: shapes and places come from a fresh model, values from the file.
                state, model = checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, (state, model)))
                state = state.thaw()
            x, y = jax.device_put(batch(jax.random.key(k), 256), rows)
            state, model, value = step(state, model, x, y)
            losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {state}")
    return {"losses": losses, "state": state, "model": model}


if __name__ == "__main__":
    main()
