"""What a launcher sends, as one value: `--dry-run` prints it, `submit` sends it, and secrets are filled in last."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhosts.control.job import HIDDEN, Job


class Later(str):
    """A placeholder in a plan for a value that is secret, or known only when it is sent. It is shown as this text."""

    __slots__ = ("name",)
    name: str
    """What `filled` finds the value by."""

    def __new__(cls, name: str, shown: str) -> Later:
        """`shown` is how it is printed."""
        made = super().__new__(cls, shown)
        made.name = name
        return made


HEAD = Later("head", "ADDRESS:PORT")
"""Where agents reach the head of their run."""
CERTIFICATE = Later("certificate", "FINGERPRINT")
"""By which agents know that head, where they are given no secret: SHA-256 in hexadecimal."""


class Shell(tuple[str, ...]):
    """Words for the shell of another host, as one word of the command that goes there."""

    __slots__ = ()


def filled(content: Any, values: Mapping[str, Any] | None) -> Any:
    """`content`, made of dicts, lists, tuples and plain values, with the value of every `Later` in it.

    Without `values` with the text by which each is shown.

    Raises:
        KeyError: `values` lacks one.
    """
    if isinstance(content, Later):
        return str(content) if values is None else values[content.name]
    if isinstance(content, Shell):
        return "exec " + shlex.join(filled(list(content), values))
    if isinstance(content, Mapping):
        return {filled(key, values): filled(inner, values) for key, inner in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(filled(inner, values) for inner in content)
    return content


def text_of(content: Any) -> str:
    """Plain values as they are shown and sent: a text as it is, everything else as JSON."""
    return content if isinstance(content, str) else json.dumps(content, default=str, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that `submit` will send, known without touching anything."""

    job: Job
    hosts: tuple[str, ...] = ()
    """By node; none where the engine chooses them when the job begins."""
    agents: tuple[tuple[str, ...], ...] = ()
    """The command that starts the agent of each node."""
    workers: tuple[Mapping[str, str], ...] = ()
    """By rank: the variables that differ from worker to worker."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Name → what is written or sent under it first, in this order: a text, or values that become JSON."""
    command: tuple[str, ...] = ()
    """What starts the agents of all nodes, or queues the job, where one command does that."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of these commands in addition to those that are there."""
    notes: tuple[str, ...] = ()
    """What the user should know before it begins, each a sentence."""

    def __str__(self) -> str:
        job = self.job
        shared = [
            f"    {name}={HIDDEN if name in job.hidden else value}" for name, value in sorted(job.environment.items())
        ]
        lines = [f"$ {shlex.join(job.command())}", f"  in {job.folder}", f"  record in {job.run_dir}"]
        lines += ["  every worker, in addition to its host's variables:", *shared] if shared else []
        for name, content in self.files.items():
            lines += [f"--- {name}", text_of(content).rstrip("\n"), "---"]
        lines += [f"$ {shlex.join(self.command)}"] if self.command else []
        lines += [f"  with {name}={value}" for name, value in self.environment.items()]
        for node, (host, agent) in enumerate(zip(self.hosts, self.agents, strict=True)):
            lines += [f"node {node}: {host}", f"  $ {shlex.join(filled(agent, None))}"]
            for rank in range(job.first_rank(node), job.first_rank(node + 1)):
                lines += [f"  rank {rank}:", *(f"    {name}={value}" for name, value in self.workers[rank].items())]
        counted = () if job.workers_are_chosen else ("a host with GPUs starts a worker for each",)
        lines += [f"note: {note}" for note in (*self.notes, *counted)]
        return "\n".join(lines)
