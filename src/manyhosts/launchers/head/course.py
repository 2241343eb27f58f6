"""How far a run is: what every part of the head must know of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from manyhosts.errors import ManyhostsError
from manyhosts.launchers.display import Display
from manyhosts.launchers.job import Job
from manyhosts.launchers.loop import Loop


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

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return self.result is not None
