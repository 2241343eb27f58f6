"""All parameters as they were before the step under way, however the step changes them.

Most are changed by an optimizer. Others are changed by the step itself: a moving average, a target network, weights
that are clipped by hand; perhaps only from some later step on, and perhaps through `.data`, which PyTorch
does not count.
So before each step every parameter is compared with its copy by a checksum, unless it is known to change: those are
copied in each step, where they are, and all others once, into the memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from manyhosts.snapshot.fingerprint import tensor_checksums


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
        still = {name: each for name, each in parameters.items() if name not in self.changing}
        found = tensor_checksums(still)
        changed = {name for name, each in found.items() if self._known.get(name, each) != each}
        self.changing |= changed
        self._known = {name: each for name, each in found.items() if name not in changed}
        for name in self._known.keys() - self.copies.keys():
            self.copies[name] = parameters[name].detach().to("cpu", copy=True)
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
