"""What every strategy can do. Read this file, then any one other in this folder.

The trainer calls, once: `place`; and for each optimizer step: `forward_backward`, `clip_gradients`, `update`. Where the
workers step alone there is one call more: see `local_updates.LocalUpdates`.
A strategy knows nothing of schedules, snapshots or logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.holding import Holding
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.part_norm import PartStatistics
from manyhosts.strategies.traits import Traits


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of each global batch a process reads: part `index` of `count`, cut as evenly as integers allow.

    Processes that hold pieces of one replica (tensor, pipeline) have the same shard.
    """

    index: int
    count: int


@dataclass(slots=True)
class Piece:
    """The samples of one forward pass.

    A worker that has nothing left to compute while others have (the cut is uneven) is given a *ghost*: a real sample
    with `weight` 0, so that it takes part in every collective that is inside the model and changes nothing.
    """

    bring: Callable[[], Any]
    """Gives the batch on the model's device, once."""
    samples: int
    weight: float
    """This piece's share of the global batch: its samples over those of all workers. The weights of a step sum to 1."""
    address: tuple[int, ...]
    """(step, part, micro-batch): where dropout's random numbers come from."""
    shares: Mapping[str, float] | None = None
    """This piece's share of each loss, by name, where a step has several and they are means over different things."""

    @property
    def batch(self) -> Any:
        """What the model's step is given. Ask once, in the order of the pieces; it is fetched then, and not before."""
        return self.bring()


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A step of a GPU, of which it is not known yet whether all workers' values have the names that were expected."""

    flag: Tensor
    """Shape (): above zero where a worker's have not."""
    settle: Callable[[], Mapping[str, Tensor]]
    """Gives the values then; every worker calls it, at the same place among its exchanges."""


@dataclass(slots=True)
class StepOutcome:
    """What `forward_backward` found, over all workers; tensors stay on their device and are not waited for."""

    values: Mapping[str, Tensor]
    """`loss` and what else the user's step returned: means over the global batch, shape (), equal on all workers."""
    control_flags: Sequence[float] | Tensor
    """The sums over all workers of the control flags that each was given: a clock, a request to stop. They travel with
    the loss, for decisions that all workers must take alike, and cost no exchange of their own."""
    unsettled: Unsettled | None = None
    """What is to be asked when the numbers are read; None where the values are settled."""


Compute = Callable[[nn.Module, Piece], Mapping[str, Tensor]]
"""Forward pass of one piece: seeds the random numbers from its address, runs model and loss under the chosen precision.

Returns `{"loss": …}` and whatever else the user's step wants logged: means over the piece's samples, shape ().
"""


class InTwo(Protocol):
    """The same with model and loss apart, for those that compute them in several places."""

    context: Callable[[], AbstractContextManager[Any]]
    """The chosen precision, within which both are computed."""

    def inputs_of(self, piece: Piece) -> tuple[Any, Any]:
        """What the model is called with, and what the loss compares with; the random numbers are those of `piece`."""

    def values_of(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """`{"loss": …}` of what the model gave."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model will be called with, for strategies that look at it before they place it."""

    inputs: Callable[[], Any]
    """Those of as many samples as a forward pass has at most."""
    context: Callable[[], AbstractContextManager[Any]]
    """What a forward pass runs in."""
    precision: str


@runtime_checkable
class LooksAhead(Protocol):
    """A strategy that places a model by what a forward pass shows, and computes model and loss apart (`InTwo`)."""

    def look(self, sample: Sample) -> None:
        """Know `sample`. Called before `place`, where there is one: of a stream there is none."""


@runtime_checkable
class TellsMisuse(Protocol):
    """A strategy under which not every use of the model is sound."""

    def misuse_told(self) -> AbstractContextManager[None]:
        """Within, the model is called.

        Raises:
            ConfigError: it was used in a way that PyTorch refuses in words of its own.
        """


@runtime_checkable
class TellsTime(Protocol):
    """A strategy that has measured where its time goes."""

    def about_time(self) -> str:
        """That in a sentence; empty where there is nothing to say. All workers call this, at the end of a run."""


class Steppable(Protocol):
    """An optimizer, or what wraps one."""

    def step(self) -> Any:
        """Change the parameters by one step."""


Scale = Callable[[Tensor], Tensor]
"""What multiplies the loss before the backward pass (fp16), or the identity."""


@runtime_checkable
class Elastic(Protocol):
    """A strategy whose workers each hold everything, so that any one of them can tell the others where the run is.

    Between two steps the world it was made with may have changed; it asks the world again for ranks and sizes.
    """

    @property
    def complete(self) -> bool:
        """Whether all that the step under way needs of others is here, and lacking is only the word that they have it,
        too. Then, where one of them has finished the step, this worker's part of it counts.
        """

    def let_go(self) -> None:
        """The group is about to change: return when nothing of this worker is on its way in it any more."""

    def step_back(self) -> None:
        """Be as before the step under way, which broke off and will be done again. No worker has finished it."""

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all workers, besides parameters and optimizer, and a new one lacks."""

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Called on every worker when the workers have changed, after worker `source` has given what it shares to those
        that lacked it: agree on what else must be alike. `new`: this worker has not trained yet; `gone`: how many of
        those that trained are no more. Returns what is lost with them, in words; empty where nothing is.
        """


class RemembersNothing:
    """The answers of a strategy that keeps nothing between two steps besides the model, and has nothing under way."""

    def let_go(self) -> None:
        """Nothing is under way between two steps."""

    def step_back(self) -> None:
        """A step under way has changed nothing that stays."""

    def shared_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it remembers nothing."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""


@runtime_checkable
class InCopies(Protocol):
    """A strategy of which several workers make one copy of the model. Then the calls of `Elastic` are for a step that
    is finished by all workers or by none; one that has had `prepare_update` finishes it without another exchange.
    """

    def why_all_end(self) -> str:
        """Why no worker continues where one is lost; empty where those of other copies do."""

    def layout(self) -> PartOfCopy | None:
        """This worker's place in its copy; None where all end with one that is lost."""


@runtime_checkable
class HoldsOptimizer(Protocol):
    """A strategy that steps by itself, or keeps what an optimizer remembers."""

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Know this worker's optimizer. Called once, before the first step."""


@runtime_checkable
class HandsOut(Protocol):
    """A strategy whose workers take the pieces of a step as they are free, each for an update of its own.

    Every worker is given all pieces of a step. `forward_backward` leaves the model as it was; `update` takes up what
    came out.
    """

    taken: Callable[[int], None]
    """Called with the number of each piece that this worker takes, before it is computed."""
    computed: list[int]
    """The numbers of those that it has computed in the step under way, or in the last one."""


@runtime_checkable
class PreparesUpdate(Protocol):
    """A strategy whose workers tell each other something between gradient and update."""

    def prepare_update(self) -> None:
        """Called before `update`. Where it breaks off, the model is that of before the step."""


@runtime_checkable
class UpdatesWithin(Protocol):
    """A strategy that changes the model in the middle of its `forward_backward`."""

    before_update: Callable[[], None]
    """To be called before each change: what still reads the model (a snapshot) is then done with it."""


@runtime_checkable
class FixedParts(Protocol):
    """A strategy that cuts each batch into parts that do not depend on who computes them."""

    statistics: PartStatistics
    """What BatchNorm layers take for their batch."""

    def share_out(self, held: Sequence[range]) -> None:
        """From the next step on each worker computes these parts, by rank; empty: neighbouring ones, evenly."""


@runtime_checkable
class SumsByGroup(Protocol):
    """A strategy that can sum the gradients of one optimizer's parameters at a time, for steps of several passes."""

    def make_group(self, parameters: Sequence[nn.Parameter]) -> Any:
        """What sums the gradients of `parameters`, whether they are trained now or not. Called after `place`; from then
        on each `forward_backward` is for one group.
        """

    def use_group(self, group: Any, call: int) -> None:
        """From now on gradients are those of `group`; None: of none. `call`: which pass of its step the next one is;
        passes of equal number give values of equal names.
        """


class Strategy(Protocol):
    """One way to spread a step over the workers.

    Those that hold the entire model on each worker build on `UncutModel`, those that cut it on `CutModel`.
    """

    @property
    def traits(self) -> Traits:
        """What holds for every run of it; its row in the table of `traits.py`."""

    @property
    def mesh(self) -> Mesh:
        """How the workers are laid out."""

    @property
    def holding(self) -> Holding:
        """What each worker holds of the tensors of the placed model and its optimizer."""

    def shard(self) -> Shard:
        """The part of the data that this process reads."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move, wrap or cut `model`, the same on every worker.

        Called before the optimizer is made, so parameters may be replaced, by DTensors too: see `holding`.
        """

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients of one optimizer step: the mean over the global batch, on every worker.

        One call takes all pieces, not one call each: a pipeline interleaves them, and data parallelism exchanges
        gradients once, while the last piece's backward pass runs. `control_flags` are summed: see `StepOutcome`.
        """

    def norm(self, model: nn.Module) -> Tensor:
        """The norm of the gradient that the next step is made by, shape ().

        All workers call this, and where they step together all get the same number.
        """

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`. Returns the norm before; see `norm`."""

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Change the parameters by one step; where workers step alone, an `exchange` follows (`LocalUpdates`)."""

    def state_dict(self) -> dict[str, Any]:
        """What this worker's strategy remembers from step to step (error feedback, say), for snapshots."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave on every worker, by rank; their number may have been another than now.

        Each value lies on the disk and is read when it is asked for: ask for those of other workers only where they are
        needed, and let go of them before the next.
        """


class OnMesh:
    """What the strategies here share: a mesh, a layout of tensors on it, and nothing remembered from step to step."""

    traits: ClassVar[Traits]

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        self.mesh, self.world, self.holding = mesh, mesh.world, holding

    def shard(self) -> Shard:
        """One part for each worker that reads samples of its own."""
        return Shard(self.mesh.data.rank, self.mesh.data.size)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""
