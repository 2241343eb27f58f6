"""A training script for tests, one of whose first workers dies at a certain call of a certain function.

`DIES_AT` names it: `module:function:call:before` or `…:after`, or `…:newcomers` for the first call about a group with
new workers; and `DYING` the worker's rank (1). Where `WRITES_LATE` is set, no worker writes a line of its metrics
before it has to. In the folder `PIDS` each worker that comes to the end leaves the hash of its weights.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import make_trainer, recipe_in_environment

from manyhosts.cluster.membership import JOINS
from manyhosts.records import line_file


def dies_at(place: str) -> None:
    module, name, number, when = place.split(":")
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    original: Callable[..., Any] = getattr(holder, last)
    calls = 0

    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(number) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "newcomers" and any(getattr(each, "newcomers", ()) for each in args):
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*args, **options)
        if calls == int(number) and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(holder, last, deadly)


if __name__ == "__main__":
    own = Path(os.environ["PIDS"], f"{os.environ['RANK']}-{os.getpid()}")
    own.touch()
    if os.environ.get("DIES_AT") and os.environ["RANK"] == os.environ.get("DYING", "1") and not os.environ.get(JOINS):
        dies_at(os.environ["DIES_AT"])
    if os.environ.get("WRITES_LATE"):
        line_file._EVERY_S = 3600.0
    recipe = recipe_in_environment()
    own.write_text(make_trainer(recipe, Path("run")).fit(recipe.duration).weights_sha256)
