"""Reading snapshots: every byte is checked before any of it is used, and what is incomplete is passed over by name."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

from manyhosts.communication.gathering import gather_plain, gather_words
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSkipped
from manyhosts.records.contents import check_owns, headers_of, records_of, unflatten
from manyhosts.records.manifest import (
    NAME,
    Facts,
    FileRecord,
    Found,
    InFolder,
    Manifest,
    fix_of,
    found_in,
    read,
    verify,
)
from manyhosts.records.tensor_parts import Box, TensorRecord
from manyhosts.snapshot.fingerprint import Fingerprint, difference
from manyhosts.snapshot.shared_reading import Headers, read_together
from manyhosts.snapshot.slices import Ahead, RequestedBlocks, TensorReader
from manyhosts.snapshot.tensors import Asked, TensorFile

Fits = Callable[[Manifest], str]
"""Why a run cannot continue from the snapshot with this manifest; nothing where it can."""


Ask = Callable[[Mapping[str, Any]], object]
"""Asks for what will be taken of a state that has a `StoredTensor` in the place of each tensor."""


def everything_fits(manifest: Manifest) -> str:
    """Any snapshot will do."""
    return ""


def same_model(wanted: Fingerprint) -> Fits:
    """Only snapshots of a model with this fingerprint will do."""
    return lambda manifest: difference(manifest.facts.model, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A complete snapshot that was checked. What it holds is on the disk, and read when it is asked for."""

    path: Path
    manifest: Manifest
    headers: Headers
    """What each file of the state's tensors holds."""
    records: Mapping[str, TensorRecord]
    """Every tensor of the state, by its name there, and where it is."""
    state: Mapping[str, Any]
    """What was given to `save`, value by value, with full tensors on the CPU."""
    owns: Owns
    """What each of the workers that saved it gave as its own, by rank."""
    ahead: Ahead = field(default_factory=Ahead)
    """What was read of it together with the other workers."""
    skipped: list[SnapshotSkipped] = field(default_factory=list)
    """Newer ones that were passed over, newest first, each with its reason."""

    @property
    def facts(self) -> Facts:
        """Its place in the run."""
        return self.manifest.facts

    @property
    def stored(self) -> Entries:
        """The state with a `StoredTensor` in the place of each tensor, for who wants blocks of some."""
        return Entries.in_file(self.path / "state.json", lambda: self.tensors().stored)

    def tensors(self) -> TensorReader:
        """What reads tensors of the state, or blocks of them, by name. It holds files open: let go of it."""
        return TensorReader(self.path, self.records, self.ahead)


def load(path: Path, fits: Fits = everything_fits, *, rank: int = 0, checkers: int = 1, tensors: bool = True) -> Loaded:
    """Check and read the snapshot in the folder `path`.

    So many `checkers`, of which this is number `rank`, share out whose bytes each compares with their hashes: what one
    worker alone remembers goes to the worker of that rank, where there is one; files of tensors to the one that
    has least so far. Sizes, headers and plain values every one of them looks at. Not `tensors`: these files are
    compared with their hashes later, when they are read.

    Raises:
        SnapshotError: it is damaged, too new, or does not fit.
    """
    manifest = read(path)
    if reason := fits(manifest):
        raise SnapshotError(
            reason, where=str(path), fix="take back the change, or begin again in another folder (of a run: --run-dir)"
        )
    others = {name for name, whose in _shares(manifest, checkers).items() if whose != rank}
    verify(path, left_to_others=others if tensors else _of_tensors(manifest))
    headers = headers_of(InFolder(path), manifest)
    records = records_of(InFolder(path), manifest, headers)
    check_owns(InFolder(path), manifest, left_to_others=others)
    ahead = Ahead()
    state = Entries.in_file(path / "state.json", lambda: TensorReader(path, records, ahead).full)
    owns = Owns(path, manifest.files, manifest.world_size)
    return Loaded(path=path, manifest=manifest, headers=headers, records=records, state=state, owns=owns, ahead=ahead)


def _of_tensors(manifest: Manifest) -> dict[str, FileRecord]:
    """The files of tensors, of the state and of what one worker alone remembers."""
    return {name: file for name, file in manifest.files.items() if name.endswith(".safetensors")}


def _shares(manifest: Manifest, checkers: int) -> dict[str, int]:
    """Which of the checkers reads all of a file of tensors, by its name."""
    owns = {f"own-{whose:05d}.safetensors": whose % checkers for whose in range(manifest.world_size)}
    shares = {name: whose for name, whose in owns.items() if name in manifest.files}
    loads = [0] * checkers
    for name, whose in shares.items():
        loads[whose] += manifest.files[name].bytes
    left = [name for name in manifest.files if name.startswith("tensors-")]
    for name in sorted(left, key=lambda name: (-manifest.files[name].bytes, name)):
        shares[name] = loads.index(min(loads))
        loads[shares[name]] += manifest.files[name].bytes
    return shares


def newest_complete(folder: Path, *, content: bool = True) -> Found | None:
    """The newest snapshot in `folder` that is complete, by every byte or only by sizes where not `content`; or None."""
    for found in found_in(folder):
        if found.how != "half" and found.step >= 0 and (found.path / NAME).exists():
            with suppress(SnapshotError, OSError):
                verify(found.path, content=content)
                return found
    return None


def newest(
    folder: Path, fits: Fits, world: World, *, sharers: Sequence[int] | None = None, ask: Ask | None = None
) -> Loaded | None:
    """The newest snapshot in `folder` that every worker could read and that fits; None where there is none at all.

    `sharers`: the ranks of the workers that have the same disk as this one, which share out what is to be read; None:
    all. `ask`: what this worker will take of the state, which is read here then, together with the hashes.

    Raises:
        SnapshotError: there are snapshots, and none can be continued from.
    """
    sharers = range(world.size) if sharers is None else sharers
    skipped: list[SnapshotSkipped] = []
    tried = 0
    # Rank 0 says which one all look at next: several hosts may see a shared folder at different moments.
    left = iter(found_in(folder) if world.is_rank_0 else [])
    while (found := _agreed(folder, next((found for found in left if found.step >= 0), None), world)) is not None:
        loaded, reason = None, "half-written: the run ended before it was complete"
        if found.how != "half":
            tried += 1
            loaded, reason = _attempt(found, fits, world, sharers, ask)
        if not world.any(loaded is None) and loaded is not None:
            loaded.skipped.extend(skipped)
            return loaded
        reason = _reason(reason, world)
        skipped.append(SnapshotSkipped(step=found.step, path=found.path, reason=reason, time=time.time()))
    if not tried:
        return None
    named = "\n".join(f"  {one.path.name}: {one.reason}" for one in skipped)
    raise SnapshotError(
        f"no snapshot here can be continued from:\n{named}",
        where=str(folder),
        fix="mend what is named above (permissions, a disk that is not there, a changed model), or begin again in "
        "another folder (of a run: --run-dir)",
    )


def _attempt(
    found: Found, fits: Fits, world: World, sharers: Sequence[int], ask: Ask | None
) -> tuple[Loaded | None, str]:
    loaded, reason, times = None, "", Counter[tuple[str, Box]]()
    try:
        loaded = load(found.path, fits, rank=sharers.index(world.rank), checkers=len(sharers), tensors=ask is None)
        if ask is not None:
            times = requested_blocks(loaded, ask)
    except SnapshotError as error:
        reason = error.what
    if ask is not None and not world.any(bool(reason)) and loaded is not None:
        files = _of_tensors(loaded.manifest)
        reason = read_together(loaded.path, files, loaded.headers, times, loaded.ahead, world, sharers)
    return None if reason else loaded, reason


def requested_blocks(loaded: Loaded, ask: Ask) -> Counter[tuple[str, Box]]:
    """How often `ask` asks for each block of a tensor of the state. Nothing of them is read."""
    noted = RequestedBlocks(loaded.records)
    ask(Entries.in_file(loaded.path / "state.json", lambda: noted.stored))
    return noted.times


def _reason(mine: str, world: World) -> str:
    """Why a snapshot is passed over: what this worker found or, where it found nothing, the first that did."""
    reported = [(rank, reason) for rank, reason in enumerate(gather_words(world, mine)) if reason]
    return mine or next(f"{reason} (found by worker {rank})" for rank, reason in reported)


def _agreed(folder: Path, mine: Found | None, world: World) -> Found | None:
    """What rank 0 has found, on every worker."""
    reported = gather_plain(world, None if mine is None else [mine.step, mine.how])[0]
    if reported is None or mine is not None:
        return mine
    step, how = reported
    return Found(path=folder / f"step-{step:08d}{'.' if how else ''}{how}", step=step, how=how)


@dataclass(frozen=True, slots=True)
class Owns(Sequence[Mapping[str, Any]]):
    """By rank, what each of the workers that saved a snapshot gave as its own; empty for one that gave nothing.

    With a worker its plain values are read; the tensors of one of its values when that value is asked for. Nothing is
    kept here, so what is asked for twice is read twice.
    """

    folder: Path
    files: Collection[str]
    """Of the snapshot."""
    workers: int
    """How many saved it."""
    key: str = ""
    """Of what each gave, only the mapping under this key; empty: all of it."""

    def under(self, key: str) -> Owns:
        """Of what each gave, the mapping under `key`."""
        return replace(self, key=key)

    def __len__(self) -> int:
        return self.workers

    @overload
    def __getitem__(self, rank: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, rank: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """What the worker of this rank gave.

        Raises:
            SnapshotError: it cannot be read; of its tensors this is reported when they are asked for.
        """
        if isinstance(rank, slice):
            return [self[each] for each in range(self.workers)[rank]]
        rank = range(self.workers)[rank]
        text, tensors = self.folder / f"own-{rank:05d}.json", self.folder / f"own-{rank:05d}.safetensors"
        if text.name not in self.files:
            return {}
        own = Entries.in_file(text, lambda: TensorFile(tensors).read)
        return own.under(self.key) if self.key else own


# A state that lies on the disk: each of its values is read when it is asked for.

Read = Callable[[str], Any]
"""Gives the tensor of a name in memory of its own, or what reads it later."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries(Mapping[str, Any]):
    """The values of a flattened mapping. Nothing is kept here: what is asked for twice is read twice."""

    text: Path
    """Where its plain values were read."""
    nodes: Mapping[str, Any]
    """Each value, flattened, by its key."""
    open: Callable[[], Read]
    """Gives what reads tensors for one value; the files that it opens are closed when it goes."""

    @classmethod
    def in_file(cls, text: Path, open: Callable[[], Read]) -> Entries:
        """Those that the file `text` holds.

        Raises:
            SnapshotError: it cannot be read.
        """
        with readable(text):
            return cls(text, _by_key(json.loads(text.read_text(encoding="utf-8"))), open)

    def under(self, key: str) -> Entries:
        """Those of the mapping under `key`; none where it is not there."""
        return replace(self, nodes=_by_key(self.nodes.get(key, {})))

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __getitem__(self, key: str) -> Any:
        """The value under `key`, with tensors of its own.

        Raises:
            KeyError: there is none.
            SnapshotError: it cannot be read.
        """
        node = self.nodes[key]
        with readable(self.text):
            return unflatten(node, Asked(self.open()))


def _by_key(nodes: dict[str, Any]) -> dict[Any, Any]:
    """Of a flattened dict, the nodes of its values by their keys."""
    if nodes.keys() != {"$dict"}:
        return nodes
    return {unflatten(key, {}): node for key, node in nodes["$dict"]}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, the file at `path` is read, and what was kept in it put together.

    Raises:
        SnapshotError: that failed.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {type(cause).__name__}: {cause}",
            where=str(path.parent),
            fix=fix_of(cause),
        ) from cause
