"""Real workers that write snapshots into one folder, one of which dies in the middle."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import CountingDisk
from ranks import run_ranks

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.events import SnapshotSaved
from manyhosts.records.manifest import found_in
from manyhosts.snapshot.store import Facts, Store

pytestmark = pytest.mark.multiprocess


class DeadlyDisk(CountingDisk):
    """Kills its worker at call number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def about_to(self, operation: str, path: Path | str) -> None:
        super().about_to(operation, path)
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def state(step: int) -> dict[str, Any]:
    return {"step": step, "tensors": [torch.full((50, index), float(step)) for index in range(1, 12)]}


def save(rank: int, folder: Path, steps: list[int]) -> list[str]:
    world = World(Place.from_environment())
    store = Store(folder, keep=2, world=world)
    for step in steps:
        facts = Facts(step=step, epoch=0, position={"samples": step}, strategy="ddp", model={})
        store.save(state(step), facts, own={"residual": torch.full((3,), float(rank))})
        store.before_update()
        world.barrier()  # training's own collectives continue beside it
    store.wait()
    world.barrier()
    world.leave()
    return [type(event).__name__ for event in store.finished()]


def read(rank: int, folder: Path) -> tuple[int, bool, list[float]]:
    world = World(Place.from_environment())
    loaded = Store(folder, keep=2, world=world).latest()
    world.leave()
    if loaded is None:
        return 0, False, []
    step = loaded.facts.step
    equal = all(torch.equal(one, two) for one, two in zip(loaded.state["tensors"], state(step)["tensors"], strict=True))
    return step, equal, [float(own["residual"][0]) for own in loaded.owns]


def die_while_saving(rank: int, folder: Path, victim: int, at: int) -> None:
    world = World(Place.from_environment())
    store = Store(folder, keep=2, world=world, disk=DeadlyDisk(at) if rank == victim else None)
    store.save(state(3), Facts(step=3, epoch=0, position={}, strategy="ddp", model={}))
    store.wait()
    with suppress(RuntimeError):  # the other one is gone, and has its own say
        world.barrier()


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (2, 1), (3, 2)])
def test_snapshots_of_some_workers_are_read_by_another_number(tmp_path: Path, writers: int, readers: int) -> None:
    reported = run_ranks(writers, save, tmp_path, [1, 2, 3])
    assert reported == [[SnapshotSaved.__name__] * 3, *[[]] * (writers - 1)]
    assert [found.step for found in found_in(tmp_path)] == [3, 2]
    assert run_ranks(readers, read, tmp_path) == [(3, True, [float(rank) for rank in range(writers)])] * readers


@pytest.mark.parametrize(("victim", "at"), [(0, 2), (0, 9), (0, 16), (1, 3), (1, 8)])
def test_worker_killed_while_saving_costs_no_earlier_snapshot(tmp_path: Path, victim: int, at: int) -> None:
    run_ranks(2, save, tmp_path, [1, 2])
    with pytest.raises(AssertionError, match=f"rank {victim} of 2"):
        run_ranks(2, die_while_saving, tmp_path, victim, at)
    assert run_ranks(1, read, tmp_path) == [(2, True, [0.0, 1.0])]

    run_ranks(2, save, tmp_path, [3])  # and the half one is cleared away
    assert [found.path.name for found in found_in(tmp_path)] == ["step-00000003", "step-00000002"]
    assert run_ranks(1, read, tmp_path) == [(3, True, [0.0, 1.0])]
