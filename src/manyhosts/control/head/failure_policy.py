"""What follows when workers end: the others continue, or are ended too, and the run ends or starts again."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from manyhosts.control.head.agents import SEE_ABOVE, Agents
from manyhosts.control.head.diagnosis import Diagnosis
from manyhosts.control.head.failures import Failure, first, signal_name
from manyhosts.control.head.group_state import MOST_WITHOUT_PROGRESS
from manyhosts.control.head.output import WorkerOutput
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.head.workers import WorkerGroup
from manyhosts.control.protocol import End, Ended, Signal, Trouble
from manyhosts.errors import LaunchError

STEP_S = 30.0
"""Most that workers get in addition, to finish the step under way before they save."""
_STEPS = 2
"""A wish to stop travels with the next step: so many of the longest ones come before a run begins to save."""
_FIRST_CAUSE_S = 2.0
"""How long a failure that looks like the consequence of another one waits for that other one to be heard of, and how
long the others have to end by themselves where they raise the same error."""
_ASKED_TO_STOP = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
"""How a worker of ours ends when one of them was asked to stop by a signal."""
_ONE_WISH_S = 0.3
_IN_A_ROW = f", failure {MOST_WITHOUT_PROGRESS + 1} in a row without one more step"
_SLOW = "see its log; a worker that needs longer is waited for with --hang-timeout"


class FailurePolicy:
    """Notes how workers end, and brings the run to its result."""

    def __init__(self, state: HeadState, agents: Agents, news: WorkerOutput) -> None:
        self._state, self._agents, self._news = state, agents, news
        self._worker_group = WorkerGroup(state, agents, self.note_failures, self._end_without_progress)
        self._failures: list[Failure] = []
        self._went_on: list[Failure] = []
        """Losses since the workers last formed a group, which the others continue without."""
        self._went_on_from = 0
        """The group that they are of."""
        self._culprit: Failure | None = None
        """Whose failure the others are being ended for. How they end then says nothing."""
        self._others_ended = 0
        self._recurring: tuple[str, int | None] | None = None
        """What the last restart was for, where that will come again if it comes again."""
        self._trouble: dict[str, str] = {}
        """By host: why it can start no worker."""
        self._exit_code = 0
        self.ended_well: list[str] = []
        """The workers of this start that have come to their end, as the user calls them."""
        self._exchanges_of_ended: list[int | None] = []
        """How many exchanges each of these had begun."""
        self.all_ended = False
        """Whether nothing runs any more, after something went wrong."""
        self._given_up: set[int] = set()
        """Members that were killed because they hung: their end is reported already."""

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers whose end this is about."""
        return self._worker_group

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to bring the run to its result."""
        return {
            "failures": [asdict(each) for each in self._failures],
            "went_on": [asdict(each) for each in self._went_on],
            "went_on_from": self._went_on_from,
            "culprit": None if self._culprit is None else asdict(self._culprit),
            "others_ended": self._others_ended,
            "recurring": self._recurring,
            "trouble": self._trouble,
            "exit_code": self._exit_code,
            "ended_well": self.ended_well,
            "exchanges_of_ended": self._exchanges_of_ended,
            "given_up": sorted(self._given_up),
        }

    def restore(self, written: Mapping[str, Any], worker_group: Mapping[str, Any]) -> None:
        """Be as another head has left this and its `worker_group`, and do what it was about to."""
        self._failures = [Failure(**each) for each in written["failures"]]
        self._went_on = [Failure(**each) for each in written["went_on"]]
        self._went_on_from = int(written["went_on_from"])
        self._culprit = None if written["culprit"] is None else Failure(**written["culprit"])
        self._others_ended, self._exit_code = int(written["others_ended"]), int(written["exit_code"])
        if written["recurring"] is not None:
            summary, step = written["recurring"]
            self._recurring = (summary, step)
        self._trouble, self.ended_well = dict(written["trouble"]), list(written["ended_well"])
        self._exchanges_of_ended = list(written["exchanges_of_ended"])
        self._given_up = set(written["given_up"])
        self._worker_group.restore(worker_group)
        if self._failures:
            self._consider()

    def forget(self) -> None:
        """All workers start: nothing that went wrong before counts."""
        self._failures.clear()
        self._went_on.clear()
        self._trouble.clear()
        self.ended_well.clear()
        self._exchanges_of_ended.clear()
        self._culprit = None

    def take_trouble(self, node: Node, message: Trouble) -> None:
        """A host can start no worker; the ends of those that it had follow. One that comes to others stays outside."""
        text, reported = message.text, self._trouble.get(node.name)
        self._trouble[node.name] = text
        if not message.early:
            return
        where = ", ".join(part for part in (f"host {node.name}", message.where) if part)
        error = LaunchError(text, where=where, fix=SEE_ABOVE)
        if not self._worker_group.do_without(node):
            self._state.result = error
        elif text != reported:
            self._state.display.warn(f"manyhosts: {error}\nmanyhosts: the run continues without host {node.name}")

    def note_end(self, node: Node, message: Ended) -> None:
        """A worker has ended, in one way or another."""
        state = self._state
        if message.member in self._given_up:
            return
        state.running.discard(message.member)
        code, number = message.code, message.signal
        asked = state.trainer_seen and code in _ASKED_TO_STOP
        if asked:
            self._exit_code = code  # the workers have agreed to stop and saved what they have: nothing has failed
        if message.finished or (code == 0 and number == 0) or asked:
            # A script whose main module came to its end has succeeded, whatever its destructors do then.
            self.ended_well.append(f"rank {self._worker_group.rank(message)} on host {node.name}")
            self._exchanges_of_ended.append(message.exchanges)
            self._worker_group.drop(message.member)
            if not state.running and not self._failures:
                state.result = 130 if state.interrupted else self._exit_code
            else:
                self._consider()
            return
        rank, why = self._worker_group.rank(message), self._worker_group.killed.pop(message.member, "")
        failure = Failure(
            rank=rank,
            host=node.name,
            hang=f"rank {rank} on host {node.name} {why}, and was ended" if why else "",
            remedy=_SLOW if why else "",
            code=code,
            signal=number,
            error=message.error,
            out_of_memory=message.out_of_memory,
            memory=message.memory,
            last_words=message.last_words,
            lost=self._trouble.get(node.name, ""),
            log=str(state.job.run_dir / "logs" / f"{node.name}-{message.rank}.log"),
        )
        self.note_failures({message.member: failure})

    def note_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Workers get no further: those that are to blame are killed, and count as failed; else the run ends."""
        worker_group, running = self._worker_group, self._state.running
        members = worker_group.regroup.group_state.members
        log = self._state.job.run_dir / "logs"
        guilty = [members[number] for number in diagnosis.guilty if number in members and number in running]
        failures = {}
        for member in guilty:
            host = self._agents.nodes[member.node].name
            failures[member.number] = Failure(
                rank=member.rank,
                host=host,
                hang=diagnosis.what,
                remedy=diagnosis.fix,
                stack=diagnosis.stack,
                log=str(log / f"{host}-{member.rank}.log"),
            )
        if len(guilty) < len(running):
            for member in guilty:
                worker_group.kill_member(member)
                self._given_up.add(member.number)
                running.discard(member.number)
            self.note_failures(failures)
        if not guilty or len(guilty) == len(running):
            self._failures.append(
                Failure(rank=0, host="", hang=diagnosis.what, remedy=diagnosis.fix, stack=diagnosis.stack, log=str(log))
            )
            worker_group.regroup.refuse()
            self._end_workers(self._state.generation)

    def take_accusation(self, fields: Mapping[str, Any]) -> None:
        """Workers have found one of them to compute wrongly; each that is right says so, and the first one is heard.

        It is left out, and so are all others on its host, unless the run has no other host.
        """
        worker_group, state = self._worker_group, self._state
        group_state = worker_group.regroup.group_state
        if int(fields["group"]) != group_state.group or int(fields["rank"]) >= len(group_state.order):
            return
        wrong = group_state.members.get(group_state.order[int(fields["rank"])])
        if wrong is None or wrong.number not in state.running:
            return
        name = self._agents.nodes[wrong.node].name
        others = [member for member in worker_group.of_node(self._agents.nodes[wrong.node]) if member is not wrong]
        if not any(member.node != wrong.node for member in group_state.trained()):
            others = []
        what, rank = str(fields["what"]), wrong.rank
        failures = {wrong.number: Failure(rank=rank, host=name, wrong=what, log=self._log_of(name, rank))}
        for member in others:
            what_follows = f"is on the host of rank {rank}, which {what}"
            failures[member.number] = Failure(
                rank=member.rank, host=name, wrong=what_follows, log=self._log_of(name, member.rank)
            )
        for member in [wrong, *others]:
            worker_group.leave_out(member)
            self._given_up.add(member.number)
            state.running.discard(member.number)
        self.note_failures(failures)

    def _log_of(self, host: str, rank: int) -> str:
        return str(self._state.job.run_dir / "logs" / f"{host}-{rank}.log")

    def note_failures(self, failures: Mapping[int, Failure]) -> None:
        """Workers, by number, have failed or are lost: the others continue, or the run ends or starts again."""
        group_state = self._worker_group.regroup.group_state
        for number, failure in failures.items():
            if not group_state.broken or self._went_on_from != group_state.group:
                self._went_on.clear()
                self._went_on_from = group_state.group
            if self._goes_on_without(number, failure):
                self._went_on.append(failure)
                continue
            if failure.may_be_consequence:
                self._failures += self._went_on  # a script that exchanges something itself does not continue
            if group_state.makes_no_progress:
                failure.note = _IN_A_ROW
            self._failures.append(failure)
        if self._failures:
            self._worker_group.regroup.refuse()
            self._consider()

    def _goes_on_without(self, number: int, failure: Failure) -> bool:
        if self._state.interrupted or self._culprit or self._failures or not failure.is_loss:
            return False
        if self._state.job.is_elastic and not self._agents.are_enough:
            return False
        regroup = self._worker_group.regroup
        members = regroup.group_state.members
        hosts_left = {member.node for member in members.values() if member.number in self._state.running}
        if failure.wrong and len(hosts_left) < (self._state.job.least_nodes or 1):
            return False
        lost, what = members.get(number), failure.reported(0).what
        if not regroup.goes_on_without(number, what, replace=self._worker_group.successor):
            return False
        if lost is not None and lost.late:  # the others have heard nothing of it
            place = (lost.node, lost.local_rank)
            again = any((member.node, member.local_rank) == place for member in members.values())
            then = "another is started" if again else "no other is started in its place"
            self._state.display.warn(f"manyhosts: {what}, before it joined the others; {then}")
        return True

    def _end_without_progress(self) -> None:
        """All who are left wait to continue from where they were the last times: they do not any more.

        Who was lost this time is the run's result; where nobody was, it is what the others then end with.
        """
        regroup = self._worker_group.regroup
        if self._went_on and self._went_on_from == regroup.group_state.group and not self._failures:
            self._went_on[0].note = _IN_A_ROW
            self._failures += self._went_on
        regroup.refuse()
        if self._failures:
            self._consider()

    def _consider(self) -> None:
        """A worker has ended in one way or another while something is wrong: decide what comes next."""
        state = self._state
        if state.interrupted or self._culprit or not self._failures:
            self.all_ended = not state.running
            return
        failure = first(self._failures)
        if (failure.may_be_consequence or failure.may_be_shared) and state.running:
            generation = state.generation
            state.loop.after(_FIRST_CAUSE_S, lambda: self._end_workers(generation))
            return
        self._end_workers(state.generation)

    def _end_workers(self, generation: int) -> None:
        """End the workers that are left after a failure."""
        state = self._state
        if self._culprit or generation != state.generation or state.is_over:
            return
        self._culprit = first(self._failures)
        if self.ended_well and self._culprit.may_be_consequence:
            self._culprit = self._culprit.caused_by_end_of(self.ended_well[0], self._exchanges_of_ended[0])
        members = self._worker_group.regroup.group_state.members
        on_their_way = {number for number in state.running if number in members and members[number].late}
        self._others_ended = len(state.running - on_their_way) + len(self._failures) - 1
        step_s = min(STEP_S, self._worker_group.regroup.longest_s)  # they save after the step under way
        self._agents.send_all(End(generation=generation, grace_s=state.job.grace_s + step_s))
        self.all_ended = not state.running

    def conclude(self) -> None:
        """All workers have ended, and not all well: what has failed is the run's result, or they start again."""
        state, failure = self._state, self._culprit
        self.all_ended = False
        if state.interrupted or failure is None:
            state.result = 130
            return
        error = failure.reported(self._others_ended)
        self._news.show_traceback(failure.traceback)
        wrong_request = error.exit_code == 2  # starting again would not change it
        recurs = failure.recurring is not None and failure.recurring == self._recurring
        self._recurring = failure.recurring
        if state.generation >= state.job.restarts or wrong_request or recurs:
            if recurs and state.generation < state.job.restarts:
                state.display.warn("manyhosts: the same error at the same step as before: no restart would change it")
            state.result = error
            return
        state.generation += 1
        state.display.warn(
            f"manyhosts: {error.what}\nmanyhosts: starting all workers again"
            f" (restart {state.generation} of {state.job.restarts})"
        )
        self._agents.begin_missing_again()

    def interrupt(self, number: signal.Signals) -> None:
        """Ctrl-C and the like: the first asks workers to end, the second does not ask."""
        state = self._state
        if state.interrupted:
            # Many send a signal to a process and then to its group (`timeout` does): that is one wish, not two.
            if time.monotonic() > state.interrupted + _ONE_WISH_S:
                state.result = 130
            return
        state.interrupted = time.monotonic()
        if not state.running:
            state.result = 130
            return
        state.display.warn(f"manyhosts: {signal_name(number)}: stopping workers; press Ctrl-C again to kill them")
        self._agents.send_all(
            Signal(
                generation=state.generation,
                signal=int(signal.SIGTERM),  # what torchrun sends: scripts that know nothing of us end in silence
                cause=int(number),
                farewell_s=state.job.farewell_s + min(STEP_S, _STEPS * self._worker_group.regroup.longest_s),
            )
        )
        self._worker_group.regroup.stop()
