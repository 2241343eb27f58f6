"""A training script for tests: the optimizer of the rank that `FAILS` names raises some steps after each start."""

from __future__ import annotations

import os
from typing import Any

import torch
from runs import make_trainer, recipe_in_environment

STEPS = 9


class Failing(torch.optim.SGD):
    made = 0

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        if os.environ["RANK"] == os.environ.get("FAILS") and self.made > STEPS:
            raise RuntimeError(f"no step at start {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        return super().step(closure)


if __name__ == "__main__":
    recipe = recipe_in_environment()
    make_trainer(recipe, None, optimizer=lambda params: Failing(params, lr=0.05, momentum=0.9)).fit(recipe.duration)
