"""A worker that trains a plain matrix in several ways, and tells what its host's card has sent in a step of each."""

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
from manyhosts.strategies.local_sgd import LocalSteps
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.strategies.strategy import Piece

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def make(way: str, world: World) -> Any:
    name, _, inside = way.partition(" ")
    if name == "local-sgd":
        return LocalSteps(mh.LocalSGD(sync_every=3, inside_node=inside), world)  # type: ignore[arg-type]
    return DataParallel(mh.DDP(compression=name, inside_node=inside or "exact"), world)  # type: ignore[arg-type]


def main() -> None:
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    world = World(Place.from_environment())
    found: dict[str, float] = {}
    for way in sys.argv[2:]:
        strategy = make(way, world)
        model = strategy.place(nn.Linear(1024, 1024, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        piece = Piece(lambda: torch.ones(1, 1024), 1, 0.25, (0,))
        for step in range(3 + steps):  # three before: the order of gradients, groups, and a whole round of local steps
            if step == 3:
                world.barrier()
                begin = int(COUNTER.read_text())
            strategy.forward_backward(
                model, [piece], lambda net, p: {"loss": net(p.batch).square().mean()}, lambda loss: loss, [0.0]
            )
            strategy.update(model, optimizer)
            if isinstance(strategy, LocalUpdates):
                strategy.exchange(model)
        world.barrier()
        found[way] = (int(COUNTER.read_text()) - begin) / steps
    if world.is_leader:
        print(json.dumps(found), flush=True)
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
