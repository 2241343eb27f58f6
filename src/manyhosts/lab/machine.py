"""The first process of a host in a lab: makes the host what it is, starts what it serves, and takes the host with it.

    unshare --net --uts --ipc --pid --mount --fork python -m manyhosts.lab.machine JSON

It says its process id and then `ready` on its standard output. When its standard input ends, which is when the lab's
owner ends in whatever way, it ends too, and the kernel kills every process of the host with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from manyhosts.lab import filesystem

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
        shown = [*spec["shown"], *filesystem.environment_folders(), str(folder)]
        filesystem.move_into_copy(str(folder / "empty"), shown=shown, empty=spec["empty"], shared=spec["shared"])
        keys = Path("/root/.ssh/authorized_keys")
        keys.parent.mkdir(mode=0o700)
        keys.write_text((folder / "key.pub").read_text())
        Path("/run/sshd").mkdir()  # sshd does its dangerous work in there
    filesystem.mount("proc", "/proc", "proc")
    filesystem.lay_over(str(folder / "hosts"), "/etc/hosts")
    filesystem.lay_over(str(folder / "resolv.conf"), "/etc/resolv.conf")
    filesystem.lay_over(str(folder / "ssh_config"), "/etc/ssh/ssh_config")


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


if __name__ == "__main__":
    main()
