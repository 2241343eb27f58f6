"""The run's records where hosts have several disks: the one next to the leader's has a copy that goes on growing."""

from __future__ import annotations

import torch

from manyhosts.communication.world import World
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.apart import bring_files, first_of_disk

_NAMES = ("run.json", "metrics.jsonl")


def restore_records(directory: RunDirectory, world: World) -> None:
    """Where the leader's disk has no record, and another host's has, bring it. Every worker calls this at the start."""
    own = directory.metrics.stat().st_size if first_of_disk(world) and directory.metrics.exists() else 0
    sizes = world.stack(torch.tensor([own], dtype=torch.int64, device=world.device)).flatten().tolist()
    if sizes[0] or not any(sizes):
        return
    source = sizes.index(max(sizes))
    has, lacks = world.rank == source, world.is_leader
    path = directory.path
    bring_files(path if has else None, path if lacks else None, _NAMES, world, source=source)


def copy_records(directory: RunDirectory, world: World, *, lacks: bool) -> None:
    """Bring the leader's record to the workers that lack it. Every worker calls this; the leader's is on its disk."""
    if world.any(lacks):
        path = directory.path
        path.mkdir(parents=True, exist_ok=True)
        bring_files(path if world.is_leader else None, path if lacks else None, _NAMES, world, source=0)
