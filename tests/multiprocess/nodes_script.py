"""A training script for tests with workers that die at certain calls, which says how equal the others are.

`DIES_AT` names them: `rank=module:function:call:before|after`, several with spaces between. In the folder `PIDS` each
worker leaves a file `equal-PID` with a line for each update: the step, the group of workers, the number of the host,
and the hash of model and optimizer; and, at the end, `weights-PID`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from deadly_script import dies_at
from runs import make_trainer, recipe_in_environment
from torch import Tensor, nn

from manyhosts.cluster.membership import JOINS


def fingerprint(model: nn.Module, optimizer: Any) -> str:
    """Of all the bits that the workers of a node share."""
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    values = [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    for value in [*model.parameters(), *values]:
        found.update(value.detach().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


def main() -> None:
    own, pid = Path(os.environ["PIDS"]), os.getpid()
    (own / f"{os.environ['RANK']}-{pid}").touch()
    for word in os.environ.get("DIES_AT", "").split():
        rank, _, place = word.partition("=")
        if os.environ["RANK"] == rank and not os.environ.get(JOINS):
            dies_at(place)
    recipe = recipe_in_environment()
    trainer = make_trainer(recipe, Path("run"))
    strategy, world = trainer.components.strategy, trainer.components.world
    update = strategy.update
    lines = (own / f"equal-{pid}").open("a")

    def reported(model: nn.Module, optimizer: Any) -> None:
        update(model, optimizer)
        number = 0 if world.membership is None else world.membership.group
        line = [strategy.steps, number, world.place.node_rank, fingerprint(model, optimizer)]
        print(json.dumps(line), file=lines, flush=True)

    strategy.update = reported  # type: ignore[method-assign]
    trainer.fit(recipe.duration)
    weights = [parameter.detach().reshape(-1) for parameter in trainer.model.parameters()]
    torch.save(torch.cat(weights), own / f"weights-{pid}")


if __name__ == "__main__":
    main()
