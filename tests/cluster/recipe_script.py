"""Trains the recipe that a test asks for, and leaves every rank's weights beside the run's record."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy
from runs import make_trainer, recipe_in_environment

if __name__ == "__main__":
    recipe = recipe_in_environment()
    run_dir = Path(os.environ["MANYHOSTS_RUN_DIR"])
    trainer = make_trainer(recipe, run_dir)
    result = trainer.fit(recipe.duration)
    rank = os.environ.get("RANK", "0")
    run_dir.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().numpy() for name, value in trainer.model.state_dict().items()}
    numpy.savez(run_dir / f"weights-{rank}.npz", **weights)
    print(f"weights {rank} {socket.gethostname()} {result.weights_sha256}", flush=True)
