"""What the kernel counts of processes that it has ended for want of memory, and how much memory there was to have.

A cgroup (a container, a Slurm step, a systemd unit) has counters of its own, which tell who was meant; those of the
whole machine tell only that somebody was.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc")


@dataclass(frozen=True, slots=True)
class Kills:
    """How many processes the kernel has ended for want of memory."""

    own: int | None
    """Of this process's cgroup and those below it; None where it has no such counter."""
    machine: int
    """Of the whole machine; 0 where the kernel does not say."""


def kills(mount: Path = _MOUNT, proc: Path = _PROCESS) -> Kills:
    """What the counters say now. The two folders are where the kernel shows cgroups and processes."""
    own = None
    for folder, is_v2 in _folders(mount, proc)[:1]:
        own = _entry(folder / ("memory.events" if is_v2 else "memory.oom_control"), "oom_kill")
    return Kills(own, _entry(proc / "vmstat", "oom_kill") or 0)


def limit_bytes(mount: Path = _MOUNT, proc: Path = _PROCESS) -> tuple[int, bool]:
    """How much memory processes like this one may have together, and whether a cgroup says so; else the machine's.

    0: nobody says.
    """
    limits = [
        _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        for folder, is_v2 in _folders(mount, proc)
    ]
    total = (_entry(proc / "meminfo", "MemTotal:") or 0) * 1024
    least = min((limit for limit in limits if limit is not None), default=total)
    return (least, True) if 0 < least < (total or least + 1) else (total, False)


def _folders(mount: Path, proc: Path) -> list[tuple[Path, bool]]:
    """The cgroup of this process and those above it, the nearest first; each with whether it is of version 2.

    In a container the path may be that of the host, and what is mounted is the container's own cgroup.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, sign = (mount, "memory.events") if not controllers else (mount / "memory", "memory.oom_control")
        own = top / path.lstrip("/")
        found = [folder for folder in (own, *own.parents) if folder.is_relative_to(top) and (folder / sign).exists()]
        if found:
            return [(folder, not controllers) for folder in found]
    return []


def _entry(path: Path, name: str) -> int | None:
    """The number behind `name` in a table of the kernel."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name] and len(words) > 1:
                return int(words[1])
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # the word `max` is no number: no limit
        return int(path.read_text())
    return None
