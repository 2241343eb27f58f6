"""Hosts as a head has them, for tests: real nodes and workers, what their agents are told, and a clock to turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhosts.control.handshake import Hello
from manyhosts.control.head.state import ExternalAgent, HeadState, Node
from manyhosts.control.head.workers import WorkerGroup
from manyhosts.control.job import Job
from manyhosts.control.protocol import FromHead, OpenStore
from manyhosts.control.session import Session


class Clock:
    """A loop whose time continues when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.waiting.append((self.now + seconds, callback))

    def jump(self, seconds: float) -> None:
        """Time passes, and nobody is called meanwhile, as in a process that is stopped."""
        self.now += seconds
        due = [callback for when, callback in self.waiting if when <= self.now]
        self.waiting = [entry for entry in self.waiting if entry[0] > self.now]
        for callback in due:
            callback()


class Display:
    """Remembers what the user was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def line(self, text: str, prefix: str, is_error: bool) -> None:
        self.said.append(f"{prefix}{text}")


class Hosts:
    """What agents are to the rest of a head: who is there, and what each was told. Those that are called never come."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.address = "10.0.0.99"
        self.nodes = [Node(number, f"n{number}", ExternalAgent()) for number in range(count)]
        self.reported: list[tuple[int, FromHead]] = []
        self._clock = clock
        self.answer: Callable[[Node, FromHead], None] = lambda node, message: None
        """What an agent does when it is told something."""
        for node in self.nodes:
            self.come_back(node.number)
            node.facts = Hello(
                session=node.name,
                heard=0,
                node=node.number,
                host=node.name,
                address=f"10.0.0.{node.number}",
                process=1,
                cores=1,
                gpus=0,
            )

    def present(self) -> list[int]:
        return [node.number for node in self.nodes if node.channel is not None]

    def lose(self, number: int) -> Node:
        self.nodes[number].channel = None
        return self.nodes[number]

    def come_back(self, number: int) -> None:
        node = self.nodes[number]
        node.channel, node.heard = Session(self._clock.after, lambda message: None), self._clock.now

    def send(self, nodes: Sequence[Node], message: FromHead) -> None:
        for node in nodes:
            self.reported.append((node.number, message))
            self.answer(node, message)

    def send_all(self, message: FromHead) -> None:
        self.send(self.nodes, message)

    def call_back(self, node: Node, on_failure: Callable[[], None]) -> None:
        pass


def begun(job: Job, clock: Clock, hosts: Hosts) -> tuple[HeadState, WorkerGroup]:
    """A run whose workers have all begun the first call of the script."""
    state = HeadState(job, Display(), clock)
    group = WorkerGroup(state, hosts, lambda failures: None, lambda: None)
    begin(state, group, hosts)
    return state, group


def begin(state: HeadState, group: WorkerGroup, hosts: Hosts) -> None:
    """Start all workers, and have them begin the first call of the script."""

    def open_store(node: Node, message: FromHead) -> None:
        if isinstance(message, OpenStore):
            group.store.take(node, 4711, shared=True, listens=message.listens)

    hosts.answer = open_store
    group.store.open(lambda address, port: group.start_all(), listens=False)
    for number in sorted(state.running):
        group.regroup.receive(number, "begin", {"call": 1, "most": 0})
