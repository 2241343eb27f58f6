"""The workers of a run: started around a store, started late to join those that train, sent messages, and killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manyhosts.control import variables
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.failures import Failure
from manyhosts.control.head.group_state import MOST_WITHOUT_PROGRESS, Member
from manyhosts.control.head.membership import GroupCoordinator
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.head.store import Asker, KeyValueStore, Store, Then
from manyhosts.control.protocol import AnswerStore, AskStore, Kill, NewWorker, OfWorker, SeenWorker, Start, ToWorker

NoteFailures = Callable[[Mapping[int, Failure]], None]
"""Called with workers that have failed or are lost, by number."""


class WorkerGroup:
    """Who is which rank, where, and which store is their rendezvous. What `regroup` needs of the hosts is here."""

    def __init__(
        self,
        state: HeadState,
        agents: Agents,
        note_failures: NoteFailures,
        end_without_progress: Callable[[], None],
    ) -> None:
        """`end_without_progress` is called when the workers would break off at one step for ever."""
        self._state, self._agents, self._note_failures = state, agents, note_failures
        self.end_without_progress = end_without_progress
        self._next_number = 0
        self.has_begun = False
        """Whether any worker was started."""
        self.regroup = self._regroup(0)
        self.killed: dict[int, str] = {}
        """Why workers were killed that others waited for, by number."""
        self.store = Store(state, agents, self._answer)
        self.board = KeyValueStore(self._answer)
        self._late: dict[int, list[Member]] = {}
        """By node: workers to be started when its agent is back, to join those that train."""
        self._left_out: set[tuple[int, int]] = set()
        """Node and local rank of workers that computed wrongly: they are not replaced in this start of the job."""
        self._never_joined: dict[tuple[int, int], int] = {}
        """By node and local rank: how many in a row, started while others train, have ended before they joined them."""

    def _regroup(self, generation: int) -> GroupCoordinator:
        return GroupCoordinator(self._state.loop, self, generation, hang_timeout_s=self._state.job.hang_timeout_s)

    def rank(self, message: OfWorker | SeenWorker) -> int:
        """What the rank of the worker that a message is about is now."""
        member = self.regroup.group_state.members.get(message.member)
        return message.rank if member is None else member.rank

    def of_node(self, node: Node) -> list[Member]:
        """The workers of a node that have not ended."""
        return [member for member in self.regroup.group_state.members.values() if member.node == node.number]

    def _number(self) -> int:
        """What a worker goes by that is about to be started."""
        self._next_number += 1
        return self._next_number - 1

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to continue with these workers."""
        return {
            "next_number": self._next_number,
            "late": [[node, [member.number for member in members]] for node, members in self._late.items()],
            "left_out": sorted(self._left_out),
            "store": self.store.to_dict(),
            "board": self.board.to_dict(),
            "regroup": self.regroup.to_dict(),
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it, and do what it was about to."""
        self._next_number, self.has_begun = int(written["next_number"]), True
        self._left_out = {(node, place) for node, place in written["left_out"]}
        self.store.restore(written["store"])
        self.board.restore(written["board"])
        self.regroup = self._regroup(self._state.generation)
        self.regroup.restore(written["regroup"])
        members = self.regroup.group_state.members
        for number, late in written["late"]:
            for member in [members[each] for each in late if each in members]:
                self._await_host(self._agents.nodes[number], member)

    # They start.

    def start_all(self) -> None:
        """Start every worker of this generation, around the store that is open."""
        assert self.store.place is not None, "it was waited for"
        self.regroup = self._regroup(self._state.generation)
        self.has_begun = True
        self._left_out.clear()
        self._never_joined.clear()
        job = self._state.job.on(self._agents.present())
        for place, number in enumerate(self._agents.present()):
            members = []
            for local_rank in range(job.workers_on(place)):
                rank = job.first_rank(place) + local_rank
                members.append(Member(number=self._number(), node=number, local_rank=local_rank, rank=rank))
                self.regroup.add(members[-1])
            self._start(members, self.store.place, shared=self.store.shared)

    def start_on(self, node: Node) -> None:
        """Start the workers of a node that comes while others train."""
        late = self._late.pop(node.number, None) or self._newcomers(node.number)
        for member in late:
            self.regroup.add_late(member)

    def _newcomers(self, number: int) -> list[Member]:
        job = self._state.job
        return [
            Member(
                number=self._number(),
                node=number,
                local_rank=place,
                rank=job.first_rank(number) + place,
                late=True,
            )
            for place in range(job.workers_on(number))
            if (number, place) not in self._left_out
        ]

    def _start(self, members: Sequence[Member], store: tuple[str, int], *, shared: bool = True) -> None:
        """Start workers that are all of one host."""
        workers = []
        job, generation, present = self._state.job, self._state.generation, self._agents.present()
        for member in members:
            self._state.running.add(member.number)
            environment = variables.of_worker(
                job if member.late else job.on(present),
                node=member.node if member.late else present.index(member.node),
                local_rank=member.local_rank,
                generation=generation,
                store=store,
                agent_store=shared,
                listens=self.store.listens and not member.late,
            )
            layout = {**self.regroup.group_state.layout, "part": member.part} if member.part >= 0 else {}
            environment |= variables.of_member(job, member=member.number, late=member.late, layout=layout)
            place = {"rank": member.rank, "local_rank": member.local_rank, "member": member.number}
            workers.append(NewWorker(**place, environment=environment))
        self._agents.send([self._agents.nodes[members[0].node]], Start(generation=generation, workers=workers))

    def start_late(self, member: Member) -> None:
        """Start a worker while others train; on a host that is away, when it is back."""
        node = self._agents.nodes[member.node]
        if node.channel is not None:
            self._start([member], self.store.place or (self._agents.address, 0))
        else:
            self._await_host(node, member)

    def _await_host(self, node: Node, member: Member) -> None:
        """Call the agent of a host that is away, which is to start `member` when it is there."""
        waiting = self._late.setdefault(member.node, [])
        waiting.append(member)
        if len(waiting) == 1:
            self._agents.call_back(node, lambda: self._give_up(node))

    def _give_up(self, node: Node) -> None:
        """A node does not come back, and nor do the workers that were to be started there."""
        late = self._late.pop(node.number, [])
        lost = "its agent is gone, and could not be started again"
        for member in late:
            self.regroup.group_state.members.pop(member.number, None)
        self._note_failures({each.number: Failure(rank=each.rank, host=node.name, lost=lost) for each in late})

    def do_without(self, node: Node) -> bool:
        """A node that came to those that train can start no worker. Whether they continue without it."""
        running, members = self._state.running, self.of_node(node)
        others = running - {member.number for member in members}
        if not self._state.job.is_elastic or not others or any(not member.late for member in members):
            return False
        self._agents.send_home(node)
        for member in members:
            running.discard(member.number)
            self.regroup.drop(member.number)
        return True

    def leave_out(self, member: Member) -> None:
        """End a worker that computes wrongly, and start none in its place."""
        self._left_out.add((member.node, member.local_rank))
        self._late.pop(member.node, None)
        self.kill_member(member)

    def successor(self, lost: Member) -> Member | None:
        """The worker that replaces another; None where that was left out, or the run can do without its node.

        None, too, after several in its place that never joined the others.
        """
        place = (lost.node, lost.local_rank)
        self._never_joined[place] = self._never_joined.get(place, 0) + 1 if lost.late else 0
        if place in self._left_out or self._never_joined[place] > MOST_WITHOUT_PROGRESS:
            return None
        if self._state.job.is_elastic and self._agents.nodes[lost.node].channel is None:
            return None
        number, rank, part = self._number(), lost.rank, lost.part
        return Member(number=number, node=lost.node, local_rank=lost.local_rank, rank=rank, late=True, part=part)

    # Messages to them, their calls, and their end.

    def open_store(self, then: Then) -> None:
        """See that there is a store. A host whose workers train has loaded what keeps one; one just back has not."""
        best = [member.node for member in self.regroup.group_state.trained()]
        self.store.open(then, best=best, listens=False)

    def close_store(self) -> None:
        """Have everybody who waits for others of the present group wait no more."""
        self.board.close(self._state.generation, self.regroup.group_state.group)
        self.store.close()

    def take_question(self, node: Node, message: AskStore) -> None:
        """A worker asks something of the store that is kept here, or wants the other one served."""
        asker = Asker(node.number, message.line, message.id)
        if message.do == "open":
            self.store.serve(asker)
        else:
            self.board.ask(asker, message.do, message.fields)

    def _answer(self, asker: Asker, /, **answer: Any) -> None:
        node, answer = self._agents.nodes[asker.node], {"id": asker.id, **answer}
        self._agents.send([node], AnswerStore(line=asker.line, answer=answer))

    def send_member(self, member: Member, kind: str, /, **content: Any) -> None:
        """Say something to a worker."""
        message = {"message": kind, **content}
        self._agents.send([self._agents.nodes[member.node]], ToWorker(member=member.number, content=message))

    def kill_member(self, member: Member, why: str = "") -> None:
        """Kill a worker; its end is reported as usual, with `why` as the reason."""
        if why:
            self.killed[member.number] = why
        self._agents.send([self._agents.nodes[member.node]], Kill(member=member.number))

    def drop(self, number: int) -> None:
        """A worker has come to its end. Where all that trained have, workers on their way to join them are not needed.

        But one that replaces a worker that was lost after the last call of the script does the rest of it.
        """
        self.regroup.drop(number)
        group_state = self.regroup.group_state
        if group_state.trained():
            return
        for member in list(group_state.members.values()):
            if self.regroup.goes_its_own_way(member):
                continue
            self._state.running.discard(member.number)
            self.regroup.drop(member.number)
            self.kill_member(member)
