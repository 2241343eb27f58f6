"""Notices that a run gets no further, and finds out who is to blame: a host that is silent, a worker that hangs.

`missing_hosts` says which hosts are silent. Workers report their steps; where one has not got further for too long, all
agents inspect their workers, and `diagnosis` judges. Time in which the head itself did not run is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhosts.control.head import diagnosis
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.diagnosis import Diagnosis, Sight, diagnose
from manyhosts.control.head.missing_hosts import GIVEN_UP_S, Silences
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.head.workers import WorkerGroup
from manyhosts.control.protocol import InspectWorkers, SeenWorker, WorkerStates

PATIENCE_S = 600.0
"""How long a Trainer may get no further, where the user has not said it."""
_UNHEARD_S = 5.0
"""Hosts that were heard, and workers that made a step, within so many seconds are well."""
_LOOK_S = 0.25
_BLINK_S = 0.5
"""When the head was kept from looking for so long, no host is to blame for the silence."""
_NAP_S = 2.0
"""When the head was kept from looking for so long, it was asleep or overloaded."""
_ANSWER_S = 2.0
"""How long agents may take to look at their workers."""
_HEADWAY_S = 1.0
"""So long before the time is over, agents are asked to look: the sentence is to come within it."""
_MEETING = 3
"""So many times longer may it take until workers that have just met have handed over their state and made a step."""
_DESERTED_S = 30.0
"""So long may all others wait in an exchange once a worker has come to its end: it will not come any more."""
_IDLE = 0.05
"""A worker that waits in a collective uses less of a core than this."""


@dataclass(slots=True)
class _Pace:
    """The progress of one worker."""

    step: int | None = None
    at: float = 0.0
    """When it last reported something new; 0 where nothing is expected of it."""
    reports: bool = False
    """Whether it has a Trainer, which reports all that takes long."""


@dataclass(slots=True)
class _Wait:
    """An exchange in which a worker was seen again and again."""

    stack: tuple[diagnosis.Frame, ...]
    cpu_s: float
    since: float


@dataclass(slots=True)
class _Round:
    """One time that all agents are asked to look."""

    number: int
    asked: float
    missing: set[int] = field(default_factory=set)
    """Nodes that have not answered."""
    sights: list[Sight] = field(default_factory=list)


class HangMonitor:
    """Watches over one run, from its first worker to its end."""

    def __init__(
        self,
        state: HeadState,
        agents: Agents,
        worker_group: WorkerGroup,
        *,
        on_silence: Callable[[Node, float], None],
        on_diagnosis: Callable[[Diagnosis], None],
        gone: Callable[[], Sequence[str]],
    ) -> None:
        """`on_silence` is called for a host that is given up, because it gives no sign of life, with the seconds.

        `on_diagnosis` is called for workers that hang; `gone` says which have come to their end.
        """
        self._gone = gone
        self._state, self._agents, self._worker_group = state, agents, worker_group
        self._silences = Silences(state.display.warn, on_silence)
        self._on_diagnosis = on_diagnosis
        self._asked_for = state.job.hang_timeout_s
        self._paces: dict[int, _Pace] = {}
        self._waits: dict[int, _Wait] = {}
        self._round: _Round | None = None
        self._rounds = 0
        self._progress = 0.0
        """When a worker reported a step last."""
        self._waited_for: dict[int, float] = {}
        """By node that is silent: when it was last heard, once the user was informed that the run waits for it."""
        self._alone = 0.0
        """When no host was heard last."""
        self._looked = time.monotonic()
        self._next_round = 0.0
        state.loop.after(_LOOK_S, self._check)

    @property
    def limit_s(self) -> float:
        """How long a worker may make no progress; 0: for ever."""
        return PATIENCE_S if self._asked_for is None else self._asked_for

    def waits_for(self, node: Node, seconds: float) -> bool:
        """Whether a host that has been silent for so long is to be kept: its workers may be well.

        They are where the workers of other hosts make progress. Where no host is heard, it is this machine that is cut
        off, and when the first host is back, the others have as long to come back as a host may be silent.
        """
        limit_s = self._state.job.head_timeout_s
        if seconds > (min(limit_s, self._asked_for) if self._asked_for else limit_s):
            return False
        now = time.monotonic()
        others = [other for other in self._agents.nodes if other is not node and other.channel is not None]
        alone = all(now - other.heard > _UNHEARD_S for other in others)
        if alone:
            self._alone = now
        waits = (node.heard < self._alone and now - self._alone < GIVEN_UP_S) or self._others_make_progress(node, now)
        if waits and self._waited_for.get(node.number) != node.heard:
            self._waited_for[node.number] = node.heard
            why = "no host is heard from: this machine may be cut off" if alone else "workers of other hosts make steps"
            self._state.display.warn(
                f"manyhosts: host {node.name} is silent, and {why}; it is waited for until {limit_s:.0f} s are over"
            )
        return waits

    def _others_make_progress(self, node: Node, now: float) -> bool:
        """Whether workers of other hosts have made steps since `node` was heard last, and a moment ago."""
        members = self._worker_group.regroup.group_state.members
        others = [
            pace.at
            for number, pace in self._paces.items()
            if number in self._state.running and number in members and members[number].node != node.number
        ]
        latest = max(others, default=0.0)
        return latest > node.heard + _UNHEARD_S and now - latest < _UNHEARD_S

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to continue watching: of each worker its last step, and what is expected of it."""
        return {
            "paces": [
                [number, pace.step, bool(pace.at), pace.reports]
                for number, pace in self._paces.items()
                if number in self._state.running
            ]
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Continue as the head before; the time without a head does not count."""
        now = time.monotonic()
        for number, step, is_expected, reports in written["paces"]:
            self._paces[number] = _Pace(step, now if is_expected else 0.0, reports)

    # What is heard.

    def take_report(self, member: int, kind: str, fields: dict[str, Any]) -> None:
        """A worker has reported something."""
        pace = self._paces.setdefault(member, _Pace())
        if kind == "step":
            pace.step, pace.at = int(fields.get("step", 0)), time.monotonic()
            self._progress = pace.at
        elif kind == "busy" and pace.at:
            pace.at = time.monotonic()
        elif kind == "rest":
            pace.at = 0.0
        elif kind == "trainer":
            pace.reports = True

    def take_sights(self, node: Node, message: WorkerStates) -> None:
        """An agent has inspected its workers."""
        this = self._round
        if this is None or message.round != this.number:
            return
        now = time.monotonic()
        for seen in message.workers:
            if seen.member in self._state.running:
                this.sights.append(self._sight(node, seen, now))
        this.missing.discard(node.number)

    def _sight(self, node: Node, seen: SeenWorker, now: float) -> Sight:
        pace = self._paces.get(seen.member, _Pace())
        sight = Sight(
            member=seen.member,
            rank=self._worker_group.rank(seen),
            host=node.name,
            still_s=now - pace.at if pace.at else 0.0,
            step=pace.step if seen.step is None else seen.step,
            state=seen.state,
            busy=seen.busy,
            stack=diagnosis.parse(seen.stack),
            loader=diagnosis.parse(seen.loader),
        )
        self._note_wait(sight, seen.cpu_s, now)
        return sight

    def _note_wait(self, sight: Sight, cpu_s: float, now: float) -> None:
        """Remember since when a worker has been in the same exchange, or has been stopped."""
        before = self._waits.get(sight.member)
        if not (sight.exchange or sight.is_stopped):
            self._waits.pop(sight.member, None)
        elif (
            before is None or before.stack != sight.stack or cpu_s - before.cpu_s > _IDLE * max(1.0, now - before.since)
        ):
            self._waits[sight.member] = _Wait(sight.stack, cpu_s, now)

    # What is watched.

    def _check(self) -> None:
        """Check all clocks, again and again."""
        if self._state.is_over:
            return
        now = time.monotonic()
        slept = now - self._looked - _LOOK_S
        self._looked = now
        if slept > _BLINK_S:
            for node in self._agents.nodes:
                self._silences.forgive(node, now, slept)
        if slept > _NAP_S:
            self._forgive(slept)
        for node in self._agents.nodes:
            self._silences.check(node, now, self._asked_for, self._progress)
        self._look_at_workers(now)
        self._state.loop.after(_LOOK_S, self._check)

    def _forgive(self, slept_s: float) -> None:
        """The head itself did not run: no host could be heard meanwhile."""
        for pace in self._paces.values():
            pace.at += slept_s if pace.at else 0.0
        self._waits.clear()
        self._round = None

    def _look_at_workers(self, now: float) -> None:
        if not self.limit_s or self._state.interrupted or not self._state.running:
            return
        if self._worker_group.regroup.is_forming:
            self._start_afresh(now + _MEETING * self.limit_s)  # who waits for others to come does not hang
            return
        this = self._round
        if this is None:
            if now >= self._next_round and self._is_time(now):
                self._begin_round(now)
        elif not this.missing or now - this.asked > _ANSWER_S:
            self._consider(this, now)

    def _is_time(self, now: float) -> bool:
        """Whether somebody is so late that it is worth a look."""
        if self._latest(now) > self.limit_s - min(_HEADWAY_S, self.limit_s / 4):
            return True
        if self._gone():
            return True
        return bool(self._asked_for) and all(self._is_unknown(number) for number in self._state.running)

    def _latest(self, now: float) -> float:
        """For how long the one of whom nothing new was heard for the longest time has got no further, in seconds."""
        members = self._worker_group.regroup.group_state.members
        waiting = {number for number, member in members.items() if member.late}  # for others, to join with them
        paces = [pace for number, pace in self._paces.items() if number in self._state.running - waiting and pace.at]
        return max((now - pace.at for pace in paces if self._asked_for is not None or pace.reports), default=0.0)

    def _is_unknown(self, number: int) -> bool:
        """Whether nothing is known of a worker's progress."""
        pace = self._paces.get(number)
        return pace is None or not pace.at

    def _begin_round(self, now: float) -> None:
        nodes = [self._agents.nodes[number] for number in self._agents.present()]
        self._rounds += 1
        self._round = _Round(self._rounds, now, {node.number for node in nodes})
        self._agents.send(nodes, InspectWorkers(round=self._rounds))

    def _consider(self, this: _Round, now: float) -> None:
        """All agents have looked, or had the time to: judge, if the time of the workers is over, too."""
        running = self._state.running
        seen = [sight for sight in this.sights if sight.member in running]
        late = self._latest(now)
        waits = [self._waits.get(number) for number in running]
        waited = min((0.0 if wait is None else now - wait.since for wait in waits), default=0.0)
        gone = self._gone()
        limit_s = min(self.limit_s, _DESERTED_S) if gone else self.limit_s
        stuck = waited > limit_s and bool(self._asked_for or gone)
        if seen and (late > self.limit_s or stuck):
            self._start_afresh(now)
            self._on_diagnosis(diagnose(seen, limit_s if stuck else self.limit_s, gone))
        elif late < self.limit_s - _HEADWAY_S:
            self._round, self._next_round = None, now + limit_s / 4  # they got on, or nothing is known of them

    def _start_afresh(self, now: float) -> None:
        for pace in self._paces.values():
            pace.at = now if pace.at else 0.0
        self._waits.clear()
        self._round = None
