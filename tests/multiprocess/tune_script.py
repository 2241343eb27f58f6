"""A script for searches: a small network with a width of its own, as slow as `SLOW` says, in seconds a sample."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import manyhosts as mh

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("--fail", action="store_true")
asked = parser.parse_args()
if asked.fail:
    raise RuntimeError("there is nothing to train")


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(24, 8, generator=random)
        self.targets = (self.inputs[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(float(os.environ.get("SLOW", "0")))
        return self.inputs[index], self.targets[index]


data = Slow()
trainer = mh.Trainer(
    model=lambda: nn.Sequential(nn.Linear(8, asked.width), nn.Tanh(), nn.Linear(asked.width, 2)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=data, validation=data, batch_size=6, loader_workers=0),
)
trainer.fit("4 epochs")
