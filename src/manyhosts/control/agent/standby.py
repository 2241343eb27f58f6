"""A fork server outlives an agent that was killed, and serves the next one: what it has loaded is not loaded again.

Its name can be computed only by the agents of one host in one run, and the process that answers to it, or
asks for it, must be the same user. It waits for `PATIENCE_S`, and no longer than the launcher lives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from manyhosts import __version__

PATIENCE_S = 120.0
_ANSWER_S = 3.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_OF_A_LOGIN = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID", "SHLVL", "_")
"""Variables in which two logins differ, and that nothing reads which is loaded here."""


def name_for(node: int, run: str, environment: Mapping[str, str], folder: str, *, stdin: bool) -> str:
    """What a fork server is known by that an agent of node `node` can use, in the start `run`.

    Empty where the system cannot do this.
    """
    if not hasattr(os, "pidfd_open"):  # Linux alone has it, and names of sockets without a file
        return ""
    kept = sorted((name, value) for name, value in environment.items() if name not in _OF_A_LOGIN)
    facts = [node, run, kept, folder, stdin, sys.executable, __version__, os.getuid()]
    return "manyhosts-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


class Waiting:
    """In the fork server: where the next agent connects. There is none while the first one lives."""

    def __init__(self, name: str, launcher: int) -> None:
        """`launcher` is a process of this host that ends with the launcher.

        Raises:
            OSError: that has ended already, or somebody has the name.
        """
        self._launcher = os.pidfd_open(launcher)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(f"\0{name}")
        self._listening.listen(4)

    def fileno(self) -> int:
        """Readable when somebody connects."""
        return self._listening.fileno()

    def refuse(self) -> None:
        """Send somebody away: there is an agent."""
        self._listening.accept()[0].close()

    def next_agent(self, stays_s: float = 0.0) -> socket.socket | None:
        """The connection to the next agent; None where none comes.

        `stays_s`: wait so long, even after the end of the launcher.
        """
        others = [] if stays_s else [self._launcher]
        while self.fileno() in select.select([self.fileno(), *others], [], [], stays_s or PATIENCE_S)[0]:
            connection, _ = self._listening.accept()
            if _other_side(connection)[1] == os.getuid():
                return connection
            connection.close()
        return None

    def follow(self, launcher: int) -> None:
        """End with this process of the host from now on.

        Raises:
            OSError: it has ended already.
        """
        os.close(self._launcher)
        self._launcher = os.pidfd_open(launcher)

    def close(self) -> None:
        """For a process that is forked: it is not the one that waits."""
        self._listening.close()
        os.close(self._launcher)


class Adopted:
    """In an agent: a fork server of an agent before it, as `subprocess.Popen` shows one that was started."""

    def __init__(self, connection: socket.socket, pid: int, stderr: IO[bytes]) -> None:
        self.socket, self.pid, self.stderr = connection, pid, stderr
        self._process = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Its exit code is unknown.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if not select.select([self._process], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork server", timeout or 0)
        return 0

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)


def adopt(
    name: str,
    environment: Mapping[str, str],
    preload: Sequence[str],
    scratch: Path,
    *,
    launcher: int = 0,
    stdin: bool = False,
) -> Adopted | None:
    """The fork server that waits under `name`, made ready for this agent; None where there is none.

    `launcher` is the process that it is to end with, where that may be another one than before.
    `stdin`: its workers may read what comes on the standard input of this process.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    reading, writing = os.pipe()
    words: dict[str, Any] = {"environment": dict(environment), "preload": list(preload), "scratch": str(scratch)}
    words["launcher"], nothing = launcher, os.open(os.devnull, os.O_RDONLY)
    try:
        connection.connect(f"\0{name}")
        pid, user, _ = _other_side(connection)
        if user == os.getuid():
            line = json.dumps(words).encode() + b"\n"
            sent = socket.send_fds(connection, [line], [writing, 0 if stdin else nothing])
            connection.sendall(line[sent:])
            if connection.recv(1):
                connection.settimeout(None)
                return Adopted(connection, pid, os.fdopen(reading, "rb", buffering=0))
    except OSError:  # no process waits there, or one that does not answer
        pass
    finally:
        os.close(writing)
        os.close(nothing)
    connection.close()
    os.close(reading)
    return None


def take_over(connection: socket.socket, waiting: Waiting) -> tuple[list[str], str]:
    """In the fork server: be as the next agent's own would be. Returns what it is to load, and its scratch folder.

    Raises:
        OSError, ValueError: that agent has gone again.
    """
    connection.settimeout(_ANSWER_S)
    came, descriptors = b"", []
    while not came.endswith(b"\n"):
        chunk, found, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not chunk:
            raise ConnectionResetError
        came += chunk
        descriptors += found
    connection.settimeout(None)
    words = json.loads(came)
    stderr, stdin = descriptors
    for source, target in ((stderr, 2), (stdin, 0)):
        os.dup2(source, target)
        os.close(source)
    if words["launcher"]:
        waiting.follow(words["launcher"])
    os.environ.clear()
    os.environ.update(words["environment"])
    connection.sendall(b"!")
    return words["preload"], words["scratch"]


def _other_side(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end, as the kernel says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group
