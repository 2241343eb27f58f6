"""A training for tests that stands still before a certain step until the file `HELD` is there, or fails then.

So what watches it can be looked at while the run neither continues nor ends.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from runs import images_and_labels, network
from torch import nn
from torch.utils.data import TensorDataset

import manyhosts as mh

SAMPLES, BATCH, EPOCHS = 96, 16, 4


class Held(TensorDataset):
    """Digits, of which one worker gets no more than those of so many steps until it may continue."""

    read = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.read += 1
        if self.read > int(os.environ["HELD_AFTER_STEPS"]) * BATCH // int(os.environ["WORLD_SIZE"]):
            goes_on = Path(os.environ["HELD"])
            Path(f"{goes_on}-{os.environ['RANK']}").touch()
            while not goes_on.exists():
                time.sleep(0.02)
            if goes_on.read_text() == "fail":
                raise RuntimeError("this <b>sample</b> cannot be read")
        return super().__getitem__(index)


def main() -> None:
    torch.set_num_threads(1)
    data: dict[str, Any] = {"train": Held(*images_and_labels(SAMPLES))}
    trainer = mh.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        data=mh.Data(**data, validation=TensorDataset(*images_and_labels(40, first=1000)), batch_size=BATCH),
    )
    trainer.fit(f"{EPOCHS} epochs")


if __name__ == "__main__":
    main()
