"""The nodes of a run that nobody starts: hosts take their places by `manyhosts join`, in the order in which they come.

A host asks first, and is told what it must have to be of use (`offer`); then its agent says hello without a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.control import messages
from manyhosts.control.head.agents import Node
from manyhosts.control.job import Job
from manyhosts.control.loop import Message
from manyhosts.control.tls import Identity
from manyhosts.records import run_directory


@dataclass(kw_only=True, slots=True)
class Joining:
    """Who may take a place, and which."""

    identity: Identity
    """The head's key and certificate, of which the typed secret knows."""
    offer: Mapping[str, Any]
    """What a host is told that asks: the run's name, program, files and versions."""
    mark: str
    """What this machine has left in the run directory; a host that sees it shares that disk."""
    tell: Callable[[str], None]
    """Is given lines for the user."""
    _marks: dict[str, int] = field(default_factory=dict)
    """What each machine has left in its run directory → a number of that disk."""

    def __post_init__(self) -> None:
        self._marks[self.mark] = 0

    def answer(self, asking: Message, nodes: Sequence[Node]) -> dict[str, Any]:
        """What a host is told that asks whether it may join: `refused` says why not, where it may not."""
        refused = ""
        here = [node for node in nodes if is_connected(node)]
        machine = asking.get("machine")
        twin = next((node for node in here if machine and node.facts.get("machine") == machine), None)
        if twin is not None:
            refused = f"this machine is a host of the run already, as {twin.name}"
        elif len(here) == len(nodes):
            refused = f"the run has all of its {len(nodes)} hosts: {', '.join(node.name for node in nodes)}"
        return {**self.offer, "refused": refused}

    def place_for(self, hello: Message, nodes: Sequence[Node]) -> Node | None:
        """The node that an agent without a number is: its own from before, its machine's, or the first free one."""
        if messages.fault_in(hello, messages.JOINING):
            return None
        joining = nodes[1:]
        for node in joining:
            if node.channel is not None and node.session == hello["session"]:
                return node
        for node in joining:
            if hello["machine"] and node.channel is not None and node.facts.get("machine") == hello["machine"]:
                return node  # its agent is gone, and the head has not noticed yet; or it is a second one
        return next((node for node in joining if node.channel is None), None)

    def take_in(self, node: Node, nodes: Sequence[Node]) -> None:
        """A host has become `node`: it gets a name that no other one has."""
        hello = node.facts
        others = {other.name for other in nodes if other is not node}
        name = base = re.sub(r"[^\w.-]", "_", hello["host"].split(".")[0]) or "host"
        count = 1
        while name in others:
            count += 1
            name = f"{base}-{count}"
        node.name = name
        alike = [self._marks[mark] for mark in hello["marks"] if mark in self._marks]
        disk = self._marks.setdefault(hello["mark"], alike[0] if alike else max(self._marks.values()) + 1)
        node.place = Folder(path=Path(hello["folder"]), disk=disk)
        self.tell(f"manyhosts: {name} ({hello['address']}) has joined as node {node.number}")


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


def is_connected(node: Node) -> bool:
    """Whether the agent of a node is here, and on a connection that has not broken."""
    return node.channel is not None and node.channel.channel is not None
