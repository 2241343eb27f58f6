"""Which accelerator a worker takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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


def gradients(backward: Callable[[Tensor], object], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    first = nn.Linear(8, 5)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    seen: list[Tensor] = []
    first.weight.register_hook(seen.append)
    for _ in range(2):  # the second one adds to the first
        loss = nn.functional.cross_entropy(model(torch.randn(16, 8, dtype=dtype)), torch.arange(16) % 3)
        loss.register_hook(lambda gradient: gradient * 2)
        backward(loss)
    return [*seen, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_backward_pass_by_the_engine_gives_the_bits_of_pytorch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients(Tensor.backward, dtype)
    without_compiler(monkeypatch)
    monkeypatch.setattr(Tensor, "backward", None)  # it is not called
    found = gradients(device.backward_from, dtype)
    assert len(found) == len(wanted) == 6
    assert all(torch.equal(mine, its) for mine, its in zip(found, wanted, strict=True))


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)


class Own(Tensor):
    """What PyTorch asks first."""


def test_what_pytorch_sees_to_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    without_compiler(monkeypatch)
    monkeypatch.setattr(Tensor, "backward", lambda loss: calls.append(loss))
    leaf = torch.ones(2, requires_grad=True)
    of_a_kind_of_its_own = leaf.sum().as_subclass(Own)
    for loss in (of_a_kind_of_its_own, leaf, leaf.sum().detach(), (leaf.sum() * 1j)):
        device.backward_from(loss)
        assert calls.pop() is loss
    loss = leaf.sum()
    with monkeypatch.context() as within:
        within.setitem(sys.modules, "torch._dynamo", device)
        device.backward_from(loss)
        assert calls.pop() is loss
    log = logging.getLogger("torch.autograd.graph")
    monkeypatch.setattr(log, "level", logging.DEBUG)
    log._cache.clear()  # type: ignore[attr-defined]
    device.backward_from(loss)
    log._cache.clear()  # type: ignore[attr-defined]
    assert calls.pop() is loss
    assert leaf.grad is None


def test_loss_without_a_graph_is_refused_in_the_words_of_pytorch() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        device.backward_from(torch.zeros(()))
