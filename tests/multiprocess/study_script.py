"""A script for studies: a small network, which fails or waits at the sizes that the files `fails` and `waits` name."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import manyhosts as mh


def is_said(name: str) -> bool:
    return os.environ["WORLD_SIZE"] in Path(os.environ["STUDIED"], name).read_text()


if is_said("fails"):
    raise RuntimeError("there is no room for so many")


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs, self.targets = torch.randn(60, 8, generator=random), torch.randint(0, 2, (60,), generator=random)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        while is_said("waits"):
            Path(os.environ["STUDIED"], f"waiting-{os.environ['WORLD_SIZE']}").touch()
            time.sleep(0.05)
        return self.inputs[index], self.targets[index]


if __name__ == "__main__":
    trainer = mh.Trainer(
        model=lambda: nn.Linear(8, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=Slow(), validation=Slow(), test=Slow(), batch_size=12),
    )
    trainer.fit("3 epochs")
    trainer.test()
