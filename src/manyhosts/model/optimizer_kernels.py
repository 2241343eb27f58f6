"""By which kernels an optimizer steps, where the script has not said so."""

from __future__ import annotations

from torch.optim import Adam, AdamW, Optimizer

from manyhosts.communication.layout import is_dtensor
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError

KERNELS = ("foreach", "fused", "capturable")
"""Options that choose them. They follow from where an optimizer steps, so no snapshot brings its own."""
_FUSED_IN_PARTS = (Adam, AdamW)
"""PyTorch knows by no other fused kernel how to step tensors that are in parts."""


def fuse(optimizer: Optimizer, *, holds_full_model: bool) -> None:
    """Let it do a step in one pass over the memory of a GPU; what lies on a host is stepped as PyTorch does it there.

    Raises:
        ConfigError: the script asks for a kernel that cannot step parts of tensors.
    """
    can_fuse = holds_full_model or isinstance(optimizer, _FUSED_IN_PARTS)
    for group in optimizer.param_groups:
        if group.get("fused") and not can_fuse:
            raise ConfigError(
                f"{type(optimizer).__name__} is made with fused=True, and PyTorch's fused kernel for it cannot step a "
                "model in parts",
                where="mh.Trainer(optimizer=…)",
                fix="leave fused out, or choose AdamW, whose kernel can",
            )
        real = all(parameter.is_floating_point() for parameter in group["params"])
        alike = len(set(map(is_dtensor, group["params"]))) < 2  # no GPU has stepped both at once
        asked = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        on_gpu = all(is_asynchronous(parameter.device) for parameter in group["params"])
        if on_gpu and "fused" in group and real and alike and can_fuse and not asked:
            group["fused"] = True
        open_to_us = group.get("foreach", False) is None and type(optimizer).__module__.startswith("torch.optim.")
        if open_to_us and not asked and all(parameter.is_cpu for parameter in group["params"]):
            group["foreach"] = False  # as PyTorch chooses there, by a look at each parameter in every step
    if all(group.get("fused") for group in optimizer.param_groups):
        # As if made so, or fp16 waits in each step. On the host it must: the kernel would not wait for the numbers.
        all_on_gpu = all(is_asynchronous(each.device) for group in optimizer.param_groups for each in group["params"])
        optimizer._step_supports_amp_scaling = all_on_gpu  # type: ignore[attr-defined]
