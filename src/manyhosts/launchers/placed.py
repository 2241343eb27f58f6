"""A run whose agents are started by commands of an engine (mpirun, srun), with this process as their head.

Those commands continue where this process is killed, and so do the agents, which call for another head. The same
command typed again is that one. What an engine gets and prints shows neither the run's secret nor values of `--env`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from manyhosts.control.display import Display
from manyhosts.control.enrolment import Enrolment
from manyhosts.control.head import takeover
from manyhosts.control.head.run import Head
from manyhosts.control.head.state import AgentProcess, HeadEndpoint
from manyhosts.control.job import Job
from manyhosts.control.plan import CERTIFICATE, HEAD, Plan, filled
from manyhosts.hosts import containers
from manyhosts.records import run_lock, run_owner

_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
"""What programs of an engine look at themselves; of `--env NAME` the value of anything else is kept from them."""
_OF_ENGINES = ("SLURM_", "OMPI_", "PMIX_", "PRTE_", "LSB_", "LSF_", "CUDA_")

_END_S = 3.0

CommandFor = Callable[[Sequence[int]], Sequence[str]]
"""What starts the agents of some nodes."""


def run(plan: Plan, command_for: CommandFor, display: Display, *, address: Callable[[Plan], str], inside: str) -> int:
    """Run a job on its hosts to its end, or resume its run where only the last command is gone.

    `address` is where the hosts reach this machine, `inside` the allocation that they are of, where there is one.

    Raises:
        ConfigError: another run has taken the run directory, or another command began the one that continues there.
        LaunchError: a host was not reached.
        ManyhostsError: workers failed; the error is that of the one that failed first.
    """
    job, before = plan.job, takeover.launcher_of(plan.job.run_dir)
    if before is not None:
        left = takeover.left_for(job) if before.get("inside") == inside and _living(before) else None
        run_lock.see_that_free(job.run_dir, takeover.start_of(job.run_dir))
        if left is not None:
            display.warn("manyhosts: the command that started this run is gone; this one takes it over")
            with contextlib.suppress(takeover.NobodyCame):
                return _Commands(plan, command_for, display, inside, left).run(left.address)
            display.warn("manyhosts: no host has kept its workers: the run starts again")
        _end(before)
    return _Commands(plan, command_for, display, inside).run(address(plan))


class _Commands:
    """The engine's commands that this process has started."""

    def __init__(
        self,
        plan: Plan,
        command_for: CommandFor,
        display: Display,
        inside: str,
        left: takeover.HeadCheckpoint | None = None,
    ) -> None:
        self._plan, self._command_for, self._display, self._inside = plan, command_for, display, inside
        self._left, self._enrolment = left, Enrolment()
        self._begun: list[subprocess.Popen[bytes]] = []

    def run(self, address: str) -> int:
        """Be the head of the run, to its end. `address` is where agents reach this process."""
        plan, left = self._plan, self._left
        together, are_placed = bool(plan.command), left is not None
        placement = Placement(plan.job.nodes, self._start, together=together, are_placed=are_placed)
        return Head(
            plan.job,
            plan.hosts,
            placement.start_agent,
            self._display,
            address=address,
            endpoint=HeadEndpoint(enrolment=self._enrolment),
            succession=takeover.TakeoverConfig(job=plan.job, facts=self._facts, left=left),
        ).run()

    def _start(self, nodes: Sequence[int], head: str) -> subprocess.Popen[bytes]:
        values = {HEAD.name: head, CERTIFICATE.name: self._enrolment.certificate}
        values[containers.SCRIPT] = containers.script()
        process = subprocess.Popen(
            filled(self._command_for(nodes), values),
            env={**_shown(self._plan.job, os.environ), **self._plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the head alone, which then asks the workers
        )
        assert process.stdout is not None, "it was asked for as a pipe"
        self._begun = [*(each for each in self._begun if each.poll() is None), process]
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        return process

    def _read(self, lines: IO[bytes]) -> None:
        """Hear the agents that have a key to announce, and show everything else."""
        with lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r\n")
                if not self._enrolment.read(text):
                    self._display.line(text, "", is_error=False)

    def _facts(self) -> dict[str, Any]:
        own = [[each.pid, run_owner.began(each.pid)] for each in self._begun if each.poll() is None]
        inherited = self._left.launcher["processes"] if self._left is not None else []
        return {"inside": self._inside, "processes": [*inherited, *own]}


Start = Callable[[Sequence[int], str], subprocess.Popen[bytes]]
"""Starts the agents of some nodes by one command, given the head's address (host:port)."""


class Placement:
    """Starts the agents of all nodes by one command, and the agent of a node that was lost by one of its own."""

    def __init__(self, nodes: int, start: Start, *, together: bool = True, are_placed: bool = False) -> None:
        """`together`: whether one command starts them all; else each is started by its own from the beginning.

        `are_placed`: another process has started the agents of all nodes.
        """
        self._nodes, self._start, self._is_together = nodes, start, together
        self._shared: _SharedProcess | None = None
        self._placed = set(range(nodes)) if are_placed else set()

    def start_agent(self, node: int, head: str, token: str) -> AgentProcess:
        """What the head calls, once for every node and again for one that was lost.

        No engine is given the token: see `control.enrolment`.
        """
        if not self._is_together or node in self._placed:
            return _NodeAgent(_SharedProcess(self._start([node], head), 1))
        if self._shared is None:
            self._shared = _SharedProcess(self._start(range(self._nodes), head), self._nodes)
        self._placed.add(node)
        return _NodeAgent(self._shared)


class _SharedProcess:
    """The one process of the agents of all nodes."""

    def __init__(self, process: subprocess.Popen[bytes], nodes: int) -> None:
        self.process, self.wanted_by, self.patience_is_over = process, nodes, False

    def end(self) -> None:
        """Have the engine end what it has started; one that does not in time is killed."""
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


class _NodeAgent:
    """One node's part of it. The process is ended when no node wants it any more."""

    def __init__(self, shared: _SharedProcess) -> None:
        self._shared, self._given_up = shared, False

    def poll(self) -> int | None:
        return self._shared.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        if self._given_up and self._shared.wanted_by:
            return 0  # the others' agents continue
        if self._shared.patience_is_over and self._shared.wanted_by:
            timeout = 0
        try:
            return self._shared.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._shared.patience_is_over = True  # it was waited for once; no second time for every other node
            raise

    def terminate(self) -> None:
        """Left to the agents: they end when the head has gone. srun, asked to end, kills those that still tidy up."""

    def kill(self) -> None:
        if not self._given_up:
            self._given_up = True
            self._shared.wanted_by -= 1
        if not self._shared.wanted_by:
            self._shared.end()


def _shown(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` without the values that `--env NAME` has taken from there: workers get those from the head.

    srun sends the environment that it is started with to all hosts, without encryption.
    """
    hidden = {name for name in job.hidden if name not in _NEEDED and not name.startswith(_OF_ENGINES)}
    return {name: value for name, value in variables.items() if name not in hidden}


def _living(known: Mapping[str, Any]) -> list[int]:
    """The engine's commands that the last head had started on this machine, and that continue."""
    return [number for number, began in known.get("processes", ()) if began and run_owner.began(number) == began]


def _end(known: Mapping[str, Any]) -> None:
    """End what the last head had started: none of its agents calls."""
    for process in _living(known):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGTERM)
