"""How many bytes a forward pass leaves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from manyhosts import device
from manyhosts.training.setup.sizing import HeldBytes, gradients_let_go


class SavedBytes:
    """Within, counts what autograd saves: each piece of memory once, and none that belongs to `apart`.

    Parameters and buffers are saved by reference, so they are `apart`. What a checkpoint computes again is not saved.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self._apart = {_memory(tensor) for tensor in apart}
        self._held: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._save, lambda saved: saved)

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(storage.nbytes() for storage in self._held.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and (place := _memory(tensor)) not in self._apart:
            self._held[place] = tensor.untyped_storage()  # held, so that nothing else can get its address
        return tensor.detach()  # the tensor itself would hold the graph that holds it


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def of_pass(forward: Callable[[], Tensor], module: torch.nn.Module) -> tuple[int, int]:
    """Bytes that a forward pass leaves for the backward pass, and those that this one holds at most in addition.

    Of a GPU it is one number: the peak that its allocator has seen, model and gradients left out.
    """
    where = next(module.parameters()).device
    for parameter in module.parameters():
        parameter.grad = None
    if not device.is_asynchronous(where):
        own = [*module.parameters(), *module.buffers()]
        with SavedBytes(own) as saved, HeldBytes() as held, gradients_let_go(module):
            held.leave_out(own)
            loss = forward()
            before = held.most = held.now
            loss.backward()
        return saved.bytes, held.most - before
    device.wait_for(where)
    memory = device.module(where)
    memory.reset_peak_memory_stats(where)
    before = memory.memory_allocated(where)
    forward().backward()
    device.wait_for(where)
    gradients = sum(each.grad.nbytes for each in module.parameters() if each.grad is not None)
    return max(0, memory.max_memory_allocated(where) - before - gradients), 0
