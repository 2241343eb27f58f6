"""Parameters that some workers use and others do not, on a device that does later what it is asked for."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from stand_in import streams, tensor
from torch import Tensor, nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.strategy import Piece

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

LAYERS = 12
"""Each in a bucket of its own."""
CONFIGS = [mh.DDP(bucket_mb=0.001), mh.DDP(bucket_mb=0.001, compression="int8", compress_above=64)]
USED = {"all": range(LAYERS), "some": range(2)}


def of_steps(rank: int, config: mh.DDP) -> list[tuple[int, list[Any]]]:
    """For each kind of step: how often the host waited for the device in it, and the gradients of all parameters."""
    world = World(Place.from_environment())
    torch.manual_seed(3)
    strategy = DataParallel(config, world)
    model = strategy.place(nn.ModuleList([nn.Linear(20, 10) for _ in range(LAYERS)]))
    waits: list[str] = []

    def compute(net: Any, piece: Piece, *, layers: range) -> dict[str, Tensor]:
        own = [*layers, *([5] if rank and len(layers) < LAYERS else [])]
        return {"loss": sum((net[number](piece.batch).square().sum() for number in own), torch.zeros(()))}

    found: list[tuple[int, list[Any]]] = []
    for used in ("all", "all", "some"):  # the order in which gradients come is found in the first step, and read there
        samples = torch.full((4, 20), rank + 1.0).to(world.device)
        waits.clear()
        with patch.object(streams, "note_synchronisation", waits.append):
            piece = Piece(lambda batch=samples: batch, 4, 0.5, (0,))
            strategy.forward_backward(model, [piece], partial(compute, layers=USED[used]), lambda loss: loss, [])
        found.append((len(waits), [None if each.grad is None else each.grad.tolist() for each in model.parameters()]))
    world.leave()
    return found


def on_device_or_not(rank: int, config: mh.DDP, on_device: bool) -> list[tuple[int, list[Any]]]:
    if on_device:
        tensor.install()
    return of_steps(rank, config)


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "int8"])
def test_host_waits_once_however_many_parameters_a_worker_does_not_use(config: mh.DDP) -> None:
    expected = run_ranks(2, on_device_or_not, config, False)
    found = run_ranks(2, on_device_or_not, config, True)
    for steps, right in zip(found, expected, strict=True):
        assert [gradients for _, gradients in steps] == [gradients for _, gradients in right]
        assert [waits for waits, _ in steps[1:]] == [0, 1]
        _, last = steps[-1]
        if not config.compression:
            assert [number for number in range(LAYERS) if last[2 * number] is not None] == [0, 1, 5], (
                "whoever used them"
            )
