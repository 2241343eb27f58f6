"""What the operating system offers to end processes for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Set
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: int) -> None:
    """Get signal `number` when the parent process ends, however it ends; 0 takes that back. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that it can still be found. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> list[int]:
    """Process ids of all children of `of`, and theirs. Linux only; empty elsewhere."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found, waiting = [], [of]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def command_of(process: int) -> str:
    """The command line of a process; empty where it has ended, or where it cannot be read. Linux only."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""


def cpu_seconds(of: int) -> float:
    """What the processes that `of` has started, and not seen end, have computed so far."""
    ticks = 0
    for process in descendants(of):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_descendants(of: int | None = None, but: Set[int] = frozenset()) -> None:
    """End whatever process `of`, by itself this one, has started and not seen end, by SIGKILL; all `but` these."""
    for process in set(descendants(os.getpid() if of is None else of)) - but:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def kill_group(leader: int, number: int) -> None:
    """Send signal `number` to a process group that may be gone, or whose leader was forked a moment ago."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            os.kill(leader, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
