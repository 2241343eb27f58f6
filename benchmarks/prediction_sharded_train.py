"""Trains a small transformer for `prediction_sharded.py`, each time in parts, in one way after another.

python prediction_sharded_train.py 1,2,3          # values of `zero`
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

LAYERS, WIDTH, CONTEXT, CHARACTERS = 4, 256, 64, 96
BATCH, SAMPLES = 16, 1600
PARTS = ("compute", "communication_exposed", "data_wait", "other")
WARM = 3
"""Steps that are left out: in the first ones units are found, and memory is got."""


class Reader(nn.Module):
    """Reads characters, and guesses the next one."""

    def __init__(self) -> None:
        super().__init__()
        layer: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(LAYERS)))
        self.guess = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (batch, context), of numbers of characters; (batch, characters) comes out."""
        found: Tensor = self.guess(self.blocks(self.embedding(text)).mean(1))
        return found


def main() -> None:
    torch.set_num_threads(1)  # as many workers as cores, or more
    chance = torch.Generator().manual_seed(0)
    text = torch.randint(0, CHARACTERS, (SAMPLES, CONTEXT + 1), generator=chance)
    steps = int(os.environ.get("STEPS", "12"))
    for zero in map(int, sys.argv[1].split(",")):
        trainer = mh.Trainer(
            model=Reader,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            data=mh.Data(train=TensorDataset(text[:, :-1], text[:, -1]), batch_size=BATCH),
            strategy=mh.FSDP(zero=zero),
            snapshots=mh.Snapshots(every="1000000 steps"),
        )
        result = trainer.fit(f"{steps} steps")
        if trainer.is_main:
            lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
            timed = [line for line in lines if line["event"] == "step"][WARM:]
            seconds = [line["seconds"] for line in timed]
            parts = {part: round(statistics.median(line[part] for line in timed), 4) for part in PARTS}
            reported = {"zero": zero, "steps": seconds, "measured": statistics.median(seconds), "parts": parts}
            print("STEPS " + json.dumps(reported))


if __name__ == "__main__":
    main()
