"""Reading snapshots: every byte is checked before any of it is used, and what is not whole is passed over by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from manyhosts.communication.world import World
from manyhosts.errors import SnapshotError
from manyhosts.events import SnapshotSkipped
from manyhosts.records.manifest import NAME, Facts, Found, Manifest, found_in, read, verify
from manyhosts.snapshot import tensors as tensor_files
from manyhosts.snapshot.fingerprint import Fingerprint, difference
from manyhosts.snapshot.skeleton import put_together

Fits = Callable[[Manifest], str]
"""Why a run cannot go on from the snapshot with this manifest; nothing where it can."""

_HOW: tuple[Literal["", "new", "old", "half"], ...] = ("", "new", "old", "half")


def everything_fits(manifest: Manifest) -> str:
    """Any snapshot will do."""
    return ""


def same_model(wanted: Fingerprint) -> Fits:
    """Only snapshots of a model with this fingerprint will do."""
    return lambda manifest: difference(manifest.facts.model, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A snapshot that was read, whole."""

    path: Path
    manifest: Manifest
    state: Any
    """What was given to `save`, with all tensors on the CPU."""
    owns: list[Any]
    """What each of the workers that saved it gave as its own, by rank; None for one that gave nothing."""
    skipped: list[SnapshotSkipped] = field(default_factory=list)
    """Newer ones that were passed over, newest first, each with its reason."""

    @property
    def facts(self) -> Facts:
        """Where in the run it stands."""
        return self.manifest.facts


def load(path: Path, fits: Fits = everything_fits) -> Loaded:
    """Check and read the snapshot in the folder `path`.

    Raises:
        SnapshotError: it is damaged, too new, or does not fit.
    """
    manifest = read(path)
    if reason := fits(manifest):
        raise SnapshotError(reason, where=str(path), fix="start in another --run-dir, or take back the change")
    verify(path)
    tensors: dict[str, Any] = {}
    for name in manifest.files:
        if name.startswith("tensors-"):
            tensors |= tensor_files.read(path / name)
    owns: list[Any] = []
    for rank in range(manifest.world_size):
        if f"own-{rank:05d}.json" not in manifest.files:
            owns.append(None)
            continue
        owns.append(_assemble(path / f"own-{rank:05d}.json", tensor_files.read(path / f"own-{rank:05d}.safetensors")))
    return Loaded(path=path, manifest=manifest, state=_assemble(path / "state.json", tensors), owns=owns)


def _assemble(path: Path, tensors: dict[str, Any]) -> Any:
    try:
        return put_together(json.loads(path.read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise SnapshotError(
            f"{path.name} cannot be read: {type(cause).__name__}: {cause}",
            where=str(path.parent),
            fix="delete the folder",
        ) from cause


def newest_whole(folder: Path, *, content: bool = True) -> Found | None:
    """The newest snapshot in `folder` that is whole, by every byte or only by sizes where not `content`; or None."""
    for found in found_in(folder):
        if found.how != "half" and found.step >= 0 and (found.path / NAME).exists():
            with suppress(SnapshotError, OSError):
                verify(found.path, content=content)
                return found
    return None


def newest(folder: Path, fits: Fits, world: World) -> Loaded | None:
    """The newest snapshot in `folder` that every worker could read and that fits; None where there is none at all.

    Raises:
        SnapshotError: there are snapshots, and none can be gone on from.
    """
    skipped: list[SnapshotSkipped] = []
    tried = 0
    # The leader says which one all look at next: several hosts may see a shared folder at different moments.
    left = iter(found_in(folder) if world.is_leader else [])
    while (found := _agreed(folder, next((found for found in left if found.step >= 0), None), world)) is not None:
        loaded, reason = None, "half-written: the run ended before it was whole"
        if found.how != "half":
            tried += 1
            loaded, reason = _attempt(found, fits)
        if not world.any(loaded is None) and loaded is not None:
            loaded.skipped.extend(skipped)
            return loaded
        reason = reason or "another worker could not read it"
        skipped.append(SnapshotSkipped(step=found.step, path=found.path, reason=reason, time=time.time()))
    if not tried:
        return None
    named = "\n".join(f"  {one.path.name}: {one.reason}" for one in skipped)
    raise SnapshotError(
        f"no snapshot here can be gone on from:\n{named}",
        where=str(folder),
        fix="start anew in another --run-dir; to start anew in this one, delete the folder named above",
    )


def _attempt(found: Found, fits: Fits) -> tuple[Loaded | None, str]:
    try:
        return load(found.path, fits), ""
    except SnapshotError as error:
        return None, error.what


def _agreed(folder: Path, mine: Found | None, world: World) -> Found | None:
    """What the leader has found, on every worker."""
    if world.size == 1:
        return mine
    step = int(world.agree(-1 if mine is None else mine.step))
    how = _HOW[int(world.agree(0 if mine is None else _HOW.index(mine.how)))]
    if step < 0 or mine is not None:
        return mine
    return Found(path=folder / f"step-{step:08d}{'.' if how else ''}{how}", step=step, how=how)
