"""Who trains together: which workers there are, which continue when one is lost, and in which order.

It decides and does nothing: `membership.GroupCoordinator` passes messages to it and carries out its decisions. The
ranks of those that stay keep their order, so that rank 0 is always one that has trained before.

Where several workers make one copy of a model, each has a part of it for as long as it lives. Between two steps all
copies are equal, so any that have all parts make one, also if they were in several before. A worker for whose
part the others lack some waits, as one that was started late does, until they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_WITHOUT_PROGRESS = 3
"""After so many failures in a row without one more finished step, continuing makes no sense."""


@dataclass(slots=True)
class Member:
    """A worker that was started."""

    number: int
    node: int
    local_rank: int
    rank: int
    """In the present group; where it was started while others train, in the group that it will join."""
    enrolled: bool = False
    """Whether it trains, and can continue without the others."""
    late: bool = False
    """Whether it was started while others train, and has not joined them yet."""
    asked: int | None = None
    """How many steps it has finished, if it waits for a new group; a late one says -1."""
    call: int = 0
    """Which call of the script it waits in for a new group; see `cluster.membership`."""
    resting: bool = False
    """Whether it has finished a call and not begun the next: it does what the script does there, and takes its time."""
    most: int = 0
    """Any number of workers up to this gives the same bits, and there cannot be more; 0: each number its own bits."""
    stepped: float = 0.0
    """When it last reported a step, by this head's clock; 0: it has reported none."""
    heard: float = 0.0
    """When it last reported a step, or that it is busy."""
    given_up: bool = False
    """Whether it counts as hung, and was killed."""
    part: int = -1
    """Which part of a copy of the model it has; -1: not known yet."""


@dataclass(slots=True)
class GroupState:
    """The workers of one start of the job."""

    members: dict[int, Member] = field(default_factory=dict)
    """By number, only those that run."""
    order: list[int] = field(default_factory=list)
    """The members of the present group, by rank."""
    group: int = 0
    broken: bool = False
    """Whether the present group has lost somebody, or cannot reach one another."""
    reason: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    """How workers make copies of a model, as they have said (`cluster.membership.PartOfCopy`). Empty: each has all."""
    _best: tuple[int, int] = (0, -1)
    """The call, and the step in it, that the farthest had come to when a group was formed."""
    _without_progress: int = 0
    """How many failures there were since a group had come farther than the one before it; see `makes_no_progress`."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, for another head."""
        return {**asdict(self), "members": [asdict(member) for member in self.members.values()]}

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> GroupState:
        """What another head has written down."""
        members = {each["number"]: Member(**{**each, "stepped": 0.0, "heard": 0.0}) for each in written["members"]}
        call, step = written["_best"]
        return cls(**{**written, "members": members, "_best": (call, step)})

    def add(self, member: Member) -> None:
        """A worker was started."""
        if self.layout and member.part < 0:
            taken = [other.part for other in self.members.values()]
            member.part = min(range(self.parts), key=taken.count)
        self.members[member.number] = member
        if not member.late:
            self.order.append(member.number)

    @property
    def parts(self) -> int:
        """How many workers make one copy of the model."""
        return int(self.layout.get("parts", 1))

    def lay_out(self, number: int, layout: Mapping[str, Any]) -> None:
        """A worker says how copies are made, and which part it has."""
        self.layout = {**layout}
        self.members[number].part = int(self.layout.pop("part", -1))

    def lose(self, number: int, reason: str) -> bool:
        """A worker is gone. Returns whether the others can continue without it.

        They can when each of them trains, and as far as is known some progress was made since they last had to.
        """
        member = self.members.pop(number)
        if not member.late:
            self._break()
            self.reason = self.reason or reason
        elif self.broken:  # it may be waited for; else the others train, and hear nothing of it
            self._without_progress += 1
        return self._is_complete() and not self.makes_no_progress and self.all_train()

    def _break(self) -> None:
        """The present group is broken: one failure, whoever hears of it first, and whether it has lost one or many."""
        if not self.broken:
            self.broken = True
            self._without_progress += 1

    def _is_complete(self) -> bool:
        """Whether those of the present group that are left have all of the model."""
        left = self.trained()
        return bool(left) and (self.parts == 1 or len({member.part for member in left}) == self.parts)

    @property
    def makes_no_progress(self) -> bool:
        """Whether the last failures came one upon the other. That is known when all who are left have asked."""
        if not self.broken or any(member.asked is None for member in self.trained()):
            return False
        return self._without_progress > MOST_WITHOUT_PROGRESS and self._farthest() <= self._best

    def _farthest(self) -> tuple[int, int]:
        """The call, and the step in it, that the farthest of those has finished who wait for a new group."""
        return max(((member.call, member.asked or 0) for member in self.trained()), default=(0, 0))

    def all_train(self) -> bool:
        """Whether all are at a point of their script from which they could continue."""
        return all(member.enrolled or member.late for member in self.members.values())

    def trained(self) -> list[Member]:
        """Those of the present group that are left, by rank."""
        return [self.members[number] for number in self.order if number in self.members]

    def ask(self, number: int, step: int, *, group: int, call: int = 1) -> None:
        """A worker waits for a new group; one that has finished `step` steps (-1: it was started late) of a call."""
        member = self.members[number]
        member.asked, member.call, member.resting = step, call, False
        if not member.late and group == self.group and not self.wants_change():
            self._break()  # no worker is known to be lost yet, but they cannot reach one another

    def wants_change(self) -> bool:
        """Whether a worker that was started late is ready to join, and there is room for it."""
        return any(member.late for member in self._line_up())

    def _line_up(self) -> list[Member]:
        """The members of the next group, by rank, as far as they are known now.

        Those that were not in the last one have their ranks after the others, host by host; of workers that make copies
        those of equal parts are ranked so.
        """
        found = [*self.trained(), *self._joining()]
        if self.parts == 1:
            nodes = list(dict.fromkeys(member.node for member in found))
            return [member for node in nodes for member in found if member.node == node]
        of_part = [[member for member in found if member.part == part] for part in range(self.parts)]
        copies = list(zip(*of_part, strict=False))  # as many as the rarest part is there
        ranked = zip(*copies, strict=True) if self.layout["parts_first"] else copies
        return [member for members in ranked for member in members]

    def _joining(self) -> list[Member]:
        """Those that were started late and are ready, host by host; as many as there is room for."""
        ready = [member for member in self.members.values() if member.late and member.asked is not None]
        most = max((member.most for member in self.members.values()), default=0)
        room = max(0, most - len(self.trained())) if most else len(ready)
        return sorted(ready, key=lambda member: (member.node, member.local_rank))[:room]

    def waited_for(self) -> list[Member]:
        """Those that a new group needs and that have not asked for it yet."""
        waiting = [member for member in self.trained() if member.asked is None]
        if self.broken and self.parts == 1 and not all(member.most for member in self.trained()):
            # The bits depend on how many there are: wait for those that take the places of the lost.
            waiting += [member for member in self.members.values() if member.late and member.asked is None]
        return waiting

    @property
    def due(self) -> bool:
        """Whether a new group can and must be formed now."""
        return (self.broken or self.wants_change()) and bool(self.trained()) and not self.waited_for()

    def form(self) -> list[Member]:
        """The members of the new group, by rank; see `_line_up`."""
        stayed = self.trained()
        if (farthest := self._farthest()) > self._best:
            self._best, self._without_progress = farthest, 0
        formed = self._line_up()
        numbers = {member.number for member in formed}
        for member in stayed:
            if member.number not in numbers:
                member.late, member.asked = True, -1  # it waits for others with which it makes a copy
        for rank, member in enumerate(formed):
            member.rank, member.asked, member.late, member.enrolled, member.resting = rank, None, False, True, False
        self.order = [member.number for member in formed]
        self.group += 1
        self.broken, self.reason = False, ""
        return formed


def places(formed: Iterable[Member]) -> list[tuple[int, int, int]]:
    """For each member by rank: its number among those of its host, how many they are, and the number of its host."""
    found = list(formed)
    nodes = list(dict.fromkeys(member.node for member in found))
    return [
        (
            member.local_rank,
            sum(other.node == member.node for other in found),
            nodes.index(member.node),
        )
        for member in found
    ]
