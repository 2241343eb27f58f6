"""What an agent does: starts the workers of its host, watches them, and tells the head. It needs no torch.

Messages, one JSON object per line, over one encrypted connection that the agent opens.

From the agent:

    call      protocol, nonce                          see `control.proof`, as for the next
    hello     session, heard, proof, node, host, address, process, cores, gpus, python, torch (or null), manyhosts
    condition told, port                               once, where `prepare` asks for it: see `agent.host_state`
    tried   answers                                  the answer to `connect`: for each place why not, or nothing
    door      port                                     the answer to `open_door`
    store     generation, port, shared                     the answer to `open_store`
    output    rank, generation, member, stream ("out", "err"), lines
    unshown   rank, generation, member, lines              so many lines were left out: the head did not keep up
    unlogged  rank, generation, member, why                its log has gaps: its disk is full, say
    report    rank, generation, member, kind, fields       what a worker said through `cluster.reports`
    member    member, kind, fields                         what a worker said through `cluster.membership`
    ended     rank, generation, member, code, signal, finished, error, out_of_memory, exchanges (how many it had begun),
              last_words (of C++), memory: {killed (the kernel ended one of its cgroup), peak (bytes that it had),
              limit (bytes there were to have), of_cgroup}
    warm      modules                                      loaded here because the script imports them; elsewhere too?
    seen      round, workers: [{rank, generation, member, step, state, cpu_s, busy, stack, loader}]
    trouble   text, where, early                           this host can start no worker; early: and has started none
    asked     signal                                       this host's agent was asked to end: a wish for the whole run
    alive     held_s                                       twice a second: see `agent.head_connection`

From the head:

    prove       protocol, nonce, proof                see `control.proof`
    prepare     command, preload, environment, run_dir, workers,  once: load what the workers will need
                log_bytes, head_timeout_s, can_be_taken_over, tell_condition, listen
    connect       places                            see whether this host reaches the others
    open_door                                     listen for a while: a host that joins tries to reach this one
    open_store  generation, address
    start       generation, workers: [{rank, local_rank, member, environment}]
    tell        member, content                   for a worker, through `cluster.membership`
    kill        member                            SIGKILL to one worker
    look        round                         say of all workers what they are doing, by `seen`
    close_store generation                        so that whoever waits for it waits no more
    end         generation, grace_s              SIGTERM to all the workers have started, SIGKILL when the time is over
    signal      generation, signal, cause, farewell_s   to the workers themselves; SIGKILL when the time is over
    leave       code                             end everything; code is what the run ends with

Where the head was killed and another one may take the run over, workers go on for `head_timeout_s`, as where the way to
it is broken. When the head is gone for good, everything this host runs is ended. Workers that have a Trainer may first
save what they hold, for `FAREWELL_S` at most; meanwhile nobody else can begin to run in the run directory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts import __version__
from manyhosts.cluster import reports
from manyhosts.cluster.ports import VARIABLE, Range, needed
from manyhosts.control import titles, variables
from manyhosts.control.agent import host_state, standby
from manyhosts.control.agent.connectivity import ConnectivityCheck
from manyhosts.control.agent.fork_server import ForkServer
from manyhosts.control.agent.head_connection import HeadConnection, Heartbeat, Outbox
from manyhosts.control.agent.inspection import Look, Seen
from manyhosts.control.agent.processes import command_of, descendants, kill_descendants
from manyhosts.control.agent.watched_worker import ReportServer, WatchedWorker, WorkerId
from manyhosts.control.loop import Loop, Message
from manyhosts.control.screen import Screen
from manyhosts.errors import LaunchError
from manyhosts.hosts import ports
from manyhosts.records import run_lock

_LONGEST_FOLDER = 80  # the name of a Unix socket has at most 107 characters, on macOS 103
_WAY_OUT_S = 3.0
_ONE_WISH_S = 0.3
_LAST_WORDS_S = 2.0
FAREWELL_S = 30.0
"""How long workers have, where nobody goes on, to save what they hold and end."""
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Who has started an agent."""

    stdin: bool = False
    """Whether the first worker reads what comes on the standard input of the agent."""
    launcher: int = 0
    """A process of this host that ends with the launcher, if there is one."""
    joins: Mapping[str, Any] | None = None
    """What the head is told of a host that has come to the run itself. Its user may take it back at any time."""


class Supervisor:
    """Everything of a run that happens on this host."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        head: str,
        *,
        node: int,
        token: str,
        address: str = "",
        origin: Origin | None = None,
    ) -> None:
        """`connection` leads to `head`: host:port, or what this process was given.

        `address` is where other hosts reach this one; by default, where the head is talked to from.

        `origin` says who has started this process.
        """
        origin = origin or Origin()
        self._stdin, self._launcher, self._joins = origin.stdin, origin.launcher, origin.joins
        self._words = Screen(sys.stderr, sys.stderr)
        self._loop = loop
        self._workers: dict[str, WatchedWorker] = {}
        self._fork_server: ForkServer | None = None
        folder = tempfile.gettempdir()
        short = folder if len(folder) < _LONGEST_FOLDER else "/tmp"  # noqa: S108  # what is made there is for us alone
        self._scratch = Path(tempfile.mkdtemp(prefix="manyhosts-", dir=short))
        self._desk = ReportServer(loop, self._scratch / "agent", self._pass_on, self._pass_on_membership)
        self._until_left = contextlib.ExitStack()
        """What is held until everything on this host has ended."""
        self._asked = 0.0
        self._headless = False
        self._trainers: set[int] = set()
        """Members that have a Trainer, which saves and ends where it is asked to stop."""
        self._saving: set[int] = set()
        """Members that save what they hold, because nobody goes on."""
        self._known = False
        """Whether the head has spoken to this agent."""
        self._fit = True
        """Whether this host can start workers at all."""
        self._stores = 0
        self._ports: Range | None = None
        self.done = False
        self.verdict: int | None = None
        """The exit code of the run, once the head has said it; a head that was lost has not."""
        self._node = node
        self._host = socket.gethostname()
        address = self._address = address or str(connection.getsockname()[0])
        hello = {
            "node": node,
            "host": self._host,
            "address": address,
            "process": os.getpid(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "gpus": host_state.count(os.environ),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "manyhosts": __version__,
            **(origin.joins or {}),
        }
        self._head = HeadConnection(
            loop,
            connection,
            head=head,
            token=token,
            hello=hello,
            on_message=self._obey,
            on_end=self._lose_head,
            tell=self._words.err.write,
        )
        self._output = Outbox(self._head, loop.after)
        self._connectivity = ConnectivityCheck(loop, self._head, address)
        self._heartbeat = Heartbeat(loop, self._head)

    def leave(self) -> None:
        """End everything on this host. Called when the head says so, and when it is gone."""
        if self.done:
            return
        self.done = True
        is_well = self.verdict == 0
        if self._fork_server is not None:
            self._fork_server.close(spare=is_well)
        if is_well:
            self._tell_of_those_left()
        else:
            kill_descendants()
        self._desk.close()
        self._heartbeat.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._head.close()
        self._until_left.close()
        self._words.close(stuck_s=_LAST_WORDS_S)

    @property
    def was_taken_in(self) -> bool:
        """Whether the head has known this agent at all."""
        return self._head.is_known

    def _lose_head(self) -> None:
        """The head is gone: workers that have a Trainer may save what they hold before everything is ended."""
        trainers = self._desk.members | self._trainers
        saving = [each for each in self._workers.values() if not each.ended and each.worker_id.member in trainers]
        if self.done or self._headless or not saving:
            self.leave()
            return
        token = self._environment.get(run_lock.VARIABLE, "")
        if not self._until_left.enter_context(run_lock.shut(self._run_dir, token)):
            self.leave()  # another run has the directory
            return
        self._headless = True
        for worker in self._workers.values():
            if worker.worker_id.member in self._desk.members:
                message = {"message": "headless", "reason": "the head of this run is gone"}
                self._desk.tell(worker.worker_id.member, message)
            elif worker in saving and self._fork_server is not None:
                # None of them could go on without the others, so they save together, as where a scheduler asks them to.
                self._fork_server.ask("signal", name=worker.worker_id.name, signal=signal.SIGTERM, group=False)
            else:
                self._kill(worker)
        deadline = time.monotonic() + FAREWELL_S

        def look() -> None:
            if all(worker.ended for worker in saving) or time.monotonic() > deadline:
                self.leave()
            else:
                self._loop.after(_LOOK_S, look)

        look()

    def _tell_of_those_left(self) -> None:
        """Name what workers have started and left behind: it goes on, as under torchrun."""
        keepers = {keeper for worker in self._workers.values() for keeper in worker.keepers}
        left = [process for process in descendants(os.getpid()) if process not in keepers]
        below = {process for parent in left for process in descendants(parent)}
        for process in [process for process in left if process not in below]:
            if words := command_of(process):
                self._words.err.write(
                    f"manyhosts: {words} (process {process}) was left behind by the script, and goes on\n"
                )

    def ask_to_leave(self, number: signal.Signals) -> None:
        """Somebody asks this agent to end (a scheduler, say): the first time it is for the head to see to that.

        A head that has not spoken yet has given the run up: mpirun ends those whose agents came too late for that.
        """
        if not self._known or self._headless or self._joins is not None:
            self.leave()
            return
        if self._asked and time.monotonic() > self._asked + _ONE_WISH_S:
            self.leave()
        self._asked = self._asked or time.monotonic()
        self._head.send("asked", signal=int(number))

    def _obey(self, message: Message) -> None:
        if message["message"] == "alive":
            return
        self._known = True
        match message["message"]:
            case "prepare":
                self._prepare(message)
            case "open_store" if self._fit:
                self._open_store(message["generation"], message["address"])
            case "start" if self._fit:
                for worker in message["workers"]:
                    self._start(worker, message["generation"])
            case "end":
                self._signal(message["generation"], signal.SIGTERM, group=True)
                self._kill_later(message["generation"], message["grace_s"])
            case "signal":
                with contextlib.suppress(OSError):  # then the workers say which signal they were sent
                    reports.leave_cause(self._desk.address, message["cause"])
                self._signal(message["generation"], message["signal"], group=False)
                self._kill_later(message["generation"], message["farewell_s"])
            case "leave":
                self.verdict = message.get("code", 0)
                if message.get("why"):
                    self._words.err.write(f"manyhosts: the run goes on without this host: {message['why']}\n")
                self.leave()
            case _:
                self._obey_about_others(message)

    def _obey_about_others(self, message: Message) -> None:
        match message["message"]:
            case "tell":
                self._desk.tell(message["member"], message["content"])
            case "kill":
                self._kill_member(message["member"])
            case "close_store":
                self._close_store()
            case "try_connections":
                self._connectivity.try_connections(message["places"])
            case "open_door":
                self._connectivity.tell_port(self._ports)
            case "look":
                number = message["round"]
                workers = list(self._workers.values())
                Look(self._loop, workers, self._desk.address, lambda seen: self._tell_seen(number, seen))

    def _tell_seen(self, number: int, seen: list[Seen]) -> None:
        self._head.send("seen", round=number, workers=seen)

    def _prepare(self, message: Message) -> None:
        """Start the template, so that it loads torch while the head still waits for other hosts."""
        self._command: dict[str, Any] = message["command"]
        self._head.patience_s = message.get("head_timeout_s", 0.0)
        self._can_be_taken_over = bool(message.get("can_be_taken_over"))
        titles.set_title(
            f"manyhosts agent of node {self._node}: {Path(self._command['program']).name}", "manyhosts agent"
        )
        self._host = message.get("host") or self._host
        if self._joins is not None:
            self._words.err.write(
                f"manyhosts: joined as {self._host}; workers start when all hosts are there, and Ctrl-C takes this host"
                f" out of the run; logs: {message['run_dir']}/logs\n"
            )
        self._run_dir = Path(message["run_dir"])
        self._logs, self._log_bytes = self._run_dir / "logs", message.get("log_bytes", 0)
        if missing := _missing(self._command):
            self._tell_unfit(missing, self._command["folder"])
            return
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"cannot make the folder for logs: {error.strerror}"
            self._tell_unfit(text, str(self._logs))
            return
        self._ports = Range.of(message["environment"].get(VARIABLE, ""))
        try:
            ports.see_that_enough_are_free(self._address, self._ports, needed(message["workers"]))
        except LaunchError as error:
            self._tell_unfit(error.what, f"address {self._address}")
            return
        environment = {**os.environ, **message["environment"]}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment |= variables.of_host(environment, cores=cores, workers=message["workers"])
        self._environment, self._preload = environment, message["preload"]
        self._open_nursery()
        if message.get("tell_condition"):
            self._connectivity.tell_condition(
                message["run_dir"], environment, opens=message["listen"], ports=self._ports
            )

    def _tell_unfit(self, text: str, where: str) -> None:
        """This host can start no worker, and has started none."""
        self._head.send("trouble", text=text, where=where, early=True)
        self._fit = False

    def _open_nursery(self) -> ForkServer:
        """The fork server; a new one where the last was killed."""
        if self._fork_server is None:
            folder, run = self._command["folder"], self._environment.get(run_lock.VARIABLE, "")
            known = bool(self._launcher and run)
            self._fork_server = ForkServer(
                self._loop,
                preload=self._preload,
                environment=self._environment,
                folder=folder,
                scratch=self._scratch,
                stdin=self._stdin,
                name=standby.name_for(self._node, run, self._environment, folder, stdin=self._stdin) if known else "",
                launcher=self._launcher,
                on_event=self._hear_of_process,
                on_warm=lambda modules: self._head.send("warm", modules=modules),
                on_end=self._lose_nursery,
                on_words=self._words.err.write,
            )
        return self._fork_server

    def _open_store(self, generation: int, address: str) -> None:
        try:  # a free port that nobody else can take meanwhile
            listening = ports.listen(address, self._ports, backlog=4096, what="the store of the workers")
        except LaunchError as error:
            self._tell_unfit(error.what, error.where)
            return
        self._close_store()
        self._stores += 1
        self._open_nursery().ask("store", [listening.fileno()], name=f"store {self._stores}")
        self._head.send("store", generation=generation, port=listening.getsockname()[1], shared=bool(_version("torch")))
        listening.close()

    def _close_store(self) -> None:
        if self._fork_server is not None:
            self._fork_server.ask("signal", name=f"store {self._stores}", signal=signal.SIGKILL, group=True)

    def _see_directory(self) -> None:
        """End everything where another run has begun in the run directory while the head is away."""
        token = self._environment[run_lock.VARIABLE]
        if self._head.is_away and not self._headless and run_lock.is_anothers(self._run_dir, token):
            self._words.err.write("manyhosts: another run has begun in the directory of this one, which ends\n")
            self.leave()

    def _start(self, worker: dict[str, Any], generation: int) -> None:
        if self._can_be_taken_over and not self._head.waits_for_another:
            self._head.waits_for_another = True
            self._loop.every(run_lock.BEAT_S, self._see_directory)
        worker_id = WorkerId(
            rank=worker["rank"], local_rank=worker["local_rank"], generation=generation, member=worker["member"]
        )
        error_file = self._logs / f"{self._host}-{worker_id.rank}-error-{generation}.json"
        error_file.unlink(missing_ok=True)
        watched = WatchedWorker(
            self._loop,
            worker_id,
            log=self._logs / f"{self._host}-{worker_id.rank}.log",
            log_bytes=self._log_bytes,
            error_file=error_file,
            tell=self._tell,
            show=self._output.put,
            on_failure=self._end_soon,
            before_end=self._desk.drain,
            on_imported=self._warm,
        )
        self._workers[worker_id.name] = watched
        environment = {
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            **worker["environment"],
            reports.VARIABLE: str(self._desk.address),
        }
        has_stdin = self._stdin and worker_id.local_rank == 0
        ends = watched.open_pipes()
        self._open_nursery().ask(
            "worker", ends, name=worker_id.name, environment=environment, stdin=has_stdin, **self._command
        )
        for end in ends:
            os.close(end)

    def _hear_of_process(self, event: dict[str, Any]) -> None:
        worker = self._workers.get(event["name"])
        if worker is None:
            return
        if event["event"] == "started":
            worker.process = event["process"]
        elif event["event"] == "ended":
            reports.board_of(self._desk.address, worker.process).unlink(missing_ok=True)
            worker.end(event["code"], event["signal"], event["peak_bytes"])

    def _lose_nursery(self) -> None:
        """The template was killed, and its workers with it."""
        early = self._fork_server is not None and not self._fork_server.ready
        self._fork_server = None
        kill_descendants()  # what the workers have started
        what = "could not load what the script needs" if early else "was killed"
        text = f"the process that its workers are forked from {what}"
        self._head.send("trouble", text=text, where="", early=early)
        for worker in self._workers.values():
            worker.end(0, signal.SIGKILL)

    def _pass_on(self, local_rank: int, kind: str, fields: dict[str, Any]) -> None:
        """A report that a worker has sent."""
        worker_ids = [
            worker.worker_id for worker in self._workers.values() if worker.worker_id.local_rank == local_rank
        ]
        if worker_ids:
            newest = max(worker_ids, key=lambda worker_id: worker_id.member)
            if kind == "trainer":
                self._trainers.add(newest.member)
            self._head.send("report", **newest.to_json(), kind=kind, fields=fields)

    def _pass_on_membership(self, member: int, kind: str, fields: dict[str, Any]) -> None:
        """What a worker says about who trains together."""
        if kind == "saving":
            self._saving.add(member)  # concerns this agent alone
            return
        self._head.send("member", member=member, kind=kind, fields=fields)

    def _warm(self, modules: list[str]) -> None:
        """A worker has imported `modules`: those to come are to find them loaded."""
        if self._fork_server is not None and self._preload:  # else each worker is to load everything by itself
            self._fork_server.warm(modules)

    def _kill_member(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.worker_id.member == number:
                self._kill(worker)

    def _end_soon(self, worker: WatchedWorker) -> None:
        """A worker has said that it failed; what it does on its way out must not keep the others waiting."""
        self._loop.after(_WAY_OUT_S, lambda: self._kill(worker))

    def _kill(self, worker: WatchedWorker) -> None:
        if not worker.ended and self._fork_server is not None:
            self._fork_server.ask("signal", name=worker.worker_id.name, signal=signal.SIGKILL, group=True)

    def _signal(self, generation: int, number: int, *, group: bool, but: Set[int] = frozenset()) -> None:
        for worker in self._workers.values():
            if worker.worker_id.member in but:
                continue
            if worker.worker_id.generation == generation and not worker.ended and self._fork_server is not None:
                self._fork_server.ask("signal", name=worker.worker_id.name, signal=number, group=group)

    def _kill_later(self, generation: int, seconds: float) -> None:
        """Kill the workers when the time is over; those that save what they hold then have `FAREWELL_S` more."""

        def kill() -> None:
            saving = [each for each in self._workers.values() if each.worker_id.member in self._saving]
            if saving and not all(each.ended for each in saving):
                self._loop.after(FAREWELL_S, lambda: self._signal(generation, signal.SIGKILL, group=True))
            self._signal(generation, signal.SIGKILL, group=True, but=self._saving)

        self._loop.after(seconds, kill)

    def _tell(self, kind: str, /, **fields: Any) -> None:
        """Send what concerns a worker: its end comes behind all that it has printed."""
        self._output.flush()
        self._head.send(kind, **fields)


def _missing(command: Mapping[str, Any]) -> str:
    """What this host lacks of the files that the workers are to run, in a sentence; empty where all is there."""
    folder = Path(command["folder"])
    if not folder.is_dir():
        return "the working directory is not here: hosts are expected to share it, or have copies"
    if command["kind"] == "script" and not (folder / command["program"]).exists():
        return f"there is no script {command['program']!r} here: hosts are expected to share it, or have copies"
    return ""


def _version(package: str) -> str | None:
    """The version of `package` on this host, without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
