"""A run whose parts are audited, for tests: faults are put in from here, as a bad processor or memory would.

`FAULTS` in the environment is a list in JSON. Each has `worker` (the rank that it was started with), `what` (gradient,
weights, input) and `step`; a `lasting` one strikes in every computation from that step on, the others once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runs import make_trainer, recipe_in_environment
from torch import Tensor

from manyhosts.strategies.strategy import Piece
from manyhosts.training.loop.step import Stepper, Transfers

FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("FAULTS") or "[]")
WORKER = int(os.environ.get("MANYHOSTS_MEMBER", "-1"))
"""At the start of a run the rank; other than the rank it stays with a worker, and its successor has another."""


def flipped(tensor: Tensor) -> Tensor:
    """A copy in which one bit of one number is turned over."""
    found = tensor.detach().clone()
    found.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
    return found


class Faults:
    """Those of this worker."""

    def __init__(self) -> None:
        self.left = [fault for fault in FAULTS if fault["worker"] == WORKER]
        self.step = 0

    def strike(self, what: str) -> bool:
        for fault in self.left:
            if (
                fault["what"] == what
                and self.step >= fault["step"]
                and (fault.get("lasting") or self.step == fault["step"])
            ):
                if not fault.get("lasting"):
                    self.left.remove(fault)
                return True
        return False

    def put_in(self) -> None:
        pieces, train_step = Transfers.pieces, Stepper.train_step

        def wrong_pieces(transfers: Transfers, step: int, due: Sequence[Any]) -> list[Piece]:
            found = pieces(transfers, step, due)
            if found and self.strike("input"):
                inputs, labels = found[0].batch
                found[0] = replace(found[0], bring=lambda: [flipped(inputs), labels])
            return found

        def wrong_step(stepper: Stepper, steps: Iterator[Any]) -> None:
            self.step = stepper.training.state.step + 1
            if self.strike("weights"):
                with torch.no_grad():
                    first = next(stepper.training.components.model.parameters())
                    first.copy_(flipped(first))
            train_step(stepper, steps)

        Transfers.pieces, Stepper.train_step = wrong_pieces, wrong_step  # type: ignore[method-assign]


if __name__ == "__main__":
    if pids := os.environ.get("PIDS"):
        Path(pids, f"{os.environ['RANK']}-{os.getpid()}").touch()
    faults = Faults()
    faults.put_in()
    recipe = recipe_in_environment()
    trainer = make_trainer(recipe, Path("run"))
    first = next(trainer.model.parameters())
    first.register_hook(lambda gradient: flipped(gradient) if faults.strike("gradient") else gradient)
    trainer.fit(recipe.duration)
