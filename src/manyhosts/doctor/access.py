"""How the doctor gets onto hosts, and who of them cannot be reached: through ssh, or as the workers of a job.

For hosts that cannot open a connection to the user's machine, see `as_job`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from manyhosts.cluster.findings import Finding
from manyhosts.control import proof, tls
from manyhosts.control.agent import host_state
from manyhosts.control.display import PlainDisplay
from manyhosts.control.job import Job
from manyhosts.doctor import channel, checksum, fabric, graphics, host_probe, wires
from manyhosts.doctor.probe_server import LATE_S, ProbeServer, Reached, unreachable
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import remote_probe
from manyhosts.hosts.connection import Connection
from manyhosts.launchers import container_options
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.ssh import ssh
from manyhosts.records import installed

_JOIN_S = 90.0
_SENT = (installed, tls, proof, remote_probe, host_state, channel, fabric, graphics, checksum, wires, host_probe)
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


def program() -> bytes:
    """A host probe as one program, for a Python that has nothing else."""
    paths = [module.__name__.split(".") for module in _SENT]
    folders = {".".join(path[:length]) for path in paths for length in range(1, len(path))}
    modules = [(name, "") for name in sorted(folders)]
    modules += [(module.__name__, Path(str(module.__file__)).read_text()) for module in _SENT]
    return _PROGRAM.format(modules=modules).encode()


@contextlib.contextmanager
def over_ssh(job: Job) -> Iterator[tuple[list[Reached], list[Finding]]]:
    """Host probes on all hosts of `job` that ssh reaches, and what is the matter with the others."""
    container = container_options.of(job, container_options.ON_HOSTS)
    container = None if container is None else replace(container, leaves_nothing=True)
    with ssh.connected(job.hosts, ssh.pythons(job), program(), container) as connections:

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
def in_a_job(engine: Engine, job: Job) -> Iterator[tuple[list[Reached], list[Finding]]]:
    """Host probes that `engine` starts, as a job with one worker on each node; what is the matter with the others."""
    lost: list[Finding] = []
    if job.hosts:
        job, lost = _without_unreachable(job)
    if job.hosts or not lost:
        with _Waiting(engine, job) as waiting:
            reached = waiting.greet()
            yield reached, lost + waiting.troubles(reached)
    else:
        yield [], lost


def _without_unreachable(job: Job) -> tuple[Job, list[Finding]]:
    """The job on those of its hosts that ssh reaches: one that is down would keep mpirun from starting any."""
    with over_ssh(job) as (reached, lost):
        names = tuple(each.name for each in reached)
    return replace(job, hosts=names, nodes=max(1, len(names)), least_nodes=None), lost


class _Waiting:
    """Waits for the host probes of a job, which it starts, and ends with it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._display = engine, _Quiet()
        self._error: ManyhostsError | None = None
        plan, token = engine.plan(job), secrets.token_hex(16)
        self._probe_server = ProbeServer(engine.address(plan), 0, token)
        variables = {host_probe.DOCTOR: self._probe_server.place, host_probe.TOKEN: token}
        # Only now: a plan may be printed, and what is secret must not be in it.
        own = replace(plan.job, environment={**plan.job.environment, **variables})
        self._plan = replace(plan, job=own)
        self._running = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Waiting:
        self._running.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._probe_server.close()
        self._running.join(timeout=20)

    def greet(self) -> list[Reached]:
        """Those that have reported, in the order of their ranks."""
        return self._probe_server.greet(
            self._plan.job.nodes, self._names, patience_s=_JOIN_S, goes_on=self._running.is_alive
        )

    def troubles(self, reached: Sequence[Reached]) -> list[Finding]:
        """Why some have not reported."""
        missing = self._plan.job.nodes - len(reached)
        if not missing:
            return []
        if self._error is not None:
            found = unreachable(self._error, "")
            said = "; ".join(self._display.last)
            return [replace(found, where=f"{found.where}: {said}" if said else found.where)]
        absent = sorted(set(self._plan.hosts) - {each.name for each in reached}) or [f"{missing} of the hosts"]
        error = LaunchError(
            f"{', '.join(absent)} did not report within {LATE_S:.0f} s of the others",
            where=f"{'; '.join(self._display.last) or 'nothing was printed there'}",
            fix="see whether the engine takes them for usable, and that the same Python is there",
        )
        return [unreachable(error, ", ".join(absent))]

    def _names(self, hellos: Sequence[Mapping[str, Any]]) -> list[str]:
        hosts = list(self._plan.hosts)
        own = [str(hello["name"]) for hello in hellos]
        names = own if len(own) != len(hosts) or any(" " in host for host in hosts) else hosts
        return [f"{name}-{number}" if names.count(name) > 1 else name for number, name in enumerate(names)]

    def _run(self) -> None:
        try:
            self._engine.submit(self._plan, self._display)
        except ManyhostsError as error:
            self._error = error


class _Quiet(PlainDisplay):
    """Shows nothing, and keeps the last words, in case they say why a host did not come."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=3)

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        if is_error and text.strip():
            self.last.append(text.strip())

    def _print(self, stream: TextIO, text: str) -> None:
        pass
