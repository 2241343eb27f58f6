"""Snapshots where workers share no disk: the leader writes for all, and brings what it has to the others' disks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.communication.gathering import gather_lists, gather_words
from manyhands.communication.world import World
from manyhands.errors import SnapshotError
from manyhands.records.manifest import NAME, found_in, verify
from manyhands.snapshot.disk import Disk
from manyhands.snapshot.skeleton import take_apart

_CHUNK_BYTES = 16 << 20


def gather_own(own: Mapping[str, Any] | None, world: World) -> dict[int, tuple[str, dict[str, Tensor]]]:
    """What each worker keeps for itself, as text and tensors, by rank, on every worker."""
    apart = take_apart(own) if own else None
    names = list(apart.tensors) if apart else []
    text = json.dumps({"nodes": apart.nodes, "names": names} if apart else None, allow_nan=False)
    tensors = gather_lists(world, [apart.tensors[name] for name in names] if apart else [])
    found = {}
    for rank, word in enumerate(gather_words(world, text)):
        told = json.loads(word)
        if told is not None:
            nodes = json.dumps(told["nodes"], indent=1, allow_nan=False) + "\n"
            found[rank] = (nodes, dict(zip(told["names"], tensors[rank], strict=True)))
    return found


def bring_newest(folder: Path, world: World, disk: Disk) -> None:
    """Bring the newest whole snapshot of the leader's `folder` to the disks of other hosts. Every worker calls this."""
    path = _newest_whole(folder) if world.is_leader else None
    [name, *_] = gather_words(world, "" if path is None else path.name)
    if not name:
        return
    files = sorted(each.name for each in path.iterdir()) if path is not None else []
    [listed, *_] = gather_words(world, json.dumps([[each, _size(path, each)] for each in files]))
    is_elsewhere = world.place.node_rank != int(world.agree(world.place.node_rank))
    writes = is_elsewhere and world.place.local_rank == 0
    half = folder / f"{name}.0.half"
    if writes:
        with suppress(OSError):
            disk.remove_folder(half)
        disk.make_folder(half)
    for file, size in json.loads(listed):
        _bring_file(path / file if path is not None else None, half / file if writes else None, size, world)
    if writes:
        disk.sync_folder(half)
        disk.remove_folder(folder / name)
        disk.rename(half, folder / name)
    world.any(False)  # nobody reads before all is there


def _bring_file(source: Path | None, target: Path | None, size: int, world: World) -> None:
    """Copy a file of `size` bytes from the leader, who has `source`, to those who have a `target`."""
    reading = source.open("rb") if source is not None else None
    writing = target.open("wb") if target is not None else None
    try:
        for begin in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - begin)
            chunk = torch.empty(length, dtype=torch.uint8)
            if reading is not None:
                chunk = torch.frombuffer(bytearray(reading.read(length)), dtype=torch.uint8)
            chunk = world.broadcast(chunk.to(world.device)).cpu()
            if writing is not None:
                writing.write(chunk.numpy().tobytes())
    finally:
        for file in (reading, writing):
            if file is not None:
                file.close()


def _newest_whole(folder: Path) -> Path | None:
    for found in found_in(folder):
        if found.how != "half" and found.step >= 0 and (found.path / NAME).exists():
            with suppress(SnapshotError, OSError):
                verify(found.path)
                return found.path
    return None


def _size(folder: Path | None, name: str) -> int:
    return (folder / name).stat().st_size if folder is not None else 0
