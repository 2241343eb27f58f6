"""A worker that trains plain matrices in several ways, and tells what its host's card has sent in a step of each.

Beside that stands what the worker itself has counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.diloco import OuterSteps
from manyhosts.strategies.fsdp.strategy import FullySharded
from manyhosts.strategies.local_stepping import LocalSteps
from manyhosts.strategies.strategy import Piece
from manyhosts.strategies.virtual import VirtualWorkers

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def make(way: str, world: World) -> Any:
    name, _, inside = way.partition(" ")
    if name == "local-sgd":
        return LocalSteps(mh.LocalSGD(sync_every=3, inside_node=inside), world)  # type: ignore[arg-type]
    if name == "diloco":
        return OuterSteps(mh.DiLoCo(sync_every=3, fragments=3, overlap_steps=0), world)
    if name == "fsdp":
        return FullySharded(mh.FSDP(zero=int(inside)), world)
    if name == "virtual":
        return VirtualWorkers(world.size, world, bucket_mb=25.0)
    return DataParallel(mh.DDP(compression=name, inside_node=inside or "exact"), world)  # type: ignore[arg-type]


def network() -> nn.Module:
    """Of 1024 x 1024 numbers, in two units."""
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2))) for _ in range(2)))


def main() -> None:
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    world = World(Place.from_environment())
    found: dict[str, tuple[float, float]] = {}
    for way in sys.argv[2:]:
        strategy = make(way, world)
        model = strategy.place(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        piece = Piece(lambda: torch.ones(1, 512), 1, 1 / world.size, (0, world.rank, 0))
        for step in range(3 + steps):  # three before: the order of gradients, groups, and a whole round of local steps
            if step == 3:
                world.barrier()
                begin, counted = int(COUNTER.read_text()), world.bytes_sent
            strategy.forward_backward(
                model, [piece], lambda net, p: {"loss": net(p.batch).square().mean()}, lambda loss: loss, [0.0]
            )
            strategy.update(model, optimizer)
            strategy.exchange(model)
        counted = world.bytes_sent - counted
        world.barrier()
        found[way] = (int(COUNTER.read_text()) - begin) / steps, counted / steps
    if world.is_rank_0:
        print(json.dumps(found), flush=True)
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
