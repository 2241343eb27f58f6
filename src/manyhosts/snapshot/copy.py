"""The copy of the state that a snapshot is written from, made during the next forward and backward pass.

Parameters that the optimizer updates, and its state, do not change between two optimizer steps. So `begin` copies at
once only what may change (buffers, counters, frozen parameters, which a step may average), and `finish`, on another
thread, the rest; the trainer waits for it right before its next update. That is not taken on trust: `begin` takes
checksums, and `finish` compares its copies with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from manyhosts.device import Event, is_asynchronous, module
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.snapshot.tensors import bytes_of


class CopySpace:
    """Memory for one copy, kept from one snapshot to the next: fresh memory costs more than the copying itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._space: dict[str, Tensor] = {}
        self._most_bytes = 0

    def begin(self, tensors: Mapping[str, Tensor], unchanged: Iterable[Tensor]) -> Copying:
        """Start to copy `tensors`. What shares memory with one of `unchanged` may be copied by `finish` only.

        The copy before this one must not be in use any more: its memory is taken.
        """
        self._make_room(tensors)
        for name, tensor in tensors.items():
            if name not in self._space:
                self._space[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=is_asynchronous(self._device)
                )
        copies = {name: self._space[name] for name in tensors}
        return Copying(tensors, copies, {_memory(tensor) for tensor in unchanged}, self._device)

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Let go of what does not fit, and of what is not needed now beyond one copy of the largest state so far.

        A small state between two large ones (the best model between two snapshots) so leaves the space as it is.
        """
        for name, tensor in tensors.items():
            space = self._space.get(name)
            if space is not None and (space.shape != tensor.shape or space.dtype != tensor.dtype):
                del self._space[name]
        needed = sum(tensor.nbytes for tensor in tensors.values())
        self._most_bytes = max(self._most_bytes, needed)
        idle = [name for name in self._space if name not in tensors]
        spare = self._most_bytes - needed
        for name in idle:
            spare -= self._space[name].nbytes
            if spare < 0:
                spare += self._space.pop(name).nbytes


class Copying:
    """One copy under way."""

    def __init__(
        self, tensors: Mapping[str, Tensor], space: Mapping[str, Tensor], unchanged: set[int], device: torch.device
    ) -> None:
        self.copies = space
        """The copies by name: contiguous, on the CPU, right once `finish` has returned."""
        self.done = threading.Event()
        """Set when the originals may change."""
        self.changed = ""
        """The name of a tensor that changed before it was copied, so that its copy is of a later moment."""
        self._device = device
        self._later = {name: tensor for name, tensor in tensors.items() if _memory(tensor) in unchanged}
        self._checksums = tensor_checksums(self._later)
        for name, tensor in tensors.items():
            if name not in self._later:
                space[name].copy_(tensor, non_blocking=True)
        # On a GPU the copies above are only asked for, in this stream's order: the next forward pass comes after them.
        self._asked = module(device).current_stream(device).record_event() if is_asynchronous(device) else None

    def finish(self) -> None:
        """Copy the rest, wait for it, and set `done`. Called once, on a thread that training does not wait for."""
        try:
            if self._asked is None:
                self._copy_on_cpu()
            else:
                self._copy_from_device(self._asked)
        finally:
            later, self._later = [*self._later], {}
            self.done.set()
        found = tensor_checksums({name: self.copies[name] for name in later})
        self.changed = next((name for name in later if found[name] != self._checksums[name]), "")

    def _copy_on_cpu(self) -> None:
        for name, tensor in self._later.items():
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                # numpy copies on this thread alone; torch would start a second team of threads against the training's.
                np.copyto(np.asarray(bytes_of(self.copies[name])), np.asarray(bytes_of(tensor)))
            else:
                self.copies[name].copy_(tensor)

    def _copy_from_device(self, asked: Event) -> None:
        accelerator = module(self._device)
        with accelerator.device(self._device):
            side = accelerator.Stream(self._device)
            side.wait_event(asked)  # the update before this snapshot may still be under way on the training's stream
            with accelerator.stream(side):
                for name, tensor in self._later.items():
                    self.copies[name].copy_(tensor, non_blocking=True)
            side.synchronize()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
