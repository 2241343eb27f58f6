"""Number formats: what the forward pass runs in, and the scaling that keeps fp16's gradients from vanishing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.holding import UNCUT, Holding
from manyhosts.device import by_device
from manyhosts.loss.compute import autocast


class Precision:
    """fp32, bf16 or fp16 by autocast. Parameters, gradients and the optimizer stay in fp32."""

    def __init__(
        self, name: str, device: torch.device, *, together: Collectives | None = None, holding: Holding = UNCUT
    ) -> None:
        """`together`: the workers that each hold a part of the gradient, and leave out a step where any overflowed;
        `holding`: which part.
        """
        self.name, self.together = name, together
        self.context = autocast(name, device)
        self.scaler = _ScalerOfParts(device.type, holding) if name == "fp16" else None
        self.is_unscaled = False
        """Whether the gradients of the step under way have their true size again."""
        self.overflows: list[Tensor] = []
        """Of the last update: whether a gradient overflowed, on each device."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss from which to go backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back to their true size, for clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            self.is_unscaled = True
            if self.together is not None:
                _agree_overflow(self.scaler, optimizer, self.together)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Any:
        """What to call `step()` on: fp16 leaves out a step whose gradients overflowed, on all workers alike."""
        return optimizer if self.scaler is None else _Scaled(self, self.scaler, optimizer)

    @property
    def left_out(self) -> bool:
        """Whether the last update was left out, for its gradients overflowed. On a GPU the host waits for that."""
        return any(bool(each) for each in self.overflows)

    def state_dict(self) -> dict[str, Any]:
        """The scale, for snapshots."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class _ScalerOfParts(torch.amp.GradScaler):
    """Looks at what this worker holds of each gradient: PyTorch's own takes no list of cut and entire ones.

    Where gradients lie on the host PyTorch's own begins to send the scale there, and multiplies before it has come.
    """

    def __init__(self, device_type: str, holding: Holding) -> None:
        super().__init__(device_type)
        self.holding = holding

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        shards = [self._held(each) for group in optimizer.param_groups for each in group["params"]]
        found: dict[torch.device, Tensor] = {}
        for where, own in by_device(shards).items():
            group = cast(torch.optim.Optimizer, SimpleNamespace(param_groups=[{"params": own}]))
            found |= super()._unscale_grads_(group, inv_scale.to(where), found_inf.to(where), allow_fp16)
        return found

    def _held(self, parameter: Tensor) -> Tensor:
        """This worker's part of a parameter, with that of its gradient."""
        shard = self.holding.local(parameter)
        shard.grad = None if parameter.grad is None else self.holding.local(parameter.grad)
        return shard


class _Scaled:
    def __init__(self, precision: Precision, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self.precision, self.scaler, self.optimizer = precision, scaler, optimizer

    def step(self) -> None:
        if self.precision.together is not None and not self.precision.is_unscaled:
            self.precision.unscale(self.optimizer)
        self.precision.is_unscaled = False
        self.scaler.step(self.optimizer)
        found = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        self.precision.overflows = list(found.values())
        self.scaler.update()


def _agree_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, together: Collectives) -> None:
    """Have the scaler know on all workers that the gradient of one of them overflowed."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    own = torch.zeros((), device=together.device)
    for each in found.values():
        own += each.to(together.device).reshape(())
    overflowed = together.all_reduce(own).clamp(max=1.0)
    for device in [*found] or [together.device]:  # a worker that holds nothing of it has looked at nothing
        found[device] = overflowed.to(device)
