"""What one worker writes of a snapshot: planned from the state, written from a copy of it, and closed by rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhosts.communication.parts import TensorPart
from manyhosts.communication.side_group import SideGroup
from manyhosts.errors import SnapshotError
from manyhosts.records.manifest import NAME, Facts, Manifest
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.commit import Part, put_in_place, remove_words, tensors_told
from manyhosts.snapshot.copy import Copying
from manyhosts.snapshot.disk import Disk
from manyhosts.snapshot.flatten import FlatState
from manyhosts.snapshot.separate_disks import send_own

Owns = Mapping[int, tuple[str, Mapping[str, Tensor]]]
"""What workers keep for themselves: rank → text, and tensors by name."""
Wanted = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name → dtype and shape of every tensor of a state."""
_STATE, _OWN = "state:", "own:"
"""What the names of copies begin with, so that the two do not mix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one worker writes. Its tensors are those of the state, or copies of them."""

    file: str = ""
    """That of its parts of the state's tensors; none where this worker writes nothing."""
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    """What goes into it, by the names of the tensors."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Files that are text: name → content."""
    own_file: str = ""
    """That of the tensors which this worker keeps for itself; none where it keeps nothing, or others write it."""
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """These tensors, by name."""
    wanted: Wanted = field(default_factory=dict)
    """What all workers together are to write; rank 0 alone looks at it."""

    @property
    def originals(self) -> dict[str, Tensor]:
        """Everything that is to be copied, by the name of its copy."""
        state = {_STATE + name: part.local for name, part in self.parts.items()}
        return state | {_OWN + name: tensor for name, tensor in self.own.items()}

    def of(self, copies: Mapping[str, Tensor]) -> Share:
        """The same with the copies in place of the originals."""
        parts = {name: TensorPart(copies[_STATE + name], each.offset, each.shape) for name, each in self.parts.items()}
        return replace(self, parts=parts, own={name: copies[_OWN + name] for name in self.own})


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """All that the writing thread needs; nothing in it changes any more when `copying` is done."""

    path: Path
    half: Path
    facts: Facts
    copying: Copying
    share: Share
    """With the copies."""
    rank: int
    size: int
    writers: Sequence[int]
    """The workers that write a part."""
    begin: float
    exchange: Callable[[Mapping[str, Tensor]], Owns] | None = None
    """Where hosts share no disk: given this worker's own, returns what of all workers' own this one is to write."""


_OF_THE_FIRST = "buffers."
"""Before the names of what modules keep and do not save: its shape may follow the samples of a worker. The first one's
counts."""


def share_of(shared: FlatState, own: FlatState | None, *, rank: int, writers: int) -> Share:
    """What worker `rank` of so many writes: a share of what all hold, its parts of what is cut, and its `own`."""
    texts = {"state.json": json_text(shared.nodes)} if rank == 0 else {}
    if own is not None:
        assert not own.parts, f"worker {rank} keeps parts of {min(own.parts)} for itself, and no one has the others"
        texts[f"own-{rank:05d}.json"] = json_text(own.nodes)
    cut = {name: part for name, part in shared.parts.items() if part.local.numel()}
    alike = {name: tensor for name, tensor in shared.tensors.items() if not name.startswith(_OF_THE_FIRST)}
    if rank == 0:
        cut |= {name: TensorPart.all_of(shared.tensors[name]) for name in shared.tensors.keys() - alike.keys()}
        empty = {name: part.local.new_empty(part.shape) for name, part in shared.parts.items() if 0 in part.shape}
        cut |= {name: TensorPart.all_of(tensor) for name, tensor in empty.items()}  # no one holds a part of it
    return Share(
        file=f"tensors-{rank:05d}-of-{writers:05d}.safetensors",
        parts=share_out(alike, writers)[rank] | cut,
        texts=texts,
        own_file="" if own is None else f"own-{rank:05d}.safetensors",
        own={} if own is None else own.tensors,
        wanted=_wanted(shared) if rank == 0 else {},
    )


def _wanted(shared: FlatState) -> Wanted:
    full: dict[str, Any] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.tensors.items()}
    return full | {name: (part.local.dtype, part.shape) for name, part in shared.parts.items()}


def write_files(task: Task, owns: Owns, disk: Disk) -> Part:
    """Write all files of this worker, and return what is in them.

    Raises:
        OSError: the disk would not have it.
    """
    share, half = task.share, task.half
    files = {share.file: tensor_files.write(half / share.file, share.parts, disk)}
    if share.own_file:
        files[share.own_file] = tensor_files.write(half / share.own_file, share.own, disk)
    for name, text in share.texts.items():
        files[name] = tensor_files.write_text(half / name, text, disk)
    for whose, (text, kept) in owns.items():
        name = f"own-{whose:05d}"
        files[f"{name}.json"] = tensor_files.write_text(half / f"{name}.json", text, disk)
        files[f"{name}.safetensors"] = tensor_files.write(half / f"{name}.safetensors", kept, disk)
    return Part(files, {name: tensor_files.record_of(part, share.file) for name, part in share.parts.items()})


def see_one_moment(copying: Copying) -> None:
    """See that all that was copied is of one moment.

    Raises:
        SnapshotError: something is of a later one.
    """
    if name := copying.changed:
        raise SnapshotError(
            f"{name.removeprefix(_STATE).removeprefix(_OWN)} was changed while the next step was computed, and not by "
            "its update; later snapshots copy everything before that"
        )


def seal(task: Task, reported: Mapping[int, Part], disk: Disk) -> Manifest:
    """Make a snapshot of the files that all have written: see that they hold the state, write the manifest, rename.

    Raises:
        SnapshotError: they do not hold every tensor exactly once.
        OSError: the disk would not have it.
    """
    wanted = {name: (tensor_files.dtype_name(dtype), shape) for name, (dtype, shape) in task.share.wanted.items()}
    manifest = Manifest(
        facts=task.facts,
        world_size=task.size,
        files={name: file for rank in task.writers for name, file in sorted(reported[rank].files.items())},
        tensors=tensors_told(reported.values(), wanted, str(task.path)),
        time=time.time(),
    )
    remove_words(task.half, task.writers, disk)
    disk.write_file(task.half / NAME, [manifest.to_text().encode()])
    put_in_place(task.half, task.path, disk)
    return manifest


def sent(nodes: Any, group: SideGroup | None, to: Sequence[int], tensors: Mapping[str, Tensor]) -> Owns:
    """What all workers keep for themselves, as far as this one writes it. `nodes`, `tensors`: its own, if it has any.

    Raises:
        SnapshotError: a worker is lost.
    """
    if group is None:
        return {} if nodes is None else {0: (json_text(nodes), tensors)}
    try:
        return send_own(nodes, tensors, group, to)
    except RuntimeError as lost:
        raise SnapshotError("the workers changed while it was being written") from lost


def json_text(nodes: Any) -> str:
    """The content of `state.json`."""
    return json.dumps(nodes, indent=1, allow_nan=False) + "\n"


def sentence(trouble: Exception) -> str:
    """`No space left on device: tensors-00000-of-00002.safetensors`."""
    if not isinstance(trouble, OSError):
        return trouble.what if isinstance(trouble, SnapshotError) else f"{type(trouble).__name__}: {trouble}"
    words = trouble.strerror or str(trouble) or type(trouble).__name__
    return f"{words}: {Path(trouble.filename).name}" if isinstance(trouble.filename, str | Path) else words


_CUT_ABOVE_BYTES = 1 << 20
"""Below that a file more to look into costs more than a worker that writes a little longer."""


def share_out(
    tensors: Mapping[str, Tensor], workers: int, *, cut_above: int = _CUT_ABOVE_BYTES
) -> list[dict[str, TensorPart]]:
    """The parts of each worker, about equal in bytes: the largest first, each to the worker that has least so far.

    A tensor is in one share, unless it is larger than an equal share, and than `cut_above` bytes: then it is cut along
    its first dimension. Looks at sizes and order only, so every worker that has the same state comes to the same
    answer. The parts are views of the tensors.
    """
    shares: list[dict[str, TensorPart]] = [{} for _ in range(workers)]
    loads = [0] * workers
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    fair = max(-(-sum(sizes.values()) // workers), cut_above)
    for name in sorted(sizes, key=lambda name: -min(sizes[name], fair)):  # stable: equal ones keep their order
        for part in _cut(tensors[name], sizes[name], fair):
            least = min((worker for worker in range(workers) if name not in shares[worker]), key=loads.__getitem__)
            shares[least][name] = part
            loads[least] += sizes[name] if part.is_all else part.local.nbytes
    return shares


def _cut(tensor: Tensor, size: int, fair: int) -> list[TensorPart]:
    """`tensor`, of `size` bytes, in as few parts of about equal size as keep each, if rows do, within `fair` bytes.

    The largest comes first: each goes to another worker, and no share gets larger than another by more than a part.
    """
    if size <= fair or not tensor.dim():
        return [TensorPart.all_of(tensor)]
    shape = tuple(tensor.shape)
    count = min(-(-size // fair), shape[0])
    bounds = [index * shape[0] // count for index in range(count + 1)]
    parts = [TensorPart(tensor[begin:end], (begin, *[0] * (len(shape) - 1)), shape) for begin, end in pairwise(bounds)]
    return sorted(parts, key=lambda part: -part.local.nbytes)
