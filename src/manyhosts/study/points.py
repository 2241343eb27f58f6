"""Which runs a study is made of: a size, the settings that are varied, a seed; and the command that runs each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhosts.config.overrides import lacks

WEAK = "batch_size_per_worker"
"""The setting of weak scaling, in which the batch grows with the workers."""
MOST_POINTS = 1000
"""More is a slip of the one who typed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person asked of a study."""

    script: str
    arguments: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    """Numbers of workers on this machine; empty where `nodes` says the sizes."""
    nodes: tuple[int, ...] = ()
    workers_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    """Where hosts are named: a study of n nodes takes the first n of them."""
    where: tuple[str, ...] = ()
    """Words that every run gets: `--on slurm`, `--cluster lab`, `-o partition=long`."""
    environment: tuple[str, ...] = ()
    """What `--env` is given, which is recorded by name alone."""
    budget: str | None = None
    """How long each run trains: time, epochs or steps. None: as the script says."""
    repeat: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    """As `--set` gives them, for every run."""
    vary: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Setting → the values that are tried, each with each of the others: see `variants`."""
    weak: int | None = None
    """Samples a worker, with which each variant is tried again: then the batch grows with the workers."""

    @property
    def varied(self) -> tuple[str, ...]:
        """The settings that distinguish one variant from another."""
        return (*self.vary, *(() if self.weak is None else (WEAK,)))

    @property
    def is_here(self) -> bool:
        """Whether every run is on this machine."""
        return not self.hosts and not {"--on", "--cluster"} & set(self.where)

    def variants(self) -> list[tuple[tuple[str, str], ...]]:
        """What is tried of the settings that are varied; a strategy that has no such setting is tried once without."""
        found = []
        for values in itertools.product(*self.vary.values()):
            varied = dict(zip(self.vary, values, strict=True))
            strategy = varied.get("strategy", self.settings.get("strategy", ""))
            found.append(tuple((key, value) for key, value in varied.items() if not lacks(strategy, key)))
        if self.weak is not None:
            found += [(*each, (WEAK, str(self.weak))) for each in found]
        return list(dict.fromkeys(found))

    def points(self) -> list[Point]:
        """Every run of the study: the sizes of one variant one after another, the smallest first."""
        sizes: list[tuple[int | None, int]] = [(count, 1) for count in self.workers]
        sizes += [(self.workers_per_node, count) for count in self.nodes]
        first = int(self.settings.get("seed", "0"))
        seeds = range(first, first + self.repeat) if self.repeat > 1 else [None]
        return [
            Point(workers_per_node=each, nodes=nodes, varied=varied, seed=seed)
            for varied in self.variants()
            for each, nodes in sorted(sizes, key=lambda size: ((size[0] or 1) * size[1], size[1]))
            for seed in seeds
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a study."""

    workers_per_node: int | None
    """None: as many as the hosts have GPUs, or one."""
    nodes: int = 1
    varied: tuple[tuple[str, str], ...] = ()
    seed: int | None = None
    """None: as the script says."""

    @property
    def workers(self) -> int:
        """How many were asked for; where that is left to the hosts, one on each."""
        return (self.workers_per_node or 1) * self.nodes

    @property
    def settings(self) -> dict[str, str]:
        """What differs between this run and others of the study, besides its size."""
        return {**dict(self.varied), **({} if self.seed is None else {"seed": str(self.seed)})}

    @property
    def name(self) -> str:
        """A name for its folder: `2-workers`, `4-workers-on-2-nodes-compression-bf16-seed-1`."""
        words = [self.size.replace(" ", "-"), *(f"{key}-{value}" for key, value in self.settings.items())]
        return re.sub(r"[^\w.=-]+", "_", "-".join(words))

    @property
    def size(self) -> str:
        """In words: `2 workers`, `4 workers on 2 nodes`, or `2 nodes` where each has as many workers as it has GPUs."""
        if self.workers_per_node is None:
            return amount(self.nodes, "node")
        return amount(self.workers, "worker") + (f" on {self.nodes} nodes" if self.nodes > 1 else "")

    def __str__(self) -> str:
        return ", ".join([self.size, *(f"{key}={value}" for key, value in self.settings.items())])


def command(asked: Asked, point: Point, run_dir: str, *, warm: bool = False) -> list[str]:
    """What is typed after `manyhosts` for this run. `warm`: others like it follow, or came before."""
    words = ["run", *(["--warm"] if warm else []), *asked.where]
    if asked.workers:
        words += ["--workers", str(point.workers_per_node)]
    elif asked.hosts:
        words += ["--hosts", ",".join(asked.hosts[: point.nodes])]
    else:
        words += ["--nodes", str(point.nodes)]
    if not asked.workers and point.workers_per_node is not None:
        words += ["--workers-per-node", str(point.workers_per_node)]
    for word in asked.environment:
        words += ["--env", word]
    settings = {**asked.settings, **({} if asked.budget is None else {"duration": asked.budget}), **point.settings}
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return [*words, "--run-dir", run_dir, asked.script, *asked.arguments]


def amount(count: int, thing: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
