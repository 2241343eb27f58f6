"""Copies of what a step may change, so that it can be made again: parameters and buffers; buffers in no state_dict.

A forward pass may write into a buffer, or put another tensor in its place. So a buffer is known by the module that
holds it and its name there, and not by the tensor.

Most parameters are changed by an optimizer. Others are changed by a script's own step itself: a moving average, a
target network, weights that are clipped by hand; perhaps only from some later step on, and perhaps through `.data`,
which PyTorch does not count. So before each step every parameter is compared with its copy by a checksum, unless it is
known to change: those are copied in each step, where they are, and all others once, into the memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from manyhosts.communication.layout import without_repeats, write
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.snapshot.tensors import can_keep


def transient(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are in no state_dict, by name: what another worker lacks to compute the same.

    One of a kind that a snapshot has no word for is left out.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name in getattr(module, "_non_persistent_buffers_set", ())  # a scripted one has none
        if tensor.layout is torch.strided and not tensor.is_quantized and can_keep(tensor.dtype)
    }


@torch.no_grad()
def put_transient(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Have what `transient` gave. A buffer of another shape, or yet without a tensor, is replaced.

    One that `model` has not, or no longer, is left out: what it holds besides its state_dict is its own affair.
    """
    modules = dict(model.named_modules())
    for name, tensor in given.items():
        path, _, key = name.rpartition(".")
        module = modules.get(path)
        if module is None or key not in module._buffers:
            continue
        present = module._buffers[key]
        if present is not None and (present.shape, present.dtype) == (tensor.shape, tensor.dtype):
            write(present, tensor)
        else:
            device = next(model.parameters()).device if present is None else present.device
            module._buffers[key] = tensor.to(device, copy=True)


class BufferCopies:
    """The buffers of one model as they were before a step, and the frozen parameters that a step changes by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places = [
            (module._buffers, name)
            for module in model.modules()
            for name, each in module._buffers.items()
            if each is not None
        ]
        self.followed: set[str] = set()
        """The names of those parameters."""
        self.tensors: list[Tensor] = []
        """Those that the modules had then."""
        self.memory: list[Tensor] = []
        """What can be written into of each."""
        self.copies: list[Tensor] = []

    def follow(self, names: Iterable[str]) -> None:
        """Remember these parameters, too, from the next step on."""
        if new := set(names) - self.followed:
            self.followed |= new
            for path, module in self.model.named_modules():
                here = [name for name in module._parameters if (f"{path}.{name}" if path else name) in new]
                self.places += [(module._parameters, name) for name in here]

    def __bool__(self) -> bool:
        return bool(self.places)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are now."""
        now = [table[name] for table, name in self.places]
        if len(now) != len(self.tensors) or any(one is not other for one, other in zip(now, self.tensors, strict=True)):
            self.places = [place for place, tensor in zip(self.places, now, strict=True) if tensor is not None]
            self.tensors = [tensor for tensor in now if tensor is not None]
            self.memory = [_memory(tensor.detach()) for tensor in self.tensors]
            self.copies = [tensor.clone() for tensor in self.memory]
        elif self.tensors:
            torch._foreach_copy_(self.copies, self.memory)

    @torch.no_grad()
    def put_back(self) -> None:
        """Have them as they were remembered: the same tensors, with the same values."""
        for (table, name), tensor in zip(self.places, self.tensors, strict=True):
            table[name] = tensor
        if self.tensors:
            torch._foreach_copy_(self.memory, self.copies)


def _memory(tensor: Tensor) -> Tensor:
    """What lies in the memory of `tensor`, each element once: of a lazy conjugate what it is the conjugate of."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return without_repeats(tensor._neg_view() if tensor.is_neg() else tensor)


class ParameterCopies:
    """Those of one model, for `put_back`."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.copies: dict[str, Tensor] = {}
        """By name; on the device of the parameter for those that change, on the host for others."""
        self.changing: set[str] = set()
        self._known: dict[str, str] = {}
        """The checksum of each that has not changed so far."""

    @torch.no_grad()
    def keep(self, parameters: Mapping[str, nn.Parameter], stepped: Iterable[str]) -> None:
        """Remember `parameters` as they are now; `stepped`: the names of those that an optimizer changes."""
        if any(self.parameters.get(name) is not each for name, each in parameters.items()):
            self.parameters, self.copies, self._known, self.changing = dict(parameters), {}, {}, set(stepped)
        found = tensor_checksums({name: each for name, each in parameters.items() if name not in self.changing})
        changed = {name for name, each in found.items() if self._known.get(name, each) != each}
        self.changing |= changed
        self._known = {name: each for name, each in found.items() if name not in changed}
        new = self._known.keys() - self.copies.keys()
        self.copies |= {name: parameters[name].detach().to("cpu", copy=True) for name in new}
        moving = [name for name in parameters if name in self.changing]
        for name in moving:
            if name not in self.copies or self.copies[name].device != parameters[name].device:
                self.copies[name] = torch.empty_like(parameters[name])
        if moving:
            torch._foreach_copy_([self.copies[name] for name in moving], [parameters[name].detach() for name in moving])

    @torch.no_grad()
    def put_back(self) -> None:
        """Have every parameter as it was remembered."""
        for name, each in self.copies.items():
            self.parameters[name].detach().copy_(each)
