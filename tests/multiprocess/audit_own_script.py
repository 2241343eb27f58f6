"""A loop of one's own whose parts are audited, for tests: faults come from the environment, as for `audit_script`.

A step has three passes with an update each: one whose parts keep something from pass to pass, one with dropout, and one
whose loss is over all rows of the batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from audit_script import Faults, flipped
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

SHARE = float(sys.argv[1] if len(sys.argv) > 1 else os.environ["SHARE"])
STEPS = 12
drawn = torch.Generator().manual_seed(3)
SAMPLES = TensorDataset(torch.randn(48, 5, generator=drawn), torch.randn(48, 1, generator=drawn))


def features() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())


if __name__ == "__main__":
    if pids := os.environ.get("PIDS"):
        Path(pids, f"{os.environ['RANK']}-{os.getpid()}").touch()
    faults = Faults()
    faults.put_in()
    run = mh.Run(
        models={"features": features, "head": lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 1))},
        optimizers={
            "features": lambda params: torch.optim.Adam(params, 1e-2),
            "head": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
        },
        data=mh.Data(train=SAMPLES, batch_size=16),
        run_dir="run",
        virtual_workers=8,
        audit=SHARE or None,
    )

    def of_both(batch: Any) -> Tensor:
        kept = run.part.keep("mean", dict)
        outputs = run.models["head"](run.models["features"](batch[0]))
        smooth = kept.get("of targets", torch.zeros(())) * 0.9 + batch[1].mean() * 0.1
        kept["calls"] = kept.get("calls", 0) + 1
        kept["of targets"] = smooth
        return (outputs - batch[1] + smooth * kept["calls"]).square().mean()

    def of_rows(batch: Any) -> Tensor:
        kept = run.part.keep("mean", dict)
        kept["calls"] = kept.get("calls", 0) + 1
        found: Tensor = run.models["features"](batch[0]) * (1 + 0.01 * kept["calls"])
        if torch.is_grad_enabled():  # the last that the step computes: a later one alone sees it
            kept["of targets"] = flipped(kept["of targets"]) if faults.strike("kept") else kept["of targets"]
        return flipped(found) if not torch.is_grad_enabled() and faults.strike("rows") else found

    def step(run: mh.Run) -> None:
        run.backward(of_both, "head")
        run.update("head")
        run.backward(of_both, "features")
        run.update("features")
        run.backward(of_rows, "features", over_batch=lambda rows: (rows.T @ rows / len(rows) - torch.eye(6)).norm())
        run.update("features", clip=1.0)

    first = next(run.models["features"].parameters())
    first.register_hook(lambda gradient: flipped(gradient) if faults.strike("gradient") else gradient)
    run.fit(step, f"{STEPS} steps")
