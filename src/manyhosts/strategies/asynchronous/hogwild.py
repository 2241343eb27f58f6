"""Hogwild: the workers of one machine update one model in shared memory, and no lock holds any of them up.

Two that update a number at once may lose the update of one, and a forward pass may see some parameters before an update
and some behind it. The model is shared within a step alone: between two steps each worker has its own, equal to the
others', so that nobody who evaluates sees what another changes.

Source: Niu, Recht, Ré and Wright 2011, arXiv:1106.5730.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.world import World
from manyhosts.config.asynchronous import Hogwild
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.hand_out import HandOut
from manyhosts.strategies.asynchronous.parameter_server import count_tried, put, take_up
from manyhosts.strategies.asynchronous.requests import LEADER, Asks, RequestHandler
from manyhosts.strategies.asynchronous.served import Served, twin
from manyhosts.strategies.asynchronous.whole_between_steps import MeetsAtSteps
from manyhosts.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import TRAITS

_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # by a name that nobody guesses, and gone once all have it


class SharedMemory(MeetsAtSteps):
    """The strategy of `Hogwild`."""

    traits = TRAITS["hogwild"]

    def __init__(self, config: Hogwild, world: World) -> None:
        super().__init__(config, world)
        self.taken: Callable[[int], None] = lambda _: None
        self._shared: list[Tensor] = []
        self._desk: RequestHandler | None = None
        self._own: list[Tensor] = []
        """What the parameters are between two steps, while a step is under way."""
        self._after: list[Tensor] = []

    def shard(self) -> Shard:
        """Every worker is given all pieces of a batch, and fetches those that it takes."""
        return Shard(0, 1)

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

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Train on this worker's share of the pieces; what comes out is taken up by `update`."""
        self.check_scale(scale)
        assert self.optimizer is not None, "hold() comes before forward_backward()"
        world, parameters = self.world, list(self.trained().values())
        tally = StepMetrics(control_flags, self.agreed, world)
        hand_out = HandOut(len(pieces), world.size, None) if world.rank == LEADER else None
        self._desk = desk = RequestHandler(Served([], self.optimizer), hand_out, self.side)
        self._own = [each.data for each in parameters]
        if world.is_leader:
            put(self._shared, self._own)
        world.barrier()
        for parameter, shared in zip(parameters, self._shared, strict=True):
            parameter.data = shared
        desk.open()
        asks, computed = Asks(desk, world.rank, [0] * world.size), list[int]()
        while (number := asks.take()) >= 0:
            self.taken(number)
            model.zero_grad()
            values = compute(model, pieces[number])
            tally.add(values, pieces[number].weight)
            values["loss"].backward()  # of the mean over the micro-batch
            self.optimizer.step()
            asks.pushed()
            computed.append(number)
            self.tried = count_tried(pieces, computed, desk)
        asks.end()
        desk.close()
        world.barrier()  # nobody changes it any more
        self._after = [each.clone() for each in self._shared]
        self._leave_shared()
        found = world.stack(torch.tensor([len(computed)], dtype=torch.float64))
        world.wait(tally.start_sum())  # last: who has it knows that every worker has all
        outcome = tally.outcome()
        own = {f"pieces/rank{rank}": pieces for rank, pieces in enumerate(found[:, 0])}
        outcome.values = {**outcome.values, **own, **self.lost_values}
        return outcome

    def norm(self, model: nn.Module) -> Tensor:
        """There is none: a step is many updates, each by a gradient of its own."""
        return torch.full((), torch.nan)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Take up what all updates of the step have made."""
        assert self.optimizer is not None, "hold() comes before update()"
        parameters = list(self.trained().values())
        take_up(self.optimizer, parameters, self._after, [{} for _ in parameters])
        self.is_done()

    def let_go(self) -> None:
        """Wait for the threads that answer."""
        if self._desk is not None:
            self._desk.abandon()

    def step_back(self) -> None:
        """Have the parameters as before the step under way, in memory of this worker's own."""
        super().step_back()
        self._leave_shared()

    def _leave_shared(self) -> None:
        for parameter, own in zip(self.trained().values(), self._own, strict=False):
            parameter.data = own
        self._own = []


def _room(tensor: Tensor) -> int:
    """Bytes for `tensor` in shared memory, so that the next one begins at an address fit for its dtype."""
    return -(-tensor.nbytes // 64) * 64
