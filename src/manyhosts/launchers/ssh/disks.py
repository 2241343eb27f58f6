"""Whether a folder is on a disk that other machines may have, too."""

from __future__ import annotations

import os
from pathlib import Path

_OF_NETWORKS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs", "lustre"),
    *("nfs", "nfs4", "orangefs", "panfs", "smb3", "wekafs"),
)


def is_on_a_network(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether `folder` is on a file system of a network, as the kernel names it. False where nothing is known."""
    path, best, kind = os.path.realpath(folder), "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        _, place, found, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")  # a space is \040 there
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, kind = place, found  # of two on one place, the later one covers the other
    return kind in _OF_NETWORKS
