"""The MPI backend: passed through where torch has it and mpirun knows all workers, else refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from manyhosts.control.agent import script_patches
from manyhosts.errors import ConfigError

WHERE = "torch.distributed.init_process_group"


class ByMpi:
    """In place of the class that PyTorch's wheels come without: a group of one process, as mpirun knows it."""

    @staticmethod
    def create(ranks: list[int]) -> distributed.ProcessGroupGloo:
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, options)


@pytest.fixture(autouse=True)
def patched_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch as a worker's script finds it, and afterwards as it was."""
    for module in (distributed, distributed_c10d):
        for name in ("init_process_group", "destroy_process_group"):
            monkeypatch.setattr(module, name, getattr(module, name))
    script_patches.watch_groups(distributed_c10d)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def with_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_MPI_AVAILABLE", True)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupMPI", ByMpi, raising=False)


def sum_of_ones() -> float:
    """Over all that are in the group of all."""
    value = torch.ones(1)
    distributed.all_reduce(value)
    return value.item()


def test_torch_without_mpi_says_so_and_takes_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError) as caught:
        distributed.init_process_group("mpi")
    assert (caught.value.what.partition(":")[0], caught.value.where) == ("this torch has no MPI backend", WHERE)
    assert "'gloo'" in caught.value.fix
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert sum_of_ones() == 1


def test_mpi_is_had_where_mpirun_knows_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mpi(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "1")
    distributed.init_process_group("mpi")
    assert (distributed.get_backend(), distributed.get_world_size()) == ("mpi", 1)


def test_worker_that_mpirun_does_not_know_of_never_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mpi(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught:
        distributed.init_process_group("mpi")
    assert (caught.value.what.partition(",")[0], caught.value.where) == ("mpirun knows 1 of the 2 workers", WHERE)
    assert "--on mpi" in caught.value.fix
