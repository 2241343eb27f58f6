"""How several workers write one snapshot: each its part, and rank 0 the name, when all parts are there.

Everything goes through the folder that the workers share, on threads, during training: a collective here would get into
the order of the training's own. Names of a folder on its way:

    step-00000400.<token>.half    being written; the token is new for each try, so that nothing left over gets into it
    step-00000400                 complete
    step-00000400.new, .old       complete; only where one of that name was there already, see `put_in_place`
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import FileRecord, found_in
from manyhosts.records.tensor_parts import TensorRecord, dtype_and_shape, first_flaw, joined
from manyhosts.snapshot.disk import Disk

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has written, or why it could not."""

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """What of the state's tensors is in these files, by their names."""
    failure: str = ""


def report_part(half: Path, rank: int, part: Part, disk: Disk) -> None:
    """Report to rank 0, by a file, that worker `rank` is done.

    Raises:
        OSError: the disk would not have it.
    """
    unready = half / f"part-{rank:05d}.unready"  # no one may read half a word
    if not part.failure:
        files = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in part.files.items()}
        tensors = {name: str(record) for name, record in part.tensors.items()}
        disk.write_file(unready, [json.dumps({"files": files, "tensors": tensors}).encode()])
        disk.rename(unready, half / _record_name(rank))
        return
    try:
        disk.write_file(unready, [part.failure.encode()])
        disk.rename(unready, half / _failure_name(rank))
    except OSError:  # a full disk may still take an empty file, and its name says the most important thing
        disk.create(half / _failure_name(rank)).close()


def hear(half: Path, ranks: Sequence[int], patience_s: float, gave_up: Callable[[], str]) -> dict[int, Part]:
    """Wait until all of `ranks` have left word.

    Raises:
        SnapshotError: one of them failed, or was silent for `patience_s` seconds, or `gave_up` gave a reason.
    """
    heard: dict[int, Part] = {}
    deadline = time.monotonic() + patience_s
    while True:
        for rank in ranks:
            if rank not in heard and (part := _word_of(half, rank)):
                heard[rank] = part
        failed = {rank: part.failure for rank, part in heard.items() if part.failure}
        if failed:
            [rank, reason] = min(failed.items())
            raise SnapshotError(f"worker {rank} could not write its part: {reason}", where=str(half))
        silent = [rank for rank in ranks if rank not in heard]
        if not silent:
            return heard
        if reason := gave_up():
            raise SnapshotError(reason, where=str(half))
        if time.monotonic() > deadline:
            raise SnapshotError(
                f"no part came from worker {', '.join(map(str, silent))} in {patience_s:g} s",
                where=str(half),
                fix="see that the run directory is on a disk that all workers share",
            )
        time.sleep(_LOOK_EVERY_S)


def _word_of(half: Path, rank: int) -> Part | None:
    with suppress(FileNotFoundError):
        return Part(failure=(half / _failure_name(rank)).read_text(errors="replace") or os.strerror(errno.ENOSPC))
    with suppress(FileNotFoundError):
        reported = json.loads((half / _record_name(rank)).read_text())
        return Part(
            {name: FileRecord(**file) for name, file in reported["files"].items()},
            {name: TensorRecord.from_text(record) for name, record in reported["tensors"].items()},
        )
    return None


def tensors_told(
    reported: Iterable[Part], wanted: Mapping[str, tuple[str, tuple[int, ...]]], where: str
) -> dict[str, TensorRecord]:
    """Where the tensors of a state are, as those say who wrote them. `wanted`: name → (dtype, shape) of each.

    Raises:
        SnapshotError: the parts of one are not just that tensor, or are of none of these.
    """
    try:
        found = joined(part.tensors for part in reported)
    except ValueError as cause:
        raise SnapshotError(f"the workers do not hold the same state: {cause}", where=where) from cause
    for name in sorted(found.keys() | wanted.keys()):
        here = found.get(name)
        if here is None and 0 in wanted[name][1]:
            found[name] = TensorRecord(*wanted[name], {})
        elif here is None or name not in wanted or (here.dtype, here.shape) != wanted[name]:
            words = [
                dtype_and_shape(*each) if each else "missing"
                for each in (wanted.get(name), here and (here.dtype, here.shape))
            ]
            what = f"{name} is {words[0]} on worker 0 and {words[1]} on others"
            raise SnapshotError(f"the workers do not hold the same state: {what}", where=where)
    if reason := first_flaw(found):
        raise SnapshotError(f"the workers do not hold all of the state: {reason}", where=where)
    return found


def remove_words(half: Path, ranks: Sequence[int], disk: Disk) -> None:
    """Take the part records out again: the manifest says the same from now on."""
    for rank in ranks:
        disk.remove_file(half / _record_name(rank))


def _record_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _failure_name(rank: int) -> str:
    return f"part-{rank:05d}.failed"


def put_in_place(half: Path, path: Path, disk: Disk) -> None:
    """Give a finished folder its name. Once there was a complete one, there always is: under `path`, `.new` or `.old`.

    Not every file system can exchange two folders in one stroke, so where `path` is taken already there are three
    renames. `.new` is never older than `path`, and `.old` never newer: readers try them in the order new, path, old.
    """
    disk.sync_folder(half)
    _settle(path, disk)
    if path.exists():
        disk.rename(half, _new(path))
        disk.sync_folder(path.parent)  # before the old one goes: a disk may forget a rename and remember a removal
    else:
        disk.rename(half, path)
    _settle(path, disk)
    disk.sync_folder(path.parent)


def _settle(path: Path, disk: Disk) -> None:
    """Let the newest complete one have the name `path`: the end of a replacement, or of one that was cut short."""
    new, old = _new(path), path.with_name(f"{path.name}.old")
    if new.exists():
        if path.exists():
            discard(old, disk)
            disk.rename(path, old)  # and not removed yet: for a moment only there is no `path`
        disk.rename(new, path)
    if path.exists():
        discard(old, disk)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def discard(folder: Path, disk: Disk) -> None:
    """Remove a complete snapshot. Its first step is the name of a half one, so its rest is not taken for complete."""
    if not folder.exists():
        return
    half = folder.with_name(f"{folder.name.partition('.')[0]}.half")
    if folder != half:
        disk.remove_folder(half)
        disk.rename(folder, half)
    disk.remove_folder(half)


def remove_halves(folder: Path, disk: Disk, *, but: Path | None = None) -> list[Path]:
    """Remove what crashes have left in `folder`. Returns what was removed."""
    halves = [found.path for found in found_in(folder) if found.how == "half" and found.path != but]
    for half in halves:
        disk.remove_folder(half)
    return halves
