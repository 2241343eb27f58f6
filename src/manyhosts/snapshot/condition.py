"""What there is to continue from, and in what condition. No torch here: the command line looks, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from manyhosts.errors import SnapshotError
from manyhosts.records.contents import check_owns, records_of
from manyhosts.records.manifest import Found, Manifest, NewerFormat, read_files, verify_files
from manyhosts.snapshot.location import SnapshotLocation

UNDER_WAY_S = 600
"""A half-written one that changed within so many seconds may be one that a run is writing just now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A snapshot that was looked at."""

    found: Found
    where: str
    """Its folder or address."""
    kind: Literal["whole", "damaged", "half", "newer"]
    reason: str
    """What is wrong with it; nothing for a complete one."""
    manifest: Manifest | None
    """None where it cannot be read."""
    bytes: int
    """What it takes, whatever is wrong with it."""
    fresh: bool = False
    """Whether it is half-written, perhaps by a run that is still at it."""

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.found.path.name

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        facts = self.manifest.facts if self.manifest else None
        return {
            "name": self.name,
            "path": self.where,
            "best": self.found.name == "best",
            "step": facts.step if facts else self.found.step if self.found.step >= 0 else None,
            "epoch": facts.epoch if facts else None,
            "bytes": self.bytes,
            "time": self.manifest.time if self.manifest else None,
            "condition": self.kind,
            "reason": self.reason,
        }


def look(location: SnapshotLocation, *, content: bool = True) -> list[Condition]:
    """Every snapshot on `location`, the newest first. Every byte is read, or only every size where not `content`.

    Raises:
        SnapshotError: there is no such place.
    """
    looked_at = []
    for found in location.found():
        with suppress(FileNotFoundError):  # a run may have removed or renamed some meanwhile
            one = _condition(location, found, content=content)
            location.total_bytes(found)
            looked_at.append(one)
    return looked_at


def look_at_one(location: SnapshotLocation, name: str) -> Condition:
    """One snapshot on `location` by its name (`best`, `step-00000400`) or step; the newest complete one for no name.

    Raises:
        SnapshotError: there is none of that name; or, for no name, none that is complete.
    """
    found = look(location, content=False)
    named = [one for one in found if name in (one.name, one.found.name, str(one.found.step))] if name else found
    chosen = next((one for one in named if one.kind == "whole"), None) or next(iter(named if name else []), None)
    if chosen is None:
        names = ", ".join(one.name for one in found)
        raise SnapshotError(
            f"there is no snapshot {name!r}" if name else "there is no snapshot that is complete",
            where=location.where,
            fix=f"choose one that is there: {names}" if found else "see that the run has made one: manyhosts status",
        )
    return chosen


def _condition(location: SnapshotLocation, found: Found, *, content: bool) -> Condition:
    size, files = location.total_bytes(found), location.files(found)
    kind: Literal["whole", "damaged", "half", "newer"] = "whole"
    reason, manifest = "", None
    if found.how == "half":
        changed = location.changed(found)
        fresh = changed is None or time.time() - changed < UNDER_WAY_S
        reason = "half-written" + (", perhaps by a run that is still at it" if fresh else "")
        return Condition(
            found=found, where=files.where, kind="half", reason=reason, manifest=None, bytes=size, fresh=fresh
        )
    try:
        manifest = read_files(files)
        verify_files(files, content=content)
        if content:
            records_of(files, manifest)
            check_owns(files, manifest)
    except NewerFormat as error:
        kind, reason = "newer", error.what
    except SnapshotError as error:
        kind, reason = "damaged", error.what
    return Condition(found=found, where=files.where, kind=kind, reason=reason, manifest=manifest, bytes=size)


def superfluous(conditions: Sequence[Condition], *, keep: int) -> list[Condition]:
    """What may go so that the newest `keep` complete ones stay: older ones, half ones, and damaged ones.

    Where none is complete, no damaged one goes: somebody may want to save what can be saved. `best`, and what takes a
    newer manyhosts to judge, always stay, and so does a half one that may be under way.
    """
    steps: list[int] = []
    gone = []
    for one in conditions:
        if one.kind == "whole" and one.found.step >= 0 and one.found.step not in steps and len(steps) < keep:
            steps.append(one.found.step)
        elif one.kind == "half":
            if not one.fresh:
                gone.append(one)
        elif one.found.step >= 0 and one.kind in ("whole", "damaged"):
            gone.append(one)
    return gone if steps else [one for one in gone if one.kind == "half"]


def remove(location: SnapshotLocation, conditions: Sequence[Condition]) -> None:
    """Remove these.

    Raises:
        OSError: the disk, or the store, would not have it.
    """
    for one in conditions:
        location.remove(one.found)


def describe(condition: Condition) -> str:
    """The manifest for a person.

    Raises:
        SnapshotError: it cannot be read.
    """
    manifest = condition.manifest
    if manifest is None or condition.reason:
        raise SnapshotError(condition.reason, where=condition.where, fix="choose one that is complete")
    facts = manifest.facts
    lines = [
        ("path", condition.where),
        ("step", f"{facts.step} (epoch {facts.epoch})"),
        ("position", ", ".join(f"{key} {value}" for key, value in facts.position.items())),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))),
        ("workers", f"{manifest.world_size}, strategy {facts.strategy}"),
        ("format", str(manifest.format_version)),
        *((key, _plain(value)) for key, value in facts.run.items() if not isinstance(value, dict | list)),
    ]
    width = max(10, *(len(key) for key, _ in lines))
    text = "\n".join(f"{key:<{width}} {value}" for key, value in lines if value)
    model = [(name, f"{dtype} {list(shape)}") for name, (dtype, shape) in facts.model.items()]
    files = [(name, f"{file.bytes:>12} B", file.sha256) for name, file in manifest.files.items()]
    return "\n".join([text, *_columns("model", model), *_columns("files", files)])


def _plain(value: object) -> str:
    """A setting as `--set` takes it: `none`, `true`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _columns(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [title, *(f"  {line}" for line in lines)] if rows else []
