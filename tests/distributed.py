"""What each process of a distributed test does. It is a module of its own, since processes are started afresh."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import optimisers as op
from optimisers.interop.torch_optim import Optimizer

RULES: dict[str, Callable[[], op.Rule]] = {
    "AdamW behind the norm of all": lambda: op.Chain(op.ClipGlobalNorm(0.1), op.AdamW(0.05)),
    "LAMB": lambda: op.LAMB(0.05),
    "SGD on gradients clipped one by one": lambda: op.Chain(op.ClipNorm(0.05), op.SGD(0.1, momentum=0.9)),
    "Prodigy": lambda: op.Prodigy(1.0),
    "Muon": lambda: op.Muon(0.05, fallback=op.AdamW(0.05)),
    "Adafactor": lambda: op.Adafactor(0.05),
    "SGD with noise": lambda: op.Chain(op.AddNoise(0.01), op.SGD(0.1)),
}


class Language(nn.Module):
    """A model with a tie, layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))


def model() -> Language:
    """The same one everywhere."""
    torch.manual_seed(0)
    return Language()


def sharded(mesh: Any) -> Language:
    """The model, its weights spread over a mesh, its tie in place."""
    made = model()
    for layer in made.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def backward(module: nn.Module, step: int, rank: int = 0, world: int = 1) -> None:
    """Leave gradients behind, of a process's part of a batch."""
    tokens = torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(step))
    part = tokens.chunk(world)[rank]
    module.zero_grad()
    logits = module(part)
    nn.functional.cross_entropy(logits.flatten(0, 1), part.roll(1, 1).flatten()).backward()


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor, on every process."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, whole."""
    return {path: full(tensor) for path, tensor in op.trainables(module).items()}


def assert_close(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Check that two models are equal within rounding."""
    assert list(found) == list(right)
    for path, tensor in right.items():
        torch.testing.assert_close(found[path], tensor, rtol=2e-4, atol=2e-5, msg=lambda text, path=path: f"{path}: {text}")


def train(module: Any, state: op.State, rank: int, world: int) -> op.State:
    """Steps with all, with frozen layers and frozen rows, and with all again."""
    for step in range(6):
        if step == 2:
            state = state.freeze("layers.0").freeze("embed", rows=[0, 7])
        if step == 4:
            state = state.thaw()
        backward(module, step, rank, world)
        state, module = op.update_(state, module)
    return state


def check_fully_sharded(rank: int, world: int) -> None:
    """FSDP2: weights, slots and gradients in parts; norms over all of them."""
    mesh = init_device_mesh("cpu", (world,))
    for name, rule in RULES.items():
        alone, spread = model(), sharded(mesh)
        right = train(alone, op.setup(rule(), alone), 0, 1)
        state = train(spread, op.setup(rule(), spread), rank, world)
        assert_close(weights(spread), weights(alone))
        assert [str(path) for path in state] == [str(path) for path in right], name
        assert [leaf.step for leaf in state.leaves()] == [leaf.step for leaf in right.leaves()]
        assert state.parameters[0].paths == right.parameters[0].paths
        assert spread.head.weight is spread.embed.weight
        assert all(parameter.requires_grad for parameter in spread.parameters())
        for mine, theirs in zip(state.leaves(), right.leaves(), strict=True):
            for slot, tensor in mine.slots.items():
                torch.testing.assert_close(full(tensor), theirs.slots[slot], rtol=1e-3, atol=1e-5)
                assert tensor.placements == op.trainables(spread)[str(mine.path)].placements


def check_pure_step(rank: int, world: int) -> None:
    """`update` leaves distributed tensors as they were."""
    spread = sharded(init_device_mesh("cpu", (world,)))
    state = op.setup(RULES["LAMB"](), spread)
    backward(spread, 0, rank, world)
    before = weights(spread)
    new_state, new = op.update(state, spread)
    assert_close(weights(spread), before)
    op.update_(state, spread)
    assert_close(weights(new), weights(spread))
    assert new_state.step == 1


def check_replicated(rank: int, world: int) -> None:
    """DDP: every process steps alike."""
    alone, replica = model(), DistributedDataParallel(model())
    right = train(alone, op.setup(RULES["LAMB"](), alone), 0, 1)
    state = train(replica, op.setup(RULES["LAMB"](), replica), rank, world)
    assert_close(weights(replica), weights(alone))
    # The shell is no part of the paths.
    assert [str(path) for path in state] == [str(path) for path in right]


def check_without_numba(rank: int, world: int) -> None:
    """Lists of tensors, in parts."""
    with op.reference_only():
        alone, spread = model(), sharded(init_device_mesh("cpu", (world,)))
        rule = RULES["AdamW behind the norm of all"]
        train(alone, op.setup(rule(), alone), 0, 1)
        train(spread, op.setup(rule(), spread), rank, world)
        assert_close(weights(spread), weights(alone))
        backward(spread, 9, rank, world)
        backward(alone, 9)
        norm = op.global_norm({path: tensor.grad for path, tensor in op.trainables(alone).items()})
        spread_norm = op.global_norm({path: tensor.grad for path, tensor in op.trainables(spread).items()})
        assert abs(norm - spread_norm) < 1e-5 * norm


def _start(world: int) -> tuple[Any, Optimizer]:
    spread = sharded(init_device_mesh("cpu", (world,)))
    return spread, Optimizer(spread, RULES["AdamW behind the norm of all"](), frozen="layers.1")


def _go(spread: Any, optimizer: Optimizer, steps: range, rank: int, world: int) -> None:
    for step in steps:
        backward(spread, step, rank, world)
        optimizer.step()


def save_run(rank: int, world: int, folder: str) -> None:
    """Train, freeze, save with `torch.distributed.checkpoint`, thaw and go on."""
    spread, optimizer = _start(world)
    optimizer.thaw("layers.1")
    _go(spread, optimizer, range(3), rank, world)
    optimizer.freeze("layers")
    _go(spread, optimizer, range(3, 4), rank, world)
    save({"model": spread.state_dict(), "optimizer": optimizer}, checkpoint_id=f"{folder}/run")
    optimizer.thaw()
    _go(spread, optimizer, range(4, 6), rank, world)
    found = weights(spread), [leaf.step for leaf in optimizer.op_state.leaves()]
    if rank == 0:
        torch.save(found, f"{folder}/end.pt")
    dist.barrier()


def load_run(rank: int, world: int, folder: str) -> None:
    """Go on from what another run has saved, on as many processes or on others: frozen parameters have their moments."""
    spread, optimizer = _start(world)
    optimizer.allocate()  # so that there are slots to read into
    read = {"model": spread.state_dict(), "optimizer": optimizer}
    load(read, checkpoint_id=f"{folder}/run")
    spread.load_state_dict(read["model"])
    assert [leaf.frozen for leaf in optimizer.op_state.leaves()].count(True) == 4
    optimizer.thaw()
    _go(spread, optimizer, range(4, 6), rank, world)
    right, steps = torch.load(f"{folder}/end.pt", weights_only=True)
    assert_close(weights(spread), right)
    assert [leaf.step for leaf in optimizer.op_state.leaves()] == steps


def check_all(rank: int, world: int, folder: str) -> None:
    """Everything that takes one number of processes."""
    check_fully_sharded(rank, world)
    check_pure_step(rank, world)
    check_replicated(rank, world)
    check_without_numba(rank, world)


def run(rank: int, world: int, port: int, folder: str, names: list[str]) -> None:
    """Some of the functions above, in one process of several."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        for name in names:
            globals()[name](rank, world, folder)
    finally:
        dist.destroy_process_group()
