"""Trainings for `prediction.py`: three kinds of models that compute by sleeping.

So hosts of one machine share no core for it. What is sent, packed, waited for and updated is real.

    python prediction_train.py exchanging none           # a kind and the compression that it trains with
    python prediction_train.py exchanging,computing none,bf16     # each with each, one after another
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import manyhosts as mh

LAYERS, BATCH, SAMPLES = 8, 16, 16_000
WARM = 3
"""Steps that are left out: in the first ones the order of gradients is found, and memory is got."""


@dataclass(frozen=True)
class Kind:
    """What limits it is in its name."""

    width: int
    """Each of the layers has a matrix of this many rows and columns."""
    pass_s: float
    """Seconds of a forward and a backward pass, for each sample."""
    read_s: float
    """Seconds to read a sample."""


KINDS = {
    "exchanging": Kind(width=512, pass_s=0.012, read_s=0.0),
    "computing": Kind(width=128, pass_s=0.030, read_s=0.0),
    "reading": Kind(width=128, pass_s=0.006, read_s=0.020),
}


class Sleep(torch.autograd.Function):
    """Passes on what it gets, a third of `seconds` later; and its gradient two thirds of `seconds` later."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None


class Paced(nn.Module):
    """A linear layer that takes as long as it is told to."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, values: Tensor) -> Tensor:
        """Shape (batch, width) both."""
        computed: Tensor = Sleep.apply(self.linear(values), self.seconds * len(values))  # type: ignore[no-untyped-call]
        return computed.relu()


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take `seconds` each to read."""

    def __init__(self, width: int, seconds: float) -> None:
        self.width, self.seconds = width, seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((self.width,), index / SAMPLES), torch.tensor(index % 10)


def make_trainer(name: str, compression: str) -> mh.Trainer:
    kind = KINDS[name]
    layers = [Paced(kind.width, kind.pass_s / LAYERS) for _ in range(LAYERS)]
    return mh.Trainer(
        model=nn.Sequential(nn.Linear(kind.width, kind.width), *layers, nn.Linear(kind.width, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=mh.Data(train=Slow(kind.width, kind.read_s), batch_size=BATCH, loader_workers=1 if kind.read_s else 0),
        strategy=mh.DDP(compression=compression, bucket_mb=2),
        snapshots=mh.Snapshots(every="1000000 steps"),
    )


def train_each(make: Callable[[str, str], mh.Trainer]) -> None:
    """Train each kind with each compression that the command line names, and tell the seconds of their steps."""
    # Two threads that wait for each other on a busy machine take longer than what they compute.
    torch.set_num_threads(1)
    names, compressions = (words.split(",") for words in sys.argv[1:3])
    steps = int(os.environ.get("STEPS", "12"))
    if settle := os.environ.get("SETTLE"):
        # Some seconds after a start each host loads what a lost worker would need, and has no core to spare meanwhile.
        make(names[0], compressions[0]).fit(settle)
    for name in names:
        for compression in compressions:
            trainer = make(name, compression)
            result = trainer.fit(f"{steps} steps")
            if trainer.is_main:
                lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
                seconds = [line["seconds"] for line in lines if line["event"] == "step"][WARM:]
                reported = {"kind": name, "compression": compression, "seconds": seconds}
                print("STEPS " + json.dumps(reported | {"median": statistics.median(seconds)}), flush=True)


if __name__ == "__main__":
    train_each(make_trainer)
