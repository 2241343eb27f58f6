"""The manifest of a snapshot: what is in the folder, its place in the run, and whether every byte is still there.

    snapshots/step-00000400/manifest.json         this file
                            state.json            the plain values, and where each tensor is among them
                            tensors-00000-of-00002.safetensors …

No torch here, so that the command line can list and check snapshots on any machine. `docs/decisions/0003` says why the
folder looks so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from manyhosts.errors import SnapshotError
from manyhosts.records.json_text import parsed
from manyhosts.records.tensor_parts import TensorRecord, dtype_and_shape, first_flaw, from_dtype_and_shape

FORMAT_VERSION = 5
"""1: nothing in `Facts.run`. 2: what the run was asked, which a resume is compared with. 3: the state may say that the
validation of its step is yet to be made; before, it never was. 4: a tensor may lie in parts in several files, and the
optimizer's state goes by the names of parameters; before, each tensor was in full, and parameters had numbers. 5: there
may be states of callbacks; before, there were none."""
_IN_PARTS_SINCE = 4
NAME = "manifest.json"
_HASH_KEY = ',\n "sha256": "'
_CHUNK_BYTES = 4 << 20
_FIRST_BYTES = 64 << 10
_FOLDER = re.compile(r"(?:step-(?P<step>\d{8,})|best)(?:\.(?P<how>new|old|[0-9a-f]+\.half|half))?")
_GO_ON = "leave it or delete it: a run resumes from the newest snapshot that is complete"
_MAY_BE_COMPLETE = "see that you may read it and that its disk answers; it may be complete, so do not delete it"


def fix_of(cause: BaseException | None = None) -> str:
    """What to do about a snapshot that `cause` shows to be damaged, or that could only not be read."""
    return _MAY_BE_COMPLETE if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else _GO_ON


class NewerFormat(SnapshotError):
    """The snapshot may well be complete, but it takes a newer manyhosts to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Where in a run a snapshot is. Plain values only."""

    step: int
    """Optimizer steps done."""
    epoch: int
    position: Mapping[str, int]
    """How far the data has been read, in the words of the order that reads it."""
    strategy: str
    model: Mapping[str, tuple[str, tuple[int, ...]]]
    """The fingerprint of the model: name → (dtype, shape) of every parameter and buffer."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What the run was asked, to be compared with what it is asked when it continues; empty in format 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file of a snapshot must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that `manifest.json` says."""

    facts: Facts
    world_size: int
    """How many workers wrote it."""
    files: Mapping[str, FileRecord]
    time: float
    """Seconds since the Unix epoch."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Every tensor of the state, by name, and which file has what of it; empty before format 4."""
    format_version: int = FORMAT_VERSION

    @property
    def has_parts(self) -> bool:
        """Whether `tensors` says where each tensor is; before format 4 the headers of the files alone do."""
        return self.format_version >= _IN_PARTS_SINCE

    @property
    def bytes(self) -> int:
        """The size of all files that it names, without its own."""
        return sum(file.bytes for file in self.files.values())

    def to_text(self) -> str:
        """The content of `manifest.json`. Its last entry is a hash over the others: a bit may flip here, too."""
        facts = self.facts
        tensors = {name: str(record) for name, record in self.tensors.items()}
        content = {
            "format_version": self.format_version,
            "step": facts.step,
            "epoch": facts.epoch,
            "position": dict(facts.position),
            "world_size": self.world_size,
            "strategy": facts.strategy,
            "time": self.time,
            "run": dict(facts.run),
            "model": {name: dtype_and_shape(dtype, shape) for name, (dtype, shape) in facts.model.items()},
            **({"tensors": tensors} if self.has_parts else {}),
            "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()},
        }
        head = json.dumps(content, indent=1).removesuffix("\n}")
        return f'{head}{_HASH_KEY}{_hash_of(head)}"\n}}\n'

    @classmethod
    def from_text(cls, text: str, *, where: str) -> Manifest:
        """Read what `to_text` gave.

        Raises:
            SnapshotError: it is damaged, or of a newer format.
        """
        try:
            content = parsed(text)
            if not isinstance(content, dict) or not isinstance(content["format_version"], int):
                raise ValueError("it holds no format_version")
        except (ValueError, KeyError) as cause:
            raise SnapshotError(f"{NAME} is damaged: {cause}", where=where, fix=_GO_ON) from cause
        version = content["format_version"]
        # A newer format may hash itself otherwise, so its number is believed before its hash is looked at.
        if version > FORMAT_VERSION:
            raise NewerFormat(
                f"it has format {version}, and this manyhosts reads formats up to {FORMAT_VERSION}",
                where=where,
                fix="install the manyhosts that wrote it, or a newer one, on this machine",
            )
        head, _, tail = text.rpartition(_HASH_KEY)
        if tail != f'{_hash_of(head)}"\n}}\n':
            raise SnapshotError(f"{NAME} is damaged: its content is not what its hash says", where=where, fix=_GO_ON)
        try:
            manifest = _from_content(content)
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise SnapshotError(
                f"{NAME} is damaged: {type(cause).__name__}: {cause}", where=where, fix=_GO_ON
            ) from cause
        if reason := first_flaw(manifest.tensors):
            raise SnapshotError(reason, where=where, fix=_GO_ON)
        return manifest


def _from_content(content: Mapping[str, Any]) -> Manifest:
    """Raises KeyError, TypeError, ValueError or AttributeError where something lacks or is of another kind."""
    if wrong := [name for name in content["files"] if "/" in name or name.startswith(".")]:
        raise ValueError(f"{wrong[0]!r} is no name of a file in the folder")
    return Manifest(
        facts=Facts(
            step=content["step"],
            epoch=content["epoch"],
            position=content["position"],
            strategy=content["strategy"],
            model={name: from_dtype_and_shape(words) for name, words in content["model"].items()},
            run=content["run"],
        ),
        world_size=content["world_size"],
        files={name: FileRecord(**file) for name, file in content["files"].items()},
        time=content["time"],
        tensors={name: TensorRecord.from_text(each) for name, each in content.get("tensors", {}).items()},
        format_version=content["format_version"],
    )


def _hash_of(head: str) -> str:
    return hashlib.sha256(head.encode()).hexdigest()


class Files(Protocol):
    """The files of one snapshot, wherever they lie. What cannot be read is an OSError, or FileNotFoundError."""

    @property
    def where(self) -> str:
        """The folder or address, for a person."""

    def size(self, name: str) -> int:
        """How many bytes the file has."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """Its content, piece by piece."""


@dataclass(frozen=True, slots=True)
class InFolder:
    """The files of a snapshot on a disk."""

    folder: Path

    @property
    def where(self) -> str:
        """The folder, for a person."""
        return str(self.folder)

    def size(self, name: str) -> int:
        """How many bytes the file has."""
        return (self.folder / name).stat().st_size

    def pieces(self, name: str) -> Iterator[bytes]:
        """Its content, piece by piece."""
        with (self.folder / name).open("rb") as file:
            size = _FIRST_BYTES  # of which a header takes no more, mostly, and no one may want what follows
            while chunk := file.read(size):
                yield chunk
                size = _CHUNK_BYTES


def read(folder: Path) -> Manifest:
    """The manifest of the snapshot in `folder`.

    Raises:
        SnapshotError: there is none, it is damaged, or of a newer format.
    """
    return read_files(InFolder(folder))


def read_files(files: Files) -> Manifest:
    """The same for a snapshot that lies anywhere."""
    try:
        text = b"".join(files.pieces(NAME)).decode()
    except FileNotFoundError as cause:
        raise SnapshotError(f"it has no {NAME}", where=files.where, fix=_GO_ON) from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise SnapshotError(f"{NAME} cannot be read: {cause}", where=files.where, fix=fix_of(cause)) from cause
    return Manifest.from_text(text, where=files.where)


def verify(folder: Path, *, content: bool = True, left_to_others: Collection[str] = ()) -> Manifest:
    """Compare every file of the snapshot in `folder` with what the manifest says; its size only where not `content`.

    `left_to_others`: files whose content somebody else compares; of them, too, the size.

    Raises:
        SnapshotError: something is missing or not as it was written; the first such file is named.
    """
    return verify_files(InFolder(folder), content=content, left_to_others=left_to_others)


def verify_files(files: Files, *, content: bool = True, left_to_others: Collection[str] = ()) -> Manifest:
    """The same for a snapshot that lies anywhere."""
    manifest = read_files(files)
    for name, file in manifest.files.items():
        with readable_file(name, files.where):
            size = files.size(name)
            reads = content and size == file.bytes and name not in left_to_others
            found = _sha256(files.pieces(name)) if reads else file.sha256
        if size != file.bytes:
            raise SnapshotError(f"{name} has {size} bytes in place of {file.bytes}", where=files.where, fix=_GO_ON)
        check_hash(name, found, file, files.where)
    return manifest


@contextmanager
def readable_file(name: str, where: str) -> Iterator[None]:
    """Within, the file `name` of the snapshot at `where` is read.

    Raises:
        SnapshotError: it is not there, or cannot be read.
    """
    try:
        yield
    except FileNotFoundError as cause:
        raise SnapshotError(f"{name} is missing", where=where, fix=_GO_ON) from cause
    except OSError as cause:
        raise SnapshotError(
            f"{name} cannot be read: {cause.strerror or cause}", where=where, fix=fix_of(cause)
        ) from cause


def check_hash(name: str, found: str, file: FileRecord, where: str) -> None:
    """See that the sha256 of what was read of the file `name`, as hex digits, is the one that was written.

    Raises:
        SnapshotError: it is not.
    """
    if found != file.sha256:
        raise SnapshotError(
            f"{name} is damaged: its sha256 is {found[:12]}… in place of {file.sha256[:12]}…", where=where, fix=_GO_ON
        )


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A folder that is a snapshot by its name. Nothing in it has been read yet."""

    path: Path
    step: int
    """-1 for `best`, whose step only the manifest knows."""
    how: Literal["", "new", "old", "half"]
    """Empty: in its place. `new`, `old`: complete, but a replacement was cut short. `half`: never finished."""

    @property
    def name(self) -> str:
        """The name that it has, or would have had."""
        return self.path.name.partition(".")[0]


def found_in(folder: Path) -> list[Found]:
    """Every snapshot folder directly in `folder`, newest step first, `best` last; none where `folder` is not there."""
    rank = {"new": 0, "": 1, "old": 2, "half": 3}
    return sorted(_look(folder), key=lambda found: (-found.step, rank[found.how], found.path.name))


def _look(folder: Path) -> Iterator[Found]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            how = match["how"] or ""
            kind: Literal["", "new", "old", "half"] = (
                "half" if how.endswith("half") else "new" if how == "new" else "old" if how == "old" else ""
            )
            yield Found(path=path, step=int(match["step"] or -1), how=kind)
