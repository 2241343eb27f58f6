"""The workers of one host: started by its fork server, sent messages and signals, ended.

The same fork server starts the process that keeps a store for their rendezvous.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.cluster import reports
from manyhosts.cluster.ports import Range
from manyhosts.control.agent.fork_server import ForkServer
from manyhosts.control.agent.head_connection import HeadConnection, Outbox
from manyhosts.control.agent.inspection import Inspection
from manyhosts.control.agent.processes import command_of, descendants, kill_descendants
from manyhosts.control.agent.store_lines import StoreLines, TcpStore
from manyhosts.control.agent.watched_worker import ReportServer, WatchedWorker, WorkerId
from manyhosts.control.loop import Loop, Message
from manyhosts.control.protocol import (
    FromAgent,
    MemberSays,
    ModulesPreloaded,
    NewWorker,
    Report,
    SeenWorker,
    StoreOpened,
    Trouble,
)

FAREWELL_S = 30.0
"""How long workers have to save their state and end, where the run does not continue."""
_LONGEST_FOLDER = 80  # the name of a Unix socket has at most 107 characters, on macOS 103
_WAY_OUT_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What all workers of a host have in common."""

    host: str
    """What the head calls this host: its name is part of the names of logs."""
    command: Mapping[str, Any]
    """What a worker runs: `kind`, `program`, `arguments`, `folder`."""
    preload: Sequence[str]
    """The modules that the fork server loads."""
    environment: Mapping[str, str]
    logs: Path
    log_bytes: int
    """How large a log grows before another one is begun; 0: no limit."""
    fork_server: str
    """What the fork server is known by for the next agent; empty where none may find it."""
    stays_s: float
    """How long the fork server waits for another run when this one is over; 0: not at all."""
    launcher: int
    """A process of this host that ends with the launcher; 0 where there is none."""
    stdin: bool
    """Whether the first worker reads what comes on the standard input of this process."""


class LocalWorkers:
    """Starts workers, watches them, passes on what they say, and ends them."""

    def __init__(self, loop: Loop, head: HeadConnection, say: Callable[[str], object]) -> None:
        """`say` is given lines for people."""
        self._loop, self._head, self._say = loop, head, say
        self._output = Outbox(head, loop.after)
        self._watched: dict[str, WatchedWorker] = {}
        self._fork_server: ForkServer | None = None
        folder = tempfile.gettempdir()
        short = folder if len(folder) < _LONGEST_FOLDER else "/tmp"  # noqa: S108  # what is made there is for us alone
        self._scratch = Path(tempfile.mkdtemp(prefix="manyhosts-", dir=short))
        self.store_lines = StoreLines(head.say)
        """What workers ask of the store that the head keeps."""
        self._tcp_store = TcpStore(self._serve_store, self._end_store)
        self._reports = ReportServer(
            loop, self._scratch / "agent", self._pass_on, self._pass_on_membership, self.store_lines
        )
        self._trainers: set[int] = set()
        """Members that have a Trainer, which saves and ends where it is asked to stop."""
        self._saving: set[int] = set()
        """Members that save their state, because the run does not continue."""

    def prepare(self, setup: WorkerSetup) -> None:
        """Start the fork server, so that it loads torch while the head still waits for other hosts."""
        self._setup = setup
        self._open_fork_server()

    def _open_fork_server(self) -> ForkServer:
        """The fork server; a new one where the last was killed."""
        if self._fork_server is None:
            setup = self._setup
            self._fork_server = ForkServer(
                self._loop,
                preload=setup.preload,
                environment=setup.environment,
                folder=setup.command["folder"],
                scratch=self._scratch,
                stdin=setup.stdin,
                name=setup.fork_server,
                launcher=setup.launcher,
                stays_s=setup.stays_s,
                on_event=self._hear_of_process,
                on_warm=lambda modules: self._head.say(ModulesPreloaded(modules=modules)),
                on_end=self._lose_fork_server,
                on_words=self._say,
            )
        return self._fork_server

    def _lose_fork_server(self) -> None:
        """It was killed, and its workers with it."""
        early = self._fork_server is not None and not self._fork_server.ready
        self._fork_server = None
        kill_descendants()  # what the workers have started
        what = "could not load what the script needs" if early else "was killed"
        text = f"the process that its workers are forked from {what}"
        self._head.say(Trouble(text=text, where="", early=early))
        for worker in self._watched.values():
            worker.end(0, signal.SIGKILL)

    # They start.

    def open_store(self, generation: int, address: str, allowed: Range | None, *, listens: bool) -> None:
        """Take one of the `allowed` ports for a TCPStore, serve it where it `listens`, and send the head its address.

        Raises:
            LaunchError: none of them is free.
        """
        shared = importlib.util.find_spec("torch") is not None
        listens = listens or not shared
        port = self._tcp_store.open(address, allowed, listens=listens)
        self._head.say(StoreOpened(generation=generation, port=port, shared=shared, listens=listens))

    def close_store(self) -> None:
        """End the process of the TCPStore, which releases the clients that wait for it."""
        self._tcp_store.close()

    def _serve_store(self, listening: int, name: str) -> None:
        self._open_fork_server().ask("store", [listening], name=name)

    def _end_store(self, name: str) -> None:
        if self._fork_server is not None:
            self._fork_server.ask("signal", name=name, signal=signal.SIGKILL, group=True)

    def start(self, generation: int, worker: NewWorker) -> None:
        """Start one worker."""
        setup, reported = self._setup, str(self._reports.address)
        worker_id = WorkerId(
            rank=worker.rank, local_rank=worker.local_rank, generation=generation, member=worker.member
        )
        error_file = setup.logs / f"{setup.host}-{worker_id.rank}-error-{generation}.json"
        error_file.unlink(missing_ok=True)
        watched = WatchedWorker(
            self._loop,
            worker_id,
            log=setup.logs / f"{setup.host}-{worker_id.rank}.log",
            log_bytes=setup.log_bytes,
            error_file=error_file,
            report=self._report,
            show=self._output.put,
            on_failure=self._end_soon,
            before_end=self._reports.drain,
            on_imported=self._warm,
        )
        self._watched[worker_id.name] = watched
        error = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
        environment = {**error, **worker.environment, reports.VARIABLE: reported}
        stdin = setup.stdin and worker_id.local_rank == 0
        ends = watched.open_pipes()
        fork_server = self._open_fork_server()
        fork_server.ask("worker", ends, name=worker_id.name, environment=environment, stdin=stdin, **setup.command)
        for end in ends:
            os.close(end)

    def _hear_of_process(self, event: dict[str, Any]) -> None:
        worker = self._watched.get(event["name"])
        if worker is None:
            return
        if event["event"] == "started":
            worker.process = event["process"]
        elif event["event"] == "ended":
            reports.board_of(self._reports.address, worker.process).unlink(missing_ok=True)
            worker.end(event["code"], event["signal"], event["peak_bytes"])

    def _warm(self, modules: list[str]) -> None:
        """A worker has imported `modules`: those to come are to find them loaded."""
        if self._setup.stays_s:
            return  # the next run may be that of another script
        if self._fork_server is not None and self._setup.preload:  # else each is to load everything by itself
            self._fork_server.warm(modules)

    # Messages from workers and to them.

    def _report(self, message: FromAgent) -> None:
        """Send what concerns a worker: its end follows everything that it has printed."""
        self._output.flush()
        self._head.say(message)

    def _pass_on(self, local_rank: int, kind: str, fields: dict[str, Any]) -> None:
        """A report that a worker has sent."""
        ids = [worker.worker_id for worker in self._watched.values() if worker.worker_id.local_rank == local_rank]
        if ids:
            newest = max(ids, key=lambda worker_id: worker_id.member)
            if kind == "trainer":
                self._trainers.add(newest.member)
            self._head.say(Report(**newest.to_json(), kind=kind, fields=fields))

    def _pass_on_membership(self, member: int, kind: str, fields: dict[str, Any]) -> None:
        """What a worker says about who trains together."""
        if kind == "saving":
            self._saving.add(member)  # concerns this agent alone
            return
        self._head.say(MemberSays(member=member, kind=kind, fields=fields))

    def send(self, member: int, message: Message) -> None:
        """Pass on what the head says to a worker."""
        self._reports.send(member, message)

    def inspect(self, then: Callable[[list[SeenWorker]], None]) -> None:
        """Say what all workers are doing, in a moment."""
        Inspection(self._loop, list(self._watched.values()), self._reports.address, then)

    # They end.

    def _end_soon(self, worker: WatchedWorker) -> None:
        """A worker has said that it failed; what it does on its way out must not keep the others waiting."""
        self._loop.after(_WAY_OUT_S, lambda: self._kill(worker))

    def kill(self, member: int) -> None:
        """End one worker, and what it has started."""
        for worker in self._watched.values():
            if worker.worker_id.member == member:
                self._kill(worker)

    def _kill(self, worker: WatchedWorker) -> None:
        if not worker.ended:
            self._signal(worker, signal.SIGKILL, group=True)

    def _signal(self, worker: WatchedWorker, number: int, *, group: bool) -> None:
        if self._fork_server is not None:
            self._fork_server.ask("signal", name=worker.worker_id.name, signal=number, group=group)

    def signal(self, generation: int, number: int, *, group: bool, but: Set[int] = frozenset()) -> None:
        """Send a signal to the workers of a start, or to all that they have started, except to members `but`."""
        for worker in self._watched.values():
            own = worker.worker_id
            if own.generation == generation and not worker.ended and own.member not in but:
                self._signal(worker, number, group=group)

    def ask_to_stop(self, generation: int, number: int, cause: int) -> None:
        """Send a signal to the workers themselves, who can say that it was `cause` that ends the run."""
        with contextlib.suppress(OSError):  # then the workers say which signal they were sent
            reports.leave_cause(self._reports.address, cause)
        if self._fork_server is not None and not self._fork_server.ready:
            # It loads what they need, which takes long on a busy machine. It would start them when it has, to train for
            # the moment that the run takes to end.
            self._fork_server.close()
            self._fork_server = None
            for worker in self._watched.values():
                if worker.worker_id.generation == generation:
                    worker.end(0, number)
            return
        self.signal(generation, number, group=False)

    def kill_later(self, generation: int, seconds: float) -> None:
        """Kill the workers when the time is over; those that save what they hold then have `FAREWELL_S` more."""

        def kill() -> None:
            saving = [each for each in self._watched.values() if each.worker_id.member in self._saving]
            if saving and not all(each.ended for each in saving):
                self._loop.after(FAREWELL_S, lambda: self.signal(generation, signal.SIGKILL, group=True))
            self.signal(generation, signal.SIGKILL, group=True, but=self._saving)

        self._loop.after(seconds, kill)

    def with_trainer(self) -> list[WatchedWorker]:
        """Those that run and have a Trainer."""
        trainers = self._reports.members | self._trainers
        return [each for each in self._watched.values() if not each.ended and each.worker_id.member in trainers]

    def have_saved(self, saving: Iterable[WatchedWorker], reason: str) -> None:
        """Have those of `saving` save their state and end, and all others end: the run does not continue."""
        for worker in self._watched.values():
            if worker.worker_id.member in self._reports.members:
                self.send(worker.worker_id.member, {"message": "headless", "reason": reason})
            elif worker in saving:
                # None of them could continue without the others, so they save together, as where a scheduler asks them
                # to.
                self._signal(worker, signal.SIGTERM, group=False)
            else:
                self._kill(worker)

    def close(self, *, is_well: bool, is_over: bool = False) -> None:
        """End everything. `is_well`: processes that finished workers started keep running, as under torchrun.

        `is_over`: the run has come to its end, so that a fork server which is to stay does so.
        """
        kept = set[int]()
        if self._fork_server is not None:
            if is_over and self._setup.stays_s and self._fork_server.rest(spare=is_well):
                kept = {self._fork_server.pid}
            else:
                self._fork_server.close(spare=is_well)
        if is_well:
            self._report_left_processes(kept)
        else:
            kill_descendants(but=kept)
        self._reports.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _report_left_processes(self, kept: Set[int]) -> None:
        """Name processes that workers started and that still run."""
        keepers = {keeper for worker in self._watched.values() for keeper in worker.keepers} | kept
        left = [process for process in descendants(os.getpid()) if process not in keepers]
        below = {process for parent in left for process in descendants(parent)}
        for process in [process for process in left if process not in below]:
            if words := command_of(process):
                self._say(f"manyhosts: {words} (process {process}) was started by the script and is still running\n")
