"""Number formats: what the forward pass runs in, and the scaling that keeps fp16's gradients from vanishing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

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
        self.context = autocast(name, device)
        self.scaler = _Scaler(device.type, holding, together) if name == "fp16" else None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss from which to go backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back to their true size, for clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Any:
        """What to call `step()` on: fp16 leaves out a step whose gradients overflowed, on all workers alike."""
        if self.scaler is None:
            return optimizer
        return SimpleNamespace(optimizer=optimizer, step=partial(self.scaler.step_and_update, optimizer))

    @property
    def left_out(self) -> bool:
        """Whether the last update was left out, for its gradients overflowed. On a GPU the host waits for that."""
        return self.scaler is not None and any(bool(each) for each in self.scaler.overflows)

    def state_dict(self) -> dict[str, Any]:
        """The scale, for snapshots."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class _Scaler(torch.amp.GradScaler):
    """Looks at what this worker holds of each gradient: PyTorch's own takes no list of cut and entire ones.

    Where gradients lie on the host PyTorch's own begins to send the scale there, and multiplies before it has come.
    """

    def __init__(self, device_type: str, holding: Holding, together: Collectives | None) -> None:
        super().__init__(device_type)
        self.holding, self.together = holding, together
        self.overflows: list[Tensor] = []
        """Of the last update: whether a gradient overflowed, on each device."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide by the scale; then all workers `together` know that a gradient of one of them overflowed."""
        super().unscale_(optimizer)
        if self.together is None:
            return
        here = self.together.device
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        own = sum((each.to(here).reshape(()) for each in found.values()), torch.zeros((), device=here))
        overflowed = self.together.all_reduce(own).clamp(max=1.0)
        for device in [*found] or [here]:  # a worker that holds nothing of it has looked at nothing
            found[device] = overflowed.to(device)

    def step_and_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step `optimizer`, unless a gradient overflowed; and choose the scale of the next step."""
        state = self._per_optimizer_states[id(optimizer)]
        if self.together is not None and state["stage"] is OptState.READY:  # a fused kernel would look here alone
            self.unscale_(optimizer)
        self.step(optimizer)
        self.overflows = list(state["found_inf_per_device"].values())
        self.update()

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
