"""Named tensors and a text from one worker to another, without pickle and without a disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from manyhosts.communication.layout import bytes_of
from manyhosts.communication.side_group import SideGroup
from manyhosts.communication.world import World

Connections = World | SideGroup
"""Those to the other workers."""


def give(world: Connections, rank: int, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Send `text` and `tensors` to worker `rank`, who must `take` them."""
    shapes = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
    head = json.dumps({"text": text, "tensors": shapes}).encode()
    world.send(torch.tensor([len(head)], device=world.device), rank)
    world.send(torch.frombuffer(bytearray(head), dtype=torch.uint8).to(world.device), rank)
    for tensor in tensors.values():
        if tensor.numel():
            world.send(bytes_of(tensor.detach()).to(world.device), rank)


def take(world: Connections, rank: int) -> tuple[str, dict[str, Tensor]]:
    """What worker `rank` gives, on the CPU."""
    [length] = world.receive(torch.zeros(1, dtype=torch.int64, device=world.device), rank).tolist()
    head = world.receive(torch.zeros(int(length), dtype=torch.uint8, device=world.device), rank)
    found = json.loads(bytes(head.tolist()).decode())
    tensors = {}
    for name, (kind, *shape) in found["tensors"].items():
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {kind!r}")
        size = math.prod(shape) * dtype.itemsize
        data = torch.empty(size, dtype=torch.uint8, device=world.device)
        if size:
            world.receive(data, rank)
        tensors[name] = data.cpu().view(dtype).reshape(shape)
    return str(found["text"]), tensors
