"""A training script for tests: the recipe comes from the environment, the rest is as a user would write it."""

from __future__ import annotations

import os
from pathlib import Path

from runs import make_trainer, recipe_in_environment

if __name__ == "__main__":
    if pids := os.environ.get("PIDS"):
        Path(pids, f"{os.environ.get('RANK', 0)}-{os.getpid()}").touch()  # for whoever wants to kill a certain worker
    recipe = recipe_in_environment()
    trainer = make_trainer(recipe, None)
    trainer.fit(recipe.duration)
