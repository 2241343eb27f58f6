"""Makes the run that benchmarks/serving.py serves: a network whose weights, 302 MB, a single sample reads in full."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

WIDTH = 6144


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)),
    )


if __name__ == "__main__":
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=mh.Data(TensorDataset(inputs, torch.arange(64) % 10), batch_size=32),
    ).fit("2 steps")
