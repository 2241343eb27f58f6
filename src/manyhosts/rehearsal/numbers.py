"""Number formats: autocast for CUDA becomes autocast for the CPU, and fp16 in it bf16, which CPUs compute well."""

from __future__ import annotations

from typing import Any

import torch

from manyhosts.rehearsal.mapping import note, replace


def put_in_place() -> None:
    """Map autocast and gradient scaling from now on."""
    begin_autocast, begin_scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def autocast(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            note("autocast for CUDA becomes autocast for the CPU")
            device_type, dtype = "cpu", dtype or torch.float16
        if dtype is torch.float16:
            note("fp16 becomes bf16")
            dtype = torch.bfloat16
        begin_autocast(self, device_type, dtype, *args, **kwargs)

    def scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        if device == "cuda":
            note("the gradient scaler for CUDA becomes one for the CPU")
        begin_scaler(self, "cpu", *args, **kwargs)

    replace(torch.autocast, __init__=autocast)
    replace(torch.amp.GradScaler, __init__=scaler)
