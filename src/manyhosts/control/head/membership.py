"""Leads workers from one group to the next, as `group_state` says.

A group of workers breaks when one of them is lost, and changes when one that was started later wants to join. Then each
of the others says how far it is, and when all have, they get their ranks in a new group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from manyhosts.control.head.group_state import GroupState, Member, places
from manyhosts.control.loop import Loop

BREAK_AFTER_S = 2.0
"""After so long, workers that have not noticed that the group is broken are informed: they may wait for a lost host."""
KILL_AFTER_S = 30.0
"""A worker that does not answer for so long counts as hung, if its steps are not as long themselves."""
UNKNOWN_S = 600.0
"""The same where it has made no steps yet: its first may take long, and so may compiling."""
START_LIMIT_S = 300.0
"""How long a worker that was started late has from its start to the point where it can join, if the first had not been
as long on their way."""
_TIMES = 3.0
"""A worker may take so many times longer than its longest step while others start next to it."""
_LOOK_S = 0.25


class Hosts(Protocol):
    """What the head can do about members, stores and hosts."""

    def send_member(self, member: Member, kind: str, /, **content: Any) -> None:
        """Say something to a worker."""

    def start_late(self, member: Member) -> None:
        """Start a worker while others train; on a host that is away, when it is back."""

    def kill_member(self, member: Member, why: str = "") -> None:
        """Kill a worker; its end is reported as usual, with `why` as the reason."""

    def end_without_progress(self) -> None:
        """End the run: its workers would break off at one step for ever."""

    def open_store(self, then: Callable[[str, int], None]) -> None:
        """See that there is a store for the workers' rendezvous, and call back with its address and port."""

    def close_store(self) -> None:
        """Have everybody who waits for others of the present group wait no more."""


class GroupCoordinator:
    """The members of one start of the job."""

    def __init__(
        self,
        loop: Loop,
        hosts: Hosts,
        generation: int,
        *,
        hang_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hang_timeout_s`: how long a worker may get no further, where the user has said it; 0: for ever."""
        self._loop, self._hosts, self._generation = loop, hosts, generation
        self._unknown_s = UNKNOWN_S if hang_timeout_s is None else hang_timeout_s or math.inf
        self._clock, self._made = clock, clock()
        self._start_s = 0.0
        """How long the first workers were on their way to where they train."""
        self._longest_s = 0.0
        """The longest time between two steps that any of them reported."""
        self.group_state = GroupState()
        self._waiting = False
        self._turn = 0
        self._forming = False
        self._outcomes: dict[int, Any] = {}
        """What came out of the calls of the script that are over, by number."""
        self.ended = self._stopping = False

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to continue with these workers."""
        return {
            "group_state": self.group_state.to_dict(),
            "outcomes": list(self._outcomes.items()),
            "start_s": self._start_s,
            "longest_s": self._longest_s,
            "ended": self.ended,
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it, and do what it was about to."""
        self.group_state, self._outcomes = GroupState.of(written["group_state"]), dict(written["outcomes"])
        self._start_s, self._longest_s = float(written["start_s"]), float(written["longest_s"])
        for member in self.group_state.members.values():
            if member.late:
                self._expect(member)
        if written["ended"]:
            self.refuse()
        else:
            self._begin()

    def add(self, member: Member) -> None:
        """A worker was started with the others."""
        self.group_state.add(member)

    @property
    def is_forming(self) -> bool:
        """Whether workers wait for others, to continue with them in a new group."""
        return (self._waiting or self._forming) and not self.ended

    def receive(self, number: int, kind: str, fields: dict[str, Any]) -> None:
        """What a worker says of itself."""
        member = self.group_state.members.get(number)
        if member is None:
            return
        if self.ended:
            self._hosts.send_member(member, "refused", reason="the run is ending")
        elif kind == "begin":
            if not member.enrolled and not member.late:
                self._start_s = max(self._start_s, self._clock() - self._made)
            member.enrolled, member.most, member.resting = True, int(fields["most"]), False
            self.group_state.lay_out(number, fields.get("layout") or {})
        elif kind == "done":
            self._note_outcome(member, int(fields["call"]), fields["outcome"])
        elif kind == "withdraw":
            member.enrolled = False
        else:
            self._hear_request(member, kind, fields)

    def note_report(self, number: int, kind: str) -> None:
        """A worker has made a step, or reports that it is busy with what takes long."""
        member = self.group_state.members.get(number)
        if member is None or kind not in ("step", "busy"):
            return
        now = self._clock()
        if kind == "step":
            if member.stepped:
                self._longest_s = max(self._longest_s, now - member.stepped)
            member.stepped = now
        member.heard = now

    def _hear_request(self, member: Member, kind: str, fields: dict[str, Any]) -> None:
        """A worker wants to be in a new group."""
        number, call = member.number, int(fields["call"])
        if call in self._outcomes:
            self._send_passed(member, call)
        elif kind == "join" and not self.group_state.trained():
            self._hosts.send_member(member, "refused", reason="those that it was to join have come to their end")
        elif kind == "join":
            member.most = int(fields["most"])
            self.group_state.ask(number, -1, group=self.group_state.group, call=call)
            self._begin()
        elif kind == "regroup":
            if not self.group_state.all_train():
                self._hosts.send_member(member, "refused", reason="not all workers are training")
                return
            self.group_state.ask(number, int(fields["step"]), group=int(fields["group"]), call=call)
            self._begin()
            if self._stopping:
                self._refuse_in_vain()

    def _note_outcome(self, member: Member, call: int, outcome: Any) -> None:
        """A call is over. Those that wait in it for a new group, and have almost been answered, need wait no longer."""
        member.resting = True
        self._outcomes.setdefault(call, outcome)
        for waiting in self.group_state.members.values():
            if waiting.asked is not None and waiting.call <= call:
                waiting.asked = None
                self._send_passed(waiting, waiting.call)

    def _send_passed(self, member: Member, call: int) -> None:
        outcome, replaces = self._outcomes.get(call), self.group_state.broken
        self._hosts.send_member(member, "passed", call=call, outcome=outcome, replaces=replaces)

    def goes_on_without(self, number: int, reason: str, *, replace: Callable[[Member], Member | None]) -> bool:
        """A worker is lost. Whether the others continue; `replace` makes the one that takes its place, or none."""
        member = self.group_state.members.get(number)
        if member is None or self.ended:
            return False
        if not self.group_state.lose(number, reason):
            return False
        if (successor := replace(member)) is not None:
            self.group_state.add(successor)
            self._hosts.start_late(successor)
            self._expect(successor)
        self._hosts.close_store()  # some may be waiting for the one that is gone
        self._begin()
        return True

    def goes_its_own_way(self, member: Member) -> bool:
        """Those that trained have come to their end: whether a worker that was started late has something to do alone.

        One that waits for them in a call that they have not made waits in vain, and gets an answer.
        """
        if not self.group_state.broken or not self._outcomes:
            return False
        if member.asked is not None:
            member.asked = None
            self._hosts.send_member(member, "refused", reason="those that it was to join have come to their end")
        return True

    def add_late(self, member: Member) -> None:
        """A host has come: start a worker there that will join the others."""
        if member.number not in self.group_state.members:
            self.group_state.add(member)
        self._hosts.start_late(member)
        self._expect(member)

    def drop(self, number: int) -> None:
        """A worker has come to its end, or will never come."""
        self.group_state.members.pop(number, None)
        self._try()

    def stop(self) -> None:
        """The run was asked to stop: nobody is waited for any more who has yet to come."""
        self._stopping = True
        self._refuse_in_vain()

    def _refuse_in_vain(self) -> None:
        """Have workers that wait for one which may never come save what they hold, where each holds all."""
        if self.group_state.parts == 1 and any(each.late for each in self.group_state.waited_for()):
            self.refuse()

    @property
    def longest_s(self) -> float:
        """Between two steps of a worker so far."""
        return self._longest_s

    def refuse(self) -> None:
        """The run does not continue: those that wait are informed, and silent hosts are not waited for any longer."""
        if not self.ended:
            self._loop.after(BREAK_AFTER_S, self._break)
        self.ended = True
        for member in self.group_state.members.values():
            if member.asked is not None:
                self._hosts.send_member(member, "refused", reason="the run is ending")

    def _break(self) -> None:
        """Those that train are to save what they hold, and cannot while they wait for one another."""
        for member in self.group_state.trained():
            if member.enrolled and not member.resting and member.asked is None:
                self._hosts.send_member(member, "broken", group=self.group_state.group)

    # A new group.

    def _begin(self) -> None:
        if not self.group_state.broken and not self.group_state.wants_change():
            return  # somebody has come for whom there is no room: idle, until one of the others is lost
        if not self._waiting:
            self._waiting = True
            self._turn += 1
            self._wait(self._turn, 0.0)
        if not self.group_state.broken and self.group_state.wants_change():
            for member in self.group_state.trained():
                if member.asked is None:
                    self._hosts.send_member(member, "change", group=self.group_state.group)
        self._try()

    def _wait(self, turn: int, waited_s: float) -> None:
        """Look again and again after those that do not answer."""
        if turn != self._turn or not self._waiting or self.ended:
            return
        silent = [member for member in self.group_state.trained() if member.asked is None]
        if self.group_state.broken and _passes(waited_s, BREAK_AFTER_S):
            for member in silent:
                self._hosts.send_member(member, "broken", group=self.group_state.group)
        if self.group_state.broken and waited_s >= KILL_AFTER_S:
            self._kill_hung([member for member in silent if not member.resting], waited_s)
        self._loop.after(_LOOK_S, lambda: self._wait(turn, waited_s + _LOOK_S))

    def _kill_hung(self, silent: Sequence[Member], waited_s: float) -> None:
        """Kill those that nothing was heard of for too long, each once."""
        now = self._clock()
        limit_s = max(KILL_AFTER_S, _TIMES * self._longest_s if self._longest_s else self._unknown_s)
        for member in silent:
            if not member.given_up and min(waited_s, now - member.heard) >= limit_s:
                member.given_up = True
                why = f"did not come to the others for {limit_s:.0f} s after one of them was lost"
                self._hosts.kill_member(member, why)

    def _expect(self, member: Member) -> None:
        limit_s = max(START_LIMIT_S, _TIMES * self._start_s)
        self._loop.after(limit_s, lambda: self._kill_if_not_there(member, limit_s))

    def _kill_if_not_there(self, member: Member, limit_s: float) -> None:
        if not self.ended and member.late and member.asked is None and member.number in self.group_state.members:
            self._hosts.kill_member(member, f"was not ready to train {limit_s:.0f} s after its start")

    def _try(self) -> None:
        if not self._waiting or self._forming or self.ended:
            return
        if self.group_state.makes_no_progress:
            self._hosts.end_without_progress()
        elif self.group_state.due:
            self._forming = True
            self._hosts.open_store(self._form)

    def _form(self, address: str, port: int) -> None:
        """There is a store: everybody gets a rank, unless somebody was lost meanwhile."""
        self._forming = False
        if self.ended or not self.group_state.due:
            return
        self._waiting = False
        reason = self.group_state.reason
        late = {member.number for member in self.group_state.members.values() if member.late}
        before, formed = len(self.group_state.order), self.group_state.form()
        newcomers = [member.rank for member in formed if member.number in late]
        nodes = len({member.node for member in formed})
        how = _how(len(formed), len(newcomers), self.group_state.parts)
        if not reason and len(formed) < before:
            how += ": the others have come to their end"
        for member, (local_rank, local_size, node_rank) in zip(formed, places(formed), strict=True):
            self._hosts.send_member(
                member,
                "group",
                number=self.group_state.group,
                key=f"{self._generation}.{self.group_state.group}",
                rank=member.rank,
                size=len(formed),
                local_rank=local_rank,
                local_size=local_size,
                node_rank=node_rank,
                nodes=nodes,
                address=address,
                port=port,
                newcomers=newcomers,
                reason=reason,
                how=how,
            )


def _passes(waited_s: float, limit_s: float) -> bool:
    return waited_s < limit_s <= waited_s + _LOOK_S


def _how(size: int, newcomers: int, parts: int) -> str:
    workers = f"{size} worker{'s' if size > 1 else ''}"
    if (copies := size // parts) < size:
        workers += f" in {copies} {'copies' if copies > 1 else 'copy'} of the model"
    return f"with {workers}, {newcomers} of them new" if newcomers else f"with {workers}"
