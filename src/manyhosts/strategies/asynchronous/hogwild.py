"""Hogwild: the workers of one machine update one model in shared memory, and no lock holds any of them up.

Two that update a number at once may lose the update of one, and a forward pass may see some parameters before an update
and some after it. The model is shared within a step alone: between two steps each worker has its own, equal to the
others', so that no one who evaluates sees what another changes.

Source: Niu, Recht, Ré and Wright 2011, arXiv:1106.5730.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import World
from manyhosts.config.asynchronous import Hogwild
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.by_micro_batch import ByMicroBatch
from manyhosts.strategies.asynchronous.full_between_steps import put
from manyhosts.strategies.asynchronous.requests import LEADER, Asks
from manyhosts.strategies.asynchronous.served import Served, twin
from manyhosts.strategies.traits import Traits

_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # by a name that no one guesses, and gone once all have it


class SharedMemory(ByMicroBatch):
    """The strategy of `Hogwild`."""

    traits = Traits()

    def __init__(self, config: Hogwild, world: World) -> None:
        super().__init__(config, world)
        self._shared: list[Tensor] = []

    def regroup(self) -> None:
        """Have memory that the workers of now share.

        Raises:
            ConfigError: they are on several hosts.
        """
        world = self.world
        if world.size > 1 and not world.is_on_one_host:
            raise ConfigError(
                f"strategy 'hogwild' shares the memory of one host, and the {world.size} workers are on several",
                where="strategy",
                fix='choose strategy="parameter-server", or run on one host',
            )
        tensors = list(self.trained().values())
        folder = _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
        path = ""
        if world.is_leader:
            file, path = tempfile.mkstemp(prefix="manyhosts-", dir=folder)
            os.truncate(file, sum(map(_room, tensors)))
            os.close(file)
        path = gather_words(world, path)[LEADER]
        try:
            size = sum(map(_room, tensors))
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            world.barrier()  # all have it
        finally:
            if world.is_leader:
                Path(path).unlink()
        self._shared, begin = [], 0
        for tensor in tensors:
            part = memory[begin : begin + tensor.nbytes]
            self._shared.append(part.view(tensor.dtype).view(tensor.shape))
            begin += _room(tensor)

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Know this worker's optimizer.

        Raises:
            ConfigError: it keeps something, of which there would be one for each worker.
        """
        super().hold(optimizer)
        parameters = list(self.trained().values())
        tried = [torch.zeros_like(each) for each in parameters]
        for each in tried:
            each.grad = torch.zeros_like(each)
        copy = twin(optimizer, dict(zip(parameters, tried, strict=True)))
        copy.step()
        if any(isinstance(value, Tensor) for state in copy.state.values() for value in state.values()):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps something of earlier steps, and with strategy 'hogwild' each worker "
                "would keep another",
                where="mh.Trainer(optimizer=…)",
                fix='use torch.optim.SGD without momentum, or strategy="parameter-server"',
            )

    def begin(self) -> tuple[Served, int | None, Sequence[int]]:
        """Compute in memory that all share; none is asked for parameters."""
        if self.world.is_leader:
            put(self._shared, list(self.trained().values()))
        self.world.barrier()
        self.enter(self._shared)
        return Served([], self.optimizer, None, looks_ahead=False), None, [0] * self.world.size

    def pull(self, asks: Asks) -> None:
        """The values of now are there."""

    def push(self, asks: Asks) -> None:
        """Change them."""
        self.optimizer.step()

    def end(self, served: Served, ahead: Sequence[int]) -> dict[str, Tensor]:
        """See `ByMicroBatch.end`. What is logged is who computed how many micro-batches."""
        self.world.barrier()  # no worker changes them any more
        self._after = [each.clone() for each in self._shared], [{} for _ in self._shared]
        self.leave()
        found = self.world.stack(torch.tensor([len(self.computed)], dtype=torch.float64))
        return {f"pieces/rank{rank}": pieces for rank, pieces in enumerate(found[:, 0])}


def _room(tensor: Tensor) -> int:
    """Bytes for `tensor` in shared memory, so that the next one begins at an address fit for its dtype."""
    return -(-tensor.nbytes // 64) * 64
