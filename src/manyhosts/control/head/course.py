"""How far a run is: what every part of the head must know of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.control.loop import Loop
from manyhosts.errors import ManyhostsError


@dataclass(slots=True)
class Course:
    """One run, from the first agent to its result."""

    job: Job
    display: Display
    loop: Loop = field(default_factory=Loop)
    generation: int = 0
    """How often all workers have been started anew."""
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
    """How the run has ended; None while it goes on."""
    can_be_taken_over: bool = False
    """Whether another head can go on with the run where this one was killed."""

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.result is not None

    def written_down(self) -> dict[str, Any]:
        """What another head needs to go on with this run."""
        return {
            "generation": self.generation,
            "running": sorted(self.running),
            "interrupted": bool(self.interrupted),
            "trainer_seen": self.trainer_seen,
            "directories": sorted(map(str, self.directories)),
            "warm": list(self.warm),
            "workers_of": list(self.job.workers_of.items()),
        }

    def go_on_from(self, written: Mapping[str, Any]) -> None:
        """Be as far as another head was when it wrote that."""
        self.generation, self.running = int(written["generation"]), set(written["running"])
        self.interrupted = time.monotonic() if written["interrupted"] else 0.0
        self.trainer_seen, self.warm = bool(written["trainer_seen"]), tuple(written["warm"])
        self.directories = {Path(path) for path in written["directories"]}
        self.job = replace(self.job, workers_of=dict(written["workers_of"]))
