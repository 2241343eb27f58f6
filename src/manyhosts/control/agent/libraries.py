"""What some training libraries must hear from whoever launches their scripts, beside what torchrun tells everybody.

Under torchrun alone, a script with Accelerate forms no process group on CPUs, and one with Lightning takes itself for
alone where there is no GPU, or for on one node: each worker then trains by itself. What a user or a script has said
counts for more.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from manyhosts.imports import when_imported


def begin() -> None:
    """Tell them when the script imports them. Call it once, before the script."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        when_imported("accelerate.state", _tell_accelerate)
        for name in ("lightning.pytorch", "pytorch_lightning"):
            when_imported(f"{name}.trainer.trainer", _tell_lightning)


def _tell_accelerate(_: ModuleType) -> None:
    """What `accelerate launch --cpu` says, on a host that has nothing else: only then does it use Gloo."""
    torch: Any = sys.modules["torch"]
    if not torch.accelerator.is_available() and not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _tell_lightning(_: ModuleType) -> None:
    """How many workers there are; by default it believes in one for each GPU of one node. Its strategy is then DDP."""
    os.environ.setdefault("PL_TRAINER_DEVICES", os.environ["LOCAL_WORLD_SIZE"])
    os.environ.setdefault("PL_TRAINER_NUM_NODES", os.environ["GROUP_WORLD_SIZE"])
