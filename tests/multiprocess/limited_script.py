"""Trains a model of 120 MB on workers whose cgroup is let have, from here on, `ROOM` bytes more for each of them."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

WIDTH, BLOCKS = 790, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


def model() -> nn.Module:
    """Without values yet: what it takes is to be taken under the limit."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, WIDTH), *[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 3))


def limit(group: Path, room: int) -> None:
    """Let the processes of `group` have so much more than they have now."""
    v1 = (group / "memory.limit_in_bytes").exists()
    used = int((group / ("memory.usage_in_bytes" if v1 else "memory.current")).read_text())
    lines = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    files = int(lines["total_inactive_file" if v1 else "inactive_file"])
    (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(used - files + room))


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 4), torch.randint(0, 3, (16,))
    if os.environ["RANK"] == "0" and "GROUP" in os.environ:
        limit(Path(os.environ["GROUP"]), int(os.environ["WORLD_SIZE"]) * int(os.environ["ROOM"]))
    trainer = mh.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        data=mh.Data(train=TensorDataset(inputs, targets), batch_size=8),
        strategy="auto",
    )
    trainer.fit("3 steps")
