"""What is common to strategies whose workers train on their own within a step, and exchange at its end.

There every worker gets all parameters and what the optimizer keeps of them. So between two steps each holds all, as in
data parallelism: any one can be lost, and snapshots, evaluation and a change of the workers know nothing of servers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.communication.side_group import SideGroup
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.requests import RANK_0, TAKE, Requests
from manyhosts.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.uncut_model import UncutModel


class SyncAtSteps(UncutModel):
    """All of such a strategy but its steps, which each adds."""

    model: nn.Module
    """After `place`."""
    optimizer: Optimizer
    """This worker's. After `hold`."""

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(world)
        if world.device.type != "cpu":
            raise ConfigError(
                f"strategy {config.name!r} computes on CPUs, and rank {world.rank} has a {world.device.type} device",
                where="strategy",
                fix='choose "ddp" or "local-sgd", or hide the GPU: CUDA_VISIBLE_DEVICES=',
            )
        self.config = config
        self.after: dict[str, tuple[Tensor, Mapping[str, Any]]] = {}
        """What an update takes up: of each parameter its value, and what the optimizer keeps of it."""
        self.side: SideGroup | None = None
        """Connections besides those of the world; None where there is one worker."""
        self.updates = 0
        """How many steps were finished, by all."""
        self.tried: tuple[int, int] = (0, 0)
        """Of a step that is not finished: the samples that this worker has computed, and that it has handed out."""
        self.samples_lost = 0
        """Samples computed in steps that broke off since the last one that was finished, by all; see `resync`."""

    def place(self, model: nn.Module) -> nn.Module:
        """Make `model` equal to rank 0's."""
        self.model = super().place(model)
        self.regroup()
        return self.model

    def regroup(self) -> None:
        """Be connected to the workers of now."""
        self.side = SideGroup(self.world) if self.world.size > 1 else None

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained now, by name."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def outcome(self, tally: StepMetrics, found: Mapping[str, Tensor]) -> StepOutcome:
        """What came of a step, with what was `found` besides. It ends here: who has it knows that all have all."""
        self.world.wait(tally.start_sum())
        outcome = tally.outcome()
        lost = {"samples_lost": torch.tensor(float(self.samples_lost))} if self.samples_lost else {}
        outcome.values = {**outcome.values, **found, **lost}
        return outcome

    @torch.no_grad()
    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Take up what the updates of the step have made: it is finished, and what broke off before it is done."""
        own = self.optimizer
        for name, parameter in self.trained().items():  # in their order, by which snapshots go
            value, state = self.after[name]
            parameter.copy_(value)
            own.state.pop(parameter, None)
            if state:
                own.state[parameter] = dict(state)
        own._opt_called = True  # type: ignore[attr-defined]  # PyTorch's own mark: a schedule knows that it has stepped
        self.after, self.updates, self.tried, self.samples_lost = {}, self.updates + 1, (0, 0), 0

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Have the parameters kept by the workers of now. The step is done again; what was computed of it is counted.

        Where who handed out is left, that is all that was handed out; else what those have computed that are left.
        """
        self.agreed.forget()
        self.regroup()
        rows = self.world.stack(torch.tensor([self.updates, *self.tried]))
        self.updates, self.tried = int(rows[:, 0].max()), (0, 0)
        computed, handed_out = rows[rows[:, 0] == self.updates, 1:].unbind(1)  # not of those that others finished
        lost = max(int(computed.sum()), int(handed_out.max()))
        self.samples_lost += lost
        return f"what was computed from {lost} samples, which are trained on again" if lost else ""


class ByMicroBatch(SyncAtSteps):
    """Each micro-batch is an update of its own, and a free worker takes the next one.

    Within a step the parameters have memory that is the step's own.
    """

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        self.taken: Callable[[Sequence[int]], None] = lambda _: None
        self.computed: list[int] = []
        self._requests: Requests | None = None

    def shard(self) -> Shard:
        """Every worker is given all pieces of a batch, and fetches those that it takes."""
        return Shard(0, 1)

    def check_shards(self) -> None:
        """Refuse them: a micro-batch goes to whichever worker is free."""
        raise ConfigError(
            "the training set is a stream that is read in shards, and micro-batches go to whichever worker is free",
            where=f"strategy={self.config.name!r}",
            fix="give a map-style dataset, or leave out the dataset's shard(index, count)",
        )

    def normalised_with(self) -> None:
        """No one: each micro-batch is computed when its worker is free."""

    def report_taken(self, pieces: int, taken: Callable[[Sequence[int]], None]) -> None:
        """Report each when this worker takes it."""
        self.taken = taken

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Train on this worker's share of the pieces; what comes out is taken up by `update`."""
        tally, self.computed = StepMetrics(control_flags, self.agreed, self.world), []
        requests, memory = self.begin(len(pieces))
        self._requests = requests
        requests.open()
        with computing_in(memory, self.trained().values()):
            while (number := requests.ask(RANK_0, TAKE, len(self.computed))[0]) >= 0:
                self.taken([number])
                self.pull(requests)
                model.zero_grad()
                values = compute(model, pieces[number])
                tally.add(values, pieces[number].weight)
                scale(values["loss"]).backward()  # of the mean over the micro-batch
                self.push(requests)
                self.computed.append(number)
                own, handed_out = [pieces[each] for each in self.computed], pieces[: requests.hand_out.taken]
                self.tried = sum(each.samples for each in own), sum(each.samples for each in handed_out)
            requests.close()
        return self.outcome(tally, self.end(requests))

    @abstractmethod
    def begin(self, pieces: int) -> tuple[Requests, Sequence[Tensor]]:
        """A step of so many micro-batches begins: what is asked in it, and the memory to compute in."""

    @abstractmethod
    def pull(self, requests: Requests) -> None:
        """Have the values of now."""

    @abstractmethod
    def push(self, requests: Requests) -> None:
        """Make an update by the gradients of now."""

    @abstractmethod
    def end(self, requests: Requests) -> dict[str, Tensor]:
        """Have what came of all updates, in `after`. Returns what is logged."""

    def norm(self, model: nn.Module) -> Tensor:
        """There is none: a step is many updates, each by a gradient of its own."""
        return torch.full((), torch.nan)

    def let_go(self) -> None:
        """Wait for the threads that answer."""
        if self._requests is not None:
            self._requests.abandon()


@contextmanager
def computing_in(memory: Sequence[Tensor], parameters: Collection[Tensor]) -> Iterator[None]:
    """Within, `parameters` are what is in `memory`: what else reads them sees nothing of a step under way."""
    before = [each.data for each in parameters]
    try:
        for parameter, tensor in zip(parameters, memory, strict=True):
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in zip(parameters, before, strict=True):
            parameter.data = tensor


@torch.no_grad()
def put(parameters: Collection[Tensor], values: Collection[Tensor]) -> None:
    """Copy `values` into `parameters`."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
