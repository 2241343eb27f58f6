"""What every strategy can do. Read this file, then any one other in this folder.

The trainer calls, once: `place`; and for each optimizer step: `forward_backward`, `clip_gradients`, `update`. What else
it asks has an answer here that most strategies give.
A strategy knows nothing of schedules, snapshots or logs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.holding import Holding
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.part_norm import PartStatistics
from manyhosts.communication.world import World
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
    """The same with model and loss separate, for those that compute them in several places."""

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


class Steppable(Protocol):
    """An optimizer, or what wraps one."""

    def step(self) -> Any:
        """Change the parameters by one step."""


Scale = Callable[[Tensor], Tensor]
"""What multiplies the loss before the backward pass (fp16), or the identity."""


def factor_of(scale: Scale, device: torch.device) -> Tensor | None:
    """What `scale` multiplies a loss by, shape (); None for 1."""
    one = torch.ones((), device=device)
    scaled = scale(one)
    return None if scaled is one else scaled.detach()


class Strategy(ABC):
    """One way to spread a step over the workers: where tensors lie, in which order passes are made, how gradients sum.

    What most have nothing to say to is answered here. Those that hold the entire model on each worker build on
    `UncutModel`, those that cut it on `CutModel`, those whose workers step alone on `LocalStepping`.
    """

    traits: ClassVar[Traits]
    """What holds for every run of it, known before there is one."""
    has_own: ClassVar[bool] = False
    """Whether a worker holds what those of no other place have: it ends a step that others have finished by itself,
    with nothing taken from them but what is equal everywhere."""
    least_samples: ClassVar[int] = 2
    """Samples of a forward pass by which it is tried whether the loss is a mean over them, at least."""
    optimizer: Any = None
    """This worker's, after `hold`."""
    statistics: PartStatistics | None = None
    """What BatchNorm layers take for their batch, where each batch is cut into parts whoever computes them."""
    digest: Any = None
    """What sees the bits of the part that is computed now, where another worker computes it again (`audit.Digest`)."""
    computed: Sequence[int] | None = None
    """The numbers of the pieces that this worker has computed in the last step; None: of all that it was given."""
    givers: Sequence[int] = ()
    """When the workers have met: for each, by rank, whose optimizer it takes; none, where all are alike."""
    before_update: Callable[[], None]
    """Called before each change of the model in the middle of `forward_backward`, where there is one: what still reads
    the model (a snapshot) is then done with it."""
    misuse_told: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within, the model is called: ConfigError, where it is used in a way that PyTorch refuses in words of its own."""

    def __init__(self, mesh: Mesh, holding: Holding) -> None:
        """`mesh`: how the workers are laid out. `holding`: what each holds of the tensors of model and optimizer."""
        self.mesh, self.world, self.holding = mesh, mesh.world, holding

    # What each does in its own way.

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Move, wrap or cut `model`, the same on every worker; one on the meta device gets its values.

        Called before the optimizer is made, so parameters may be replaced, by DTensors too: see `holding`.
        """

    @abstractmethod
    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients of one optimizer step: the mean over the global batch, on every worker.

        One call takes all pieces, not one call each: a pipeline interleaves them, and data parallelism exchanges
        gradients once, while the last piece's backward pass runs. `control_flags` are summed: see `StepOutcome`.
        """

    @abstractmethod
    def norm(self, model: nn.Module) -> Tensor:
        """The norm of the gradient that the next step is made by, shape ().

        All workers call this, and where they step together all get the same number.
        """

    @abstractmethod
    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`. Returns the norm before; see `norm`."""

    @abstractmethod
    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Change the parameters by one step; an `exchange` follows, where workers step alone."""

    # Before the first step.

    def look(self, sample: Callable[[], Sample | None]) -> None:
        """Ask for `sample`, where a model is placed by what a forward pass shows: before `place`. Of a stream there is
        none. Who asks computes model and loss separately (`InTwo`).
        """

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """Know this worker's optimizer. Called once."""
        self.optimizer = optimizer

    def make_group(self, parameters: Sequence[nn.Parameter]) -> Any:
        """What sums the gradients of `parameters`, whether they are trained now or not, for steps of several passes.

        None, where that cannot be. Called after `place`; from then on each `forward_backward` is for one group.
        """

    def use_group(self, group: Any, call: int) -> None:
        """From now on gradients are those of `group`; None: of none. `call`: which pass of its step the next one is;
        passes of equal number give values of equal names.
        """

    # Samples, and what is computed from them.

    def shard(self) -> Shard:
        """The part of the data that this process reads: one for each worker that reads samples of its own."""
        return Shard(self.mesh.data.rank, self.mesh.data.size)

    def normalised_with(self) -> Collectives | None:
        """Those whose samples BatchNorm can take for one batch with this worker's; None where each has its own.

        Those that compute the same samples together see one process's batch.
        """
        return self.mesh.data if self.mesh.replica.size == 1 or self.mesh.data.size > 1 else None

    def passing(self) -> World | None:
        """Those who exchange something in every forward pass, so that all must make equally many; None: no one."""
        return self.world if self.traits.communicates_in_forward else None

    def check_shards(self) -> None:
        """See that each worker can read shards of its own, where the training set is a stream that has them.

        Raises:
            ConfigError: it cannot.
        """

    def share_out(self, assignment: Sequence[range]) -> None:
        """From the next step on each worker computes these parts, by rank; empty: neighbouring ones, evenly."""

    def report_taken(self, pieces: int, taken: Callable[[Sequence[int]], None]) -> None:
        """Report which of so many pieces of a step this worker computes, by their numbers, as soon as that is known."""
        taken(range(pieces))

    def about_rate(self, optimizer: Steppable) -> str:
        """What it does to the learning rate, in a sentence for the user; empty where it does nothing."""
        return ""

    def about_time(self) -> str:
        """Where its time went, in a sentence; empty where there is nothing to say. All call this as a run ends."""
        return ""

    # Where workers step alone.

    def exchange(self, model: nn.Module) -> None:
        """Exchange what is due after the last step. If that breaks off, it is called again among those left."""

    def average(self, model: nn.Module) -> None:
        """Have one model on all workers, where they diverge: the mean."""

    def averaged(self, model: nn.Module) -> AbstractContextManager[bool]:
        """Within, `model` is the same on every worker: the mean, where they diverge. Gives whether they may."""
        return nullcontext(False)

    def compared(self, model: nn.Module) -> dict[str, Tensor]:
        """By name, what must have equal bits on all workers after `average`, or on all that hold the same part."""
        return {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}

    def compare_copies(
        self, tensors: Mapping[str, Tensor], checksums: Callable[[Mapping[str, Tensor]], Mapping[str, str]]
    ) -> tuple[str, Mapping[str, Tensor]]:
        """A tensor of which those that hold the same part do not hold the same, by name, and the ones without parts.

        The name is empty where there is none. All workers call this.
        """
        return "", tensors

    def own_statistics(self, model: nn.Module) -> list[Tensor]:
        """What BatchNorm layers have seen, where each has the batch of its worker and nothing has made it alike."""
        layers = (each for each in model.modules() if isinstance(each, _BatchNorm))
        return [each for layer in layers for each in layer.buffers(recurse=False)]

    # Where workers are lost and others come. Between two steps the world may have changed; it is asked again for ranks
    # and sizes. Where several workers make one copy, a step is finished by all or by none: one that has had
    # `prepare_update` finishes it without another exchange.

    def why_all_end(self) -> str:
        """Why no worker continues where one is lost; empty where those that are left do."""
        return "" if self.traits.survives_loss else "no worker holds the entire model"

    def layout(self) -> PartOfCopy | None:
        """This worker's place, where several make one copy and others continue without one that is lost."""
        return None

    @property
    def complete(self) -> bool:
        """Whether all that the step under way needs of others is here, and lacking is only the word that they have it,
        too. Then, where one of them has finished the step, this worker's part of it counts.
        """
        return False

    def prepare_update(self) -> None:
        """Send others what an update takes of them. Where it breaks off, the model is that of before the step."""

    def let_go(self) -> None:
        """The group is about to change: return when nothing of this worker is on its way in it any more."""

    def step_back(self) -> None:
        """Be as before the step under way, which broke off and will be done again. No worker has finished it."""

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all workers, besides parameters and optimizer, and a new one lacks."""
        return {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Called on every worker when the workers have changed, after worker `source` has given what it shares to those
        that lacked it: agree on what else must be alike. `new`: this worker has not trained yet; `gone`: how many of
        those that trained are no more. Returns what is lost with them, in words; empty where nothing is.
        """
        return ""

    # For snapshots.

    def state_dict(self) -> dict[str, Any]:
        """What this worker's strategy remembers from step to step (error feedback, say)."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave on every worker, by rank; their number may have been another than now.

        Each value lies on the disk and is read when it is asked for: ask for those of other workers only where they are
        needed, and let go of them before the next.
        """
