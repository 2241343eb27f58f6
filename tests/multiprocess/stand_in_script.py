"""The training script of `recipe_script`, on a device that does later what it is asked for.

In the folder `PIDS` each worker that comes to the end leaves the hash of its weights.
"""

from __future__ import annotations

import os
from pathlib import Path

from runs import make_trainer, recipe_in_environment
from stand_in import tensor

if __name__ == "__main__":
    own = Path(os.environ["PIDS"], f"{os.environ['RANK']}-{os.getpid()}")
    own.touch()
    tensor.install()
    recipe = recipe_in_environment()
    trainer = make_trainer(recipe, None)
    own.write_text(trainer.fit(recipe.duration).weights_sha256)
