"""A whole training state, written by workers of one strategy and read by those of every other: all pairs, same bits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhosts.communication.holding import UNCUT, Holding
from manyhosts.communication.parts import TensorPart
from manyhosts.model.optimizer_state import by_name
from manyhosts.model.sharded_state import TakenUp, in_parts
from manyhosts.records.manifest import Facts, Manifest
from manyhosts.records.tensor_parts import TensorRecord
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.flatten import flatten
from manyhosts.snapshot.load import load
from manyhosts.snapshot.writing import share_of

LAYOUTS = {"single": (1, 0), "ddp": (2, 0), **{f"fsdp-{n}": (n, n) for n in range(1, 6)}, "two copies of two": (4, 2)}
"""How many workers there are, and how many of them hold one copy in parts; 0: each holds all."""


class Odd(nn.Module):
    """Rows that nothing divides, a weight in two places, a frozen one, a scalar, an empty one; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.last.weight = self.words.weight
        self.frozen = nn.Parameter(torch.linspace(0, 1, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.kernel = nn.Parameter(torch.randn(1, 3, 2, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.arange(6.0))
        self.register_buffer("count", torch.tensor(3))


class Rows(Holding):
    """Each parameter, and what an optimizer keeps of its shape, cut along the first dim; what has no dim is whole."""

    def __init__(self, module: nn.Module, rank: int, shard: int) -> None:
        self.shapes = {each.shape for each in module.parameters() if each.dim()}
        self.rank, self.shard = rank, shard

    def part(self, tensor: Tensor) -> Tensor | TensorPart:
        if tensor.shape not in self.shapes:
            return tensor
        block = self.block(tensor)
        if self.rank < self.shard:
            return block
        return TensorPart(block.local.new_empty((0,) * tensor.dim()), (0,) * tensor.dim(), tuple(tensor.shape))

    def local(self, tensor: Tensor) -> Tensor:
        return self.block(tensor).local

    def block(self, tensor: Tensor) -> TensorPart:
        if tensor.shape not in self.shapes:
            return TensorPart.all_of(tensor)
        rows = math.ceil(len(tensor) / self.shard)  # rounded up, so that the last workers may go empty
        begin = min(self.rank % self.shard * rows, len(tensor))
        local = tensor.detach()[begin : begin + rows].clone()
        offset = (begin if local.numel() else 0, *[0] * (tensor.dim() - 1))
        return TensorPart(local, offset, tuple(tensor.shape))

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def like(self, tensor: Tensor, local: Tensor) -> Tensor:
        return local


def holdings(layout: str, module: nn.Module) -> Iterator[Holding]:
    workers, shard = LAYOUTS[layout]
    for rank in range(workers):
        yield Rows(module, rank, shard) if shard else UNCUT


def trained() -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Odd()
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.1)
    for each in module.parameters():
        each.grad = torch.randn_like(each) if each.requires_grad else None
    optimizer.step()
    return module, optimizer


def state_of(module: Odd, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(module.state_dict()), "optimizer": by_name(optimizer, module), "random": torch.arange(9)}


def write(folder: Path, layout: str, module: Odd, state: Mapping[str, Any]) -> None:
    """What the workers of this layout write together."""
    folder.mkdir()
    records: dict[str, TensorRecord] = {}
    workers, _ = LAYOUTS[layout]
    for rank, holding in enumerate(holdings(layout, module)):
        share = share_of(flatten(in_parts(state, holding)), None, rank=rank, writers=workers)
        tensor_files.write(folder / share.file, share.parts, Disk())
        for name, text in share.texts.items():
            (folder / name).write_text(text)
        for name, part in share.parts.items():
            here = tensor_files.record_of(part, share.file)
            known = records.get(name, TensorRecord(here.dtype, here.shape, {}))
            records[name] = TensorRecord(here.dtype, here.shape, {**known.parts, **here.parts})
    files = {
        path.name: tensor_files.FileRecord(
            bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.iterdir())
    }
    facts = Facts(step=1, epoch=0, position={}, strategy=layout, model={})
    manifest = Manifest(facts=facts, world_size=workers, files=files, tensors=records, time=0.0)
    (folder / "manifest.json").write_text(manifest.to_text())


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key in state:
            yield from leaves(state[key], f"{path}/{key}")
    elif isinstance(state, list):
        for number, each in enumerate(state):
            yield from leaves(each, f"{path}/{number}")
    else:
        yield path, state


@pytest.mark.parametrize("writers", LAYOUTS)
def test_what_one_layout_writes_every_other_takes_up_to_the_same_bits(writers: str, tmp_path: Path) -> None:
    module, optimizer = trained()
    state = state_of(module, optimizer)
    expected = dict(leaves(state))
    assert sum(isinstance(each, Tensor) for each in expected.values()) > 15
    write(tmp_path / "step-00000001", writers, module, state)
    for readers in LAYOUTS:
        for holding in holdings(readers, module):
            found = dict(leaves(TakenUp(load(tmp_path / "step-00000001").stored, module, holding, {})))
            assert found.keys() == expected.keys()
            for name, value in found.items():
                if isinstance(value, Tensor):
                    of_model = not name.startswith("/random")
                    wanted = holding.block(expected[name]).local if of_model else expected[name]
                    assert torch.equal(value, wanted), (writers, readers, name)
                    assert value.dtype == wanted.dtype, (writers, readers, name)
                else:
                    assert value == expected[name], (writers, readers, name)
