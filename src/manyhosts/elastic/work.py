"""What a call is to those who take a worker through changes of the workers: its progress, its state, its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manyhosts.cluster.membership import Group
from manyhosts.events import Event

NO_STATE = -1
"""The step of a worker whose state is of no use to others."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker is in a call."""

    step: int = 0
    """Steps finished; `NO_STATE` for one whose state is of no use."""
    done_actions: int = 0
    """Of what is due after that step, how much is done."""
    tried: int = 0
    """The step that broke off; 0 where none did."""
    lost_snapshot: int = 0
    """Whether a snapshot that was being written is lost."""
    new: int = 0
    """Whether it lacks what the others hold of every trainer of the script."""
    trusted: int = NO_STATE
    """The last step that is not in doubt, where some are; `NO_STATE` where none is."""
    part: int = 0
    """Which part of a copy of the model it has, where several workers make one."""

    @property
    def reached(self) -> tuple[int, int]:
        """What is compared."""
        return self.step, self.done_actions


def most_advanced(progress: Sequence[WorkerProgress], *, part: int | None = None) -> int:
    """The rank whose state is taken by those that lag: of several that are level, the first that is not new.

    `part`: among those that have this part of a copy of the model.
    """
    ranks = [rank for rank, found in enumerate(progress) if part in (None, found.part)]
    return max(ranks, key=lambda rank: (progress[rank].reached, -progress[rank].new, -rank))


class Records(Protocol):
    """What is written and printed of a run when its workers change."""

    def become_rank_0(self) -> None:
        """Be rank 0 from now on, and record what every worker knows and the last rank 0 has not written."""

    def emit(self, event: Event) -> None:
        """Pass `event` to the listeners."""

    def flush(self) -> bool:
        """Have all events on the disk. Whether they are there."""

    def copy_records(self) -> None:
        """Where hosts share no disk, see that another one has the records, too. Every worker calls this."""


class StateProvider(Protocol):
    """What one trainer holds that a new worker lacks."""

    @property
    def records(self) -> Records | None:
        """Those of the last run that it has begun; None before the first."""

    @property
    def step(self) -> int:
        """The last step of that run."""

    def everything(self) -> dict[str, Any]:
        """All of it; the tensors are those in use."""

    def take_up(self, given: dict[str, Any]) -> None:
        """Hold what `everything` gave on another worker."""


class RecoverableCall(Protocol):
    """What workers do together in one call, and continue with when some of them are lost.

    What is written here is that of a call with no progress of its own: all are at its beginning.
    """

    lost: str = ""
    """What went with those that are gone, in words."""

    @property
    def since(self) -> float:
        """When the current work began, by a monotonic clock (`time.monotonic`)."""

    @property
    def provider(self) -> StateProvider | None:
        """Whose state this is, so that it is not given twice."""
        return None

    @property
    def records(self) -> Records | None:
        """Where a change of the workers is recorded."""

    @property
    def step(self) -> int:
        """The last step of the run that records it."""

    @property
    def done(self) -> int:
        """How much of the call is done that is not done again."""
        return 0

    def stand_nowhere(self) -> None:
        """What this worker has of this call is of no use to others."""
        return

    def let_go(self) -> bool:
        """Have nothing under way in the group that is left. Whether a snapshot is lost by it."""
        return False

    def progress(self) -> WorkerProgress:
        """How far this worker is. Called when it has entered the new group."""
        return WorkerProgress()

    def compare(self, progress: Sequence[WorkerProgress]) -> None:
        """Know how far each worker is, by rank."""
        return

    def begin(self) -> None:
        """No worker has come to the first step: begin, all together."""
        return

    def settle(self, *, finished: bool) -> None:
        """End the step that broke off. `finished`: another has done it, so this worker's part counts."""
        return

    def state(self, *, but_parts: bool = False) -> dict[str, Any]:
        """All that a worker lacks which lags. `but_parts`: it has another part of the model, and that of now."""
        return {}

    def take_state(self, given: Mapping[str, Any]) -> None:
        """Be where the worker is that gave `state`."""
        return

    def met(self, group: Group, source: int, progress: Sequence[WorkerProgress]) -> None:
        """All are as far as worker `source`: agree on what else must be alike, among the workers of now."""
        return


class RestartedCall(RecoverableCall):
    """A call that is made again from its beginning: the state from before it is still there."""

    def __init__(self, teller: Callable[[], StateProvider | None]) -> None:
        """`teller`: whose records report a loss, asked when there is one."""
        self._teller = teller
        self._since = time.monotonic()

    @property
    def since(self) -> float:
        """When it was begun first."""
        return self._since

    @property
    def records(self) -> Records | None:
        """Those that report it; None where there are none."""
        teller = self._teller()
        return None if teller is None else teller.records

    @property
    def step(self) -> int:
        """The last step of the run that reports it."""
        teller = self._teller()
        return 0 if teller is None else max(0, teller.step)
