"""The eye and hand of the ssh launcher on one host: a program that is sent through ssh, and needs Python alone.

It prints what it finds on lines that begin with `manyhosts-probe `, each a JSON object, and takes questions as JSON
objects on its standard input, one on each line. It ends when its input does: when the launcher is gone. The standard
library of Python 3.8 is enough for it: hosts with an old one are reported. The doctor's probe uses `serve`, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import importlib.util
import json
import os
import platform
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARK = "manyhosts-probe "
_SIOCGIFADDR = 0x8915
_HERE_S = 4.0
"""How long a host of the same cluster may take to take a connection."""
_TUNNEL_S = 12.0
"""The same through a tunnel, which its first packet makes: WireGuard repeats a lost handshake after 5 s and 10 s."""
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
        answers[index] = try_connections(address, port, _patience_s(address)) if address else ""

    asking = [threading.Thread(target=ask, args=(index,)) for index in range(len(places))]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return answers


def _patience_s(address: str) -> float:
    """How long a connection to `address` may take to be opened."""
    own = way_to(address)
    tunnelled = any(each["address"] == own and _is_tunnel(each["name"]) for each in interfaces())
    return _TUNNEL_S if tunnelled else _HERE_S


def _is_tunnel(name: str) -> bool:
    """Whether what is sent over an interface is packed again: WireGuard, and what a program does as Tailscale."""
    return _kind(name) == "wireguard" or os.path.exists(f"/sys/class/net/{name}/tun_flags")


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
    from importlib import metadata  # it loads much, and agents have no use for it

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
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


def differing(folder: str, files: dict[str, list[int]], contents: dict[str, str]) -> list[str]:
    """Which of `files` (path → size, time of its last change in ns) are not like that in `folder`.

    `contents` are the hashes of some of them: `content_of`.
    """
    different = []
    for path, (size, changed_ns) in files.items():
        try:
            state = os.lstat(os.path.join(folder, path))
        except OSError:
            different.append(path)
            continue
        is_like = state.st_size == size and state.st_mtime_ns // 10**9 == changed_ns // 10**9
        if is_like and path in contents:
            is_like = content_of(os.path.join(folder, path)) == contents[path]
        if not is_like:
            different.append(path)
    return different


def content_of(path: str) -> str:
    """The SHA-256 of a file, or of where a link leads; empty for what is neither, or cannot be read."""
    digest = hashlib.sha256()
    with contextlib.suppress(OSError):
        if os.path.islink(path):
            return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
        if os.path.isfile(path):
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            return digest.hexdigest()
    return ""


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


def listen(address: str, ports: list[int] | None, listening: list[socket.socket]) -> int:
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


def make(path: str) -> bool:
    """Make a folder. Returns whether it can be written to."""
    os.makedirs(path, exist_ok=True)
    return os.access(path, os.W_OK)


COMMANDS: Mapping[str, Callable[..., Any]] = {
    "mark": write_marker,
    "marks": find_markers,
    "unmark": remove_marker,
    "network": is_on_a_network,
    "files": files_below,
    "differing": differing,
    "exists": os.path.exists,
    "make": make,
    "way": way_to,
    "try_connections": try_all_connections,
}
"""By what is asked: what gives the answer."""


def main() -> None:
    """Say what this host is, then answer until standard input ends."""
    reserved: list[socket.socket] = []
    deeds = {**COMMANDS, "listen": lambda address, ports: listen(address, ports, reserved)}
    serve(sys.stdin, sys.stdout, facts(), deeds, remove_markers)


def remove_markers() -> None:
    """Take away all that `write_marker` has left here."""
    for path in list(_left):
        with contextlib.suppress(OSError):
            os.unlink(path)


def serve(
    coming: Iterable[str],
    going: Any,
    hello: Mapping[str, Any],
    deeds: Mapping[str, Callable[..., Any]],
    close: Callable[[], None],
) -> None:
    """Say `hello` on `going`, a stream of text, then answer what comes until nothing does; `close` leaves nothing here.

    Questions are taken while an answer is worked at, so that signs of life (empty lines) are heard.
    """
    heard = [time.monotonic()]
    questions: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(coming, questions, heard), daemon=True).start()
    threading.Thread(target=_watch, args=(heard, close), daemon=True).start()

    def say(content: Mapping[str, Any]) -> None:
        going.write(MARK + json.dumps(content) + "\n")
        going.flush()

    try:
        say(hello)
        while line := questions.get():
            asked = json.loads(line)
            question = asked.pop("ask")
            try:
                if question not in deeds:
                    raise ValueError(f"{question!r} is not known here")
                say({"answer": deeds[question](**asked)})
            except Exception as error:
                say({"trouble": _in_words(error)})
    except OSError:
        pass  # the other side is gone
    finally:
        close()


def _read(coming: Iterable[str], questions: queue.Queue[str], heard: list[float]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in coming:
            heard[0] = time.monotonic()
            if line.strip():
                questions.put(line)
    questions.put("")


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _watch(heard: list[float], close: Callable[[], None]) -> None:
    """End this host's side of the connection when the other is gone without a word, as with a cut cable."""
    while time.monotonic() - heard[0] < SILENCE_S:
        time.sleep(1)
    close()
    hang_up()


def hang_up() -> None:
    """End this process, and the ssh server's own for this connection."""
    with contextlib.suppress(OSError):
        parent = os.getppid()
        with open(f"/proc/{parent}/comm") as name:
            if name.read().startswith("sshd"):  # or it would wait for the other side for a quarter of an hour
                os.kill(parent, signal.SIGTERM)
    os._exit(1)


if __name__ == "__main__":
    main()
