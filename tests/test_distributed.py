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


def _spawn(world: int, folder: Path, *names: str) -> None:
    spawn(distributed.run, args=(world, _free_port(), str(folder), list(names)), nprocs=world)


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one(world: int, tmp_path: Path) -> None:
    _spawn(world, tmp_path, "check_all")


def test_a_run_goes_on_from_what_it_saved_also_on_more_processes(tmp_path: Path) -> None:
    _spawn(2, tmp_path, "save_run", "load_run")
    _spawn(4, tmp_path, "load_run")
