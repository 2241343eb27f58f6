"""A training script for tests: that of `recipe_script`, with an optimizer that remembers nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from runs import make_trainer, recipe_in_environment

if __name__ == "__main__":
    Path(os.environ["PIDS"], f"{os.environ.get('RANK', 0)}-{os.getpid()}").touch()
    recipe = recipe_in_environment()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.requires_grad:
            time.sleep(0.01)  # so that there is time for something to happen within a step
        return torch.nn.functional.cross_entropy(logits, labels)

    trainer = make_trainer(recipe, None, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    trainer.fit(recipe.duration)
