"""PyTorch on several processes: fully sharded and replicated models."""

import socket
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

from tests import distributed


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one(world: int, tmp_path: Path) -> None:
    spawn(distributed.run, args=(world, _free_port(), str(tmp_path)), nprocs=world)
