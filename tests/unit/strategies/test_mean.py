"""The mean over workers: its value, and how many messages it takes."""

from typing import Any, cast

import torch
from torch import Tensor

from manyhosts.communication.world import World
from manyhosts.strategies.local_updates import weighted_mean


class Pair:
    """Two workers, of whom the other one holds ten times as much of everything."""

    size = 2
    device = torch.device("cpu")
    exchange_s = 0.0

    def __init__(self) -> None:
        self.messages: list[int] = []

    def start_all_reduce(self, tensor: Tensor) -> None:
        self.messages.append(tensor.numel())
        tensor.mul_(11)

    def wait(self, work: Any) -> None:
        pass


def test_mean_of_many_small_tensors_is_one_message() -> None:
    world = Pair()
    tensors = [torch.full((3, 2), 1.0), torch.full((5,), 2.0), torch.tensor(4.0)]
    weighted_mean(tensors, 0.5, cast(World, world))
    assert world.messages == [12]
    assert torch.equal(tensors[0], torch.full((3, 2), 5.5))
    assert torch.equal(tensors[1], torch.full((5,), 11.0))
    assert float(tensors[2]) == 22.0


def test_mean_keeps_each_dtype_in_a_message_of_its_own() -> None:
    world = Pair()
    tensors = [torch.full((4,), 1.0), torch.full((3,), 2.0, dtype=torch.float64)]
    weighted_mean(tensors, 1.0, cast(World, world))
    assert world.messages == [4, 3]
    assert tensors[1].dtype == torch.float64
    assert torch.equal(tensors[1], torch.full((3,), 22.0, dtype=torch.float64))
