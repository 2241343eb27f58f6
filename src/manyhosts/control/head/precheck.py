"""What is looked at before workers start, while hosts load torch: is every host fit, does each reach the others.

An agent tells its host's condition as soon as it is asked to prepare, and listens for the others; then each connects to
all. That takes some milliseconds of a second or more in which torch is loaded. Errors end the run, warnings are a line
each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhosts.cluster.findings import Finding, worst_first
from manyhosts.control.head import host_checks
from manyhosts.control.head.agents import Agents, Node
from manyhosts.control.head.course import Course
from manyhosts.control.loop import Message
from manyhosts.errors import CommunicationError, LaunchError
from manyhosts.hosts.ways import Place, Ways

_LIMIT_S = 10.0
"""How long a host may take to tell. One that takes longer is not waited for: its workers may fare as badly."""


class Precheck:
    """Looked through once, before the first workers start."""

    def __init__(self, course: Course, agents: Agents, *, ways: bool, one_way: bool = False) -> None:
        """`ways`: whether hosts try to reach each other, too; ssh has had them do so already.

        `one_way`: see `hosts.ways`.
        """
        self._course, self._agents = course, agents
        self._over = not course.job.check
        self._ways = ways and len(agents.nodes) > 1
        self._asked: dict[int, float] = {}
        self._findings: list[Finding] = []
        self._found = Ways(one_way=one_way)
        self._told: set[int] = set()
        self._knocked: set[int] = set()
        self._then: Callable[[], None] | None = None

    def requests(self, node: Node) -> dict[str, bool]:
        """What an agent is to tell beside preparing itself."""
        self._asked[node.number] = time.time()
        return {"tell_condition": not self._over, "listen": not self._over and self._ways}

    def before(self, then: Callable[[], None]) -> None:
        """Call `then` when everything is looked through and nothing is in the way."""
        if self._over:
            then()
            return
        self._then = then
        self._course.loop.after(_LIMIT_S, self._conclude)
        self._go_on()

    def skip(self) -> None:
        """The workers have begun already."""
        self._over = True

    def hear(self, node: Node, message: Message) -> None:
        """What an agent tells of its host."""
        if self._over:
            return
        if message["message"] == "condition":
            self._take_condition(node, message)
        elif message["message"] == "connections_tried":
            self._take_answers(node, message["answers"])
        self._go_on()

    def _take_condition(self, node: Node, message: Message) -> None:
        told, now = message["told"], time.time()
        before = self._asked[node.number]
        offset = told["time_s"] - (before + now) / 2
        self._findings += host_checks.findings(node.name, told, offset_s=offset, unsure_s=(now - before) / 2)
        self._told.add(node.number)
        if message.get("port"):
            self._found.places[node.number] = place_of(node, int(message["port"]))

    def _take_answers(self, node: Node, answers: list[str]) -> None:
        self._found.take(node.number, list(self._found.places), answers)
        self._knocked.add(node.number)

    def _go_on(self) -> None:
        """Take the next step, if everybody has taken the last one."""
        present = set(self._agents.present())
        if self._then is None or not present <= self._told:
            return
        if self._ways and len(present) > 1 and not self._knocked:
            self._knocked.add(-1)  # asked for
            places = [(place.address, place.port) for place in self._found.places.values()]
            self._agents.tell_all("try_connections", places=places)
        if not self._ways or len(present) < 2 or present <= self._knocked:
            self._conclude()

    def _conclude(self) -> None:
        then = self._then
        if self._over or then is None or self._course.is_over:
            return
        self._over = True
        findings = [*self._findings, *self._found.findings()]
        errors = [finding for finding in findings if finding.level == "error"]
        for finding in worst_first(findings):
            if finding.level == "warning":
                self._course.display.warn(f"manyhosts: warning: {finding.what} ({finding.fix})")
        if not errors:
            then()
            return
        first, more = errors[0], len(errors) - 1
        kind = CommunicationError if first.kind == "network" else LaunchError
        rest = f" (and {more} more: `manyhosts doctor` lists all)" if more else ""
        self._course.result = kind(f"{first.what}{rest}", where=first.where, fix=first.fix)


def place_of(node: Node, port: int) -> Place:
    """Where the host of a node can be connected to. Workers meet at a store on the first one."""
    return Place(
        name=node.name,
        address=str(node.facts["address"]),
        port=port,
        gpus=int(node.facts.get("gpus", 0)),
        keeps_store=node.number == 0,
    )
