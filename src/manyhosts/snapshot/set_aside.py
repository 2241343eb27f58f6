"""Snapshots that must not be continued from, kept under another name to be looked at."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from manyhosts.records.manifest import NAME, found_in

PREFIX = "suspect-"


def newest_step(folder: Path) -> int:
    """The step of the newest snapshot in `folder` that has its name and a manifest; -1 where there is none."""
    found = [each.step for each in found_in(folder) if not each.how and (each.path / NAME).exists()]
    return max(found, default=-1)


def is_newest(path: Path, *, up_to: int) -> bool:
    """Whether no snapshot but `path` is from between it and step `up_to`."""
    steps = [found.step for found in found_in(path.parent) if not found.how and found.step <= up_to]
    return bool(steps) and path.name == f"step-{max(steps):08d}"


def set_aside(folder: Path, *, after: int) -> None:
    """Rename every snapshot in `folder` from after step `after`, complete or not. Several may do so at once."""
    for found in found_in(folder):
        if found.step > after:
            with suppress(FileNotFoundError):  # another host on the same disk was quicker
                found.path.rename(_free(folder / f"{PREFIX}{found.path.name}"))


def _free(path: Path) -> Path:
    """`path`, or the like where something has that name."""
    number = 2
    chosen = path
    while chosen.exists():
        chosen, number = path.with_name(f"{path.name}-{number}"), number + 1
    return chosen
