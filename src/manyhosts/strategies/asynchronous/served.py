"""The parameters that one worker keeps for all: their values of now, and an optimizer of its own over them."""

from __future__ import annotations

import copy
import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.communication.gathering import joined
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.strategies.asynchronous.pushed import Gradients


def owners_of(sizes: Mapping[str, int], servers: int | None, workers: int) -> dict[str, int]:
    """Which worker keeps each parameter, by its name, as `sizes` (bytes): evenly, the largest first.

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
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        owners[name], loads[least] = least % workers, loads[least] + sizes[name]
    return owners


def twin(optimizer: Optimizer, other: Mapping[Tensor, Tensor]) -> Optimizer:
    """The same optimizer over other tensors: those of `other`, in place of its own. Its state is a copy."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # of a schedule
    groups = [{**each, "params": [other[one] for one in each["params"] if one in other]} for each in made.param_groups]
    made.param_groups = [each for each in groups if each["params"]]
    kept = {own: copy.deepcopy(optimizer.state[one]) for one, own in other.items() if one in optimizer.state}
    made.state = defaultdict(dict, kept)
    return made


class Served:
    """What one worker serves in one step. Its calls may come from any thread.

    A worker that pulls will push after all that have pulled and not pushed yet. So it may be given, in place of the
    newest values, those that they are expected to make of them: as many of the last update once more. Its gradient is
    then one of about the values that it is applied to (Chen et al. 2018, "Efficient and Robust Parallel DNN Training
    through Model Parallelism on Multi-GPU Platform", arXiv:1809.02839, predict the weights of a pipeline so).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, gradients: Gradients, *, looks_ahead: bool
    ) -> None:
        self.values = [parameter.detach().clone() for parameter in parameters]
        self.optimizer = twin(optimizer, dict(zip(parameters, self.values, strict=True)))
        self._groups = [dict(group) for group in self.optimizer.param_groups]
        self.gradients, self.looks_ahead = gradients, looks_ahead
        self.version = 0
        """How many gradients were applied in this step."""
        self._under_way = 0
        """How many have pulled and not pushed yet."""
        self._moved: list[Tensor | None] = [None] * len(parameters)
        """What the last update has added to each; None where it is not known, as of one by some rows."""
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, Tensor]:
        """The version of now, and the values, `joined`."""
        with self._lock:
            ahead, self._under_way = self._under_way, self._under_way + 1
            pairs = zip(self.values, self._moved, strict=True)
            values = [value if by is None or not ahead else torch.add(value, by, alpha=ahead) for value, by in pairs]
            return self.version, joined(values)

    def push(self, version: int, payload: Tensor) -> int:
        """Make an update by gradients of the values of `version`. Returns how many came in between."""
        gradients = self.gradients.unpacked(payload, self.values)
        with self._lock:
            if self.looks_ahead and any(self.optimizer.state.values()):  # else an update says nothing of the next
                known = [gradient is not None and not gradient.is_sparse for gradient in gradients]
                self._moved = [each.clone() if of else None for each, of in zip(self.values, known, strict=True)]
            self.update(gradients)
            for value, before in zip(self.values, self._moved, strict=True):
                if before is not None:
                    torch.sub(value, before, out=before)
            self.version += 1
            self._under_way -= 1
            return self.version - 1 - version

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Step by `gradients`, one for each value.

        Raises:
            TrainingError: the optimizer keeps something in its groups, from which no worker would take it.
        """
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        if self.optimizer.param_groups:
            self.optimizer.step()
        for before, after in zip(self._groups, self.optimizer.param_groups, strict=True):
            for name, value in before.items():
                if isinstance(value, int | float) and not math.isnan(value) and after[name] != value:
                    raise TrainingError(
                        f"the optimizer {type(self.optimizer).__name__} keeps {name!r} for all parameters together, "
                        "and each server has those of its own alone",
                        where="the first step",
                        fix='choose another optimizer, or strategy="ddp"',
                    )


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
