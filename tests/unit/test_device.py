"""Which accelerator a worker takes."""

from __future__ import annotations

import pytest
import torch

from manyhosts import device
from manyhosts.errors import ConfigError


class Visible:
    """An accelerator's module on a machine where this process sees one of them."""

    def __init__(self) -> None:
        self.chosen = -1

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, number: int) -> None:
        self.chosen = number


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Visible:
    found = Visible()
    monkeypatch.setattr(device, "module", lambda kind: found)
    for name in ("SLURM_LOCALID", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_task_of_srun_takes_the_one_gpu_that_it_was_given(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert device.of_worker(1, rank=3) == torch.device("cuda", 0)
    assert visible.chosen == 0


def test_second_worker_of_a_host_with_one_gpu_is_refused(visible: Visible, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.of_worker(0, rank=0) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="worker 1 of this host finds 1 GPUs"):
        device.of_worker(1, rank=1)
    monkeypatch.setenv("SLURM_LOCALID", "1")  # all tasks see the same one
    monkeypatch.setenv("SLURM_TRES_PER_TASK", "cpu=4")
    with pytest.raises(ConfigError, match="worker 1 of this host finds 1 GPUs"):
        device.of_worker(1, rank=1)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")  # the task is an agent, whose workers share what it was given
    with pytest.raises(ConfigError, match="worker 1 of this host finds 1 GPUs"):
        device.of_worker(1, rank=1)
