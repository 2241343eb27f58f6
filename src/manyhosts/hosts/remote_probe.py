"""The eye and hand of the ssh launcher on one host: a program that is sent through ssh, and needs Python alone.

It prints what it finds on lines that begin with `manyhosts-probe `, each a JSON object, and takes questions as JSON
objects on its standard input, one on each line. It ends when its input does: when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MARK = "manyhosts-probe "
_SIOCGIFADDR = 0x8915
_HERE_S = 4.0
"""How long a host of the same cluster may take to take a connection."""
SILENCE_S = 20.0
"""How long the launcher may be silent before it counts as gone. It says something every `PULSE_S`."""
PULSE_S = 2.0
MARK_OF_DISK = ".manyhosts-disk-"
"""How files begin that machines leave in a folder to see who else has it."""
_OF_NETWORKS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "gpfs", "lustre"),
    *("nfs", "nfs4", "orangefs", "panfs", "smb3", "wekafs"),
)
_left: set[str] = set()
"""Files that this process has left and that are to be gone when it ends."""


def facts() -> dict[str, Any]:
    """What this host is, as far as a run cares."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": version("torch"),
        "manyhosts": version("manyhosts"),
        "name": socket.gethostname(),
        "address": connection[2] if len(connection) == 4 else "",
        "interfaces": interfaces(),
        "machine": machine(),
        "process": os.getpid(),
        "image": os.environ.get("MANYHOSTS_IMAGE", ""),
    }


def machine() -> str:
    """What no other machine has, nor a container of this one: its id, its last start, its network. Empty: unknown."""
    found = []
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError), open(path) as file:
            found.append(file.read().strip())
    with contextlib.suppress(OSError):
        found.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(found) if len(found) == 3 else ""


def interfaces() -> list[dict[str, str]]:
    """Every address of this host, with the interface that has it and what kind that is."""
    found = []
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            found.append({"name": name, "address": socket.inet_ntoa(answer[20:24]), "kind": _kind(name)})
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, *_, name = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            found.append({"name": name, "address": address, "kind": _kind(name)})
    return found


def way_to(address: str) -> str:
    """The address that this host sends from when it talks to `address`, as its routes say. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])


def try_connections(address: str, port: int, timeout_s: float) -> str:
    """Open a connection and close it. Returns why that failed, or nothing."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def try_all_connections(places: list[list[Any]]) -> list[str]:
    """Connect to all places (address, port) at once. For each, why it was not opened, or nothing."""
    answers = [""] * len(places)

    def ask(index: int) -> None:
        address, port = places[index]
        answers[index] = try_connections(address, port, _HERE_S) if address else ""

    asking = [threading.Thread(target=ask, args=(index,)) for index in range(len(places))]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return answers


def _kind(name: str) -> str:
    """`wireguard` for an encrypted link, else nothing that anybody asks for."""
    with contextlib.suppress(OSError), open(f"/sys/class/net/{name}/uevent") as table:
        if "DEVTYPE=wireguard" in table.read():
            return "wireguard"
    return "wireguard" if os.path.exists(f"/run/wireguard/{name}.sock") else ""  # one that runs outside the kernel


def version(package: str) -> str:
    """The version that is installed; empty where there is none."""
    if importlib.util.find_spec(package) is None:
        return ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"


def stamp(path: str) -> list[int]:
    """What is equal on two hosts only if they look at the same file or folder of one file system."""
    try:
        state = os.stat(path)
    except OSError:
        return []
    return [state.st_ino, state.st_ctime_ns]


def write_marker(folder: str, name: str) -> bool:
    """Leave an empty file in `folder`, which is made if need be. Returns whether that was possible."""
    path = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        return False
    _left.add(path)
    return True


def find_markers(folder: str) -> tuple[list[str], list[int]]:
    """What `write_marker` has left in `folder`, on any machine, and its stamp."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder) if name.startswith(MARK_OF_DISK)], stamp(folder)
    return [], []


def remove_marker(folder: str, name: str) -> None:
    """Take away what `write_marker` has left."""
    path = os.path.join(folder, name)
    with contextlib.suppress(OSError):
        os.unlink(path)
    _left.discard(path)


def is_on_a_network(folder: str, mounts: str = "/proc/self/mounts") -> bool:
    """Whether `folder` is on a file system of a network, as the kernel names it. False where nothing is known."""
    path, best, kind = os.path.realpath(folder), "", ""
    try:
        with open(mounts) as table:
            lines = table.read().splitlines()
    except OSError:
        return False
    for line in lines:
        _, place, found, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")  # a space is \040 there
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, kind = place, found  # of two on one place, the later one covers the other
    return kind in _OF_NETWORKS


def differing(folder: str, files: dict[str, list[int]]) -> list[str]:
    """Which of `files` (path → size, time of its last change in ns) are not like that in `folder`."""
    different = []
    for path, (size, changed_ns) in files.items():
        try:
            state = os.lstat(os.path.join(folder, path))
        except OSError:
            different.append(path)
            continue
        if state.st_size != size or state.st_mtime_ns // 10**9 != changed_ns // 10**9:
            different.append(path)
    return different


def files_below(folder: str, left_out: list[str]) -> dict[str, list[int]]:
    """Path → size, and time of its last change in ns, of all that is below `folder`: what `differing` compares.

    `left_out` are patterns of names in `folder` itself.
    """
    found = {}
    for place, folders, names in os.walk(folder):
        if place == folder:
            folders[:] = [each for each in folders if not _is_one_of(each, left_out)]
            names = [each for each in names if not _is_one_of(each, left_out)]
        links = [each for each in folders if os.path.islink(os.path.join(place, each))]
        for path in [os.path.join(place, each) for each in (*names, *links)] or [place] * (not folders):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                state = os.lstat(path)
                found[os.path.relpath(path, folder)] = [state.st_size, state.st_mtime_ns]
    return found


def _is_one_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


_OF_FOLDERS: dict[str, Callable[..., Any]] = {
    "mark": write_marker,
    "marks": find_markers,
    "unmark": remove_marker,
    "network": is_on_a_network,
    "files": files_below,
}


def _listen(address: str, ports: list[int] | None, listening: list[socket.socket]) -> int:
    """Listen at a free port from the first to the last of `ports`, or at any. Returns it; 0 where none is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in [0] if ports is None else range(ports[0], ports[1] + 1):
        try:
            listening.append(socket.create_server((address, port), family=family, backlog=256))
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
            continue
        return int(listening[-1].getsockname()[1])
    return 0


def _answer(question: dict[str, Any], listening: list[socket.socket]) -> Any:
    if question["ask"] in _OF_FOLDERS:
        return _OF_FOLDERS[question.pop("ask")](**question)
    match question["ask"]:
        case "listen":
            return _listen(question["address"], question["ports"], listening)
        case "try_connections":
            return try_all_connections(question["places"])
        case "way":
            return way_to(question["address"])
        case "make":
            os.makedirs(question["path"], exist_ok=True)
            return os.access(question["path"], os.W_OK)
        case "differing":
            return differing(question["folder"], question["files"])
        case "exists":
            return os.path.exists(question["path"])
    return None


def main() -> None:
    """Say what this host is, then answer until nobody asks any more."""
    try:
        _serve()
    finally:
        _remove_markers()


def _remove_markers() -> None:
    for path in list(_left):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _serve() -> None:
    _say(facts())
    listening: list[socket.socket] = []
    heard = [time.monotonic()]
    threading.Thread(target=_watch, args=(heard,), daemon=True).start()
    for line in sys.stdin:
        heard[0] = time.monotonic()
        if not line.strip():
            continue  # a sign of life
        try:
            _say({"answer": _answer(json.loads(line), listening)})
        except OSError as error:
            _say({"trouble": f"{error.strerror}: {error.filename}" if error.filename else str(error)})


def _watch(heard: list[float]) -> None:
    """End this host's side of the connection when the launcher is gone without a word, as with a cut cable."""
    while time.monotonic() - heard[0] < SILENCE_S:
        time.sleep(1)
    hang_up()


def hang_up() -> None:
    """End this process, and the ssh server's own for this connection."""
    with contextlib.suppress(OSError):
        parent = os.getppid()
        with open(f"/proc/{parent}/comm") as name:
            if name.read().startswith("sshd"):  # or it would wait for the other side for a quarter of an hour
                os.kill(parent, signal.SIGTERM)
    _remove_markers()
    os._exit(1)


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
