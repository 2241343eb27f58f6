"""One host as ssh reaches it: a connection that everything shares, and the remote probe that answers there."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhosts.errors import LaunchError
from manyhosts.hosts import containers, hostfile, remote_probe, ways
from manyhosts.hosts.containers import Container

CONNECT_S = 5
"""How long a host may take to answer at its port."""
_ANSWER_S = 20.0
_CONTAINER_S = 300.0
"""How long the first container of an image may take to start: Podman may first give all of its files to the user."""
_EATEN = "manyhosts: what was sent to this host was read by somebody else"
_START = (
    "import sys; size = sys.stdin.buffer.readline();"
    f" size.strip().isdigit() or sys.exit({_EATEN!r}); code = sys.stdin.buffer.read(int(size));"
    f" len(code) == int(size) or sys.exit({_EATEN!r}); exec(code)"
)
_QUIET_S, _AFTER_S = 3.0, 5.0
"""How long a host is waited for before it is seen whether a start file there reads what is sent; and then."""
_CHOOSE = 'for python in "$@"; do command -v "$python" >/dev/null && exec "$python" -c "$0"; done; exit 127'
"""For sh: start the first available Python of several, with the program that comes before them."""

_OPTIONS = (
    *("-o", "BatchMode=yes"),  # no password can be typed
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)

_FAILED, _GIVEN_UP = 255, " not responding."
"""How ssh ends where it failed itself, and what it says, if anything, where the host did not answer for 15 s."""
_CLOSED, _SILENT = (
    r"port (?P<port>\d+): Connection refused",
    r"timed out|No route to host|Network is unreachable|Host is down",
)
_MAY_PASS = (_CLOSED, _SILENT)
"""What a host shows that is off, or is just being started."""
_TROUBLES = [
    (
        r"Could not resolve hostname (?P<name>\S+?):",
        "the name {name} of host {host} does not resolve",
        "see how it is written in --hosts, in ~/.ssh/config and in /etc/hosts",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host {host} shows another key than the one that is known of it",
        "if it was installed again, `ssh-keygen -R {known}` forgets the old key; if not, somebody may be in between",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "the key of host {host} is not known here",
        "type `ssh {typed}` once, compare the key that it shows, and say yes",
    ),
    (
        r"Permission denied",
        "host {host} does not let us in: it takes none of our keys",
        "`ssh-copy-id {typed}` brings your key there; see also User and IdentityFile in ~/.ssh/config",
    ),
    (
        _CLOSED,
        "host {host} is up, but no server listens on its port {port}",
        "start the ssh server there, or give the right Port in ~/.ssh/config",
    ),
    (
        _SILENT,
        "host {host} does not answer",
        "see that it is on, that its cable is in, and that no firewall is before it",
    ),
]


_QUIET = "commands for interactive use belong after `[[ $- == *i* ]] || return` in ~/.bashrc"
_OF_SHELLS = [
    (
        _EATEN,
        "the login shell of host {host} reads standard input itself, before its command can",
        f"see its start files there for `read`, `cat` or a question; {_QUIET}",
    ),
    (
        r"restricted: cannot|rbash: \S+: command not found",
        "the login shell of host {host} is a restricted one (rbash), and does not run our command",
        "give this user another shell there: `chsh -s /bin/bash`",
    ),
    (
        r"No module named 'encodings'|Could not find platform (?:in)?dependent libraries",
        "Python does not start on host {host}: PYTHONHOME, set there for every login, names another Python's folder",
        "take PYTHONHOME out of ~/.bashrc, ~/.profile and ~/.ssh/environment there",
    ),
]
"""What start files of a host do to non-interactive shells."""


class Unreachable(LaunchError):
    """A host does not answer, and may do so later."""


class _Silent(Unreachable):
    """It takes connections, and says nothing."""


class Lost(LaunchError):
    """A host has answered, and does so no more."""


class Connection:
    """A host that ssh has been asked to reach. Use `facts` first: it waits until the host has answered."""

    def __init__(
        self,
        host: str,
        folder: Path,
        pythons: Sequence[str],
        program: bytes = b"",
        container: Container | None = None,
    ) -> None:
        """Begin to connect. `folder` is where the sockets of shared connections are; `pythons` are tried in order.

        `program` takes the remote probe's place there, and speaks as it does. In `container`, where there is one, all
        Python runs.

        Raises:
            LaunchError: this machine has no ssh.
        """
        self.host, self._folder, self._pythons, self._program = host, folder, pythons, program
        self.container = container
        self._destination, port = hostfile.destination(host)
        self._port = ["-p", port] if port else []
        self._path = folder / f"{abs(hash(host)):x}"
        self._lines: queue.Queue[dict[str, Any] | LaunchError | None] = queue.Queue()
        words = self.inside(["sh", "-c", _CHOOSE, _START, *pythons])
        self._outpost = _started(self.command(words, *("-o", "ControlMaster=yes", "-o", "ControlPersist=no")))
        program = program or Path(remote_probe.__file__).read_bytes()
        self._sent = program.partition(b"\n")[0].decode()
        self._errors: list[str] = []
        self._has_answered = False
        self._writing = threading.Lock()
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._write(f"{len(program)}\n".encode() + program)

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of its end."""
        return self._outpost.poll() is None

    def wait_for_end(self) -> None:
        """Return when ssh has ended: the host has not answered for 15 s, or has ended the connection."""
        self._outpost.wait()

    def again(self) -> Connection:
        """Another try to reach the same host."""
        self._path.unlink(missing_ok=True)
        return Connection(self.host, self._folder, self._pythons, self._program, self.container)

    def inside(self, words: Sequence[str]) -> str:
        """The command line for the host's shell that runs `words`: in the container, where there is one."""
        return shlex.join(words if self.container is None else self.container.command(words))

    def command(self, words: str, *options: str) -> list[str]:
        """What runs `words` on the host, for its shell, over the connection that is open."""
        return command(self.host, self.socket, words, *options)

    @property
    def socket(self) -> str:
        """The option of ssh that names the connection that is open."""
        return f"ControlPath={self._path}"

    def facts(self) -> dict[str, Any]:
        """What the remote probe has found.

        Raises:
            Unreachable: the host does not answer.
            LaunchError: it does not let us in, has no Python, or a start file there reads what it is sent.
        """
        found = self._first_answer()
        if not found.get("address"):
            found["address"] = remote_probe.way_to(self._destination.rpartition("@")[2])
        return found

    def _first_answer(self) -> dict[str, Any]:
        if self.container is not None:
            return self._next(CONNECT_S + _CONTAINER_S)
        until = time.monotonic() + CONNECT_S + _ANSWER_S
        with contextlib.suppress(_Silent):
            return self._next(_QUIET_S)
        is_eaten = self._is_answered_without_input()
        with contextlib.suppress(_Silent):
            return self._next(_AFTER_S if is_eaten else max(0.0, until - time.monotonic()))
        raise self._eaten() if is_eaten else self._silence(CONNECT_S + _ANSWER_S)

    def ask(self, question: str, *, timeout_s: float = _ANSWER_S, **details: Any) -> Any:
        """Have the remote probe answer.

        Raises:
            LaunchError: it could not, or the host is gone.
        """
        self._write(json.dumps({"ask": question, **details}).encode() + b"\n")
        said = self._next(timeout_s)
        if "trouble" in said:
            raise LaunchError(
                f"host {self.host} refused: {said['trouble']}",
                where=f"host {self.host}",
                fix=f"look at that with `ssh {as_typed(self.host)}`",
            )
        return said["answer"]

    def tunnel(self, address: str, port: int, there: int = 0) -> int:
        """Let the host reach `address` and `port` of this side. Returns the port on the host's own loopback.

        `there`: which one that is to be; 0 is any free one.

        Raises:
            LaunchError: the host does not allow that.
        """
        place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        words = ["ssh", "-o", self.socket, "-O", "forward", "-R", f"127.0.0.1:{there}:{place}"]
        done = subprocess.run([*words, *self._port, self._destination], capture_output=True, text=True)
        if there and done.returncode == 0:
            return there
        if done.returncode != 0 or not done.stdout.strip().isdigit():
            raise LaunchError(
                f"host {self.host} can open no connection to this machine, and allows no tunnel",
                where=f"host {self.host}: {done.stderr.strip()}",
                fix=f"let it reach {address} of this machine, or allow AllowTcpForwarding in its sshd_config",
            )
        return int(done.stdout)

    def pulse(self) -> None:
        """Give a sign of life; without one the remote probe takes this side for gone after a while."""
        self._write(b"\n")

    def close(self) -> None:
        """Let go of the host. Safe to call twice."""
        with self._writing, contextlib.suppress(OSError):
            assert self._outpost.stdin is not None, "it was asked for as a pipe"
            self._outpost.stdin.close()
        try:
            self._outpost.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._outpost.kill()
            self._outpost.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def _write(self, text: bytes) -> None:
        assert self._outpost.stdin is not None, "it was asked for as a pipe"
        with self._writing, contextlib.suppress(OSError, ValueError):  # the wait for the answer reports its end
            self._outpost.stdin.write(text)
            self._outpost.stdin.flush()

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._silence(timeout_s) from None
        if line is None:
            raise self._trouble()
        if isinstance(line, LaunchError):
            raise line
        return line

    def _silence(self, seconds: float) -> _Silent:
        return _Silent(
            f"host {self.host} takes connections, but said nothing within {seconds:.0f} s",
            where=f"host {self.host}",
            fix=f"see with `ssh {as_typed(self.host)}` whether it is frozen, waits for a file system that is away, or"
            " reads standard input in a start file (~/.bashrc)",
        )

    def _is_answered_without_input(self) -> bool:
        """Whether the same host runs a Python whose standard input is empty: a start file that reads it then ends."""
        words = self.inside(["sh", "-c", _CHOOSE, "print('here')", *self._pythons])
        asked = self.command(words)
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False)
            return done.returncode == 0
        return False

    def _eaten(self) -> LaunchError:
        """What is the matter where a start file has read what was sent."""
        return trouble(self.host, 1, _EATEN, self._pythons)

    def _read_answers(self) -> None:
        assert self._outpost.stdout is not None, "it was asked for as a pipe"
        with self._outpost.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace")
                _, mark, reported = text.partition(remote_probe.MARK)
                with contextlib.suppress(
                    ValueError
                ):  # else a login shell says it, which need not end with a line break
                    if mark and isinstance(answer := json.loads(reported), dict):
                        self._has_answered = True
                        self._lines.put(answer)
                if not self._has_answered and text.strip() == self._sent:
                    self._lines.put(self._eaten())  # `cat` in a start file
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._outpost.stderr is not None, "it was asked for as a pipe"
        with self._outpost.stderr as stream:
            self._errors += [line.decode(errors="replace").strip() for line in stream]

    def _trouble(self) -> LaunchError:
        """Why ssh has ended."""
        code = self._outpost.wait()
        self._readers[1].join(timeout=5)
        error = trouble(self.host, code, "\n".join(self._errors), self._pythons, self.container)
        if isinstance(error, Lost) and ways.are_lost(self._destination, self._port):
            return LaunchError(
                f"small packets reach host {self.host}, and large ones do not",
                where=error.where,
                fix="the packet size (MTU) of a switch, tunnel or VPN on the way is smaller than that of the hosts:"
                " `ip link set dev INTERFACE mtu 1200` here and there shows whether that is it",
            )
        return error


def command(host: str, socket: str, words: Any, *options: str) -> list[Any]:
    """What runs `words` on `host`, for its shell. `socket` is the option of ssh that names an open connection."""
    destination, port = hostfile.destination(host)
    return ["ssh", *_OPTIONS, "-o", socket, *options, *(["-p", port] if port else []), "-T", destination, words]


def trouble(host: str, code: int, said: str, pythons: Sequence[str], container: Container | None = None) -> LaunchError:
    """What ssh's exit code and words mean."""
    where = f"host {host}"
    if container is not None and (error := containers.trouble(container, host, code, said, pythons)) is not None:
        return error
    if code == 0:
        return LaunchError(
            f"the login shell of host {host} ends before it runs our command",
            where=where,
            fix=f"see its start files there for `exit` or `exec`; {_QUIET}",
        )
    for pattern, what, fix in _OF_SHELLS:
        if re.search(pattern, said):
            return LaunchError(what.format(host=host), where=where, fix=fix.format(host=host))
    if code == 127:
        return LaunchError(
            f"there is no Python on host {host}: neither {' nor '.join(pythons)}",
            where=where,
            fix="install the same environment there, or name one that is there with -o python=PATH",
        )
    for pattern, what, fix in _TROUBLES:
        if found := re.search(pattern, said):
            name, port = hostfile.destination(host)
            known = shlex.quote(f"[{name.rpartition('@')[2]}]:{port}") if port else name.rpartition("@")[2]
            words = {"host": host, "typed": as_typed(host), "known": known, **found.groupdict()}
            kind = Unreachable if pattern in _MAY_PASS else LaunchError
            return kind(what.format(**words), where=where, fix=fix.format(**words))
    last = next((line for line in reversed(said.splitlines()) if line), f"exit code {code}")
    if code == _FAILED and (not said.strip() or _GIVEN_UP in last):
        return Lost(
            f"host {host} was reached, and does not answer any more: it is off, or cut off",
            where=where,
            fix="see that it is on and that its cable is in, and start the run again",
        )
    return LaunchError(f"ssh to host {host} failed: {last}", where=where, fix=f"see what `ssh {as_typed(host)}` says")


def as_typed(host: str) -> str:
    """How one writes `host` after `ssh`: `-p 2222 me@name` for `me@name:2222`."""
    name, port = hostfile.destination(host)
    return f"-p {port} {name}" if port else name


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """ssh, with all of its ends in our hands.

    Raises:
        LaunchError: this machine has none.
    """
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},  # its sentences are read
            start_new_session=True,  # Ctrl-C is for the head alone
        )
    except FileNotFoundError as cause:
        raise LaunchError(
            f"there is no {words[0]} on this machine", where="PATH", fix="install OpenSSH's client, or add it to PATH"
        ) from cause
