"""Where one worker's training loop stands: in which step, and how much is done of what is due after the last one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from manyhosts.data.steps import Step
from manyhosts.training.loop.progress import Progress


@dataclass(slots=True)
class LoopState:
    """Written by the loop, the step and what is due after it, and by nobody else; `RunState` is what snapshots keep."""

    all_actions: int = 0
    """How many things may be due after a step."""
    first_duty: int = 0
    """The number of the first that may be due after a step that ends no epoch."""
    done_actions: int = 0
    """Of what is due after the last step, how much is done."""
    before: Progress = field(default_factory=Progress)
    """How far the run had come before the last step."""
    ends_epoch: bool = False
    """Whether the last step was the last of its epoch."""
    under_way: int = 0
    """The step that is being computed; 0 between steps."""
    tried: int = 0
    """The last step that broke off since workers went; 0 where none did."""
    taken: Step | None = None
    """What the step under way, or the last one, has read."""
    inconsistent: bool = False
    """Whether an update or a transfer broke off, so that the parameters are those of no step."""
    trusted: int | None = None
    """After workers were found to compute wrongly: the last step that all agree on, until the run is back there."""
    change_granted: bool = False
    """Whether all workers have heard that somebody waits to join them."""
    save_again: bool = False
    """Whether a snapshot is lost that was being written when workers went."""
    since: float = field(default_factory=time.monotonic)
    """When what is being done now was begun, by a clock that nobody sets."""

    def begin_step(self, number: int, step: Step) -> None:
        """From here on, until `end_step`, step `number` is under way."""
        self.under_way, self.taken = number, step

    def end_step(self, *, ends_epoch: bool) -> None:
        """The model has changed: what is due after the step is due."""
        self.under_way, self.ends_epoch = 0, ends_epoch
        self.done_actions = 0 if ends_epoch else self.first_duty

    def break_off(self) -> None:
        """The step under way was put back, or finished because another worker has finished it."""
        self.tried, self.under_way = max(self.tried, self.under_way), 0

    def stand(self, *, done_actions: int) -> None:
        """The state is that of a snapshot now: nothing is under way."""
        self.done_actions, self.ends_epoch = done_actions, False
        self.under_way, self.inconsistent = 0, False

    def go_on(self, *, save_again: bool) -> None:
        """All workers are as far as the farthest."""
        self.under_way, self.tried, self.inconsistent = 0, 0, False
        if save_again:
            self.save_again, self.done_actions = True, min(self.done_actions, self.all_actions - 1)
