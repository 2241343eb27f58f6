"""The workers as a mesh with named axes: who holds copies of a model, and who holds its parts.

    replicate   copies that read different samples and sum their gradients
    shard       workers that read different samples, too, and hold parts of each tensor
    tensor      workers that read the same samples and compute parts of each layer
    pipe        workers that read the same samples and compute some layers

`data` (replicate and shard) is who reads different samples: batches, gradients and BatchNorm are over it. `replica`
(tensor and pipe) is who computes the same samples together.

A worker that was started late to join the others knows its place along the axes of one copy, and is alone along
`replicate` until it has met them.

Ranks run over `pipe` slowest and over `tensor` fastest, so that neighbours, which mostly share a host, are those that
exchange most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.collectives import Collectives
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError

if TYPE_CHECKING:  # it takes half a second to load, and few need it
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipe", "replicate", "shard", "tensor")
"""From the one that ranks run over slowest to the one that they run over fastest."""


Members = tuple[tuple[int, ...], dist.ProcessGroup | None]
"""The ranks of some workers of a world, and their group; None where there is but one, or it is that of all."""


class Mesh:
    """A world as a mesh. Where its workers change, `replicate` is what is left of them."""

    def __init__(self, world: World, *, shard: int = 1, tensor: int = 1, pipe: int = 1) -> None:
        """Nothing is exchanged, and no group made, before `along` is asked for one.

        Raises:
            ConfigError: the workers cannot be laid out so.
        """
        self.world = world
        self._fixed = {"shard": shard, "tensor": tensor, "pipe": pipe}
        self.is_cut_twice = shard > 1 < tensor
        """Whether a copy is cut along two axes; one of them may be of a single worker."""
        self._made_for: object = None
        self._along: dict[tuple[str, ...], Members] = {}
        self._both: DeviceMesh | None = None
        self._shape()

    def _shape(self) -> dict[str, int]:
        """The size of each axis now.

        Raises:
            ConfigError: the workers of now do not fill the mesh.
        """
        fixed, workers = self._fixed, self.world.size
        if min(fixed.values()) < 1:
            sizes = ", ".join(f"{axis} is {size}" for axis, size in fixed.items() if size < 1)
            raise ConfigError(
                f"{sizes}, but an axis of the mesh has at least one worker", where="strategy", fix="set it to 1 or more"
            )
        block = self.parts
        if self._comes_late:
            workers = block
        if workers % block:
            given = " and ".join(f"{axis}={size}" for axis, size in fixed.items() if size > 1)
            raise ConfigError(
                f"{given} make blocks of {block} workers, and {workers} workers are no multiple of that",
                where="strategy",
                fix=f"start {block} workers or a multiple of {block}, or choose sizes that {workers} can be divided by",
            )
        return {axis: fixed.get(axis, workers // block) for axis in AXES}

    @property
    def _comes_late(self) -> bool:
        return self.world.is_joining and self.world.part is not None

    @contextmanager
    def stood_in_for(self) -> Iterator[None]:
        """Within, where this worker comes late, PyTorch finds a group of its copy that exchanges nothing."""
        if not self._comes_late:
            yield
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=self.parts)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def place(self, plan: Mapping[str, Any]) -> PartOfCopy:
        """This worker's place in its copy. `plan`: how the model is cut, in plain values."""
        own, part = self._coordinates(self._rank), 0
        for axis, size in self._shape().items():
            part = part * size + own[axis] if axis in self._fixed else part
        return PartOfCopy(part=part, parts=self.parts, parts_first=self._fixed["pipe"] > 1, plan=plan)

    @property
    def _rank(self) -> int:
        part = self.world.part
        return part.part if part is not None and self.world.is_joining else self.world.rank

    @property
    def parts(self) -> int:
        """How many workers hold one copy of the model together."""
        return math.prod(self._fixed.values())

    def any_part(self, own: bool) -> bool:
        """Whether that is so of any part of the model: all workers call this. One's `own` is all, where it is uncut."""
        return own if self.parts == 1 else self.world.any(own)

    def size(self, *axes: str) -> int:
        """How many workers there are along these axes together; along none of them 1."""
        return math.prod(map(self._shape().__getitem__, axes))

    def coordinate(self, axis: str) -> int:
        """This worker's number along one axis, from 0."""
        return self._coordinates(self._rank)[axis]

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for axis, size in reversed(self._shape().items()):
            rank, found[axis] = divmod(rank, size)
        return found

    @property
    def data(self) -> Collectives:
        """Those that read different samples."""
        return self.along("replicate", "shard")

    @property
    def replica(self) -> Collectives:
        """Those that compute the same samples together."""
        return self.along("tensor", "pipe")

    @property
    def leads_replica(self) -> bool:
        """Whether this worker is the first of those that compute the same samples together."""
        return self.coordinate("tensor") == self.coordinate("pipe") == 0

    def along(self, *axes: str) -> Collectives:
        """The workers that differ from this one along `axes` alone, by rank: the world, where that is all of them.

        Where the workers change, it is those of now, but for the world where that was all of them. The first time since
        then all workers of the world call this together, or ask what it gave before, for groups are made.
        """
        wanted = tuple(axis for axis in AXES if axis in axes)
        assert len(wanted) == len(axes), f"axes are {AXES}, each named once, got {axes}"
        if self.size(*wanted) == self.world.size and not self._comes_late:
            return self.world  # and no group is kept: to let go of one that broke may take as long as what broke it
        self.members(wanted)
        return Along(self.world, partial(self.members, wanted))

    def members(self, wanted: tuple[str, ...]) -> Members:
        """Those along `wanted`, in the order of `AXES`. Where no groups are made, that of the world is not kept."""
        size = self.size(*wanted)
        if self._comes_late or size == 1:
            return (self.world.rank,), None
        if size == self.world.size:
            return tuple(range(size)), None
        if self._made_for is not self.world.group:
            # To let go of a group that broke in the midst of a sum takes as long as that sum: no worker waits for it.
            Thread(target=self._along.clear, daemon=True).start()
            self._made_for, self._along = self.world.group, {}
        if wanted not in self._along:
            self._along[wanted] = self.world.new_groups(self.groups(*wanted))
        return self._along[wanted]

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """The ranks of each group along `axes`; every worker is in one of them."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*(range(size) for size in self._shape().values()))):
            others = tuple(number for axis, number in zip(AXES, place, strict=True) if axis not in axes)
            found.setdefault(others, []).append(rank)
        return (tuple(ranks) for ranks in found.values())

    def peers(self, *axes: str) -> tuple[int, ...]:
        """The ranks of those that differ from this worker along `axes` alone, itself among them."""
        return next(ranks for ranks in self.groups(*axes) if self._rank in ranks)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """PyTorch's mesh over these axes, slowest first, on groups of our own; all workers call this together.

        Where a copy is cut along two axes, that of one is a part of the mesh over both, so that PyTorch knows of parts
        of parts.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        wanted = tuple(axis for axis in AXES if axis in axes)
        if self.is_cut_twice and wanted in (("shard",), ("tensor",)):
            self._both = self._both or self.device_mesh("shard", "tensor")
            return self._both[wanted[0]]
        ranks = torch.tensor(self.peers(*wanted)).view([self.size(axis) for axis in wanted])
        groups = [self.group(axis) for axis in wanted]
        given, rows = (groups[0], None) if len(wanted) == 1 else (groups, ranks)
        return DeviceMesh.from_group(given, self.world.device.type, mesh=rows, mesh_dim_names=wanted)

    def group(self, axis: str) -> dist.ProcessGroup:
        """A process group along one axis, also where one worker is there alone."""
        members = self.along(axis)
        if members.process_group is not None:
            return members.process_group
        if members.size == self.world.size:
            assert dist.group.WORLD is not None, "torch.distributed is initialised where there are several workers"
            return dist.group.WORLD
        _, own = self.world.new_groups((rank,) for rank in range(self.world.size))
        assert own is not None, f"worker {self.world.rank} made no group of itself"
        return own


class Along(Collectives):
    """Some of the workers of a world. What they send and wait for counts in the world."""

    def __init__(self, world: World, members: Callable[[], Members]) -> None:
        """`members`: gives those of now."""
        self.world, self.members, self.device, self.timeout_s = world, members, world.device, world.timeout_s

    @property
    def ranks(self) -> tuple[int, ...]:
        """Theirs in the world."""
        return self.members()[0]

    @property
    def rank(self) -> int:
        """This worker's number among them, from 0."""
        return self.ranks.index(self.world.rank)

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Theirs; None where this worker is alone, or they are all."""
        return self.members()[1]
