"""A training that has one cause of lost speed in it, which `causes.py` names: its script, no benchmark by itself.

Computing is waiting for the clock, as it is on a GPU, so that two workers on one machine do not fight for its cores.
Where the cause is a processor that one worker has a quarter of, it is computing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch._dynamo  # what the first optimizer loads: here, so that it is no part of the training
from torch import nn
from torch.utils.data import Dataset

import manyhosts as mh

CAUSE = os.environ["CAUSE"]
SAMPLES, BATCH, SAMPLE_S = 4096, 16, 0.008
LOADER_S, EVALUATION_S = 0.2, 2.0
WIDTH = 1000 if CAUSE == "link" else 64
KEPT = 10_000_000 if CAUSE == "snapshot" else 1
"""Numbers that snapshots hold and no exchange carries."""
QUARTER = """
import os, signal, sys, time
worker = int(sys.argv[1])
while os.getppid() == worker:
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.03)
    os.kill(worker, signal.SIGCONT)
    time.sleep(0.01)
"""
"""Lets its parent run for 10 ms of every 40, as a quota of the kernel does."""


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, *, fetch_s: float = 0.0) -> None:
        self.count, self.fetch_s = count, fetch_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.fetch_s)
        return [torch.full((WIDTH,), index / self.count) for index in indices]


def model() -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    made.register_buffer("kept", torch.zeros(KEPT))
    return made


def compute(seconds: float) -> None:
    if CAUSE != "processor":
        time.sleep(seconds)
        return
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    if model.training:
        slow = 4 if CAUSE == "worker" and os.environ["RANK"] == "1" else 1
        compute(slow * SAMPLE_S * len(batch))
    outputs: torch.Tensor = model(batch)
    return outputs.square().mean()


def main() -> None:
    torch.set_num_threads(1)
    if CAUSE == "processor" and os.environ["RANK"] == "1":
        subprocess.Popen([sys.executable, "-c", QUARTER, str(os.getpid())])
    # One sample cannot be shared out.
    evaluated = {"validation": Samples(1, fetch_s=EVALUATION_S)} if CAUSE == "evaluation" else {}
    trainer = mh.Trainer(
        model=model,
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=mh.Data(
            train=Samples(SAMPLES, fetch_s=LOADER_S if CAUSE == "loader" else 0), batch_size=BATCH, **evaluated
        ),
        snapshots=mh.Snapshots(every="1 step" if CAUSE == "snapshot" else "1 h", keep=1),
        validate_every="10 steps",
    )
    trainer.fit("40 steps")


if __name__ == "__main__":
    main()
