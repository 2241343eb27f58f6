"""A loop of one's own for tests: two models, two optimizers, a mean over counts, state by part and of the run.

Words: `DURATION PARTS WHEN [EVERY]`; `WHEN` says where the worker of rank 1 is killed, once: `no`, or `STEP:PLACE` with
the place `begin`, `between` (two updates) or `end` of that step; or `STEP:wait`: all wait there until they
are killed.
"""

from __future__ import annotations

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

DURATION, PARTS, WHEN = sys.argv[1:4]
DIES = os.environ.get("RANK") == "1" and JOINS not in os.environ  # now: ranks change when workers do
EVERY = sys.argv[4] if len(sys.argv) > 4 else "1000 steps"


class Texts(Dataset[torch.Tensor]):
    """Rows of other lengths."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(index)
        return torch.randn(1 + index % 7, 5, generator=made)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask


def perhaps_die(place: str) -> None:
    """Once: a worker that replaces another does not."""
    if place == "begin" and f"{run.steps_done}:wait" == WHEN:
        time.sleep(600)
    if DIES and f"{run.steps_done}:{place}" == WHEN:
        os.kill(os.getpid(), signal.SIGKILL)


def coded(batch):
    rows, mask = batch
    noise = 0.1 * torch.randn(rows.shape) if PARTS != "0" else 0.0
    made = run.models["decoder"](run.models["coder"](rows + noise))
    error = ((made - rows).square().mean(-1) * mask).sum() / mask.sum()
    if PARTS != "0":
        seen = run.part.keep("seen", dict)
        seen["rows"] = seen.get("rows", 0) + len(rows)
        seen["mean"] = 0.9 * seen.get("mean", torch.zeros(5)) + 0.1 * rows.mean((0, 1))
        error = error + 0.01 * (made.mean((0, 1)) - seen["mean"]).square().sum()
    return {"loss": error, "count": mask.sum()}


def sparse(batch):
    rows, mask = batch
    size = run.models["coder"](rows).abs().mean(2) * mask
    return (size.sum(1) / mask.sum(1)).mean()


def pooled(batch):
    """A row for each sample, from what the part keeps."""
    rows, _ = batch
    seen = run.part.keep("pooled", dict)
    seen["mean"] = 0.5 * seen.get("mean", torch.zeros(5)) + rows.mean((0, 1))
    return run.models["decoder"](run.models["coder"](rows)).mean(1) - seen["mean"]


def noisy(rows):
    return nn.functional.dropout(rows, 0.3).square().mean()


def step(run):
    perhaps_die("begin")
    run.backward(coded, "decoder")
    run.state["drawn"] = torch.rand(())  # equal on all workers, wherever in a step it is drawn
    if PARTS != "0":
        run.backward(pooled, "decoder", over_batch=noisy)
    run.update("decoder")
    if PARTS != "0" and run.steps_done >= 5:  # an average that begins later, in the step in which a worker dies
        for kept, new in zip(run.models["average"].parameters(), run.models["decoder"].parameters(), strict=True):
            kept.data.lerp_(new.data, 0.3)
    perhaps_die("between")
    run.backward(coded, "coder")
    run.backward(sparse, "coder")  # adds to the gradient
    run.log(norm=run.update("coder", clip=1.0))
    run.state["steps"] = run.state.get("steps", 0) + 1
    run.state["mean"] = 0.5 * run.state.get("mean", torch.zeros(())) + run.models["coder"][0].bias.detach().sum()
    perhaps_die("end")


run = mh.Run(
    models={
        "coder": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        "decoder": lambda: nn.Sequential(nn.Dropout(0.1 if PARTS != "0" else 0.0), nn.Linear(3, 5)),
        **({"average": lambda: nn.Linear(3, 5)} if PARTS != "0" else {}),
    },
    optimizers={
        "coder": lambda params: torch.optim.AdamW(params, 1e-2),
        "decoder": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    },
    schedulers={"coder": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)},
    data=mh.Data(train=Texts(), batch_size=8, collate=padded),
    virtual_workers=int(PARTS) or None,
    snapshots=mh.Snapshots(every=EVERY),
)

if __name__ == "__main__":
    run.fit(step, DURATION)
    if run.is_main:
        kept = {"state": run.state, "parts": run._own_step.parts.kept}
        torch.save(kept, Path(os.environ["KEPT"]))
