"""Lightning looks for itself whether a device is a GPU, and would refuse the CPU that every GPU has become."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from manyhosts.imports import when_imported
from manyhosts.rehearsal.mapping import replace

_HOMES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


def put_in_place() -> None:
    """Have it believe us, when a script imports it."""
    for home in _HOMES:
        when_imported(f"{home}.accelerators.cuda", _map)


def _map(module: ModuleType) -> None:
    def setup_device(self: Any, device: Any) -> None:
        """Nothing is to be set up on a CPU."""

    replace(module.CUDAAccelerator, setup_device=setup_device)
