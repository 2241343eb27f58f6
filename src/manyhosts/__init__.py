"""Train a PyTorch model on as many ordinary machines as there are: the same model, sooner, and no work lost."""

from __future__ import annotations

import importlib
import os
from typing import Any

from manyhosts import refusals
from manyhosts.errors import speak_plainly
from manyhosts.records import opened_files

__version__ = "0.1.0"

_AGENT = "MANYHOSTS_AGENT"
"""The variable of `cluster.reports`, whose import takes longer than all of this one."""

# Imported when first asked for, so that the command line starts without torch.
_PUBLIC = {
    "DDP": "manyhosts.config.strategies",
    "DiLoCo": "manyhosts.config.local_steps",
    "InitFrom": "manyhosts.config.init_from",
    "LocalSGD": "manyhosts.config.local_steps",
    "Hogwild": "manyhosts.config.asynchronous",
    "ParameterServer": "manyhosts.config.asynchronous",
    "FSDP": "manyhosts.config.fully_sharded",
    "CSVLogger": "manyhosts.listeners.loggers",
    "PipeDream": "manyhosts.config.asynchronous",
    "Pipeline": "manyhosts.config.pipelined",
    "Tensor": "manyhosts.config.tensor_cut",
    "Mesh": "manyhosts.config.mesh",
    "Callback": "manyhosts.callbacks.callback",
    "Data": "manyhosts.data.data",
    "EMA": "manyhosts.callbacks.averaging",
    "Freeze": "manyhosts.callbacks.freezing",
    "SWA": "manyhosts.callbacks.averaging",
    "EarlyStopping": "manyhosts.config.stopping",
    "Best": "manyhosts.config.stopping",
    "Saver": "manyhosts.snapshot.saver",
    "Single": "manyhosts.config.strategies",
    "MLflowLogger": "manyhosts.listeners.trackers",
    "Order": "manyhosts.data.sampler",
    "Run": "manyhosts.training.run",
    "Snapshots": "manyhosts.config.snapshots",
    "Trainer": "manyhosts.training.trainer",
    "WandbLogger": "manyhosts.listeners.trackers",
    "balanced": "manyhosts.data.drawing",
    "groups": "manyhosts.model.parameter_groups",
    "load": "manyhosts.snapshot.weights",
    "print": "manyhosts.cluster.printing",
}

__all__ = [
    "DDP",
    "EMA",
    "FSDP",
    "SWA",
    "Best",
    "CSVLogger",
    "Callback",
    "Data",
    "DiLoCo",
    "EarlyStopping",
    "Freeze",
    "Hogwild",
    "InitFrom",
    "LocalSGD",
    "MLflowLogger",
    "Mesh",
    "Order",
    "ParameterServer",
    "PipeDream",
    "Pipeline",
    "Run",
    "Saver",
    "Single",
    "Snapshots",
    "Tensor",
    "Trainer",
    "WandbLogger",
    "__version__",
    "balanced",
    "groups",
    "launch",
    "load",
    "print",
]


def __getattr__(name: str) -> Any:
    if name == "launch":  # a module: `mh.launch.run`
        return importlib.import_module("manyhosts.notebook.launch")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    from manyhosts.table import nearest

    raise AttributeError(f"module 'manyhosts' has no attribute {name!r}. {nearest(name, __all__)}".rstrip())


opened_files.begin()  # what a script reads is in the record of its run
if _AGENT not in os.environ:  # else the agent's worker reports what the script raises
    # From the import on: a model may be sent to a GPU before any word of ours.
    speak_plainly(refusals.explained, lambda error: importlib.import_module("manyhosts.own_frames").of_script(error))


def __dir__() -> list[str]:
    return __all__
