"""A snapshot that workers read together: each file is read by one of them, once, who gives the others what they need.

The reader of a file is the worker that needs most of it. It reads block by block, adds each block to the hash of the
file, and sends it to the workers that need something of it; these copy that into tensors of their own. Only when the
hashes of all files were compared is anything used. Besides these tensors a worker holds one block of each reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import FileRecord, check_hash, readable_file
from manyhosts.records.tensor_parts import Box, TensorRecord
from manyhosts.snapshot.slices import Ahead
from manyhosts.snapshot.tensors import dtype_of

Headers = Mapping[str, Mapping[str, TensorRecord]]
"""Name of a file → the tensors in it, in the order of their bytes."""
_BYTES_AT_ONCE = 16 << 20
"""Of all blocks that are under way at one time."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Some rows of a tensor, or of a part of it, in full."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.size * self.dtype.itemsize


@dataclass(slots=True)
class _Block:
    """What is read of a file at once."""

    file: str
    bytes: int
    rows: list[_Row] = field(default_factory=list)
    """In the order of their bytes; none in the header of a file."""
    takers: list[int] = field(default_factory=list)
    """The workers that need something of it."""


Needs = Mapping[str, Sequence[Box]]
"""Of one worker: the blocks that it needs of each tensor, by name."""


def read_together(
    folder: Path,
    files: Mapping[str, FileRecord],
    headers: Headers,
    times: Mapping[tuple[str, Box], int],
    ahead: Ahead,
    world: World,
    sharers: Sequence[int],
) -> str:
    """Read `files` of the snapshot in `folder`, those of tensors; gives what was wrong with what this worker read.

    `times`: how often this worker will ask for each block; they go into `ahead`. `sharers`: the ranks of the workers
    that have the same disk as this one. Every worker of `world` calls this.
    """
    ahead.times.update(times)
    reported = gather_plain(world, [[name, str(box)] for name, box in ahead.times])
    needs = {rank: _by_name(reported[rank]) for rank in sharers}
    for name, box in ahead.times:
        [dtype] = {header[name].dtype for header in headers.values() if name in header}
        ahead.blocks[name, box] = torch.empty(box.shape, dtype=dtype_of(dtype))
    queues = _queues(files, headers, needs, _BYTES_AT_ONCE // len(sharers))
    source = _Source(folder, files)
    for turn in range(max(map(len, queues.values()))):
        for block, content in _exchanged(queues, turn, source, world):
            _copy(block, content, needs[world.rank], ahead.blocks)
    return source.trouble


def _by_name(pairs: Sequence[Sequence[str]]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for name, box in pairs:
        found.setdefault(name, []).append(Box.from_text(box))
    return found


def _queues(
    files: Mapping[str, FileRecord], headers: Headers, needs: Mapping[int, Needs], at_once: int
) -> dict[int, list[_Block]]:
    """What each worker reads, block by block, by rank: every file is read by the one that needs most of it."""
    queues: dict[int, list[_Block]] = {rank: [] for rank in needs}
    loads = dict.fromkeys(needs, 0)
    for file in sorted(files, key=lambda file: (-files[file].bytes, file)):
        blocks = _blocks(file, files[file].bytes, headers.get(file, {}), at_once)
        wanted = dict.fromkeys(needs, 0)
        for block in blocks:
            block.takers = [rank for rank, need in needs.items() if any(_needs(need, row) for row in block.rows)]
            for rank in block.takers:
                wanted[rank] += block.bytes
        reader = max(needs, key=lambda rank: (wanted[rank] - loads[rank], -rank))
        loads[reader] += files[file].bytes
        queues[reader] += blocks
    return queues


def _needs(need: Needs, row: _Row) -> bool:
    return any(row.box.overlap(box) is not None for box in need.get(row.name, ()))


def _blocks(file: str, size: int, header: Mapping[str, TensorRecord], at_once: int) -> list[_Block]:
    """A file of so many bytes, cut between rows: blocks of at most `at_once` bytes, or of one row that has more."""
    rows = [row for name, record in header.items() for row in _rows(name, record, record.parts[file], at_once)]
    other = size - sum(row.bytes for row in rows)  # a header, or tensors that only one worker remembers
    blocks = [_Block(file, min(at_once, other - begin)) for begin in range(0, other, at_once)]
    for row in rows:
        if not blocks[-1].rows or blocks[-1].bytes + row.bytes > at_once:
            blocks.append(_Block(file, 0))
        blocks[-1].rows.append(row)
        blocks[-1].bytes += row.bytes
    return blocks


def _rows(name: str, record: TensorRecord, box: Box, at_once: int) -> Iterator[_Row]:
    dtype = dtype_of(record.dtype)
    if not box.shape:
        yield _Row(name, dtype, box)
        return
    [first, *offset], [count, *shape] = box.offset, box.shape
    if not box.size:
        return
    step = max(1, at_once * count // (box.size * dtype.itemsize))
    for begin in range(0, count, step):
        some = Box((first + begin, *offset), (min(step, count - begin), *shape))
        yield _Row(name, dtype, some)


class _Source:
    """The files that this worker reads, one after another. With the first trouble it reads no more, but its blocks go
    to the others all the same, without meaning: they wait for as many as there are."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        self.trouble = ""
        self._folder, self._files = folder, files
        self._digest, self._place = hashlib.sha256(), 0

    def read(self, block: _Block) -> Tensor:
        """The next block of its file, as bytes; see that the file has its hash where it ends."""
        content = torch.empty(block.bytes, dtype=torch.uint8)
        try:
            if not self.trouble:
                self._fill(content, block.file)
        except SnapshotError as error:
            self.trouble = error.what
        return content

    def _fill(self, content: Tensor, name: str) -> None:
        record, where = self._files[name], str(self._folder)
        with readable_file(name, where), (self._folder / name).open("rb", buffering=0) as file:
            file.seek(self._place)
            left = content.numpy().data
            while left and (count := file.readinto(left)):
                left = left[count:]
        self._digest.update(content.numpy().data)
        self._place += len(content)
        if self._place == record.bytes:
            check_hash(name, self._digest.hexdigest(), record, where)
            self._digest, self._place = hashlib.sha256(), 0


def _exchanged(
    queues: Mapping[int, Sequence[_Block]], turn: int, source: _Source, world: World
) -> list[tuple[_Block, Tensor]]:
    """Read a block of this worker's and send it; gives those of this turn that this worker needs, with their bytes."""
    blocks = {rank: queue[turn] for rank, queue in queues.items() if turn < len(queue)}
    own = source.read(blocks[world.rank]).to(world.device) if world.rank in blocks else None
    found: list[tuple[_Block, Tensor]] = []
    works = []
    for rank, block in blocks.items():  # in one order on all workers: on a GPU one exchange waits for the one before
        if rank == world.rank and own is not None:
            works += [world.start_send(own, taker) for taker in block.takers if taker != rank]
            found.append((block, own))
        elif world.rank in block.takers:
            content = torch.empty(block.bytes, dtype=torch.uint8, device=world.device)
            works.append(world.start_receive(content, rank))
            found.append((block, content))
    for work in works:
        world.wait(work)
    return [(block, content.cpu()) for block, content in found]


def _copy(block: _Block, content: Tensor, needs: Needs, into: Mapping[tuple[str, Box], Tensor]) -> None:
    """Copy what is needed of a block that was read."""
    begin = 0
    for row in block.rows:
        part = content[begin : begin + row.bytes]
        begin += row.bytes
        for box in needs.get(row.name, ()):
            if (common := row.box.overlap(box)) is not None:
                values = part.clone().view(row.dtype).reshape(row.box.shape)  # a view may not begin at an odd byte
                into[row.name, box][common.within(box)] = values[common.within(row.box)]
