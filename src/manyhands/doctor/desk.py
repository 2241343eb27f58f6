"""How the doctor gets onto hosts, and who of them cannot be reached: through ssh, or as the workers of a job."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from manyhands.cluster.findings import Finding
from manyhands.doctor import graphics, likeness, station, wires
from manyhands.errors import LaunchError, ManyhandsError
from manyhands.launchers import addresses
from manyhands.launchers.host import condition
from manyhands.launchers.job import Job, Plan
from manyhands.launchers.launcher import Launcher
from manyhands.launchers.ssh import outpost as ssh_outpost
from manyhands.launchers.ssh import ssh
from manyhands.launchers.ssh.connection import Connection

_JOIN_S = 90.0
_LATE_S = 25.0
"""How long the others are waited for once a host has reported."""
_ANSWER_S = 30.0
_RAY_HERE = Path("/tmp/ray/ray_current_cluster")  # noqa: S108  # where Ray itself looks for the cluster it is part of
_SENT = (ssh_outpost, condition, graphics, likeness, wires, station)
"""What a host is sent that has nothing but Python, in the order of their imports."""
_PROGRAM = """\
import sys, types
for name, source in {modules!r}:
    module = types.ModuleType(name)
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
main = module.main
for name, _ in {modules!r}:
    del sys.modules[name]  # so that what is installed here is seen, and not what was sent
main()
"""


class Asked(Protocol):
    """A host that answers questions."""

    def facts(self) -> dict[str, Any]:
        """What it said first."""

    def ask(self, question: str, *, timeout_s: float = ..., **details: Any) -> Any:
        """Its answer.

        Raises:
            LaunchError: it could not answer, or is gone.
        """


@dataclass(frozen=True, slots=True)
class Reached:
    """A host that was reached: what it is called, what it said first, and how to ask it."""

    name: str
    hello: Mapping[str, Any]
    asked: Asked


def program() -> bytes:
    """A station as one program, for a Python that has nothing else."""
    paths = [module.__name__.split(".") for module in _SENT]
    folders = {".".join(path[:length]) for path in paths for length in range(1, len(path))}
    modules = [(name, "") for name in sorted(folders)]
    modules += [(module.__name__, Path(str(module.__file__)).read_text()) for module in _SENT]
    return _PROGRAM.format(modules=modules).encode()


def unreachable(error: ManyhandsError, host: str) -> Finding:
    """What it means that a host was not reached."""
    return Finding(
        level="error", check="reach", what=error.what, where=error.where or f"host {host}", fix=error.fix, kind="reach"
    )


@contextlib.contextmanager
def over_ssh(job: Job) -> Iterator[tuple[list[Reached], list[Finding]]]:
    """Stations on all hosts of `job` that ssh reaches, and what is the matter with the others."""
    with ssh.connected(job.hosts, ssh.pythons(job), program()) as connections:

        def greet(connection: Connection) -> Reached | Finding:
            try:
                return Reached(connection.host, connection.facts(), connection)
            except LaunchError as error:
                return unreachable(error, connection.host)

        with ThreadPoolExecutor(len(connections)) as pool:
            found = list(pool.map(greet, connections))
        yield (
            [each for each in found if isinstance(each, Reached)],
            [each for each in found if isinstance(each, Finding)],
        )


@contextlib.contextmanager
def in_a_job(launcher: Launcher, job: Job) -> Iterator[tuple[list[Reached], list[Finding]]]:
    """Stations that `launcher` starts, as a job with one worker on each node; what is the matter with the others."""
    lost: list[Finding] = []
    if job.hosts:
        job, lost = _without_unreachable(job)
    if job.hosts or not lost:
        with _Waiting(launcher, job) as waiting:
            reached = waiting.greet()
            yield reached, lost + waiting.troubles(reached)
    else:
        yield [], lost


def _without_unreachable(job: Job) -> tuple[Job, list[Finding]]:
    """The job on those of its hosts that ssh reaches: one that is down would keep mpirun from starting any."""
    with over_ssh(job) as (reached, lost):
        names = tuple(each.name for each in reached)
    return replace(job, hosts=names, nodes=max(1, len(names)), least_nodes=None), lost


class _Connected:
    """A station that has opened a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines: queue.Queue[str] = queue.Queue()
        self._writing = threading.Lock()
        self._facts: dict[str, Any] = {}
        self.name = ""
        threading.Thread(target=self._read, daemon=True).start()

    def facts(self) -> dict[str, Any]:
        if not self._facts:
            self._facts = self._next(_ANSWER_S)
        self._facts["address"] = self._facts.get("address") or self._socket.getpeername()[0]
        return self._facts

    def ask(self, question: str, *, timeout_s: float = _ANSWER_S, **details: Any) -> Any:
        self._write(json.dumps({"ask": question, **details}) + "\n")
        said = self._next(timeout_s)
        if "trouble" in said:
            fix = "look at that on the host itself"
            raise LaunchError(f"host {self.name} refused: {said['trouble']}", where=f"host {self.name}", fix=fix)
        return said["answer"]

    def pulse(self) -> None:
        self._write("\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, text: str) -> None:
        with self._writing, contextlib.suppress(OSError):  # its end is told where the answer is awaited
            self._socket.sendall(text.encode())

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = ""
        if not line:
            raise LaunchError(
                f"host {self.name} said nothing within {timeout_s:.0f} s, or is gone",
                where=f"host {self.name}",
                fix="see whether it is up, and whether somebody ended the job",
            )
        found: dict[str, Any] = json.loads(line.removeprefix(ssh_outpost.MARK))
        return found

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("r") as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")


class _Waiting:
    """Waits for the stations of a job, which it starts, and ends with it."""

    def __init__(self, launcher: Launcher, job: Job) -> None:
        self._token = secrets.token_hex(16)
        self._launcher, self._job = launcher, job
        self._display = _Quiet()
        self._error: ManyhandsError | None = None
        self._over = threading.Event()
        self._came: list[_Connected] = []
        self._plan: Plan | None = None

    def __enter__(self) -> _Waiting:
        plan = self._launcher.plan(self._job)
        self._listening = socket.create_server((_address_for(plan), 0), backlog=64)
        host, port = self._listening.getsockname()[:2]
        variables = {station.DOCTOR: f"{host}:{port}", station.TOKEN: self._token}
        # Only now: a plan may be printed, and what is secret must not be in it.
        own = replace(plan.job, environment={**plan.job.environment, **variables})
        self._plan = replace(plan, job=own)
        for work in (self._accept, self._pulse):
            threading.Thread(target=work, daemon=True).start()
        self._running = threading.Thread(target=self._run, daemon=True)
        self._running.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._came:
            each.close()
        self._running.join(timeout=20)

    def greet(self) -> list[Reached]:
        """Those that have reported, in the order of their ranks."""
        assert self._plan is not None, "it was entered"
        wanted = self._plan.job.nodes
        deadline = time.monotonic() + _JOIN_S
        first = 0.0
        while len(self._came) < wanted and time.monotonic() < deadline and self._running.is_alive():
            time.sleep(0.02)
            if self._came and not first:
                first, deadline = time.monotonic(), min(deadline, time.monotonic() + _LATE_S)
        hellos = []
        for each in self._came:
            with contextlib.suppress(LaunchError):
                hellos.append((each.facts(), each))
        hellos.sort(key=lambda pair: int(pair[0]["group_rank"] or 0))
        return [Reached(name, hello, each) for name, (hello, each) in zip(self._names(hellos), hellos, strict=True)]

    def troubles(self, reached: Sequence[Reached]) -> list[Finding]:
        """Why some have not reported."""
        assert self._plan is not None, "it was entered"
        missing = self._plan.job.nodes - len(reached)
        if not missing:
            return []
        if self._error is not None:
            found = unreachable(self._error, "")
            said = "; ".join(self._display.last)
            return [replace(found, where=f"{found.where}: {said}" if said else found.where)]
        absent = sorted(set(self._plan.hosts) - {each.name for each in reached}) or [f"{missing} of the hosts"]
        error = LaunchError(
            f"{', '.join(absent)} did not report within {_LATE_S:.0f} s of the others",
            where=f"{'; '.join(self._display.last) or 'nothing was printed there'}",
            fix="see whether the engine takes them for usable, and that the same Python is there",
        )
        return [unreachable(error, ", ".join(absent))]

    def _names(self, hellos: Sequence[tuple[Mapping[str, Any], _Connected]]) -> list[str]:
        assert self._plan is not None, "it was entered"
        hosts = list(self._plan.hosts)
        own = [str(hello["name"]) for hello, _ in hellos]
        names = own if len(own) != len(hosts) or any(" " in host for host in hosts) else hosts
        names = [f"{name}-{number}" if names.count(name) > 1 else name for number, name in enumerate(names)]
        for name, (_, connected) in zip(names, hellos, strict=True):
            connected.name = name
        return names

    def _run(self) -> None:
        assert self._plan is not None, "it was entered"
        try:
            self._launcher.submit(self._plan, self._display)
        except ManyhandsError as error:
            self._error = error

    def _pulse(self) -> None:
        while not self._over.wait(ssh_outpost.PULSE_S):
            for each in list(self._came):
                each.pulse()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Let in who knows the token."""
        challenge = os.urandom(wires.CHALLENGE_BYTES)
        wanted = hmac.new(self._token.encode(), challenge, hashlib.sha256).hexdigest().encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            connection.sendall(challenge)
            if hmac.compare_digest(wires.receive(connection, len(wanted)), wanted):
                connection.settimeout(None)
                self._came.append(_Connected(connection))
                return
        connection.close()


class _Quiet:
    """A display that keeps the last words, in case they say why a host did not come."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=3)

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        if is_error and text.strip():
            self.last.append(text.strip())

    def progress(self, fields: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _address_for(plan: Plan) -> str:
    """Where the doctor listens, so that the hosts of `plan` reach it."""
    named = [host for host in plan.hosts if " " not in host]
    if plan.command and named:
        return addresses.towards(named)
    if not named:  # Ray says which nodes they are when it has placed the job; the way to its head is the way to them
        with contextlib.suppress(OSError):
            place = plan.job.options.get("address") or os.environ.get("RAY_ADDRESS", "")
            place = place or _RAY_HERE.read_text().strip()
            return addresses.towards([place.removeprefix("ray://").rpartition(":")[0]])
    return addresses.LOOPBACK
