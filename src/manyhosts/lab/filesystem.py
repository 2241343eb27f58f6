"""What a host of a lab sees of the disk: the system of this machine, as a copy of its own that vanishes with it.

The copy is an overlay, so it costs nothing until something is written. Home, /tmp and the like are empty: nothing that
one host writes is seen by another one. Python is where it is here, and cannot be written to.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_READ_ONLY, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE = 1, 4, 32, 4096, 16384
_DETACH = 2

EMPTY = ("root", "home", "tmp", "var/tmp", "run", "mnt", "var/log", "var/spool", "var/lib/slurm", "var/lib/munge")
"""Folders that are every host's own, and empty at its start."""


def environment_folders() -> list[str]:
    """The folders that hold this Python, and the packages that it finds outside of itself."""
    homes = [sys.prefix, sys.base_prefix]
    homes += [path for path in sys.path if path and Path(path).is_dir()]
    chosen: list[str] = []
    for path in sorted({os.path.realpath(home) for home in homes} | {os.path.abspath(home) for home in homes}, key=len):
        if path != "/usr" and not any(path == other or path.startswith(other + "/") for other in chosen):
            chosen.append(path)
    return chosen


def move_into_copy(
    scratch: str, *, shown: Sequence[str], empty: Sequence[str], shared: Mapping[str, str] | None = None
) -> None:
    """Make a copy of this machine's system the root of this mount namespace.

    `scratch` is an empty folder to build it in. `shown` are paths that look as they do here, and are read-only;
    `empty` are more folders, without the leading slash, that the copy has empty. `shared`, path in the copy → folder
    of this machine, are those that it can write to and others see, too.

    Raises:
        OSError: the kernel refused a mount.
    """
    mount("tmpfs", scratch, "tmpfs", data="mode=755")
    root = f"{scratch}/root"
    for name in ("upper", "work", "root"):
        Path(scratch, name).mkdir()
    mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work")
    for name in (*EMPTY, *empty):
        Path(root, name).mkdir(parents=True, exist_ok=True)
        mount("tmpfs", f"{root}/{name}", "tmpfs", data="mode=1777" if name.endswith("tmp") else "mode=755")
    for path in shown:
        _show(path, root + path)
    for path, source in (shared or {}).items():
        Path(root + path).mkdir(parents=True, exist_ok=True)
        mount(source, root + path, flags=_BIND)
    mount("/dev", f"{root}/dev", flags=_BIND | _RECURSIVE)
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", data="mode=1777")  # noqa: S108  # a place to mount at
    mount("sysfs", f"{root}/sys", "sysfs")  # of this network namespace, so that it has this host's interfaces
    old = Path(root, "mnt", "before")
    old.mkdir()
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "mnt/before"], check=True)
    os.chdir("/")
    # What is shown lives on in its own mounts; the rest of the old root is let go.
    _check(_libc().umount2(b"/mnt/before", _DETACH), "/mnt/before")


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    """What mount(2) does.

    Raises:
        OSError: the kernel refused.
    """
    done = _libc().mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    _check(done, target)


def lay_over(source: str, target: str) -> None:
    """Show the file or folder `source` at `target`, which is there already."""
    mount(source, target, flags=_BIND)


def _show(path: str, target: str) -> None:
    Path(target).mkdir(parents=True, exist_ok=True)
    mount(path, target, flags=_BIND | _RECURSIVE)
    mount("", target, flags=_REMOUNT | _BIND | _READ_ONLY)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, place: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)
