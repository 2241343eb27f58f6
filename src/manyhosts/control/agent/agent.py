"""The agent: one process per host of a run. It reports the state of its host to the head and starts the workers there.

    python -m manyhosts.control.agent.agent --head HOST:PORT --node N

Where the head has started it on its own machine, it is given one end of a pair of sockets: `--head fd:NUMBER`. It needs
no torch. It ends when the head says so, when the head is gone, and when it is asked to twice.

What the two say to each other is in `control.protocol`.

Where the head was killed and another one may take the run over, workers continue for `head_timeout_s`, as where the way
to it is broken. When the head is gone for good, everything this host runs is ended. Workers that have a Trainer may
first save their state, for `FAREWELL_S` at most; until then no other run can use the run directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.cluster.ports import VARIABLE, Range, needed
from manyhosts.control import protocol, titles, variables
from manyhosts.control.agent import host_state, standby, warm
from manyhosts.control.agent.connectivity import ConnectivityCheck
from manyhosts.control.agent.head_connection import HeadConnection, Heartbeat, connect
from manyhosts.control.agent.processes import adopt_orphans
from manyhosts.control.agent.workers import FAREWELL_S, LocalWorkers, WorkerSetup
from manyhosts.control.handshake import Hello
from manyhosts.control.loop import Loop, Message
from manyhosts.control.screen import Screen
from manyhosts.control.wire_format import read
from manyhosts.errors import LaunchError
from manyhosts.hosts import interfaces, ports
from manyhosts.records import run_lock

_ONE_WISH_S = 0.3
_LAST_WORDS_S = 2.0
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Who has started an agent."""

    stdin: bool = False
    """Whether the first worker reads what comes on the standard input of the agent."""
    launcher: int = 0
    """A process of this host that ends with the launcher, if there is one."""
    joins: Mapping[str, Any] | None = None
    """What a host that joined by itself sends to the head first. Its user may take it back at any time."""


class Agent:
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
        self._origin = origin or Origin()
        self._words = Screen(sys.stderr, sys.stderr)
        self._loop, self._node = loop, node
        self._until_left = contextlib.ExitStack()
        """Released when everything on this host has ended."""
        self._asked = 0.0
        self._headless = False
        self._known = False
        """Whether the head has spoken to this agent."""
        self._fit = True
        """Whether this host can start workers at all."""
        self._ports: Range | None = None
        self.done = False
        self.verdict: int | None = None
        """The exit code of the run, once the head has said it; a head that was lost has not."""
        self._address = address or str(connection.getsockname()[0])
        self._head = HeadConnection(
            loop,
            connection,
            head=head,
            token=token,
            hello=self._hello(),
            on_message=self._obey,
            on_end=self._lose_head,
            show=self._words.err.write,
        )
        self._workers = LocalWorkers(loop, self._head, self._words.err.write)
        self._connectivity = ConnectivityCheck(loop, self._head, self._address)
        self._heartbeat = Heartbeat(loop, self._head)

    def _hello(self) -> Hello:
        return Hello(
            session=secrets.token_hex(8),
            heard=0,
            node=self._node,
            host=socket.gethostname(),
            address=self._address,
            process=os.getpid(),
            cores=host_state.cores(),
            gpus=host_state.count(os.environ),
            **(self._origin.joins or {}),
        )

    @property
    def was_taken_in(self) -> bool:
        """Whether the head has known this agent at all."""
        return self._head.is_known

    # What the head says.

    def _obey(self, found: Message) -> None:
        if found["message"] == protocol.Alive.NAME:
            return
        self._known = True
        try:
            message = read(found, protocol.FROM_HEAD)
        except ValueError as fault:
            self._words.err.write(f"manyhosts: the head has sent a message that cannot be read: {fault}\n")
            self.leave()
            return
        match message:
            case protocol.Prepare():
                self._prepare(message)
            case protocol.OpenStore() if self._fit:
                self._open_store(message)
            case protocol.Start() if self._fit:
                self._start(message)
            case protocol.End():
                self._workers.signal(message.generation, signal.SIGTERM, group=True)
                self._workers.kill_later(message.generation, message.grace_s)
            case protocol.Signal():
                self._workers.ask_to_stop(message.generation, message.signal, message.cause)
                self._workers.kill_later(message.generation, message.farewell_s)
            case protocol.Leave():
                self.verdict = message.code
                if message.why:
                    self._words.err.write(f"manyhosts: the run continues without this host: {message.why}\n")
                self.leave()
            case _:
                self._obey_about_others(message)

    def _obey_about_others(self, message: protocol.FromHead) -> None:
        match message:
            case protocol.ToWorker():
                self._workers.send(message.member, message.content)
            case protocol.Kill():
                self._workers.kill(message.member)
            case protocol.CloseStore():
                self._workers.close_store()
            case protocol.AnswerStore():
                self._workers.store_lines.answer(message)
            case protocol.TryConnections():
                self._connectivity.try_connections(message.places)
            case protocol.ListenForHost():
                self._connectivity.report_port(self._ports)
            case protocol.InspectWorkers():
                number = message.round
                self._workers.inspect(lambda seen: self._head.say(protocol.WorkerStates(round=number, workers=seen)))

    def _prepare(self, message: protocol.Prepare) -> None:
        """See that this host can start the workers, and have all be loaded that they need."""
        command, origin = message.command, self._origin
        self._head.patience_s = message.head_timeout_s
        self._can_be_taken_over = message.can_be_taken_over
        self._run_dir = Path(message.run_dir)
        self._run_token = message.environment.get(run_lock.VARIABLE, "")
        logs = self._run_dir / "logs"
        titles.set_title(f"manyhosts agent of node {self._node}: {Path(command['program']).name}", "manyhosts agent")
        host = message.host
        if origin.joins is not None:
            self._words.err.write(
                f"manyhosts: joined as {host}; workers start when all hosts are there, and Ctrl-C takes this host"
                f" out of the run; logs: {logs}\n"
            )
        if missing := _missing(command):
            self._report_unfit(missing, command["folder"])
            return
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._report_unfit(f"cannot make the folder for logs: {error.strerror}", str(logs))
            return
        self._ports = Range.of(message.environment.get(VARIABLE, ""))
        try:
            ports.see_that_enough_are_free(self._address, self._ports, needed(message.workers))
        except LaunchError as error:
            self._report_unfit(f"{error.what} ({error.fix})", f"address {self._address}")
            return
        environment = {**os.environ, **message.environment}
        environment |= variables.of_host(environment, cores=host_state.cores(), workers=message.workers)
        folder, stdin, name = command["folder"], origin.stdin, ""
        if origin.launcher and message.warm_s:
            name = warm.name_for(self._node, environment, message.preload, folder)
        elif origin.launcher and self._run_token:
            name = standby.name_for(self._node, self._run_token, environment, folder, stdin=stdin)
        setup = WorkerSetup(
            host=host,
            command=command,
            preload=message.preload,
            environment=environment,
            logs=logs,
            log_bytes=message.log_bytes,
            fork_server=name,
            stays_s=message.warm_s if name else 0.0,
            launcher=origin.launcher,
            stdin=stdin,
        )
        self._workers.prepare(setup)
        if message.tell_condition:
            self._connectivity.report_condition(message.run_dir, environment, opens=message.listen, ports=self._ports)

    def _report_unfit(self, text: str, where: str) -> None:
        """This host can start no worker, and has started none."""
        self._head.say(protocol.Trouble(text=text, where=where, early=True))
        self._fit = False

    def _open_store(self, message: protocol.OpenStore) -> None:
        try:
            self._workers.open_store(message.generation, message.address, self._ports, listens=message.listens)
        except LaunchError as error:
            self._report_unfit(f"{error.what} ({error.fix})", error.where)
        except OSError as error:
            what = f"this host cannot listen at {message.address}, which is the address that the head has for it"
            self._report_unfit(f"{what}: {error.strerror or error}", "")

    def _start(self, message: protocol.Start) -> None:
        if self._can_be_taken_over and not self._head.waits_for_another:
            self._head.waits_for_another = True
            self._loop.every(run_lock.BEAT_S, self._see_directory)
        for worker in message.workers:
            self._workers.start(message.generation, worker)

    def _see_directory(self) -> None:
        """End everything where another run has begun in the run directory while the head is away."""
        if self._head.is_away and not self._headless and run_lock.is_anothers(self._run_dir, self._run_token):
            self._words.err.write("manyhosts: another run has begun in the directory of this one, which ends\n")
            self.leave()

    # It ends.

    def ask_to_leave(self, number: signal.Signals) -> None:
        """Somebody asks this agent to end (a scheduler, say): the first time it is for the head to see to that.

        A head that has not spoken yet has given the run up: mpirun ends those whose agents came too late for that.
        """
        if not self._known or self._headless or self._origin.joins is not None:
            self.leave()
            return
        if self._asked and time.monotonic() > self._asked + _ONE_WISH_S:
            self.leave()
        self._asked = self._asked or time.monotonic()
        self._head.say(protocol.StopRequested(signal=int(number)))

    def _lose_head(self) -> None:
        """The head is gone: workers that have a Trainer may save what they hold before everything is ended."""
        saving = self._workers.with_trainer()
        if self.done or self._headless or not saving:
            self.leave()
            return
        if not self._until_left.enter_context(run_lock.shut(self._run_dir, self._run_token)):
            self.leave()  # another run has the directory
            return
        self._headless = True
        self._workers.have_saved(saving, "the command of this run was killed: --run-dir of the run continues it")
        deadline = time.monotonic() + FAREWELL_S

        def check() -> None:
            if all(worker.ended for worker in saving) or time.monotonic() > deadline:
                self.leave()
            else:
                self._loop.after(_LOOK_S, check)

        check()

    def leave(self) -> None:
        """End everything on this host. Called when the head says so, and when it is gone."""
        if self.done:
            return
        self.done = True
        self._workers.close(is_well=self.verdict == 0, is_over=self.verdict is not None)
        self._heartbeat.close()
        self._head.close()
        self._until_left.close()
        self._words.close(stuck_s=_LAST_WORDS_S)


def _missing(command: Mapping[str, Any]) -> str:
    """What this host lacks of the files that the workers are to run, in a sentence; empty where all is there."""
    folder = Path(command["folder"])
    if not folder.is_dir():
        return "the working directory is not here: hosts are expected to share it, or have copies"
    if command["kind"] == "script" and not (folder / command["program"]).exists():
        return f"there is no script {command['program']!r} here: hosts are expected to share it, or have copies"
    return ""


def main(words: list[str] | None = None, token: str = "") -> int:
    """Be the agent of this host. Returns its exit code.

    Without a `token`, the run's secret, that is the first line of the standard input.
    """
    parser = argparse.ArgumentParser(prog="manyhosts agent")
    parser.add_argument("--head", required=True, help="host:port, or fd:NUMBER")
    parser.add_argument("--node", type=int, required=True, help="this host's number, from 0")
    parser.add_argument("--address", default="", help="where other hosts reach this one")
    parser.add_argument(
        "--stdin", action="store_true", help="its first worker reads the standard input of this process"
    )
    parser.add_argument("--launcher", type=int, default=0, help="a process of this host that ends with the launcher")
    parser.add_argument("--interface", default="", help="the interface that has that address")
    asked = parser.parse_args(words)
    if asked.interface:
        interfaces.use(asked.interface, os.environ)
    born_with_it = asked.head.startswith("fd:")
    token = "" if born_with_it else token or sys.stdin.readline().strip()
    if not (token or born_with_it):
        sys.stderr.write("manyhosts: this agent was given no secret, by which it would know its head\n")
        return 2
    try:
        connection = connect(asked.head)
    except OSError as error:
        sys.stderr.write(f"manyhosts: this host cannot reach the head at {asked.head}: {error}\n")
        return 3
    agent = serve(
        connection,
        asked.head,
        node=asked.node,
        token=token,
        address=asked.address,
        origin=Origin(stdin=asked.stdin, launcher=asked.launcher),
    )
    return 0 if agent.was_taken_in else 3


def serve(
    connection: socket.socket,
    head: str,
    *,
    node: int,
    token: str,
    address: str,
    origin: Origin | None = None,
) -> Agent:
    """Be the agent of this host until the head, which `connection` leads to, has said that all is over, or is lost.

    Returns:
        What was the agent; its `verdict` is the exit code of the run, where the head has said one.
    """
    titles.set_title(f"manyhosts agent of node {node}", "manyhosts agent")
    adopt_orphans()
    loop = Loop()
    # First the signals, which the loop handles when it runs: what the agent makes on this host must be taken away.
    loop.on_signals([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], lambda number: agent.ask_to_leave(number))
    agent = Agent(
        loop,
        connection,
        head,
        node=node,
        token=token,
        address=address,
        origin=origin,
    )
    try:
        loop.run(until=lambda: agent.done)
    finally:
        agent.leave()
    return agent


if __name__ == "__main__":
    sys.exit(main())
