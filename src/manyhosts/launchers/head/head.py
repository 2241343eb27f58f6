"""The head of a run, one per run: hears all agents and passes what they say to the part that it concerns.

`course` is what its parts know of the whole; `agents` come and go; `crew` starts the workers; `news` is what the user
hears of them; `vigil` notices that they get no further; `ending` is what follows when they end.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence

from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.launchers import variables
from manyhosts.launchers.display import Display
from manyhosts.launchers.head import failed_record
from manyhosts.launchers.head.agents import SEE_ABOVE, Agents, Node, StartAgent, StartHere
from manyhosts.launchers.head.course import Course
from manyhosts.launchers.head.ending import Ending
from manyhosts.launchers.head.failures import Failure
from manyhosts.launchers.head.hold import Hold
from manyhosts.launchers.head.meeting import Meeting
from manyhosts.launchers.head.news import News
from manyhosts.launchers.head.precheck import Precheck
from manyhosts.launchers.head.vigil import Vigil
from manyhosts.launchers.host import gpus
from manyhosts.launchers.job import Job
from manyhosts.launchers.loop import Message
from manyhosts.records import run_lock


class Head:
    """Runs one job on agents that `start_agent` starts, until all workers are done, failed too often or interrupted."""

    def __init__(
        self,
        job: Job,
        hosts: Sequence[str],
        start_agent: StartAgent,
        display: Display,
        *,
        address: str = "127.0.0.1",
        meeting: Meeting | None = None,
        start_here: StartHere | None = None,
        ways_are_known: bool = False,
    ) -> None:
        """`hosts` are the names of the nodes in order; `address` is where agents can reach this process.

        `meeting` is what agents that an engine starts have been told beforehand; `ways_are_known`: it was seen already
        that all hosts reach each other. `start_here` starts the agents that are on this machine, without a port.
        """
        self._course = Course(job, display)
        self._hold = Hold(self._course)
        try:
            agents = Agents(self._course, hosts, start_agent, address, self, meeting, start_here)
            self._begin(agents, ways_are_known=ways_are_known)
        except BaseException:
            self._hold.release()
            raise

    def _begin(self, agents: Agents, *, ways_are_known: bool) -> None:
        self._agents = agents
        self._news = News(self._course, len(agents.nodes))
        self._ending = Ending(self._course, self._agents, self._news)
        self._crew = self._ending.crew
        self._vigil = Vigil(
            self._course,
            self._agents,
            self._crew,
            on_silence=self._lose_silent,
            on_verdict=self._ending.note_verdict,
            gone=lambda: self._ending.ended_well,
        )
        self._precheck = Precheck(self._course, self._agents, ways=not ways_are_known)
        self._agents.expect()
        self._tell_who_is_awaited()

    def run(self) -> int:
        """Returns 0, 130 if it was interrupted, or 128 + the signal that asked a worker to stop.

        Raises:
            ConfigError: another run has taken the run directory.
            LaunchError: an agent did not start.
            ManyhostsError: workers failed; the error is that of the worker that failed first.
        """
        course = self._course
        with contextlib.suppress(ValueError):  # outside the main thread whoever called this hears of signals
            course.loop.on_signals([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], self._ending.interrupt)
        try:
            course.loop.every(run_lock.BEAT_S, self._hold.check)
            course.loop.run(until=lambda: course.is_over)
        finally:
            self._agents.say_goodbye()
            self._hold.release()
        if isinstance(course.result, ManyhostsError):
            if course.result.exit_code != 2:
                course.result.go_on = self._hold.command_to_go_on()
            failed_record.write(course.directories, course.result)
            raise course.result
        if course.result == 0:
            self._news.tell_end()
        elif command := self._hold.command_to_go_on():
            course.display.warn(f"manyhosts: go on with: {command}")
        return course.result or 0

    # What agents ask of their owner.

    def welcome(self, node: Node) -> None:
        """An agent has come: it prepares, and its workers start with all others, or late."""
        job = self._course.job
        if not job.workers_are_chosen:
            own = job.environment.get(gpus.CHOSEN)
            count = node.facts.get("gpus", 0) if own is None else gpus.named(own)
            self._course.job = job.with_workers(node.number, max(1, count))
        self._prepare(node)
        if self._course.running:
            self._crew.start_on(node)
        elif self._agents.all_here:
            self.begin()
        else:
            self._tell_who_is_awaited()

    def _tell_who_is_awaited(self) -> None:
        nodes = self._agents.nodes
        self._news.beginning.await_hosts([node.name for node in nodes if node.channel is None], len(nodes))

    def _prepare(self, node: Node) -> None:
        job = self._course.job
        self._agents.tell(
            [node],
            "prepare",
            host=node.name,
            command={"kind": job.kind, "program": job.program, "arguments": job.arguments, "folder": str(job.folder)},
            preload=[*job.preload, *self._course.warm],
            environment={
                **job.environment,
                variables.RUN_DIR: str(job.run_dir),
                run_lock.VARIABLE: self._hold.token,
            },
            run_dir=str(job.run_dir),
            log_bytes=job.log_bytes,
            head_timeout_s=job.head_timeout_s,
            workers=job.workers_on(node.number),
            **self._precheck.wishes(node),
        )

    def begin(self) -> None:
        """All agents are here, or enough of them."""
        self._news.beginning.await_workers(self._course.job.on(self._agents.present()).workers)
        self._precheck.before(self._ending.begin)

    def _lose_silent(self, node: Node, seconds: float) -> None:
        if self._agents.may_come_back(node) and self._vigil.waits_for(node, seconds):
            return
        self._agents.give_up_silent(node, seconds)

    def lose(self, node: Node, why: str) -> None:
        """An agent is gone, and with it its workers."""
        course = self._course
        if not course.running:
            course.result = LaunchError(f"{why}, before a worker was started", where=f"host {node.name}", fix=SEE_ABOVE)
        self._crew.store.lose(node)
        gone = self._crew.of_node(node)
        for member in gone:
            course.running.discard(member.number)
        if course.job.is_elastic and self._agents.are_enough:
            self._agents.bring_back(node)
        self._ending.note_failures({each.number: Failure(rank=each.rank, host=node.name, lost=why) for each in gone})

    def hear(self, node: Node, message: Message) -> None:
        """What an agent says."""
        if message.get("generation", self._course.generation) != self._course.generation:
            return  # news of workers that were given up
        match message["message"]:
            case "store":
                self._crew.store.take(node, message["port"], shared=message["shared"])
            case "asked" if not self._course.interrupted:
                self._ending.interrupt(signal.Signals(message["signal"]))
            case "condition" | "knocked":
                self._precheck.hear(node, message)
            case "warm":
                self._course.warm = tuple(message["modules"])
            case "trouble":
                self._ending.take_trouble(node, message)
            case _:
                self._hear_of_worker(node, message)

    def _hear_of_worker(self, node: Node, message: Message) -> None:
        match message["message"]:
            case "member" if message["kind"] == "accuse":
                self._ending.take_accusation(message["fields"])
            case "member":
                self._crew.regroup.hear(message["member"], message["kind"], message["fields"])
            case "output":
                is_error = message["stream"] == "err"
                self._news.show(node, self._crew.rank(message), message["lines"], is_error=is_error)
            case "report":
                self._vigil.take_report(message["member"], message["kind"], message["fields"])
                self._news.take_report(self._crew.rank(message), message["kind"], message["fields"])
            case "unshown":
                self._news.tell_of_unshown(node, self._crew.rank(message), message["lines"])
            case "unlogged":
                self._news.tell_of_gaps(node, self._crew.rank(message), message["why"])
            case "seen":
                self._vigil.take_sights(node, message)
            case "ended":
                self._ending.note_end(node, message)
