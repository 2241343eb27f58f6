"""Snapshots where hosts have several disks: two of them keep each one complete, so that any one host may be lost.

Each copy is complete by itself, with its own manifest, and each host gives its own the name when it is written: no one
waits for anybody. Where a run begins, the newest that is complete on some host is brought to all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhosts.communication import transfer
from manyhosts.communication.gathering import gather_plain, gather_words
from manyhosts.communication.side_group import SideGroup
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.records import run_directory
from manyhosts.records.manifest import NAME, read
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.load import newest_complete

COPIES = 2
"""Disks that keep each snapshot: rank 0's and the next one."""
_CHUNK_BYTES = 16 << 20


def send_own(
    nodes: Any, tensors: Mapping[str, Tensor], group: SideGroup, to: Sequence[int]
) -> dict[int, tuple[str, Mapping[str, Tensor]]]:
    """What each worker keeps for itself, as text and tensors, by rank, on the workers `to`; nothing on all others.

    `nodes`, `tensors`: this worker's, flattened; None and nothing where it keeps nothing. Every worker calls this. They
    send one after another, and those that receive take it in the same order: no two wait for each other.

    Raises:
        RuntimeError: a worker is lost.
    """
    found: dict[int, tuple[str, Mapping[str, Tensor]]] = {}
    for source in range(group.size):
        if source == group.rank:
            text, sent = json.dumps(nodes, allow_nan=False), tensors
            for rank in to:
                if rank != source:
                    transfer.give(group, rank, text, sent)
        elif group.rank in to:
            text, sent = transfer.take(group, source)
        if group.rank in to and (reported := json.loads(text)) is not None:
            found[source] = (_text(reported), sent)
    return found


def _text(nodes: Any) -> str:
    return json.dumps(nodes, indent=1, allow_nan=False) + "\n"


def first_of_disk(world: World) -> bool:
    """Whether this is the worker that writes to its disk, which several hosts may share. Every worker calls this."""
    disks = _disks(world)
    return disks.index(disks[world.rank]) == world.rank


def sharers_of_disk(world: World) -> list[int]:
    """The workers that have the same disk as this one. Every worker calls this."""
    disks = _disks(world)
    return [rank for rank, disk in enumerate(disks) if disk == disks[world.rank]]


def keepers(world: World) -> list[int]:
    """The workers that write a copy of each snapshot, one for each of `COPIES` disks. Every worker calls this."""
    disks = _disks(world)
    return [disks.index(disk) for disk in list(dict.fromkeys(disks))[:COPIES]]


def own_disk(world: World) -> int:
    """A number of this worker's disk."""
    return int(os.environ.get(run_directory.DISK) or world.place.node_rank)


def _disks(world: World) -> list[int]:
    """A number of each worker's disk, by rank. A launcher gives all workers theirs, or none of them."""
    own = torch.tensor([own_disk(world)], dtype=torch.int64, device=world.device)
    return [int(disk) for disk in world.stack(own).flatten().tolist()]


def bring_newest(folder: Path, world: World, disk: Disk) -> None:
    """Bring the newest snapshot that is complete on some host to all hosts that lack it. Every worker calls this."""
    is_first = first_of_disk(world)
    own = newest_complete(folder) if is_first else None
    path = None if own is None else own.path
    reported = [word.split() for word in gather_words(world, "" if path is None else f"{path.name} {_content(path)}")]
    if not any(reported):
        return
    source = max(
        (rank for rank in range(world.size) if reported[rank]), key=lambda rank: (_order(reported[rank][0]), -rank)
    )
    name = reported[source][0].partition(".")[0]
    writes = is_first and reported[world.rank] != reported[source]
    _bring(path if world.rank == source else None, folder / name if writes else None, world, disk, source=source)


def bring_best(path: Path, world: World, disk: Disk, step: int) -> None:
    """Bring the best model to all hosts: that of `step`, from the first host that has it, or else rank 0's.

    Every worker calls this. Nothing is brought where there is none.
    """
    is_first = first_of_disk(world)
    own = ""
    with contextlib.suppress(SnapshotError, OSError):  # one that is damaged is none
        own = f"{read(path).facts.step} {_content(path)}" if (path / NAME).exists() else ""
    reported = [word.split() for word in gather_words(world, own)]
    source = next((rank for rank, words in enumerate(reported) if words and int(words[0]) == step), 0)
    if reported[source]:
        writes = is_first and reported[world.rank] != reported[source]
        _bring(path if world.rank == source else None, path if writes else None, world, disk, source=source)


def _bring(reading: Path | None, writing: Path | None, world: World, disk: Disk, *, source: int) -> None:
    """Copy the folder `reading` of worker `source` to all that have a place for it, each completely or not at all."""
    half = None if writing is None else writing.with_name(f"{writing.name}.0.half")
    if half is not None:
        with suppress(OSError):
            disk.remove_folder(half)
        disk.make_folder(half)
    files = sorted(each.name for each in reading.iterdir()) if reading is not None else []
    bring_files(reading, half, files, world, source=source)
    if half is not None and writing is not None:
        disk.sync_folder(half)
        disk.remove_folder(writing)
        disk.rename(half, writing)
    world.any(False)  # no one reads before all is there


def bring_files(reading: Path | None, writing: Path | None, names: Sequence[str], world: World, *, source: int) -> None:
    """Copy the files `names` of worker `source`, which has the folder `reading`, to all that have one to write to."""
    listed = [[name, _size(reading, name)] for name in names]
    for name, size in gather_plain(world, listed)[source]:
        place = reading / name if reading is not None else None
        _bring_file(place, writing / name if writing is not None else None, size, world, source)


def _bring_file(reading: Path | None, writing: Path | None, size: int, world: World, source: int) -> None:
    """The file gets its name when it is complete: what is there may be open, also as the one that is being read."""
    half = None if writing is None else writing.with_name(f".{writing.name}.half")
    with ExitStack() as stack:
        origin = stack.enter_context(reading.open("rb")) if reading is not None else None
        target = stack.enter_context(half.open("wb")) if half is not None else None
        for begin in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - begin)
            chunk = torch.empty(length, dtype=torch.uint8)
            if origin is not None:
                chunk = torch.frombuffer(bytearray(origin.read(length)), dtype=torch.uint8)
            chunk = world.broadcast(chunk.to(world.device), source).cpu()
            if target is not None:
                target.write(chunk.numpy().tobytes())
        if target is not None:
            target.flush()
            os.fsync(target.fileno())
    if half is not None and writing is not None:
        half.replace(writing)


def _order(name: str) -> tuple[int, int]:
    """What is newer: the step, and of one step what lies in its place."""
    plain, _, how = name.partition(".")
    return int(plain.removeprefix("step-")), {"new": 2, "": 1, "old": 0}[how]


def _content(path: Path) -> str:
    """What distinguishes a snapshot from another one of the same step."""
    files = sorted((name, file.sha256) for name, file in read(path).files.items())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _size(folder: Path | None, name: str) -> int:
    return (folder / name).stat().st_size if folder is not None else 0
