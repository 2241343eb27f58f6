"""What every strategy can do. Read this file, then any one other in this folder.

The trainer calls, once: `place`; and for each optimizer step: `forward_backward`, `clip_gradients`, `update`.
A strategy is told nothing of schedules, snapshots or logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of each global batch a process reads: part `index` of `count`, cut as evenly as integers allow.

    Processes that hold pieces of one replica (tensor, pipeline) have the same shard.
    """

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples of one forward pass.

    A worker that has nothing left to compute while others have (the cut is uneven) is given a *ghost*: a real sample
    with `weight` 0, so that it takes part in every collective that stands inside the model and changes nothing.
    """

    batch: Any
    """What the model's step is given, on its device."""
    samples: int
    weight: float
    """This piece's share of the global batch: its samples over those of all workers. The weights of a step sum to 1."""
    address: tuple[int, ...]
    """(step, part, micro-batch): where dropout's random numbers come from."""


@dataclass(slots=True)
class StepOutcome:
    """What `forward_backward` found, over all workers; tensors stay on their device and are not waited for."""

    loss: Tensor
    """The mean over the global batch, shape (), float32, equal on all workers."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Further values of the user's step, likewise."""


Compute = Callable[[nn.Module, Piece], Mapping[str, Tensor]]
"""Forward pass of one piece: seeds the random numbers from its address, runs model and loss under the chosen precision.

Returns `{"loss": …}` and whatever else the user's step wants logged: means over the piece's samples, shape ().
"""

Scale = Callable[[Tensor], Tensor]
"""What multiplies the loss before the backward pass (fp16), or the identity."""


class Strategy(Protocol):
    """One way to spread a step over the workers."""

    def shard(self) -> Shard:
        """The part of the data that this process reads."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move, wrap or cut `model`, the same on every worker.

        Called before the optimizer is made, so parameters may be replaced.
        """

    def forward_backward(self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale) -> StepOutcome:
        """Fill the gradients of one optimizer step: the mean over the global batch, on every worker.

        One call takes all pieces, not one call each: a pipeline interleaves them, and data parallelism exchanges
        gradients once, while the last piece's backward pass runs.
        """

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm`. Returns the norm before, shape ()."""

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Change the parameters by one step, and exchange them where the strategy does so."""

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself remembers from step to step (error feedback, say), for snapshots."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, also where the number of workers was another."""
