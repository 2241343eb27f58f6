"""Whether all weights of a model are finite: looked at before they are kept, because no one continues from others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import UNCUT, Holding
from manyhosts.device import by_device


@torch.no_grad()
def first_not_finite(model: nn.Module, holding: Holding = UNCUT) -> str:
    """What is wrong with the first trained parameter that holds NaN or infinity, or the first buffer that holds NaN.

    Nothing where all are well. A buffer may well hold infinities, as a mask of attention does. One pass over the
    memory, and one wait for a GPU. Of what is cut each worker looks at what it holds.
    """
    parameters = {name: holding.local(value) for name, value in model.named_parameters() if value.requires_grad}
    buffers = {name: holding.local(value) for name, value in model.named_buffers()}
    largest = _largest([*parameters.values(), *buffers.values()])
    if bool(largest.isfinite()):
        return ""
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            return f"{'nan' if bool(parameter.isnan().any()) else 'infinity'} in the parameter {name!r}"
    return next((f"nan in the buffer {name!r}" for name, buffer in buffers.items() if bool(buffer.isnan().any())), "")


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute number in `tensors`; NaN where one is. Shape ()."""
    looked_at = [each for each in tensors if each.numel() and (each.is_floating_point() or each.is_complex())]
    if not looked_at:
        return torch.zeros(())
    found = []
    for own in by_device(looked_at).values():
        # Numbers of one byte have no norm of their own.
        norms = torch._foreach_norm([each.float() if each.element_size() == 1 else each for each in own], math.inf)
        found.append(torch.stack([norm.float() for norm in norms]).max().cpu())
    return torch.stack(found).max()
