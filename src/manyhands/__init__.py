"""Train a PyTorch model on as many ordinary machines as there are: the same model, sooner, and no work lost."""

from __future__ import annotations

import importlib
import os
from typing import Any

from manyhands.errors import speak_plainly

__version__ = "0.1.0"

# Imported when first asked for, so that the command line starts without torch.
_PUBLIC = {
    "DDP": "manyhands.config.strategies",
    "DiLoCo": "manyhands.config.local_steps",
    "LocalSGD": "manyhands.config.local_steps",
    "Data": "manyhands.data.data",
    "EarlyStopping": "manyhands.config.stopping",
    "Single": "manyhands.config.strategies",
    "Snapshots": "manyhands.config.snapshots",
    "Trainer": "manyhands.training.trainer",
}

__all__ = [
    "DDP",
    "Data",
    "DiLoCo",
    "EarlyStopping",
    "LocalSGD",
    "Single",
    "Snapshots",
    "Trainer",
    "__version__",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name == "launch":  # a module: `mh.launch.run`
        return importlib.import_module("manyhands.launchers.launch")
    if name in _PUBLIC:
        from manyhands.cluster.reports import VARIABLE

        if VARIABLE not in os.environ:  # else the agent's worker tells what the script raises
            speak_plainly()  # from the first word of ours on: mh.Data(...) comes before any Trainer
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
