"""The head: knows all agents of a run, says who is which rank, and tells the user what happens. One per run."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manyhands.errors import LaunchError, ManyhandsError
from manyhands.launchers import variables
from manyhands.launchers.display import Display
from manyhands.launchers.failures import Failure, first, signal_name
from manyhands.launchers.job import Job
from manyhands.launchers.loop import Channel, Loop, Message, notice_loss
from manyhands.launchers.placement import AgentProcess
from manyhands.launchers.regroup import Regroup
from manyhands.launchers.roster import MOST_WITHOUT_PROGRESS, Member
from manyhands.launchers.tracebacks import is_native_frame, without_native_frames

_JOIN_LIMIT_S = 60.0
_GATHER_S = 15.0
"""How long a run that may begin with fewer nodes waits for the others."""
_CALL_AGAIN_S = 2.0
_LONGEST_CALL_AGAIN_S = 30.0
_FIRST_CAUSE_S = 2.0
"""How long a failure that looks like the consequence of another one waits for that other one to be heard of."""
_ASKED_TO_STOP = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
"""How a worker of ours ends when one of them was asked to stop by a signal."""
_STRANGER_LIMIT_S = 10.0
_GOODBYE_LIMIT_S = 5.0
_LOOK_S = 0.2
_ONE_WISH_S = 0.3

_SEE_ABOVE = "mend that on this host, or run without it; what was printed above may say more"

StartAgent = Callable[[int, str, str], AgentProcess]
"""Starts the agent of a node, given the head's address (host:port) and the run's token."""


@dataclass(slots=True)
class _Node:
    """One host of the run, as the head sees it."""

    name: str
    agent: AgentProcess
    channel: Channel | None = None
    facts: Message = field(default_factory=dict)
    leaving: bool = False
    late: list[Member] = field(default_factory=list)
    """Workers to be started when the agent is back, to join those that train."""


class Head:
    """Runs one job on agents that `start_agent` starts, until all workers are done, failed too often or interrupted."""

    def __init__(
        self, job: Job, hosts: Sequence[str], start_agent: StartAgent, display: Display, *, address: str = "127.0.0.1"
    ) -> None:
        """`hosts` are the names of the nodes in order; `address` is where agents can reach this process."""
        self._job, self._display, self._start_agent, self._address = job, display, start_agent, address
        self._loop = Loop()
        self._token = secrets.token_hex(16)
        self._listening = socket.create_server((address, 0))
        self._loop.watch(self._listening, self._accept)
        self._nodes = [_Node(name, self._begin_agent(node)) for node, name in enumerate(hosts)]
        self._strangers: set[Channel] = set()
        self._generation = 0
        self._numbers = itertools.count()
        self._regroup = Regroup(self._loop, self, 0)
        self._running: set[int] = set()
        """Members by number."""
        self._store: tuple[int, str, int] | None = None
        """The node that keeps it, its address and port."""
        self._on_store: Callable[[str, int], None] | None = None
        self._failures: list[Failure] = []
        self._culprit: Failure | None = None
        """Whose failure the others are being ended for. How they end then says nothing."""
        self._others_ended = 0
        self._trouble: dict[str, str] = {}
        self._interrupted = 0.0
        """When the first signal came, on the monotonic clock; 0 before."""
        self._result: int | ManyhandsError | None = None
        self._trainer_seen = False
        self._exit_code = 0
        self._expect_agents()

    def run(self) -> int:
        """Returns 0, 130 if it was interrupted, or 128 + the signal that asked a worker to stop.

        Raises:
            LaunchError: an agent did not start.
            ManyhandsError: workers failed; the error is that of the worker that failed first.
        """
        with contextlib.suppress(ValueError):  # outside the main thread whoever called this hears of signals
            self._loop.on_signals([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], self._interrupt)
        try:
            self._loop.run(until=lambda: self._result is not None)
        finally:
            self._say_goodbye()
        if isinstance(self._result, ManyhandsError):
            raise self._result
        if self._job.overrides and not self._trainer_seen and self._result == 0:
            self._display.say("manyhands: --set had no effect, because the script made no mh.Trainer")
        return self._result or 0

    # Agents come and go.

    def _begin_agent(self, node: int) -> AgentProcess:
        host, port = self._listening.getsockname()[:2]
        return self._start_agent(node, f"{host}:{port}", self._token)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        notice_loss(connection)
        channel = Channel(
            self._loop, connection, lambda message: self._admit(channel, message), lambda: self._forget(channel)
        )
        channel.longest_line = 1 << 16  # until it has shown that it belongs to us
        self._strangers.add(channel)
        self._loop.after(_STRANGER_LIMIT_S, lambda: self._forget(channel))

    def _forget(self, channel: Channel) -> None:
        if channel in self._strangers:
            self._strangers.discard(channel)
            channel.close()

    def _admit(self, channel: Channel, message: Message) -> None:
        """The first message of a connection: whoever does not know the token is not listened to any further."""
        number = message.get("node")
        known = hmac.compare_digest(str(message.get("token", "")), self._token)
        if not known or message["message"] != "hello" or not isinstance(number, int):
            self._forget(channel)
            return
        if not 0 <= number < len(self._nodes) or self._nodes[number].channel is not None:
            self._forget(channel)
            return
        self._strangers.discard(channel)
        channel.longest_line = 64 << 20
        node = self._nodes[number]
        node.channel, node.facts = channel, message
        channel.on_message = lambda heard: self._hear(number, heard)
        channel.on_end = lambda: self._lose_agent(number)
        self._prepare(node)
        if not self._running:
            if all(each.channel is not None for each in self._nodes):
                self._open_store()
            return
        late, node.late = node.late or self._newcomers(number), []
        for member in late:
            self._regroup.add_late(member)

    def _newcomers(self, number: int) -> list[Member]:
        """The workers of a node that comes while others train."""
        first = number * self._job.workers_per_node
        return [
            Member(number=next(self._numbers), node=number, local_rank=place, rank=first + place, late=True)
            for place in range(self._job.workers_per_node)
        ]

    def _prepare(self, node: _Node) -> None:
        job = self._job
        assert node.channel is not None, "a node is prepared when it has said hello"
        node.channel.send(
            "prepare",
            host=node.name,
            command={"kind": job.kind, "program": job.program, "arguments": job.arguments, "folder": str(job.folder)},
            preload=job.preload,
            environment={**job.environment, variables.RUN_DIR: str(job.run_dir)},
            run_dir=str(job.run_dir),
            workers=job.workers_per_node,
        )

    def _expect_agents(self, waited_s: float = 0) -> None:
        """Look now and then whether the agents that have not said hello are still on their way."""
        missing = [node for node in self._nodes if node.channel is None]
        if not missing or self._result is not None:
            return
        dead = [node for node in missing if node.agent.poll() is not None]
        if self._job.is_elastic and (len(dead) == len(missing) or waited_s > _GATHER_S):
            if self._begin_without(missing):
                return
        elif dead or waited_s > _JOIN_LIMIT_S:
            why = "ended before it said a word" if dead else f"did not report within {_JOIN_LIMIT_S:.0f} s"
            self._result = LaunchError(
                f"the agent {why}",
                where="host " + ", ".join(node.name for node in dead or missing),
                fix=f"see what it printed above, and that it can open a connection to {self._address}",
            )
        self._loop.after(_LOOK_S, lambda: self._expect_agents(waited_s + _LOOK_S))

    def _present(self) -> list[int]:
        """The nodes whose agents are here."""
        return [number for number, node in enumerate(self._nodes) if node.channel is not None]

    def _begin_without(self, missing: Sequence[_Node]) -> bool:
        """Begin with the nodes that are here, if they are enough; the others may come later."""
        present = self._present()
        if len(present) < (self._job.least_nodes or len(self._nodes)):
            if all(node.agent.poll() is not None for node in missing):
                names = ", ".join(node.name for node in missing)
                self._result = LaunchError(
                    f"only {len(present)} of at least {self._job.least_nodes} nodes are here",
                    where=f"not here: {names}",
                    fix="see what their agents printed above",
                )
            return False
        self._open_store()
        for number, node in enumerate(self._nodes):
            if node in missing:
                self._call_again(number, self._generation, _CALL_AGAIN_S)
        return True

    def _call_again(self, number: int, generation: int, pause_s: float) -> None:
        """Try now and then to start the agent of a node that is away, so that it can come back."""
        node = self._nodes[number]

        def call() -> None:
            if self._result is not None or generation != self._generation or node.channel is not None:
                return
            if node.agent.poll() is not None:
                node.agent.wait()
                node.agent = self._begin_agent(number)
            self._call_again(number, generation, min(2 * pause_s, _LONGEST_CALL_AGAIN_S))

        self._loop.after(pause_s, call)

    def _lose_agent(self, number: int) -> None:
        node = self._nodes[number]
        node.channel = None
        if node.leaving or self._result is not None:
            return
        if not self._running:
            self._result = LaunchError("the agent ended while it prepared", where=f"host {node.name}", fix=_SEE_ABOVE)
        if self._store is not None and self._store[0] == number:
            self._store = None
        gone = [member for member in self._regroup.roster.members.values() if member.node == number]
        for member in gone:
            self._running.discard(member.number)
        if self._job.is_elastic and len(self._present()) >= (self._job.least_nodes or 0):
            node.agent.kill()
            self._call_again(number, self._generation, _CALL_AGAIN_S)
        self._note_failures(
            {each.number: Failure(rank=each.rank, host=node.name, lost="its agent is gone") for each in gone}
        )

    # Workers start and end.

    def _open_store(self) -> None:
        self._store = None
        node = next(number for number, node in enumerate(self._nodes) if node.channel is not None)
        address = self._store_address(node)
        self._broadcast_to([self._nodes[node]], "open_store", generation=self._generation, address=address)

    def _store_address(self, node: int = 0) -> str:
        """Where the other hosts reach this one."""
        return str(self._nodes[node].facts.get("address", self._address))

    def _take_store(self, number: int, message: Message) -> None:
        address = self._store_address(number)
        self._store = (number, address, message["port"])
        if self._on_store is not None:
            then, self._on_store = self._on_store, None
            then(address, message["port"])
        elif not self._running:
            self._start_workers(message["port"], message["shared"])

    def _start_workers(self, port: int, shared: bool) -> None:
        """Start every worker of this generation, now that there is a store for them to meet at."""
        self._failures.clear()
        self._trouble.clear()
        self._culprit = None
        self._regroup = Regroup(self._loop, self, self._generation)
        present = self._present()
        for place, number in enumerate(present):
            members = []
            for local_rank in range(self._job.workers_per_node):
                rank = place * self._job.workers_per_node + local_rank
                members.append(Member(number=next(self._numbers), node=number, local_rank=local_rank, rank=rank))
                self._regroup.add(members[-1])
            self._start(members, (self._store_address(), port), shared=shared)

    def _start(self, members: Sequence[Member], store: tuple[str, int], *, shared: bool = True) -> None:
        """Start workers that are all of one host."""
        workers = []
        present = self._present()
        for member in members:
            self._running.add(member.number)
            environment = variables.of_worker(
                self._job if member.late else replace(self._job, nodes=len(present), least_nodes=None),
                node=member.node if member.late else present.index(member.node),
                local_rank=member.local_rank,
                generation=self._generation,
                store=store,
                agent_store=shared,
            )
            environment |= variables.of_member(self._job, member=member.number, late=member.late)
            place = {"rank": member.rank, "local_rank": member.local_rank, "member": member.number}
            workers.append({**place, "environment": environment})
        self._broadcast_to([self._nodes[members[0].node]], "start", generation=self._generation, workers=workers)

    # What regrouping needs of the hosts.

    def tell_member(self, member: Member, kind: str, /, **content: Any) -> None:
        """Say something to a worker."""
        message = {"message": kind, **content}
        self._broadcast_to([self._nodes[member.node]], "tell", member=member.number, content=message)

    def start_late(self, member: Member) -> None:
        """Start a worker while others train; on a host that is away, when it is back."""
        node = self._nodes[member.node]
        if node.channel is not None:
            self._start([member], self._store[1:] if self._store else (self._address, 0))
            return
        node.late.append(member)
        if len(node.late) == 1:
            self._call_back(member.node)

    def _call_back(self, number: int) -> None:
        """Start the agent of a host that is away again."""
        node = self._nodes[number]
        node.agent.kill()
        node.agent.wait()
        node.agent = self._begin_agent(number)
        self._expect_back(number, self._generation)

    def _expect_back(self, number: int, generation: int, waited_s: float = 0) -> None:
        node = self._nodes[number]
        if node.channel is not None or self._result is not None or generation != self._generation:
            return
        if node.agent.poll() is not None or waited_s > _JOIN_LIMIT_S:
            late, node.late = node.late, []
            lost = "its agent is gone, and could not be started again"
            for member in late:
                self._regroup.roster.members.pop(member.number, None)
            self._note_failures({each.number: Failure(rank=each.rank, host=node.name, lost=lost) for each in late})
            return
        self._loop.after(_LOOK_S, lambda: self._expect_back(number, generation, waited_s + _LOOK_S))

    def kill_member(self, member: Member) -> None:
        """End a worker that does not answer; its end is told as usual."""
        self._broadcast_to([self._nodes[member.node]], "kill", member=member.number)

    def open_store(self, then: Callable[[str, int], None]) -> None:
        """See that there is a store for workers to meet at, and call back with its address and port."""
        if self._store is not None:
            then(*self._store[1:])
            return
        self._on_store = then
        self._open_store()

    def close_store(self) -> None:
        """Have everybody who waits for the store wait no more."""
        if self._store is not None:
            self._broadcast_to([self._nodes[self._store[0]]], "close_store")
        self._store = None

    def _successor(self, lost: Member) -> Member | None:
        """Who takes the place of a worker; nobody where its node is away and the run can do without."""
        if self._job.is_elastic and self._nodes[lost.node].channel is None:
            return None
        return Member(number=next(self._numbers), node=lost.node, local_rank=lost.local_rank, rank=lost.rank, late=True)

    def _hear(self, number: int, message: Message) -> None:
        if message.get("generation", self._generation) != self._generation:
            return  # news of workers that were given up
        match message["message"]:
            case "store":
                self._take_store(number, message)
            case "member":
                self._regroup.hear(message["member"], message["kind"], message["fields"])
            case "output":
                self._show(self._nodes[number], message)
            case "report":
                self._take_report(self._rank(message), message["kind"], message["fields"])
            case "ended":
                self._note_end(self._nodes[number], message)
            case "asked":
                if not self._interrupted:
                    self._interrupt(signal.Signals(message["signal"]))
            case "trouble":
                self._take_trouble(self._nodes[number], message)

    def _rank(self, message: Message) -> int:
        """What a worker's rank is now."""
        member = self._regroup.roster.members.get(message["member"])
        return int(message["rank"]) if member is None else member.rank

    def _show(self, node: _Node, message: Message) -> None:
        rank = self._rank(message)
        for line in message["lines"]:
            if not is_native_frame(line):
                self._display.line(line, self._prefix(node, rank), message["stream"] == "err")

    def _prefix(self, node: _Node, rank: int) -> str:
        if self._job.workers == 1:
            return ""
        return f"[{rank}] " if len(self._nodes) == 1 else f"[{node.name} {rank}] "

    def _take_report(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if kind == "progress" and rank == 0:
            self._display.progress(fields)
        elif kind == "say":
            self._display.say(str(fields.get("text", "")))
        elif kind == "trainer":
            self._trainer_seen = True

    def _take_trouble(self, node: _Node, message: Message) -> None:
        """A host can start no worker; the ends of those that it had follow."""
        self._trouble[node.name] = message["text"]
        if message["early"]:
            where = ", ".join(part for part in (f"host {node.name}", message["where"]) if part)
            self._result = LaunchError(str(message["text"]), where=where, fix=_SEE_ABOVE)

    def _note_end(self, node: _Node, message: Message) -> None:
        self._running.discard(message["member"])
        code, number = message["code"], message["signal"]
        asked = self._trainer_seen and code in _ASKED_TO_STOP
        if asked:
            self._exit_code = code  # the workers have agreed to stop and saved what they have: nothing has failed
        if message["finished"] or (code == 0 and number == 0) or asked:
            # A script whose main module came to its end has succeeded, whatever its destructors do then.
            self._regroup.drop(message["member"])
            self._dismiss_those_that_come_too_late()
            if not self._running and not self._failures:
                self._result = 130 if self._interrupted else self._exit_code
            else:
                self._consider()
            return
        failure = Failure(
            rank=self._rank(message),
            host=node.name,
            code=code,
            signal=number,
            error=message["error"],
            out_of_memory=message["out_of_memory"],
            lost=self._trouble.get(node.name, ""),
            log=str(self._job.run_dir / "logs" / f"{node.name}-{message['rank']}.log"),
        )
        self._note_failures({message["member"]: failure})

    # Failure, and what follows from it.

    def _dismiss_those_that_come_too_late(self) -> None:
        """All that trained have finished: whoever was on the way to them is needed no more."""
        roster = self._regroup.roster
        if roster.trained():
            return
        for member in list(roster.members.values()):
            self._running.discard(member.number)
            self._regroup.drop(member.number)
            self.kill_member(member)

    def _note_failures(self, failures: Mapping[int, Failure]) -> None:
        """Workers, by number, have failed or are lost: the others go on, or the run ends or starts again."""
        for number, failure in failures.items():
            if not self._goes_on_without(number, failure):
                self._failures.append(failure)
        if self._failures:
            self._regroup.refuse()
            self._consider()

    def _goes_on_without(self, number: int, failure: Failure) -> bool:
        if self._interrupted or self._culprit or self._failures or not failure.is_loss:
            return False
        if self._job.is_elastic and len(self._present()) < (self._job.least_nodes or 0):
            return False
        reason = failure.told(0).what
        if self._regroup.goes_on_without(number, reason, replace=self._successor):
            return True
        if self._regroup.roster.makes_no_progress:
            failure.note = f", failure {MOST_WITHOUT_PROGRESS + 1} in a row without one more step"
        return False

    def _consider(self) -> None:
        """A worker has ended in one way or another while something is wrong: decide what comes next."""
        if self._interrupted or self._culprit or not self._failures:
            if not self._running:
                self._conclude()
            return
        if first(self._failures).may_be_consequence and self._running:
            generation = self._generation
            self._loop.after(_FIRST_CAUSE_S, lambda: self._end_workers(generation))
            return
        self._end_workers(self._generation)

    def _end_workers(self, generation: int) -> None:
        """End the workers that are left after a failure."""
        if self._culprit or generation != self._generation or self._result is not None:
            return
        self._culprit = first(self._failures)
        self._others_ended = len(self._running) + len(self._failures) - 1
        self._broadcast_to(self._nodes, "end", generation=generation, grace_s=self._job.grace_s)
        if not self._running:
            self._conclude()

    def _conclude(self) -> None:
        """Nothing runs any more."""
        if self._interrupted or self._culprit is None:
            self._result = 130
            return
        failure = self._culprit
        error = failure.told(self._others_ended)
        for line in without_native_frames(failure.traceback).splitlines():
            self._display.line(line, "", is_error=True)
        wrong_request = error.exit_code == 2  # starting again would not change it
        if self._generation >= self._job.restarts or wrong_request:
            self._result = error
            return
        self._generation += 1
        self._display.say(
            f"manyhands: {error.what}\nmanyhands: starting all workers again"
            f" (restart {self._generation} of {self._job.restarts})"
        )
        for number, node in enumerate(self._nodes):
            if node.channel is None:
                node.agent.kill()
                node.agent.wait()
                node.agent = self._begin_agent(number)
        if all(node.channel is not None for node in self._nodes):
            self._open_store()
        else:
            self._expect_agents()  # the store is opened when the last one has joined

    def _interrupt(self, number: signal.Signals) -> None:
        """Ctrl-C and the like: the first asks workers to end, the second does not ask."""
        if self._interrupted:
            # Many send a signal to a process and then to its group (`timeout` does): that is one wish, not two.
            if time.monotonic() > self._interrupted + _ONE_WISH_S:
                self._result = 130
            return
        self._interrupted = time.monotonic()
        if not self._running:
            self._result = 130
            return
        self._display.say(f"manyhands: {signal_name(number)}: the workers are ending; once more ends them at once")
        self._broadcast_to(
            self._nodes,
            "signal",
            generation=self._generation,
            signal=int(signal.SIGTERM),
            farewell_s=self._job.farewell_s,
        )

    def _broadcast_to(self, nodes: Sequence[_Node], kind: str, **fields: Any) -> None:
        for node in nodes:
            if node.channel is not None:
                node.channel.send(kind, **fields)

    def _say_goodbye(self) -> None:
        """Have every agent end what is left, and see that it has gone."""
        for node in self._nodes:
            node.leaving = True
        self._broadcast_to(self._nodes, "leave")
        for node in self._nodes:
            if node.channel is not None:
                node.channel.flush(timeout_s=1)
            else:
                node.agent.terminate()
        for node in self._nodes:
            try:
                node.agent.wait(timeout=_GOODBYE_LIMIT_S)
            except subprocess.TimeoutExpired:
                node.agent.kill()
                node.agent.wait()
            if node.channel is not None:
                node.channel.close()
        self._loop.unwatch(self._listening)
        self._listening.close()
        self._loop.close()
