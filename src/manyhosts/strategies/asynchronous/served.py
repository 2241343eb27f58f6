"""The parameters that one worker keeps for all: their values of now, and an optimizer of its own over them."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.errors import ConfigError


def owners_of(sizes: Mapping[str, int], servers: int | None, workers: int) -> list[int]:
    """Which worker keeps each parameter, in the order of `sizes` (bytes by name): evenly, the largest first.

    `servers`: into how many parts, one after another to the workers; None: one for each worker.

    Raises:
        ConfigError: there are more servers than parameters.
    """
    if servers is not None and servers > len(sizes):
        raise ConfigError(
            f"{servers} servers are to keep the parameters, but {len(sizes)} tensors of the model are trained",
            where="ParameterServer(servers=…)",
            fix=f"give {len(sizes)} or fewer, or leave it out",
        )
    loads = [0] * min(servers or workers, len(sizes))
    server_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        server_of[name] = least
        loads[least] += sizes[name]
    return [server_of[name] % workers for name in sizes]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes one after another, uint8 of shape (bytes,)."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


@torch.no_grad()
def unpack(payload: Tensor, into: Sequence[Tensor]) -> None:
    """Fill tensors with what `packed` gave for ones of the same shapes and dtypes."""
    begin = 0
    for tensor in into:
        part = payload[begin : begin + tensor.nbytes].clone()  # which begins at an address fit for its dtype
        tensor.copy_(part.view(tensor.dtype).reshape(tensor.shape))
        begin += tensor.nbytes


def gradients_packed(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients, packed, and behind them which parameters have one."""
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in parameters]
    there = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8)
    return torch.cat([packed(gradients), there])


def gradients_bytes(parameters: Sequence[Tensor]) -> int:
    """Of what `gradients_packed` gives."""
    return sum(each.nbytes for each in parameters) + len(parameters)


def unpack_gradients(payload: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """What `gradients_packed` gave for parameters like these."""
    found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in parameters]
    unpack(payload, found)
    there = payload[len(payload) - len(parameters) :].tolist()
    return [each if has else None for each, has in zip(found, there, strict=True)]


def twin(optimizer: Optimizer, other: Mapping[Tensor, Tensor]) -> Optimizer:
    """The same optimizer over other tensors: those of `other`, in place of its own. Its state is a copy."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # of a schedule
    made.param_groups = []
    for group in optimizer.param_groups:
        own = [other[each] for each in group["params"] if each in other]
        if own:
            made.param_groups.append({**group, "params": own})
    made.state = defaultdict(dict)
    for theirs, own_tensor in other.items():
        if theirs in optimizer.state:
            made.state[own_tensor] = copy.deepcopy(optimizer.state[theirs])
    return made


class Served:
    """What one worker serves in one step. Its calls may come from any thread."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
        self.values = [parameter.detach().clone() for parameter in parameters]
        self.optimizer = twin(optimizer, dict(zip(parameters, self.values, strict=True)))
        self.version = 0
        """How many gradients were applied in this step."""
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, Tensor]:
        """The version of now, and the values, packed."""
        with self._lock:
            return self.version, packed(self.values)

    def push(self, version: int, payload: Tensor) -> int:
        """Make an update by gradients of the values of `version`. Returns how many came in between."""
        gradients = unpack_gradients(payload, self.values)
        with self._lock:
            for value, gradient in zip(self.values, gradients, strict=True):
                value.grad = gradient
            if self.optimizer.param_groups:
                self.optimizer.step()
            self.version += 1
            return self.version - 1 - version

    def states(self) -> list[dict[str, Any]]:
        """What the optimizer keeps of each parameter."""
        return [dict(self.optimizer.state.get(value, {})) for value in self.values]


def state_tensors(state: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of what an optimizer keeps of one parameter, in the order of `described`."""
    return [value for value in state.values() if isinstance(value, Tensor)]


def described(state: Mapping[str, Any]) -> list[Any]:
    """Such a state in plain values, in its order: of a tensor its dtype and shape."""
    return [
        [name, [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else value]
        for name, value in state.items()
    ]


def like_described(description: Sequence[Any], device: torch.device) -> dict[str, Any]:
    """A state of this description, whose tensors are yet to be filled."""
    return {
        name: torch.empty(value[1], dtype=getattr(torch, value[0]), device=device) if isinstance(value, list) else value
        for name, value in description
    }
