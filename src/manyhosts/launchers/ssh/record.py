"""What hosts bring back over ssh at the end of a run: its record, and the logs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from manyhosts.errors import LaunchError
from manyhosts.hosts import sync
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.disks import HERE, Disks
from manyhosts.launchers.ssh.host import Host, of_all

_STILL_THERE_S = 8.0
"""How long a host has at the end of a run to say that it is there: one that was lost is not waited for long."""

_NAMED = 3
"""What stays on a host is named, up to so many."""


def fetch(run_dir: Path, here: Sequence[Host], disks: Disks, connections: list[Connection]) -> list[str]:
    """Bring the run directory of the host that led here, and the logs of the others: each disk's once.

    Returns what could not be brought, in words. `connections` is kept, where a host is reached again.
    """
    path = str(run_dir / "summary.json")
    if not here:
        return []

    def has(host: Host) -> bool | None:
        with contextlib.suppress(LaunchError, OSError):
            if not host.still_answers():  # ssh has given a host up that was cut off for a while
                host.connect_again(connections)
            return bool(host.connection.ask("exists", path=path, timeout_s=_STILL_THERE_S))
        return None

    have = dict(zip((host.node for host in here), of_all(here, has), strict=True))
    # The first host; or, where the run continued without it and ended on another one's disk, that one.
    led = disks.of(next((node for node, found in have.items() if found), here[0].node))
    by_disk: dict[int, Host] = {}
    for host in sorted(here, key=lambda host: have[host.node] is None):  # those that answer first
        by_disk.setdefault(disks.of(host.node), host)
    by_disk.pop(disks.of(HERE), None)

    def fetch_from(host: Host) -> str:
        stays = f"manyhosts: the record on {host.name} stays there, in {run_dir}"
        if have[host.node] is None:
            return f"{stays}: it does not answer"
        only = "." if disks.of(host.node) == led else "logs"
        try:
            left = sync.fetch(host.connection, run_dir, only=only)
        except (LaunchError, OSError) as trouble:
            return f"{stays}: {trouble}".partition("\n")[0]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"manyhosts: on {host.name} stay, in {run_dir}: {', '.join(left[:_NAMED])}{more}" if left else ""

    return list(filter(None, of_all(list(by_disk.values()), fetch_from)))
