"""CPU time of other programs on this machine while a run trains: a step next to them is longer than on its own.

From Linux's accounts in /proc: all processor time of the machine, less that of this run's processes, which are those
below the topmost command of manyhosts (a study, say, and all its runs), or below this process where there is none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_WORTH_SAYING = 0.1
"""The share of all cores from which others are worth a sentence."""
NOTE = "other programs took "
"""How the sentence begins."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    busy: float
    """Core seconds of the machine so far."""
    seconds: dict[int, float]
    """The same by process; its children that have ended are counted with it."""
    parents: dict[int, int]
    names: dict[int, str]


class Neighbours:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._begin = _moment()

    def in_words(self) -> str:
        """A sentence about what others have taken since; empty where that is little, or cannot be known."""
        begin, now = self._begin, _moment()
        if begin is None or now is None or now.at - begin.at < 1:
            return ""
        taken = _taken(begin, now)
        own = set(_family(now))
        passed, cores = now.at - begin.at, os.cpu_count() or 1
        others = (now.busy - begin.busy - sum(taken[pid] for pid in own)) / passed
        if others < _WORTH_SAYING * cores:
            return ""
        busiest = max((pid for pid in taken if pid not in own), key=lambda pid: taken[pid], default=None)
        most = ""
        if busiest is not None and (share := taken[busiest] / passed) > 0.05:
            words = "most of it" if share > others / 2 else "the busiest of them"
            most = f", {words} {now.names[busiest]} (process {busiest}, {share:.1f})"
        return (
            f"{NOTE}{others:.1f} of the {cores} cores of this host meanwhile{most}: "
            "steps were longer than they are on a quiet machine"
        )


def _taken(begin: _Moment, now: _Moment) -> dict[int, float]:
    """Core seconds between two moments, by process that is left."""
    taken = {pid: seconds - begin.seconds.get(pid, 0.0) for pid, seconds in now.seconds.items()}
    for pid in begin.parents.keys() - now.parents.keys():
        # It ended meanwhile, so all of its life is in its parent's account: what lay before does not count.
        heir = begin.parents[pid]
        while heir in begin.parents and heir not in taken:
            heir = begin.parents[heir]
        if heir in taken:
            taken[heir] = max(0.0, taken[heir] - begin.seconds[pid])
    return taken


def _moment() -> _Moment | None:
    """None where the system keeps no such accounts."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(word) for word in (_PROC / "stat").read_text().split("\n")[0].split()[1:]]
        busy = (sum(fields[:8]) - fields[3] - fields[4]) / tick  # but idle, and waiting for a disk
        found = list(_processes(tick))
    except (OSError, ValueError, IndexError):
        return None
    return _Moment(
        time.monotonic(),
        busy,
        {pid: seconds for pid, _, seconds, _ in found},
        {pid: parent for pid, parent, _, _ in found},
        {pid: name for pid, _, _, name in found},
    )


def _processes(tick: int) -> Iterator[tuple[int, int, float, str]]:
    """Number, parent, core seconds and name of each."""
    for path in _PROC.iterdir():
        if not path.name.isdigit():
            continue
        try:
            before, _, after = (path / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        words = after.split()
        yield int(path.name), int(words[1]), sum(int(each) for each in words[11:15]) / tick, before.partition("(")[2]


def _family(now: _Moment) -> Iterator[int]:
    """The processes of this run."""
    root = pid = os.getpid()
    while pid in now.parents:
        if _is_ours(pid):
            root = pid
        pid = now.parents[pid]
    children: dict[int, list[int]] = {}
    for pid, parent in now.parents.items():
        children.setdefault(parent, []).append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _is_ours(pid: int) -> bool:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.rpartition(b"/")[2].startswith(b"manyhosts") for word in words[:3])
