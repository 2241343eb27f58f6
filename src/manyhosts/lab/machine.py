"""The first process of a host in a lab: makes the host what it is, starts what it serves, and takes the host with it.

    unshare --net --uts --ipc --pid --mount --fork python -m manyhosts.lab.machine JSON

It says its process id and then `ready` on its standard output. When its standard input ends, which is when the lab's
owner ends in whatever way, it ends too, and the kernel kills every process of the host with it.

The host's disk is an overlay of this machine's, so it costs nothing until something is written. Home, /tmp and the like
are empty: nothing that one host writes is seen by another one. Python is where it is here, and read-only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SSH_PORT = 22
_LISTENS = "0A"  # what /proc/net/tcp calls it


def main() -> None:
    """Be the host that `sys.argv[1]` describes: `name`, `folder` (the lab's), `is_desk`, `empty`, `shown`, `shared`."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    _say(os.readlink("/proc/self"))  # as the lab's owner counts, for /proc is still the owner's
    sys.stdin.readline()  # the cable is plugged in now
    _become(spec)
    if not spec["is_desk"]:
        _serve_ssh(str(Path(spec["folder"], f"{spec['name']}.sshd_config")))
    _say("ready")
    _look_after_orphans()


def _become(spec: dict[str, Any]) -> None:
    folder = Path(spec["folder"])
    socket.sethostname(spec["name"])
    if not spec["is_desk"]:
        shown = [*spec["shown"], *environment_folders(), str(folder)]
        move_into_copy(str(folder / "empty"), shown=shown, empty=spec["empty"], shared=spec["shared"])
        keys = Path("/root/.ssh/authorized_keys")
        keys.parent.mkdir(mode=0o700)
        keys.write_text((folder / "key.pub").read_text())
        Path("/run/sshd").mkdir()  # sshd does its dangerous work in there
    mount("proc", "/proc", "proc")
    lay_over(str(folder / "hosts"), "/etc/hosts")
    lay_over(str(folder / "resolv.conf"), "/etc/resolv.conf")
    lay_over(str(folder / "ssh_config"), "/etc/ssh/ssh_config")


def _serve_ssh(config: str) -> None:
    """Start the ssh server and wait until it listens."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "sshd"
    process = os.posix_spawn(program, [program, "-D", "-f", config], os.environ)
    while not _listens(_SSH_PORT):
        if os.waitpid(process, os.WNOHANG)[0]:
            sys.exit("sshd ended at once; what it printed above says why")
        time.sleep(0.005)


def _listens(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(words[1].endswith(f":{port:04X}") and words[3] == _LISTENS for words in map(str.split, lines))


def _look_after_orphans() -> None:
    """Bury the dead, as the first process of a system must, until the owner is gone."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        readable, _, _ = select.select([reading, 0], [], [])
        if 0 in readable and not os.read(0, 64):
            return
        with contextlib.suppress(BlockingIOError):
            os.read(reading, 512)


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


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


if __name__ == "__main__":
    main()
