"""What to run, in words that every launcher understands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from manyhosts.cluster.ports import Range
from manyhosts.errors import ConfigError

HIDDEN = "…hidden"
"""Replaces a value that is not shown."""
MOST_WORKERS = 1 << 16
"""Of one host, and hosts of one run: more is a slip of the hand, and a plan of them would fill the memory."""
LEAST_HANG_TIMEOUT_S = 2
"""Steps are reported twice a second at most, and a look at all workers takes half a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One start of the user's program on `nodes` hosts with `workers_per_node` workers each.

    Raises:
        ConfigError: a number is below what makes sense, or `ports` is no range.
    """

    program: str
    """A script's path, a module's name, or an executable: `kind` says which."""
    kind: Literal["script", "module", "executable"] = "script"
    arguments: tuple[str, ...] = ()
    folder: Path
    """Working directory of the workers, absolute."""
    run_dir: Path
    """Where the run's record is kept, absolute."""
    nodes: int = 1
    nodes_are_chosen: bool = True
    """Whether the user has said how many; if not, an engine that has given us some uses all of them."""
    least_nodes: int | None = None
    """With how many nodes the run continues where others are gone, and begins where others are late. None: with all."""
    workers_per_node: int = 1
    workers_are_chosen: bool = True
    """Whether the user has said how many; if not, every host starts as many as it has GPUs, and one without any."""
    workers_of: Mapping[int, int] = field(default_factory=dict)
    """Node → workers, for nodes that have another number of them than `workers_per_node`."""
    hang_timeout_s: float | None = None
    """How long workers may make no progress. 0: for ever. None: long, and only where they report progress."""
    head_timeout_s: float = 300.0
    """How long agents that have lost the head keep their workers and call it again. 0: not at all."""
    restarts: int = 0
    """How often all workers are started again after a failure."""
    show: tuple[int, ...] = ()
    """The ranks whose output is shown; all where it is empty. Logs are kept of all."""
    prefix: bool = True
    """Whether a line that is shown begins with its rank, where there are several."""
    log_bytes: int = 1 << 30
    """How large the log of a worker grows before another one is begun in its place; 0: no limit."""
    warm_s: float = 0.0
    """How long what workers are forked from waits for another run when this one is over; 0: not at all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers in addition to those of their host."""
    hidden: tuple[str, ...] = ()
    """Those of these variables whose values are shown nowhere: what the user has given may be a secret."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """The settings of `--set`; already part of `environment`, kept to notice that no Trainer read them."""
    for_trainer: tuple[str, ...] = ()
    """Other options that only mh.Trainer obeys; part of `environment`, too."""
    preload: tuple[str, ...] = ()
    """Modules that a host imports once, before its workers are forked."""
    uses_manyhosts: bool = False
    """Whether the program is known to import manyhosts, so that its workers ask where they need a TCPStore."""
    grace_s: float = 5
    """Seconds that workers get to end by themselves when another one failed."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts, by node, where the user has given them."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What `-o KEY=VALUE` asked of the target."""
    check: bool = True
    """Whether hosts are checked before workers start."""
    sync: bool = True
    """Whether the working directory is brought to hosts that do not share it."""
    bring: tuple[str, ...] = ()
    """Data below the working directory that is brought to hosts that lack it, by what it holds."""
    encrypt: bool = False
    """Whether hosts may only talk over encrypted links."""
    ports: str = ""
    """The range that every port is taken from, as A-B; empty: the system chooses."""
    words: tuple[str, ...] = ()
    """What was typed after `manyhosts`, where it was; the last of them are the program and its arguments."""
    run_dir_is_chosen: bool = True
    """Whether the user has named the run directory."""
    in_place: str = ""
    """A module whose `be_node` the nodes of an engine's job call in place of a run."""
    farewell_s: float = 30
    """Seconds that workers get after Ctrl-C or SIGTERM, to save what they have."""

    def __post_init__(self) -> None:
        counts: Sequence[tuple[str, Any, float, float]] = (
            ("--workers-per-node" if self.hosts else "--workers", self.workers_per_node, 1, MOST_WORKERS),
            ("slots", max(self.workers_of.values(), default=1), 1, MOST_WORKERS),
            ("--nodes", self.nodes, 1, MOST_WORKERS),
            ("--restarts", self.restarts, 0, math.inf),
        )
        for name, count, least, most in counts:
            if not isinstance(count, int):
                raise ConfigError(f"{name} is {count!r}", where=name, fix="give an integer, such as 2")
            if count < least:
                raise ConfigError(f"{name} is {count}", where=name, fix=f"give {least} or more")
            if count > most:
                raise ConfigError(f"{name} is {count}", where=name, fix=f"give {most:,} or fewer")
        if wrong := [rank for rank in self.show if not 0 <= rank < self.workers and self.workers_are_chosen]:
            raise ConfigError(
                f"there is no rank {wrong[0]} among {self.workers} worker{'s' * (self.workers > 1)}",
                where="--show",
                fix=f"give ranks from 0 to {self.workers - 1}, as in --show 0 or --show 0,1"
                if self.workers > 1
                else "give --show 0, or leave it out: there is one worker",
            )
        Range.of(self.ports)
        if self.hang_timeout_s is not None and not (
            self.hang_timeout_s == 0 or LEAST_HANG_TIMEOUT_S <= self.hang_timeout_s < math.inf
        ):
            raise ConfigError(
                f"--hang-timeout is {self.hang_timeout_s:g} s",
                where="--hang-timeout",
                fix=f"give {LEAST_HANG_TIMEOUT_S} seconds or more, longer than the longest step; or 0 for never",
            )
        if not 0 <= self.head_timeout_s < math.inf:
            raise ConfigError(
                f"--head-timeout is {self.head_timeout_s:g} s",
                where="--head-timeout",
                fix="give the seconds that hosts wait for the head to be there again; or 0 for none",
            )
        if self.least_nodes is not None and not 1 <= self.least_nodes <= self.nodes:
            raise ConfigError(
                f"--nodes is {self.least_nodes}:{self.nodes}, which no number is between",
                where="--nodes",
                fix="give MIN:MAX with MIN from 1 to MAX",
            )

    @property
    def workers(self) -> int:
        """Workers on all nodes together."""
        return self.first_rank(self.nodes)

    def workers_on(self, node: int) -> int:
        """Workers of one node."""
        return self.workers_of.get(node, self.workers_per_node)

    def first_rank(self, node: int) -> int:
        """The rank of a node's first worker, where all nodes are there."""
        return sum(self.workers_on(before) for before in range(node))

    def with_workers(self, node: int, count: int) -> Job:
        """The job with `count` workers on `node`."""
        return replace(self, workers_of={**self.workers_of, node: count})

    def on(self, nodes: Sequence[int]) -> Job:
        """The job on some of its nodes, which are then its nodes 0, 1, …"""
        own = {place: self.workers_on(node) for place, node in enumerate(nodes)}
        return replace(self, nodes=len(nodes), least_nodes=None, workers_of=own)

    @property
    def recovers(self) -> bool:
        """Whether workers can continue without one of them: alone, none can."""
        return self.workers > 1

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may go and come."""
        return self.least_nodes is not None and self.least_nodes < self.nodes

    @property
    def run_id(self) -> str:
        """A name of the run that is no secret."""
        return self.run_dir.name

    def command(self) -> list[str]:
        """What one would type to run the program alone."""
        start = {"script": ["python"], "module": ["python", "-m"], "executable": []}[self.kind]
        return [*start, self.program, *self.arguments]
