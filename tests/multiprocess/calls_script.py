"""A training script with several calls, for tests whose worker of a certain rank dies in a certain place of it.

Words: `PLACE RANK PARTS`; a place is one of those here, or `module:function:call:before` as in `deadly_script`. Each
worker that comes to the end writes what its calls gave into the folder `ended`. With `STAND_IN` set, all computes on
a device that does later what it is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import manyhosts as mh
from manyhosts.cluster.membership import JOINS

PLACE, RANK, PARTS = sys.argv[1:4]
DIES = os.environ["RANK"] == RANK and JOINS not in os.environ  # ranks change when workers do
here, reads = "", 0


def come_to(place: str) -> None:
    global here, reads
    here, reads = place, 0


def perhaps_die(after: int = 0) -> None:
    if DIES and here == PLACE and reads >= after:
        os.kill(os.getpid(), signal.SIGKILL)


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        global reads
        reads += 1
        perhaps_die(after=9)
        return self.inputs[index] + 0.01 * torch.randn(6), self.labels[index]


def make(model: nn.Module) -> mh.Trainer:
    return mh.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=Numbers(90), validation=Numbers(31), test=Numbers(61), batch_size=16, loader_workers=0),
        snapshots=mh.Snapshots(every="7 steps"),
        virtual_workers=int(PARTS) or None,
        record_samples=True,
    )


def deeper(trainer: mh.Trainer) -> nn.Module:
    """What a script may make of a model that it has trained: its weights count."""
    perhaps_die()
    first = trainer.model[0]
    assert isinstance(first, nn.Linear)
    wide = nn.Linear(6, int(10 + 1000 * first.weight.detach().abs().sum()) % 7 + 8)
    nn.init.constant_(wide.weight, float(first.weight.detach().mean()))
    nn.init.constant_(wide.bias, 0.1)
    last = nn.Linear(wide.out_features, 2)
    nn.init.constant_(last.weight, 0.02)
    nn.init.constant_(last.bias, 0.0)
    return nn.Sequential(wide, nn.Tanh(), last)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if DIES and ":" in PLACE:
        from deadly_script import dies_at

        dies_at(PLACE)
    if os.environ.get("STAND_IN"):
        from stand_in import tensor

        tensor.install()
    torch.manual_seed(1)
    given = []
    trainer = make(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)))
    come_to("fit")
    given.append(trainer.fit("20 steps").weights_sha256)
    come_to("test")
    given.append(trainer.test())
    come_to("between")
    time.sleep(0.3)
    perhaps_die()
    come_to("fit again")
    given.append(trainer.fit("40 steps").weights_sha256)
    come_to("making")
    second = make(deeper(trainer))
    come_to("fit of another")
    given.append(second.fit("20 steps").weights_sha256)
    given.append(trainer.test(weights="last"))
    come_to("validation")
    given.append(second.validate())
    come_to("end")
    perhaps_die()
    Path("ended", f"{os.getpid()}.json").write_text(json.dumps(given))
