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
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.requests import RANK_0, HandOut, Requests
from manyhosts.strategies.asynchronous.served import Served
from manyhosts.strategies.asynchronous.sync_at_steps import ByMicroBatch, put
from manyhosts.strategies.traits import Traits

_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # by a name that no one guesses, and gone once all have it
_ALIGNED = 64
"""In shared memory each tensor begins at a multiple of so many bytes, which is fit for any dtype."""


class SharedMemory(ByMicroBatch):
    """The strategy of `Hogwild`."""

    traits = Traits()

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
        super().regroup()  # after the refusal: who is refused does not leave the others in an exchange
        tensors = dict(self.model.named_parameters())  # those that are frozen, too: they may be trained later
        rooms = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors.values()]
        path = ""
        if world.is_rank_0:
            file, path = tempfile.mkstemp(prefix="manyhosts-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None)
            os.close(file)
        path = gather_words(world, path)[RANK_0]
        try:
            memory = torch.from_file(path, shared=True, size=sum(rooms), dtype=torch.uint8)  # makes the file so long
            world.barrier()  # all have it
        finally:
            if world.is_rank_0:
                Path(path).unlink()
        self._shared = {
            name: room[: each.nbytes].view(each.dtype).view(each.shape)
            for (name, each), room in zip(tensors.items(), memory.split(rooms), strict=True)
        }

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Know this worker's optimizer.

        Raises:
            ConfigError: it keeps something, of which there would be one for each worker.
        """
        super().hold(optimizer)
        trial = Served(list(self.trained().values()), optimizer, None, looks_ahead=False)
        trial.update([torch.zeros_like(each) for each in trial.values])
        if any(
            value is not None
            for kept in trial.optimizer.state.values()
            for value in (kept.values() if isinstance(kept, dict) else [kept])
        ):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps something of earlier steps, and with strategy 'hogwild' each worker "
                "would keep another",
                where="mh.Trainer(optimizer=…)",
                fix='use torch.optim.SGD without momentum, or strategy="parameter-server"',
            )

    def begin(self, pieces: int) -> tuple[Requests, Sequence[Tensor]]:
        """Compute in memory that all share; none is asked for parameters."""
        memory = [self._shared[name] for name in self.trained()]
        if self.world.is_rank_0:
            put(memory, self.trained().values())
        self.world.barrier()
        return Requests(None, HandOut(pieces, self.world.size, None), self.side, ()), memory

    def pull(self, requests: Requests) -> None:
        """The values of now are there."""

    def push(self, requests: Requests) -> None:
        """Change them."""
        self.optimizer.step()

    def end(self, requests: Requests) -> dict[str, Tensor]:
        """See `ByMicroBatch.end`. What is logged is who computed how many micro-batches."""
        self.world.barrier()  # no worker changes them any more
        self.after = {name: (self._shared[name].clone(), {}) for name in self.trained()}
        found = self.world.stack(torch.tensor([len(self.computed)], dtype=torch.float64))
        return {f"pieces/rank{rank}": pieces for rank, pieces in enumerate(found[:, 0])}
