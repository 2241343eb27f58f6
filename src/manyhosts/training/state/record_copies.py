"""The run's records where hosts have several disks: each has a copy that continues growing with the leader's."""

from __future__ import annotations

from pathlib import Path

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.records.line_file import read_from_end
from manyhosts.records.run_directory import RunDirectory
from manyhosts.snapshot.separate_disks import bring_files, first_of_disk

_NAMES = ("run.json", "metrics.jsonl")
_NO_RECORD = -1


def restore_records(directory: RunDirectory, world: World, step: int) -> None:
    """Where the leader's record does not reach as far as `step`, and another host's does, or farther, bring that one.

    Every worker calls this at the start, when the run continues after `step`.
    """
    own = last_step(directory.metrics) if first_of_disk(world) else _NO_RECORD
    steps: list[int] = gather_plain(world, own)
    if steps[0] >= min(step, max(steps)):
        return
    source = steps.index(max(steps))
    has, lacks = world.rank == source, world.is_leader
    path = directory.path
    bring_files(path if has else None, path if lacks else None, _NAMES, world, source=source)


def last_step(path: Path) -> int:
    """The last step that the record in `path` has a line of; 0 where it has none, and less where there is no record."""
    if not path.exists():
        return _NO_RECORD
    return next((line["step"] for line in read_from_end(path) if line.get("event") == "step"), 0)


def copy_records(directory: RunDirectory, world: World, *, lacks: bool) -> None:
    """Bring the leader's record to the workers that lack it. Every worker calls this; the leader's is on its disk."""
    if world.any(lacks):
        path = directory.path
        path.mkdir(parents=True, exist_ok=True)
        bring_files(path if world.is_leader else None, path if lacks else None, _NAMES, world, source=0)
