"""A run with audits for tests: faults are put in from here, as a bad processor or memory would, never by the product.

`FAULT` in the environment is JSON: `rank`, `what` (gradient, weights, input), `step` (the first one that is wrong) and
`last` (the last one; every one from then on where it is absent). `PARTS`, `AUDIT`, `STEPS` and `MODEL` say what is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from runs import network
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh
from manyhosts.communication.tree_buckets import TreeBuckets
from manyhosts.strategies.strategy import Piece
from manyhosts.training.loop import Loop

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))
MEMBER = int(os.environ.get("MANYHOSTS_MEMBER", "-1"))
"""Stays with a worker whatever becomes of its rank; at the start of a run the two are the same."""


def flip(tensor: Tensor) -> None:
    """Turn over one bit of the mantissa of one number."""
    with torch.no_grad():
        bits = tensor.view(-1)[:1].view(torch.int32)
        bits ^= 1 << 12


def strikes(step: int) -> bool:
    return FAULT.get("rank") == MEMBER and FAULT["step"] <= step <= FAULT.get("last", 1 << 30)


def put_in() -> None:
    take, pieces, train_step = TreeBuckets._take, Loop.pieces, Loop.train_step
    now = {"step": 0}

    def wrong_take(self: TreeBuckets, bucket: Any, part: int) -> None:
        if strikes(now["step"]) and FAULT["what"] == "gradient":
            flip(bucket.parameters[0].grad)
        take(self, bucket, part)

    def wrong_pieces(self: Loop, loaded: Sequence[Any]) -> list[Piece]:
        found = pieces(self, loaded)
        if strikes(now["step"]) and FAULT["what"] == "input" and found:
            inputs = found[0].batch[0].clone()
            flip(inputs)
            found[0] = Piece([inputs, found[0].batch[1]], found[0].samples, found[0].weight, found[0].address)
        return found

    def wrong_step(self: Loop, step: Any) -> Any:
        now["step"] = self.state.step + 1
        if strikes(now["step"]) and FAULT["what"] == "weights":
            flip(next(self.parts.model.parameters()).data)
        return train_step(self, step)

    TreeBuckets._take, Loop.pieces, Loop.train_step = wrong_take, wrong_pieces, wrong_step  # type: ignore[method-assign]


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(150, 1, 8, 8, generator=generator)
    return TensorDataset(inputs, (inputs.mean((1, 2, 3)) > 0).long())


def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


if __name__ == "__main__":
    if FAULT:
        put_in()
    trainer = mh.Trainer(
        model=lambda: network(batch_norm=True, dropout=0.2),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        data=mh.Data(images(), batch_size=32),
        virtual_workers=int(os.environ.get("PARTS", "8")),
        snapshots=mh.Snapshots(every=os.environ.get("EVERY", "10 min")),
        record_samples=True,
        run_dir=Path("run"),
    )
    trainer.fit(os.environ.get("STEPS", "12") + " steps")
