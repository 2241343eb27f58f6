"""The head of a run, one per run: waits for its agents, checks their hosts, starts workers and sees them to an end.

`run` reads as a run goes; what agents say meanwhile is passed to the part that it concerns.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from manyhosts.cluster import ports
from manyhosts.control import protocol, variables
from manyhosts.control.agent import host_state
from manyhosts.control.display import Display
from manyhosts.control.head import takeover
from manyhosts.control.head.agent_starter import StartAgent, StartHere
from manyhosts.control.head.agents import SEE_ABOVE, Agents
from manyhosts.control.head.checks import Newcomers, Precheck
from manyhosts.control.head.failure_policy import FailurePolicy
from manyhosts.control.head.failures import Failure
from manyhosts.control.head.hang_monitor import HangMonitor
from manyhosts.control.head.missing_hosts import Gathering
from manyhosts.control.head.output import WorkerOutput
from manyhosts.control.head.state import HeadEndpoint, HeadState, Node
from manyhosts.control.job import Job
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.records import run_directory, run_lock

_STREAMS = ("step", "busy", "rest", "progress", "say")
"""What workers report that changes nothing of what another head would have to know."""


class _Over(Exception):
    """The run has its result, so nothing more of it begins."""


class Head:
    """Runs one job on agents that `start_agent` starts, until all workers are done, failed too often or interrupted."""

    def __init__(  # noqa: PLR0913  # what launchers differ in
        self,
        job: Job,
        hosts: Sequence[str],
        start_agent: StartAgent,
        display: Display,
        *,
        address: str = "127.0.0.1",
        endpoint: HeadEndpoint | None = None,
        start_here: StartHere | None = None,
        ways_are_known: bool = False,
        succession: takeover.TakeoverConfig | None = None,
    ) -> None:
        """`hosts` are the names of the nodes in order; `address` is where agents can reach this process.

        `endpoint` is the address that agents which an engine starts already have; `ways_are_known`: it was seen already
        that all hosts reach each other. `start_here` starts the agents that are on this machine, without a port.

        `succession`: another head may continue where this one is killed, or this one resumes the run of another.

        Raises:
            ConfigError: another run has taken the run directory, or the head of this one lives.
            LaunchError: this machine cannot listen where the agents of another head call.
        """
        self._state = HeadState(job, display, can_be_taken_over=succession is not None and job.head_timeout_s > 0)
        self._succession, left = succession, None if succession is None else succession.left
        if left is not None:
            address, endpoint = left.address, replace(endpoint or HeadEndpoint(), token=left.token, port=left.port)
        self._hold = takeover.RunDirLock(self._state, "" if left is None else left.start)
        self._record = takeover.Record(job.run_dir, self._gather)
        try:
            inherits = left is not None
            agents = Agents(self._state, hosts, start_agent, address, self, endpoint, start_here, inherits=inherits)
            joined = endpoint is not None and endpoint.joining is not None
            self._begin(agents, ways_are_known=ways_are_known, joined=joined)
            if left is not None:
                self._go_on_from(left)
        except BaseException:
            self._hold.release()
            raise

    def _begin(self, agents: Agents, *, ways_are_known: bool, joined: bool) -> None:
        self._agents, self._present = agents, agents.present()
        self._news = WorkerOutput(self._state, len(agents.nodes))
        self._failure_policy = FailurePolicy(self._state, self._agents, self._news)
        self._worker_group = self._failure_policy.worker_group
        self._hang_monitor = HangMonitor(
            self._state,
            self._agents,
            self._worker_group,
            on_silence=self._lose_silent,
            on_diagnosis=self._failure_policy.note_diagnosis,
            gone=lambda: self._failure_policy.ended_well,
        )
        self._precheck = Precheck(self._state, self._agents, ways=not ways_are_known, one_way=joined)
        self._newcomers = Newcomers(self._state, self._agents) if joined and self._state.job.check else None

    def run(self) -> int:
        """Returns 0, 130 if it was interrupted, or 128 + the signal that asked a worker to stop.

        Raises:
            ConfigError: another run has taken the run directory.
            LaunchError: an agent did not start.
            ManyhostsError: workers failed; the error is that of the worker that failed first.
        """
        self._listen_to_clocks_and_signals()
        try:
            with contextlib.suppress(_Over):
                while not self._state.is_over:
                    if not self._has_workers:  # else another head has started them
                        self._wait_for_agents()
                        self._check_hosts()
                        self._open_store()
                        self._start_workers()
                    self._watch()
                    self._handle_failure()
        finally:
            self._end()
        return self._result()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Hear what agents say until `until()`.

        Raises:
            _Over: the run has its result.
        """
        self._state.loop.run(until=lambda: self._state.is_over or until())
        if self._state.is_over:
            raise _Over

    @property
    def _has_workers(self) -> bool:
        """Whether workers run, or have ended in a way that is yet to be handled."""
        return bool(self._state.running) or self._failure_policy.all_ended

    def _wait_for_agents(self) -> None:
        gathering = Gathering(self._state, self._agents)
        self._report_awaited_hosts()
        self._wait(lambda: gathering.is_over)

    def _check_hosts(self) -> None:
        self._report_ports()
        self._news.beginning.await_workers(self._state.job.on(self._agents.present()).workers)
        self._precheck.begin()
        self._wait(lambda: self._precheck.is_over)

    def _report_ports(self) -> None:
        """NCCL has no setting for its ports, and opens them inside its own library."""
        chosen, nodes = self._state.job.ports, self._agents.nodes
        if (
            chosen
            and len(nodes) > 1
            and not self._state.generation
            and any(node.facts and node.facts.gpus for node in nodes)
        ):
            self._state.display.warn(
                f"manyhosts: NCCL takes ports that the system chooses, not those of --ports {chosen}: have firewalls"
                " let all TCP pass between the hosts, or narrow net.ipv4.ip_local_port_range on each"
            )

    def _open_store(self) -> None:
        """See that there is a fresh store for workers that start together, on the host of the first.

        Those of a Trainer have their rendezvous through the channel, and take a port for it only.
        """
        store, listens = self._worker_group.store, not self._state.job.uses_manyhosts
        store.close()
        store.open(lambda *_: None, listens=listens)
        self._wait(lambda: store.place is not None and (store.listens or not listens))

    def _start_workers(self) -> None:
        self._failure_policy.forget()
        self._worker_group.start_all()

    def _watch(self) -> None:
        """Until all workers have ended. Where some are lost, and the others continue, that is done meanwhile."""
        self._wait(lambda: self._failure_policy.all_ended)

    def _handle_failure(self) -> None:
        """What has failed is the run's result, or all workers start again."""
        self._failure_policy.conclude()

    def _end(self) -> None:
        """Have every agent end, and leave the run directory to others."""
        nobody_hears = bool(self._state.interrupted) and self._agents.nobody_has_called
        self._agents.say_goodbye()
        if self._succession is not None and not self._hold.is_lost and not nobody_hears:
            self._record.remove()
        self._hold.release()

    def _result(self) -> int:
        state = self._state
        if isinstance(state.result, takeover.NobodyCame):
            raise state.result
        if isinstance(state.result, ManyhostsError):
            if state.result.exit_code != 2:
                state.result.go_on = self._hold.resume_command()
            takeover.write_failed_summary(state.directories, state.result)
            raise state.result
        if state.result == 0:
            self._news.report_end()
        elif command := self._hold.resume_command():
            state.display.warn(f"manyhosts: resume with: {command}")
        return state.result or 0

    def _interrupt(self, number: signal.Signals) -> None:
        self._failure_policy.interrupt(number)
        self._news.beginning.await_end()

    def _listen_to_clocks_and_signals(self) -> None:
        loop = self._state.loop
        with contextlib.suppress(ValueError):  # outside the main thread the caller handles signals
            loop.on_signals([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], self._interrupt)
        loop.every(run_lock.BEAT_S, self._hold.check)
        if self._state.can_be_taken_over:
            loop.every(run_lock.BEAT_S, self._record.beat)
            loop.before_waiting = self._commit

    # Where this head is killed, another one continues.

    def _gather(self) -> takeover.HeadCheckpoint:
        succession, (address, port) = self._succession, self._agents.place
        assert succession is not None, "it was seen that there is one"
        return takeover.HeadCheckpoint(
            token=self._agents.token,
            start=self._hold.token,
            address=address,
            port=port,
            asked=takeover.fingerprint(succession.job, self._agents.token),
            unasked=run_directory.UNASKED in self._state.job.environment,
            launcher=succession.facts(),
            state={
                "head": self._state.to_dict(),
                "agents": takeover.to_dict(self._agents.nodes),
                "worker_group": self._worker_group.to_dict(),
                "ending": self._failure_policy.to_dict(),
                "hang_monitor": self._hang_monitor.to_dict(),
            },
        )

    def _commit(self) -> None:
        """Write down what has changed, and only then let go what follows from it."""
        record, state = self._record, self._state
        present = self._agents.present()
        record.is_needed |= self._agents.hold_something_back or present != self._present
        if record.is_needed and self._worker_group.has_begun and not state.is_over and state.can_be_taken_over:
            self._present = present
            try:
                record.write()
            except OSError as error:
                state.can_be_taken_over = False
                why = f"{error.strerror}: {state.job.run_dir}"
                state.display.warn(f"manyhosts: if this command is killed, no other can take the run over: {why}")
        self._agents.release()

    def _go_on_from(self, left: takeover.HeadCheckpoint) -> None:
        state = left.state
        self._precheck.is_over = True
        self._state.restore(state["head"])
        environment = dict(self._state.job.environment)
        environment.pop(run_directory.UNASKED, None)
        environment |= {run_directory.UNASKED: "1"} if left.unasked else {}
        self._state.job = replace(self._state.job, environment=environment)
        assert self._succession is not None, "a run is taken over"
        self._succession.name(self._agents.nodes)
        takeover.go_on_with(self._agents, state["agents"], self._preparation)
        self._hang_monitor.restore(state["hang_monitor"])
        self._failure_policy.restore(state["ending"], state["worker_group"])
        for node in self._agents.nodes:
            if node.channel is None and self._state.job.is_elastic:
                self._agents.call_again(node)
        for number in self._succession.gone:
            self._agents.give_up(self._agents.nodes[number], "its agent is gone")
        self._state.loop.after(takeover.CALLERS_S, self._see_who_has_called)
        if not self._has_workers:  # the last head was about to start them all again
            self._agents.begin_missing_again()

    def _see_who_has_called(self) -> None:
        if self._agents.nobody_has_called and not self._state.is_over:
            self._state.result = takeover.no_agents(self._state.job.run_dir)

    # What agents ask of their owner.

    def welcome(self, node: Node) -> None:
        """An agent has come: it prepares, and its workers start with all others, or late."""
        job = self._state.job
        if not job.workers_are_chosen:
            own = job.environment.get(host_state.CHOSEN)
            gpus = 0 if node.facts is None else node.facts.gpus
            count = gpus if own is None else host_state.named(own)
            self._state.job = job.with_workers(node.number, max(1, count))
        self._prepare(node)
        if self._state.running and self._newcomers is not None:
            self._newcomers.admit(node, lambda: self._worker_group.start_on(node))
        elif self._state.running:
            self._worker_group.start_on(node)
        else:
            self._report_awaited_hosts()

    def _report_awaited_hosts(self) -> None:
        nodes = self._agents.nodes
        if missing := [node.name for node in nodes if node.channel is None]:
            self._news.beginning.await_hosts(missing, len(nodes))

    def _prepare(self, node: Node) -> None:
        self._agents.send([node], self._preparation(node))

    def _preparation(self, node: Node) -> protocol.Prepare:
        """The first message to an agent."""
        job = self._state.job if node.place is None else node.place.job(self._state.job)
        known = {variables.RUN_DIR: str(job.run_dir), ports.VARIABLE: job.ports}
        return protocol.Prepare(
            host=node.name,
            command={
                "kind": job.kind,
                "program": job.program,
                "arguments": job.arguments,
                "folder": str(job.folder),
            },
            preload=[*job.preload, *self._state.warm],
            environment={**job.environment, **known, run_lock.VARIABLE: self._hold.token},
            run_dir=str(job.run_dir),
            log_bytes=job.log_bytes,
            warm_s=job.warm_s,
            head_timeout_s=job.head_timeout_s,
            can_be_taken_over=self._state.can_be_taken_over,
            workers=job.workers_on(node.number),
            **self._precheck.requests(node),
        )

    def _lose_silent(self, node: Node, seconds: float) -> None:
        if self._agents.may_come_back(node) and self._hang_monitor.waits_for(node, seconds):
            return
        self._agents.give_up_silent(node, seconds)

    def lose(self, node: Node, why: str) -> None:
        """An agent is gone, and with it its workers."""
        state = self._state
        if not self._has_workers:
            state.result = LaunchError(f"{why}, before a worker was started", where=f"host {node.name}", fix=SEE_ABOVE)
        self._worker_group.store.lose(node)
        if self._newcomers is not None:
            self._newcomers.lose(node)
        gone = self._worker_group.of_node(node)
        for member in gone:
            state.running.discard(member.number)
        if state.job.is_elastic and self._agents.are_enough:
            self._agents.bring_back(node)
        self._failure_policy.note_failures(
            {each.number: Failure(rank=each.rank, host=node.name, lost=why) for each in gone}
        )

    def receive(self, node: Node, message: protocol.FromAgent) -> None:
        """What an agent says."""
        if getattr(message, "generation", self._state.generation) != self._state.generation:
            return  # news of workers that were given up
        if message.CHANGES_STATE and not (isinstance(message, protocol.Report) and message.kind in _STREAMS):
            self._record.is_needed = True
        match message:
            case protocol.StoreOpened():
                self._worker_group.store.take(node, message.port, shared=message.shared, listens=message.listens)
            case protocol.AskStore():
                self._worker_group.take_question(node, message)
            case protocol.StopRequested() if not self._state.interrupted:
                self._interrupt(signal.Signals(message.signal))
            case protocol.Condition() | protocol.ConnectionsTried() | protocol.Connectivity():
                self._precheck.receive(node, message)
                if self._newcomers is not None:
                    self._newcomers.receive(node, message)
            case protocol.ModulesPreloaded():
                self._state.warm = tuple(message.modules)
            case protocol.Trouble():
                self._failure_policy.take_trouble(node, message)
            case _:
                self._hear_of_workers(node, message)

    def _hear_of_workers(self, node: Node, message: protocol.FromAgent) -> None:
        match message:
            case protocol.WorkerStates():
                self._hang_monitor.take_sights(node, message)
            case protocol.MemberSays(kind="accuse"):
                self._failure_policy.take_accusation(message.fields)
            case protocol.MemberSays():
                self._worker_group.regroup.receive(message.member, message.kind, message.fields)
            case protocol.OfWorker():
                self._hear_of_worker(node, message)

    def _hear_of_worker(self, node: Node, message: protocol.OfWorker) -> None:
        rank = self._worker_group.rank(message)
        match message:
            case protocol.Output():
                self._news.show(node, rank, message.lines, is_error=message.stream == "err")
            case protocol.Report():
                self._hang_monitor.take_report(message.member, message.kind, message.fields)
                self._worker_group.regroup.note_report(message.member, message.kind)
                self._news.take_report(rank, message.kind, message.fields)
            case protocol.LinesDropped():
                self._news.report_unshown(node, rank, message.lines)
            case protocol.Unlogged():
                self._news.report_gaps(node, rank, message.why)
            case protocol.Ended():
                self._failure_policy.note_end(node, message)
