"""The TCPStore of a run, for workers that do not meet through the channel: one at a time, kept by one of their hosts.

Its port is taken when workers start, because their variables name it. Where workers are expected to meet through the
channel (`head.board`), nobody listens there before one of them asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.board import Answer, Asker
from manyhosts.control.head.placement import Node
from manyhosts.control.head.state import Course
from manyhosts.control.protocol import CloseStore, OpenStore

Then = Callable[[str, int], None]
"""Is told the address and the port of a store."""


class Store:
    """Which host keeps it, and who waits for it."""

    def __init__(self, course: Course, agents: Agents, answer: Answer) -> None:
        """`answer` tells a worker that has asked for one that listens."""
        self._course, self._agents, self._answer = course, agents, answer
        self._node: int | None = None
        """The host that keeps it, or was asked to; None where nobody does."""
        self._port = 0
        """0 until it is known."""
        self.shared = True
        """Whether it is more than a free port. On a host without torch it is not: rank 0 opens one there itself."""
        self.listens = False
        """Whether it is served, and not only its port taken."""
        self._is_opening = False
        """Whether the host that has its port was asked to serve it."""
        self._then: Then | None = None
        self._askers: list[Asker] = []
        """Workers that wait until it is served."""
        self._best: Sequence[int] = ()
        self._is_asked_for = False
        """Whether another head has asked for one, and the answer is still to come."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Its address and port, where it has one."""
        return None if self._node is None or not self._port else (self._address(self._node), self._port)

    def _address(self, node: int) -> str:
        """Where the other hosts reach this one."""
        return str(self._agents.nodes[node].facts.get("address", self._agents.address))

    def open(self, then: Then, *, best: Sequence[int] = (), listens: bool = True) -> None:
        """See that there is one, and call back. A new one is kept by the first node here, of `best`, then of all.

        `listens`: have it served. What a caller wanted that has not been called back yet is forgotten.
        """
        if (place := self.place) is not None and (self.listens or not listens):
            then(*place)
            return
        self._then, self._best = then, best
        if not self._is_asked_for:
            self._ask(listens=listens)

    def serve(self, asker: Asker) -> None:
        """A worker is about to use it: tell it where it is, once it is served."""
        if self.listens and self.place is not None:
            self._answer(asker, value=list(self.place))
            return
        self._askers.append(asker)
        if self._node is None or (self._port and not self._is_opening):
            self._ask(listens=True)

    def _ask(self, *, listens: bool) -> None:
        if self.place is None:
            here = self._agents.present()
            self._node = next((number for number in (*self._best, *here) if number in here), None)
            self._port = 0
        if self._node is not None:
            self._is_opening = listens
            address, generation = self._address(self._node), self._course.generation
            node = self._agents.nodes[self._node]
            self._agents.tell([node], OpenStore(generation=generation, address=address, listens=listens))

    def written_down(self) -> dict[str, Any]:
        """Which host keeps it, or was asked to, and who waits for it."""
        return {
            "node": self._node,
            "port": self._port,
            "shared": self.shared,
            "listens": self.listens,
            "is_opening": self._is_opening,
            "askers": [list(asker) for asker in self._askers],
        }

    def go_on_from(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it. A host that was asked has yet to answer, and is not asked again."""
        self._node, self._port, self.shared = written["node"], int(written["port"]), bool(written["shared"])
        self.listens, self._is_opening = bool(written["listens"]), bool(written["is_opening"])
        self._askers = [Asker(*asker) for asker in written["askers"]]
        self._is_asked_for = self._node is not None and not self._port

    def take(self, node: Node, port: int, *, shared: bool, listens: bool) -> None:
        """A node says that it keeps one."""
        if node.number != self._node:
            return  # it was asked before, given up, and is here again
        self._port, self.shared, self.listens = port, shared, listens
        self._is_opening = self._is_asked_for = False
        then, self._then = self._then, None
        if then is not None:
            then(self._address(node.number), port)
        askers, self._askers = self._askers, []
        for asker in askers:
            self.serve(asker)

    def lose(self, node: Node) -> None:
        """A node is gone, and with it the store if it kept it. Whoever waits for one gets that of another."""
        if node.number == self._node:
            self._node, self._port, self._is_asked_for = None, 0, False
            self.listens = self._is_opening = False
            if self._then is not None or self._askers:
                self._ask(listens=bool(self._askers))

    def close(self) -> None:
        """Have everybody who waits at the store, or for it, wait no more. A port that is only taken stays so."""
        askers, self._askers = self._askers, []
        for asker in askers:
            self._answer(asker, error="a worker of this group is lost")
        if (self.listens or self._is_opening) and self._node is not None:
            self._agents.tell([self._agents.nodes[self._node]], CloseStore())
            self._node, self._port = None, 0
            self.listens = self._is_opening = False
