"""A trial whose run is in progress: what it has cost, and what its validations have said."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.follower import Follower
from manyhosts.records.whole_file import read_json
from manyhosts.trials.runs import Place, Trial
from manyhosts.tune.asked import Slot


@dataclass(slots=True)
class UnderWay:
    """A trial whose run is in progress."""

    trial: Any
    slot: Slot
    place: Place
    run: Trial
    follower: Follower
    before: float
    """Seconds that it had taken when it was interrupted."""
    seen: dict[int, float] = field(default_factory=dict)
    """Optimizer step of each validation → value."""
    steps: tuple[int, int] = (0, 0)
    """How far it is, and how far it goes; 0: not known."""
    asked_to_end: str = ""
    """`pruned` or `stopped`."""
    ended_since: float = 0.0
    begun: float | None = None
    """When its workers were there, where a scheduler starts them."""

    def seconds(self, *, waits: bool) -> float:
        """What it has cost so far, this time."""
        if waits:
            return 0.0 if self.begun is None else time.monotonic() - self.begun
        return self.run.seconds

    def was_stopped(self) -> bool:
        """Whether a signal ended it, rather than a fault of its own: the run itself says so."""
        with contextlib.suppress(ConfigError):
            return str(read_json(self.place.run.summary).get("status")) == "interrupted"
        return self.run.process.returncode in (130, 143, -2, -15)
