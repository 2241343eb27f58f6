"""How workers are laid out along the axes of a mesh: by numbers alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import product
from threading import Event
from typing import Any

import pytest
import torch

from manyhosts.communication.mesh import AXES, Mesh
from manyhosts.config.strategies import BY_NAME, kind_of
from manyhosts.errors import ConfigError
from manyhosts.strategies.strategy import Strategy
from manyhosts.strategies.table import STRATEGIES
from manyhosts.strategies.uncut_model import SingleProcess
from manyhosts.strategies.virtual import VirtualWorkers


@dataclass
class Numbered:
    """A world that nobody has joined: of it only the numbers are known."""

    size: int
    rank: int = 0
    group: object = field(default_factory=object)
    device: torch.device | None = None
    is_joining: bool = False
    part: object = None
    timeout_s: float = 1.0


def world_of(size: int, rank: int = 0) -> Numbered:
    return Numbered(size, rank)


@pytest.mark.parametrize("sizes", [{}, {"shard": 2}, {"tensor": 3}, {"shard": 2, "pipe": 2}])
def test_every_worker_stands_once_in_each_group_along_any_axes(sizes: dict[str, int]) -> None:
    workers = 12
    if workers % math.prod(sizes.values()):
        workers = 16
    mesh = Mesh(world_of(workers), **sizes)
    assert math.prod(mesh.size(axis) for axis in AXES) == workers
    for wanted in product([False, True], repeat=len(AXES)):
        axes = tuple(axis for axis, is_in in zip(AXES, wanted, strict=True) if is_in)
        groups = list(mesh.groups(*axes))
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(workers))
        assert {len(ranks) for ranks in groups} == {mesh.size(*axes)}
        for ranks in groups:  # within a group only the coordinates along its axes differ
            places = [Mesh(world_of(workers, rank), **sizes) for rank in ranks]
            others = {tuple(place.coordinate(axis) for axis in AXES if axis not in axes) for place in places}
            assert len(others) == 1


def test_tensor_runs_over_neighbours_and_pipe_over_the_farthest() -> None:
    mesh = Mesh(world_of(8), tensor=2, pipe=2)
    assert next(mesh.groups("tensor")) == (0, 1)
    assert next(mesh.groups("pipe")) == (0, 4)
    assert next(mesh.groups("replicate")) == (0, 2)


@pytest.mark.parametrize("sizes", [{"shard": 3}, {"shard": 2, "tensor": 4}, {"shard": 8}])
def test_mesh_that_the_workers_do_not_fill_is_refused_with_what_would(sizes: dict[str, int]) -> None:
    block = math.prod(sizes.values())
    with pytest.raises(ConfigError, match=re.escape(f"blocks of {block} workers, and 4 workers")):
        Mesh(world_of(4), **sizes)


def test_mesh_with_an_axis_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard is 0"):
        Mesh(world_of(4), shard=0)


def test_whole_world_is_asked_for_itself_and_no_group_is_made() -> None:
    world = world_of(4)
    assert Mesh(world).data is world  # it has nothing to make a group with
    assert Mesh(world, shard=4).along("shard") is world
    assert Mesh(world).replica.size == 1
    assert Mesh(world).replica.rank == 0


def test_mesh_follows_its_world() -> None:
    world: Any = world_of(4)
    mesh = Mesh(world, shard=2)
    world.size, world.group = 6, object()
    assert mesh.size("replicate") == 3
    world.size, world.group = 5, object()
    with pytest.raises(ConfigError, match="5 workers"):
        mesh.along("shard")


class SlowToGo:
    """A group that broke in the midst of a sum: its destructor waits for a thread that waits for what no one sends."""

    def __init__(self, began: Event, may_end: Event, has_ended: Event) -> None:
        self.began, self.may_end, self.has_ended = began, may_end, has_ended

    def __del__(self) -> None:
        self.began.set()
        self.may_end.wait(10)
        self.has_ended.set()


def test_no_worker_waits_for_a_broken_group_to_be_let_go_of() -> None:
    world: Any = world_of(4)
    began, may_end, has_ended = Event(), Event(), Event()
    groups: list[Any] = ["of those that are left", SlowToGo(began, may_end, has_ended)]
    world.new_groups = lambda ranks: (next(iter(ranks)), groups.pop())
    mesh = Mesh(world, shard=2)
    members = mesh.along("shard")
    assert members.size == 2
    assert not began.is_set(), "the group is gone before it broke"
    world.group = object()  # the workers have changed
    try:
        assert members.process_group == "of those that are left"
        assert not has_ended.is_set(), "it came after the one that broke was let go of"
        assert began.wait(10), "the one that broke is held for ever"
    finally:
        may_end.set()
    assert has_ended.wait(10)


def test_traits_say_what_each_strategy_answers_in_its_own_way() -> None:
    assert BY_NAME.keys() - {"auto"} <= {"single", *STRATEGIES.own}
    assert all(kind_of(name) is not None for name in STRATEGIES.own), "each has settings, and combinations those of one"
    kinds: list[Any] = [SingleProcess, VirtualWorkers, *map(STRATEGIES.load, STRATEGIES.own)]
    assert all("traits" in vars(kind) for kind in kinds), "each says its own"
    for kind in kinds:
        assert kind.traits.synchronous == (kind.exchange is Strategy.exchange) == (kind.average is Strategy.average)
        assert kind.has_own == (not kind.traits.synchronous or not kind.traits.holds_full_model)
        assert kind.resync is not Strategy.resync or not kind.traits.survives_loss
        assert kind.layout is not Strategy.layout or kind.traits.holds_full_model or not kind.traits.synchronous


@pytest.mark.parametrize(("sizes", "axis"), [({"pipe": 2}, "pipe"), ({"shard": 3}, "shard")])
def test_worker_that_comes_late_has_its_place_in_a_copy_before_it_meets_the_others(
    sizes: dict[str, int], axis: str
) -> None:
    for rank in range(6):
        among = Mesh(world_of(6, rank), **sizes).place({"cuts": ["3"]})
        assert among.part == Mesh(world_of(6, rank), **sizes).coordinate(axis)
        assert (among.parts, among.parts_first) == (sizes[axis], axis == "pipe")
        world: Any = world_of(1)
        world.is_joining, world.part = True, among
        late = Mesh(world, **sizes)
        assert late.coordinate(axis) == among.part
        assert late.place({"cuts": ["3"]}) == among
        assert late.size(axis) == sizes[axis]
        assert (late.data.size, late.replica.size) == (1, 1), "there is nobody to exchange anything with"
        world.is_joining, world.size, world.rank = False, 6, rank
        assert late.coordinate(axis) == among.part


def test_who_is_along_an_axis_follows_the_workers() -> None:
    world: Any = world_of(4, 2)
    world.new_groups = lambda parts: next((ranks, object()) for ranks in parts if world.rank in ranks)
    over = Mesh(world, shard=2).along("replicate")
    assert over.ranks == (0, 2)
    world.size, world.rank, world.group = 2, 0, object()
    assert (over.ranks, over.size, over.process_group) == ((0,), 1, None)
