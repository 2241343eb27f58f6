"""Fully sharded data parallelism: each worker keeps a part of the model, and gathers the rest unit by unit.

Units, gathering and summing are PyTorch's FSDP2. Ours is what it is fed and what comes out of it: pieces that carry
their share of the global batch, so that sums are the mean; ghosts, so that all workers make the same passes; norms over
all parts; and a comparison, in the exchange of the loss, of which units each worker has used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from manyhosts.communication.collectives import Work
from manyhosts.communication.dtensors import DTensors
from manyhosts.communication.layout import as_real, put_flat, spread
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.model_watch import ModelWatch
from manyhosts.communication.world import World
from manyhosts.config.fully_sharded import FSDP
from manyhosts.device import LateNumbers, is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import CutModel, sum_together
from manyhosts.strategies.fsdp.exchange import StepDigest, check_alike, rounded_sum
from manyhosts.strategies.fsdp.place import begin_again, is_kept, is_of_layer, on_several_hosts, place_root
from manyhosts.strategies.fsdp.refused import Replaced, Written, misuse_told
from manyhosts.strategies.materialise import Places, materialise, places_of
from manyhosts.strategies.optimizer_step import asks_within_update
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.traits import Traits
from manyhosts.strategies.units import find_units, has_parts, is_uncut


class FullySharded(CutModel):
    """Parameters, gradients and optimizer state in parts; each unit in full while it is computed."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False)

    def __init__(self, config: FSDP, world: World) -> None:
        """A strategy for several workers.

        Raises:
            ConfigError: `shard` does not divide them, or there is no GPU to keep parts away from.
        """
        if config.cpu_offload and not is_asynchronous(world.device):
            raise ConfigError(
                "parts are to lie in the memory of the host while a GPU computes, and this worker computes on the CPU",
                where="FSDP(cpu_offload=True)",
                fix="leave it out, for the parts lie there already; or start on machines with GPUs",
            )
        shard = config.shard or world.size
        if shard == "host":
            shard = _of_one_host(world) if world.part is None else world.part.parts
        mesh = Mesh(world, shard=shard, tensor=config.by_layers)
        super().__init__(mesh, DTensors(mesh))
        self.config = config
        mesh.along("replicate")  # all workers make its groups together
        self.step_digest = StepDigest(mesh.along("shard"))
        self.late = LateNumbers(world.device)
        self.roots: list[FSDPModule] = []
        self.parameters: list[nn.Parameter] = []
        self.model_watch: ModelWatch | None = None
        self.replaced, self.written = Replaced(nn.Module()), Written()
        self.misuse_told = misuse_told

    def place(self, model: nn.Module) -> nn.Module:
        """Keep this worker's part of `model`, equal to rank 0's.

        Raises:
            ConfigError: it has no units, or cannot be gathered as asked.
        """
        # The loss, where it has parameters, is one more root: it is called by itself, and small.
        uncut, *loss = model.children() if getattr(model, "is_never_called", False) else [model]
        units, places = find_units(uncut, self.config.patterns), places_of(model)
        self.replaced = Replaced(model)
        self.cut_layers(model, uncut)
        self.plan = {"is_far": self._is_far()} if self.world.part is None else {**self.world.part.plan}
        with self.mesh.stood_in_for():
            for root in (uncut, *loss):
                self._place_root(root, units if root is uncut else {}, places)
        self.parameters = list(model.parameters())
        self.model_watch = ModelWatch(model, self.world)
        self.model_watch.watch.parameters = []  # units come and go: what a forward pass sees is not what is kept
        return model

    def step_alone(self, alone: bool) -> None:
        """Have each copy step by the gradient of its own samples (`alone`), or all copies by one."""
        self.members = self.mesh.along("shard") if alone else self.world
        self.of_gradient = DTensors(self.mesh, alike=()) if alone else self.holding

    def cut_layers(self, model: nn.Module, uncut: nn.Module) -> None:
        """Nothing: each worker of a copy computes entire layers. `uncut`: what is called, without the loss."""

    def _place_root(self, root: nn.Module, units: Mapping[str, nn.Module], places: Places) -> None:
        """Keep this worker's part of `root`, and of each of `units` in it; all of it, where it has no parts."""
        if has_parts(root):
            place_root(
                root,
                units,
                self.config,
                mesh=self.mesh,
                step_digest=self.step_digest,
                written=self.written,
                places=places,
                is_far=self.plan["is_far"],
            )
            self.roots.append(cast(FSDPModule, root))
        else:
            materialise(root.modules(), places)
            root.to(self.world.device)
            spread([*root.parameters(), *root.buffers()], self.world)

    def _is_far(self) -> bool:
        """Whether what workers of a copy exchange goes to other hosts; alike for all copies, which may swap workers."""
        return not is_asynchronous(self.world.device) and self.world.any(
            on_several_hosts(self.mesh.along("shard"), self.world.place.node_rank)
        )

    def why_all_end(self) -> str:
        """See `CutModel`."""
        if why := super().why_all_end():
            return why
        if is_asynchronous(self.world.device):
            return "exchanges of a GPU that break off are not put back under fsdp"
        if not all(hasattr(each, "reset_iter_state") for each in self.roots):
            return f"torch {torch.__version__} cannot begin a step of fsdp again"
        return asks_within_update(self.optimizer)

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Gather and sum with the workers of the copy that this one is in now, from no step under way."""
        self.step_digest.begin()
        group = self.mesh.group("shard")
        for root in self.roots:
            begin_again(root, group)
        self.written.forget()
        if self.model_watch is not None:
            self.model_watch.all_is_new()
        return super().resync(source, new=new, gone=gone)

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Accumulate the gradients of this worker's pieces, each part of their sum on the worker that keeps it."""
        for parameter in self.parameters:
            parameter.grad = None
        self.step_digest.begin()
        self._compare_buffers()
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            for root in self.roots:  # what is kept in full after this forward and backward pass, and what is summed
                root.set_reshard_after_backward(is_last or self.config.zero >= 3)
                root.set_requires_gradient_sync(is_last or self.config.zero > 1)
            with misuse_told():
                values = compute(model, piece)
                self.written.check()
                loss = scale(self.counted(tally, values, piece))
                self.step_digest.announce()
                self.step_digest.compare()  # in the backward pass those that have left out a unit would wait for ever
                loss.backward()
            self.replaced.check()
        self.sum_layers()
        self._sum_copies()
        self.step_digest.announce(*(each.grad is not None for each in self.parameters))
        self.step_digest.compare()
        # Those who compute parts of the same layers have exchanged something in each.
        reported = self.step_digest.reported() if self.mesh.leads_replica else [0.0, 0.0]
        tally.control_flags = [*control_flags, *reported]
        uncut, flat, work = self._start_uncut()
        self.world.wait(tally.start_sum())
        self.world.wait(work)
        put_flat(flat, uncut)
        reported, tally.control_flags = tally.control_flags[-2:], tally.control_flags[:-2]
        if (sums := self.late.read(reported)) is not None:
            check_alike(sums, self.mesh.size("replicate", "shard"))
        return tally.outcome()

    def sum_layers(self) -> None:
        """Nothing: each worker has the gradients of entire layers."""

    def _sum_copies(self) -> None:
        """Sum each part over those who hold it, but for copies that step alone.

        What has no gradient is sent as zeros: copies that have used other units learn so with the loss, and until
        then each of their messages must be as long as the others'.
        """
        copies = self.mesh.along("replicate")
        if copies.size == 1 or self.members is not self.world:
            return

        def summed(flat: Tensor) -> Tensor:
            flat = flat.to(self.world.device)
            return rounded_sum(copies, flat) if self.config.reduce == "bf16" else copies.all_reduce(flat)

        in_parts = [each for each in self.parameters if not is_kept(each, self.mesh.size("shard"))]
        # Separately, for the order in which numbers are added depends on the length of a message.
        for own in ([each for each in in_parts if is_of_layer(each) is cut] for cut in (False, True)):
            sum_together(self.gradients(own), summed)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What this worker holds of those of `parameters` that are trained; zeros for one that has none."""
        local = self.holding.local
        trained = [each for each in parameters if each.requires_grad]
        return [torch.zeros_like(local(each)) if each.grad is None else local(each.grad) for each in trained]

    def _start_uncut(self) -> tuple[list[Tensor], Tensor, Work]:
        """Begin to sum the gradients of what each worker keeps in full; what has none is sent as zero."""
        given = [as_real(each) for each in self.gradients([each for each in self.parameters if is_uncut(each)])]
        if not given:
            return [], torch.empty(0), None
        flat = torch.cat([each.double().reshape(-1) for each in given])
        members = self.mesh.data if self.members is self.world else self.members
        return given, flat, members.start_all_reduce(flat)

    def _compare_buffers(self) -> None:
        """See that all workers have the same buffers and train the same parameters, before anything relies on it."""
        assert self.model_watch is not None, "place() comes before"
        self.model_watch.watch.count_step()
        if reported := self.model_watch.numbers():
            sums = self.world.all_reduce(torch.tensor(reported, dtype=torch.float64, device=self.world.device))
            if (found := self.model_watch.read(sums)) is not None:
                self.model_watch.check(found)
            self.model_watch.known(self.model_watch.unfrozen())


def _of_one_host(world: World) -> int:
    """How many workers each host has.

    Raises:
        ConfigError: not all have as many.
    """
    own = world.place.local_size
    first = int(world.agree(own))
    if world.any(own != first):
        raise ConfigError(
            f"the host of rank 0 has {first} workers, and not every host has as many: copies would be cut otherwise",
            where='FSDP(shard="host")',
            fix="start as many workers on each host, or give a number that all of them can be divided by",
        )
    return first
