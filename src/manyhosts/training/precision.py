"""Number formats: what the forward pass runs in, and the scaling that keeps fp16's gradients from vanishing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhosts.training.compute import autocast


class Precision:
    """fp32, bf16 or fp16 by autocast. Parameters, gradients and the optimizer stay in fp32."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.context = autocast(name, device)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss from which to go backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back to their true size, for clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Any:
        """What to call `step()` on: fp16 leaves out a step whose gradients overflowed, on all workers alike."""
        return optimizer if self.scaler is None else _Scaled(self.scaler, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scale, for snapshots."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class _Scaled:
    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self.scaler, self.optimizer = scaler, optimizer

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
