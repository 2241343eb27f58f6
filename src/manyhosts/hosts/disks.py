"""Which machines share a folder: each leaves a file there with a name of its own, and looks for those of the others."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from manyhosts.hosts import remote_probe
from manyhosts.hosts.connection import Connection

T = TypeVar("T")
HERE = -1
"""The number of this machine, next to those of nodes."""
MARKS = f"{remote_probe.MARK_OF_DISK}*"
"""A pattern of such files, which are brought nowhere."""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What one machine finds in a folder."""

    mark: str
    """The name of the file that it has left there; empty where it may not write."""
    marks: Sequence[str]
    """All such names that it sees."""
    stamp: Sequence[int]
    """See `remote_probe.stamp`."""

    def shares_with(self, other: FolderFacts) -> bool:
        """Whether both look at one folder. Where neither may write to it, its number and time decide."""
        if self.mark or other.mark:
            return (self.mark in other.marks) if self.mark else (other.mark in self.marks)
        return bool(self.stamp) and list(self.stamp) == list(other.stamp)


class Disks:
    """Which hosts, and this machine, share the working directory and the run directory of one run."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self._folder, self._run_dir = str(folder), str(run_dir)
        self._run = secrets.token_hex(4)
        self._fresh = itertools.count()
        self._of: dict[int, int] = {}
        """Node, or `HERE` → a number of the disk that has its run directory."""

    def find(self, hosts: Mapping[int, Connection]) -> dict[int, int]:
        """Look at the disks of all. Returns for each host, and `HERE`, the first that has the same working directory.

        What is left in the run directory stays until `forget`, for hosts that come later.

        Raises:
            LaunchError: a host does not answer.
        """
        folders = _first_alike(self._inspect(self._folder, hosts, "folder"))
        self._unmark(self._folder, hosts, "folder")
        firsts = _first_alike(self._inspect(self._run_dir, hosts, "record"))
        numbers = {first: next(self._fresh) for first in dict.fromkeys(firsts.values())}
        self._of = {node: numbers[first] for node, first in firsts.items()}
        return folders

    def find_again(self, hosts: Mapping[int, Connection], known: Mapping[int, int]) -> None:
        """Continue with what another process has `known` of these disks: only what it had left there is left again.

        Raises:
            LaunchError: a host does not answer.
        """
        self._inspect(self._run_dir, hosts, "record")
        self._of = dict(known)
        self._fresh = itertools.count(max(known.values(), default=-1) + 1)

    @property
    def known(self) -> dict[int, int]:
        """Node, or `HERE` → a number of the disk that has its run directory."""
        return dict(self._of)

    def find_late(self, node: int, host: Connection) -> bool:
        """Look at the disk of a host that comes later. Returns whether it has the working directory of this machine.

        Raises:
            LaunchError: it does not answer.
        """
        folders = _first_alike(self._inspect(self._folder, {node: host}, "folder"))
        self._unmark(self._folder, {node: host}, "folder")
        looks = self._inspect(self._run_dir, {node: host}, "record")
        others = {self._name(other, "record"): disk for other, disk in self._of.items() if other != node}
        alike = [disk for name, disk in others.items() if name in looks[node].marks]
        self._of[node] = alike[0] if alike else next(self._fresh)
        return folders[node] == HERE

    def of(self, node: int) -> int:
        """A number of the disk that has the run directory of `node`, or of this machine (`HERE`)."""
        return self._of[node]

    def forget(self) -> None:
        """Take away what this machine has left in its run directory; hosts do that when their remote probes end."""
        remote_probe.remove_marker(self._run_dir, self._name(HERE, "record"))

    def _inspect(self, folder: str, hosts: Mapping[int, Connection], what: str) -> dict[int, FolderFacts]:
        names = {node: self._name(node, what) for node in hosts}
        here = self._name(HERE, what) if remote_probe.write_marker(folder, self._name(HERE, what)) else ""
        left = _of_all(hosts, lambda node, host: host.ask("mark", folder=folder, name=names[node]))
        seen = _of_all(hosts, lambda node, host: host.ask("marks", folder=folder))
        looks = {node: FolderFacts(names[node] if left[node] else "", *seen[node]) for node in hosts}
        return {HERE: FolderFacts(here, *remote_probe.find_markers(folder)), **looks}

    def _unmark(self, folder: str, hosts: Mapping[int, Connection], what: str) -> None:
        remote_probe.remove_marker(folder, self._name(HERE, what))
        _of_all(hosts, lambda node, host: host.ask("unmark", folder=folder, name=self._name(node, what)))

    def _name(self, node: int, what: str) -> str:
        return f"{remote_probe.MARK_OF_DISK}{self._run}-{what}-{'here' if node == HERE else node}"


def _first_alike(looks: Mapping[int, FolderFacts]) -> dict[int, int]:
    """Of each machine the first, by number, that sees the same folder."""
    return {
        node: next(other for other in sorted(looks) if other == node or look.shares_with(looks[other]))
        for node, look in looks.items()
    }


def _of_all(hosts: Mapping[int, Connection], ask: Callable[[int, Connection], T]) -> dict[int, T]:
    """What `ask` gives for every host, all at the same time."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(lambda node: ask(node, hosts[node]), hosts), strict=True))
