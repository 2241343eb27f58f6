"""The store at which the workers of a run meet: one at a time, kept by one of their hosts, and then by another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.placement import Node
from manyhosts.control.head.state import Course
from manyhosts.control.protocol import CloseStore, OpenStore

Then = Callable[[str, int], None]
"""Is told the address and the port of a store that is open."""


class Store:
    """Which host keeps it, and who waits for it."""

    def __init__(self, course: Course, agents: Agents) -> None:
        self._course, self._agents = course, agents
        self._node: int | None = None
        """The host that keeps it, or was asked to; None where nobody does."""
        self._port = 0
        """0 until it is open."""
        self.shared = True
        """Whether it is more than a free port. On a host without torch it is not: rank 0 opens one there itself."""
        self._then: Then | None = None
        self._best: Sequence[int] = ()
        self._is_asked_for = False
        """Whether another head has asked for one, and the answer is still to come."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Its address and port, where it is open."""
        return None if self._node is None or not self._port else (self._address(self._node), self._port)

    def _address(self, node: int) -> str:
        """Where the other hosts reach this one."""
        return str(self._agents.nodes[node].facts.get("address", self._agents.address))

    def open(self, then: Then, *, best: Sequence[int] = ()) -> None:
        """See that there is one, and call back. A new one is kept by the first node here, of `best`, then of all.

        What a caller wanted that has not been called back yet is forgotten.
        """
        if (place := self.place) is not None:
            then(*place)
            return
        self._then, self._best = then, best
        if not self._is_asked_for:
            self._ask()

    def _ask(self) -> None:
        here = self._agents.present()
        keeper = next((number for number in (*self._best, *here) if number in here), None)
        self._node, self._port = keeper, 0
        if keeper is not None:
            node = self._agents.nodes[keeper]
            address, generation = self._address(keeper), self._course.generation
            self._agents.tell([node], OpenStore(generation=generation, address=address))

    def written_down(self) -> dict[str, Any]:
        """Which host keeps it, or was asked to."""
        return {"node": self._node, "port": self._port, "shared": self.shared}

    def go_on_from(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it. A host that was asked has yet to answer, and is not asked again."""
        self._node, self._port, self.shared = written["node"], int(written["port"]), bool(written["shared"])
        self._is_asked_for = self._node is not None and not self._port

    def take(self, node: Node, port: int, *, shared: bool) -> None:
        """A node says that it keeps one."""
        if node.number != self._node:
            return  # it was asked before, given up, and is here again
        self._port, self.shared, self._is_asked_for = port, shared, False
        then, self._then = self._then, None
        if then is not None:
            then(self._address(node.number), port)

    def lose(self, node: Node) -> None:
        """A node is gone, and with it the store if it kept it. Whoever waits for one gets that of another."""
        if node.number == self._node:
            self._node, self._port, self._is_asked_for = None, 0, False
            if self._then is not None:
                self._ask()

    def close(self) -> None:
        """Have everybody who waits at the store wait no more."""
        if self.place is not None and self._node is not None:
            self._agents.tell([self._agents.nodes[self._node]], CloseStore())
            self._node, self._port = None, 0
