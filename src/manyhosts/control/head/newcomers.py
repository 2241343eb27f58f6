"""Hosts that join while others train: whether they and the others reach each other is seen before a worker starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from manyhosts.control.head.agents import Agents, Node
from manyhosts.control.head.course import Course
from manyhosts.control.head.precheck import place_of
from manyhosts.control.loop import Message
from manyhosts.hosts.ways import Ways

_LIMIT_S = 15.0
"""How long this may take. A host that does not answer is not waited for: its connection is looked after elsewhere."""


class Newcomers:
    """They are received one after another: all agents listen, then the newcomer and the others try each other."""

    def __init__(self, course: Course, agents: Agents) -> None:
        self._course, self._agents = course, agents
        self._waiting: deque[tuple[Node, Callable[[], None]]] = deque()
        """The first of them is being received."""
        self._turn = 0

    def receive(self, node: Node, then: Callable[[], None]) -> None:
        """Call `then` when nothing is in the way of `node`; turn it away otherwise."""
        self._waiting.append((node, then))
        if len(self._waiting) == 1:
            self._begin()

    def hear(self, node: Node, message: Message) -> None:
        """An agent listens, or has connected to the others."""
        if not self._waiting:
            return
        if message["message"] == "connectivity" and node.number in self._awaited and not self._places_are_told:
            self._ways.places[node.number] = place_of(node, message["port"])
            self._go_on(node)
        elif message["message"] == "connections_tried" and node.number in self._awaited and self._places_are_told:
            self._ways.take(node.number, self._knocks_at[node.number], message["answers"])
            self._go_on(node)

    def lose(self, node: Node) -> None:
        """An agent is gone."""
        if not self._waiting:
            return
        if node is self._waiting[0][0]:
            self._end(lambda: None)
            return
        self._waiting = deque(each for each in self._waiting if each[0] is not node)
        self._go_on(node)

    def _begin(self) -> None:
        self._turn += 1
        turn = self._turn
        self._ways = Ways(one_way=True)
        self._places_are_told = False
        self._knocks_at: dict[int, list[int]] = {}
        here = [self._agents.nodes[number] for number in self._agents.present()]
        newcomers = {node.number for node, _ in self._waiting} - {self._waiting[0][0].number}
        self._taking_part = [node for node in here if node.number not in newcomers]
        self._awaited = {node.number for node in self._taking_part}
        self._agents.tell(self._taking_part, "open_door")

        def look() -> None:
            if self._waiting and turn == self._turn:
                self._conclude()

        self._course.loop.after(_LIMIT_S, look)

    def _go_on(self, node: Node) -> None:
        self._awaited.discard(node.number)
        if self._awaited:
            return
        if self._places_are_told:
            self._conclude()
            return
        self._places_are_told = True
        newcomer = self._waiting[0][0].number
        for each in self._taking_part:
            if each.number not in self._ways.places:
                continue
            others = [number for number in self._ways.places if number != newcomer]
            self._knocks_at[each.number] = others if each.number == newcomer else [newcomer]
            self._awaited.add(each.number)
            places = [self._ways.places[number] for number in self._knocks_at[each.number]]
            self._agents.tell([each], "try_connections", places=[(place.address, place.port) for place in places])

    def _conclude(self) -> None:
        node, then = self._waiting[0]
        found = self._ways.findings()
        if not found:
            self._end(then)
            return
        self._course.display.warn(
            f"manyhosts: {found[0].what} ({found[0].fix})\nmanyhosts: the run goes on without host {node.name}"
        )
        self._end(lambda: self._agents.turn_away(node, f"{found[0].what} ({found[0].fix})"))

    def _end(self, do: Callable[[], None]) -> None:
        self._waiting.popleft()
        self._turn += 1
        do()
        if self._waiting:
            self._begin()
