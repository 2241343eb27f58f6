"""What strategies share in which each parameter is kept by one worker within a step, and all meet at its end.

There every worker gets all parameters and what the optimizer keeps of them. So between two steps each holds all, as in
data parallelism: any one can be lost, and snapshots, evaluation and a change of the workers know nothing of servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.layout import spread
from manyhosts.communication.side_group import SideGroup
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError, TrainingError
from manyhosts.strategies.asynchronous.served import described, like_described, state_tensors
from manyhosts.strategies.strategy import Scale, Steppable
from manyhosts.strategies.tally import Agreed
from manyhosts.strategies.uncut_model import UncutModel

After = tuple[list[Tensor], list[dict[str, Any]]]
"""Of each parameter its value, and what the optimizer keeps of it."""


class MeetsAtSteps(UncutModel):
    """All of such a strategy but its steps, which each adds."""

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(world)
        if world.device.type != "cpu":
            raise ConfigError(
                f"strategy {config.name!r} computes on CPUs, and rank {world.rank} has a {world.device.type} device",
                where="strategy",
                fix='choose "ddp" or "local-sgd", or hide the GPU: CUDA_VISIBLE_DEVICES=',
            )
        self.config = config
        self.agreed = Agreed()
        self.model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._after: After = ([], [])
        """What an update takes up."""
        self._side: SideGroup | None = None
        self.updates = 0
        """How many steps were finished, by all."""
        self.tried: tuple[int, int] = (0, 0)
        """Of the step under way: the samples that this worker has computed, and those that it has handed out to all."""
        self._broken_off = (0, 0)
        """The same of a step that broke off."""
        self.samples_lost = 0
        """Samples computed in steps that broke off since the last one that was finished, by all; see `meet`."""

    def place(self, model: nn.Module) -> nn.Module:
        """Make `model` equal to the leader's."""
        self.model = model.to(self.world.device)
        spread([*model.parameters(), *model.buffers()], self.world)
        self.regroup()
        return self.model

    def regroup(self) -> None:
        """Know who keeps what among the workers of now."""

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained now, by name."""
        assert self.model is not None, "place() comes before"
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def hold(self, optimizer: Optimizer) -> None:
        """Know this worker's optimizer."""
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer:
        """This worker's. After `hold`."""
        assert self._optimizer is not None, "hold() comes before"
        return self._optimizer

    @property
    def side(self) -> SideGroup | None:
        """Connections besides those of the world; None where there is one worker. Called by all workers."""
        if self.world.size == 1:
            return None
        if self._side is None or not self._side.is_of(self.world):
            self._side = SideGroup(self.world)
        return self._side

    def check_scale(self, scale: Scale) -> None:
        """See that losses are not scaled."""
        one = torch.ones((), device=self.world.device)
        assert scale(one) is one, "fp16 is refused with the settings"

    def share(self, values: Sequence[Tensor], states: list[dict[str, Any]], owners: Sequence[int]) -> None:
        """Have what each owner holds, on every worker: replace `values` and `states`. All workers call it."""
        world = self.world
        if world.size == 1:
            return
        own = {number: described(states[number]) for number, owner in enumerate(owners) if owner == world.rank}
        told = {int(key): each for found in gather_plain(world, own) for key, each in found.items()}
        for owner in sorted(set(owners)):
            tensors = []
            for number in (number for number, each in enumerate(owners) if each == owner):
                if owner != world.rank:
                    states[number] = like_described(told[number], world.device)
                tensors += [values[number], *state_tensors(states[number])]
            spread(tensors, world, owner)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Take up what the updates of the step have made: it is finished, and what broke off before it is done."""
        parameters, (values, states), own = list(self.trained().values()), self._after, self.optimizer
        put(parameters, values)
        for parameter, state in zip(parameters, states, strict=True):  # in their order, by which snapshots go
            own.state.pop(parameter, None)
            if state:
                own.state[parameter] = dict(state)
        own._opt_called = True  # type: ignore[attr-defined]  # PyTorch's own mark: a schedule knows that it has stepped
        self._after = ([], [])
        self.updates, self.tried, self.samples_lost = self.updates + 1, (0, 0), 0

    # Workers that go and come: between two steps each has everything.

    complete = False
    """A step that broke off is always done again, unless another worker has finished it: then this one takes that."""

    def let_go(self) -> None:
        """Nothing is under way between two steps."""

    def step_back(self) -> None:
        """The step under way has changed nothing that stays."""
        self._broken_off, self.tried = self.tried, (0, 0)

    @property
    def lost_values(self) -> dict[str, Tensor]:
        """What is logged of a step that is done again."""
        return {"samples_lost": torch.tensor(float(self.samples_lost))} if self.samples_lost else {}

    def shared_state(self) -> dict[str, Any]:
        """Nothing besides parameters and optimizer."""
        return {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Have the parameters kept by the workers of now. The step is done again; what was computed of it is counted.

        Where who handed out is left, that is all that was handed out; else what those have computed that are left.
        """
        self.agreed.forget()
        self.regroup()
        rows = self.world.stack(torch.tensor([self.updates, *self._broken_off]))
        self.updates, self._broken_off = int(rows[:, 0].max()), (0, 0)
        computed, handed_out = rows[rows[:, 0] == self.updates, 1:].unbind(1)  # not of those that others finished
        lost = max(int(computed.sum()), int(handed_out.max()))
        self.samples_lost += lost
        return f"what was computed from {lost} samples, which are trained on again" if lost else ""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: between two steps it remembers nothing."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `parameters`."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def check_groups(before: Optimizer, after: Optimizer) -> None:
    """See that an optimizer keeps nothing in its groups, from which no one would take it.

    Raises:
        TrainingError: it does.
    """
    for one, other in zip(before.param_groups, after.param_groups, strict=False):
        for name, value in one.items():
            if name != "params" and isinstance(value, int | float) and not math.isnan(value) and other[name] != value:
                raise TrainingError(
                    f"the optimizer {type(before).__name__} keeps {name!r} for all parameters together, and each "
                    "server has those of its own alone",
                    where="the first step",
                    fix='choose another optimizer, or strategy="ddp"',
                )
