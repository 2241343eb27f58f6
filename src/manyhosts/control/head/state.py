"""What every part of the head reads: the state of the run, its hosts, and the places of those that join it.

A host that joins by `manyhosts join` asks first, and gets what it must have to be of use (`offer`); then its agent
says hello without a number, and takes the first free place.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from manyhosts.cluster.ports import Range
from manyhosts.control.display import Display
from manyhosts.control.handshake import Ask, Hello, Offer
from manyhosts.control.job import Job
from manyhosts.control.loop import Loop
from manyhosts.control.session import Session
from manyhosts.errors import ManyhostsError
from manyhosts.records import run_directory

if TYPE_CHECKING:
    from manyhosts.control.enrolment import Enrolment
    from manyhosts.control.tls import Identity  # loads OpenSSL, which few runs need


@dataclass(slots=True)
class HeadState:
    """One run, from the first agent to its result."""

    job: Job
    display: Display
    loop: Loop = field(default_factory=Loop)
    generation: int = 0
    """How often all workers have been started again."""
    running: set[int] = field(default_factory=set)
    """The workers that run, by their members' numbers."""
    interrupted: float = 0.0
    """When the first signal came, on the monotonic clock; 0 before."""
    trainer_seen: bool = False
    """Whether a worker has said that it made a Trainer."""
    directories: set[Path] = field(default_factory=set)
    """The run directories in which a Trainer's run has begun, as workers name them."""
    warm: tuple[str, ...] = ()
    """What a host has loaded because the script imports it: one that comes later need not find that out."""
    result: int | ManyhostsError | None = None
    """How the run has ended; None while it continues."""
    can_be_taken_over: bool = False
    """Whether another head can resume the run where this one was killed."""

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.result is not None

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to resume this run."""
        return {
            "generation": self.generation,
            "running": sorted(self.running),
            "interrupted": bool(self.interrupted),
            "trainer_seen": self.trainer_seen,
            "directories": sorted(map(str, self.directories)),
            "warm": list(self.warm),
            "workers_of": list(self.job.workers_of.items()),
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be as far as another head was when it wrote that."""
        self.generation, self.running = int(written["generation"]), set(written["running"])
        self.interrupted = time.monotonic() if written["interrupted"] else 0.0
        self.trainer_seen, self.warm = bool(written["trainer_seen"]), tuple(written["warm"])
        self.directories = {Path(path) for path in written["directories"]}
        self.job = replace(self.job, workers_of=dict(written["workers_of"]))


class AgentProcess(Protocol):
    """An agent as the head holds it: `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """None while it runs, or its exit code."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""


PORT = 29400
"""Where a head listens when agents must know its port before it runs. Such nodes belong to one job."""


def port_of(job: Job) -> int:
    """Where the head of `job` listens, where agents must know that beforehand: the first port of its range."""
    ports = Range.of(job.ports)
    return PORT if ports is None else ports.first


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadEndpoint:
    """What the agents of a run know of its head."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """What distinguishes them from strangers."""
    port: int = 0
    """Where the head listens; 0 is any free one."""
    patience_s: float = 60.0
    """How long the head waits for them."""
    joining: Joining | None = None
    """Where hosts come by themselves: who may, and what they become."""
    enrolment: Enrolment | None = None
    """Where agents are not given the token when they are started: which of them may have it."""

    @property
    def identity(self) -> Identity | None:
        """The certificate that agents know of beforehand, where they do."""
        known = self.joining or self.enrolment
        return None if known is None else known.identity


@dataclass(slots=True)
class Node:
    """One host of the run, as the head sees it."""

    number: int
    name: str
    agent: AgentProcess
    channel: Session | None = None
    """None where its agent is not here; one whose connection is broken for a while still counts as here."""
    session: str = ""
    """What its agent calls itself, on whichever connection."""
    is_local: bool = False
    """Whether its agent was born with its connection: there will be no other."""
    facts: Hello | None = None
    """What its agent said of it when it came."""
    place: Any = None
    """Where its host has the project, where that is not the same path as here: see `head.state`."""
    leaving: bool = False
    heard: float = 0.0
    """When it last gave a sign of life, on the monotonic clock."""
    held_s: float = 0.0
    """For how long its agent has waited for something of its own system; then it does nothing else."""


class ExternalAgent:
    """The agent of another node, which an engine starts, and starts again: all that is known of it is what it says."""

    def poll(self) -> int | None:
        """It may come at any time."""
        return None

    def wait(self, timeout: float | None = None) -> int:
        """There is nothing to wait for: it ends by itself when the head has said that all is over."""
        return 0

    def terminate(self) -> None:
        """Its engine does that."""

    def kill(self) -> None:
        """Its engine does that."""


@dataclass(kw_only=True, slots=True)
class Joining:
    """Who may take a place, and which."""

    identity: Identity
    """The head's key and certificate, of which the typed secret knows."""
    offer: Offer
    """The answer to a host that asks: the run's name, program, files and versions."""
    mark: str
    """What this machine has left in the run directory; a host that sees it shares that disk."""
    say: Callable[[str], None]
    """Is given lines for the user."""
    _marks: dict[str, int] = field(default_factory=dict)
    """What each machine has left in its run directory → a number of that disk."""
    _hosts: dict[int, tuple[str, Folder]] = field(default_factory=dict)
    """Node → what the host is called, and where it has the project."""

    def __post_init__(self) -> None:
        self._marks[self.mark] = 0

    def to_dict(self) -> dict[str, Any]:
        """What another head needs to know of the hosts that have come. It has the private key."""
        hosts = [[number, name, str(at.path), at.disk] for number, (name, at) in self._hosts.items()]
        return {"identity": self.identity.pem, "mark": self.mark, "marks": self._marks, "hosts": hosts}

    def restore(self, written: Mapping[str, Any], nodes: Sequence[Node]) -> None:
        """Give `nodes` the names and folders that they have had with another head."""
        self._marks.update(written["marks"])
        for number, name, path, disk in written["hosts"]:
            self._hosts[number] = name, Folder(path=Path(path), disk=disk)
            nodes[number].name, nodes[number].place = self._hosts[number]

    def answer(self, asking: Ask, nodes: Sequence[Node]) -> Offer:
        """The answer to a host that asks whether it may join; `refused` is the reason if it may not."""
        refused = ""
        here = [node for node in nodes if is_connected(node)]
        twin = next((node for node in here if is_machine(node, asking.machine)), None)
        if twin is not None:
            refused = f"this machine is a host of the run already, as {twin.name}"
        elif len(here) == len(nodes):
            refused = f"the run has all of its {len(nodes)} hosts: {', '.join(node.name for node in nodes)}"
        return replace(self.offer, refused=refused)

    def place_for(self, hello: Hello, nodes: Sequence[Node]) -> Node | None:
        """The node that an agent without a number is: its own from before, its machine's, or the first free one."""
        if not hello.mark:
            return None  # it does not say what a host that joins says
        joining = nodes[1:]
        for node in joining:
            if node.channel is not None and node.session == hello.session:
                return node
        for node in joining:
            if node.channel is not None and is_machine(node, hello.machine):
                return node  # its agent is gone, and the head has not noticed yet; or it is a second one
        return next((node for node in joining if node.channel is None), None)

    def take_in(self, node: Node, nodes: Sequence[Node]) -> None:
        """A host has become `node`: it gets a name that no other one has."""
        hello = node.facts
        assert hello is not None, "its agent has come"
        others = {other.name for other in nodes if other is not node}
        name = base = re.sub(r"[^\w.-]", "_", hello.host.split(".")[0]) or "host"
        count = 1
        while name in others:
            count += 1
            name = f"{base}-{count}"
        node.name = name
        alike = [self._marks[mark] for mark in hello.marks if mark in self._marks]
        disk = self._marks.setdefault(hello.mark, alike[0] if alike else max(self._marks.values()) + 1)
        node.place = Folder(path=Path(hello.folder), disk=disk)
        self._hosts[node.number] = name, node.place
        self.say(f"manyhosts: {name} ({hello.address}) has joined as node {node.number}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """Where a host that joined has the project."""

    path: Path
    disk: int
    """A number of the disk that has its run directory."""

    def job(self, job: Job) -> Job:
        """`job` as it is there: what is below the working directory here is below this folder."""
        program = job.program
        if job.kind == "script" and Path(program).is_absolute():
            program = str(self._there(Path(program), job.folder) or program)
        run_dir = self._there(job.run_dir, job.folder) or self.path / "runs" / job.run_dir.name
        environment = {**job.environment, run_directory.DISK: str(self.disk)}
        return replace(job, folder=self.path, program=program, run_dir=run_dir, environment=environment)

    def _there(self, path: Path, folder: Path) -> Path | None:
        return self.path / path.relative_to(folder) if path.is_relative_to(folder) else None


def is_machine(node: Node, machine: str) -> bool:
    """Whether the host of a node is known to be `machine`; nothing is known where that is empty."""
    return bool(machine) and node.facts is not None and node.facts.machine == machine


def is_connected(node: Node) -> bool:
    """Whether the agent of a node is here, and on a connection that has not broken."""
    return node.channel is not None and node.channel.channel is not None
