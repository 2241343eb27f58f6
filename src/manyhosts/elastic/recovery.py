"""Going on when workers die or come: the others keep their processes, model and optimizer, and redo one step at most.

When a collective breaks, each worker

1. asks the head who is left, and meets them in a new group,
2. tells them how far it is: some may have finished the step, others not. The farthest is right; where several are, the
   one of the lowest rank,
3. puts back what the unfinished step has changed (the buffers, what a compression keeps; parameters change in the
   update alone), or, where another has finished it and each has something of its own, finishes it,
4. takes everything from the farthest where it is behind or new; what each has of its own the strategy sees to,
5. reads from there on its part of each batch, which is another one where the number of workers is.

The leader says what happened. If it was the leader that died, the new one takes over its files: what the other had told
and not yet written, every worker still remembers.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from manyhosts.cluster.membership import Group
from manyhosts.communication import transfer
from manyhosts.elastic.optimizers import share_optimizers
from manyhosts.elastic.rendezvous import Rendezvous
from manyhosts.elastic.session import CollectiveCalls, StateProvider
from manyhosts.events import EpochDone, Event, Note, Recovered, RunStarted, StepDone, StepTiming, ValidationDone
from manyhosts.snapshot.flatten import flatten, unflatten
from manyhosts.strategies.strategy import Survivable
from manyhosts.training.build import Parts
from manyhosts.training.loop import Loop
from manyhosts.training.progress import Progress
from manyhosts.training.snapshot_schedule import SnapshotSchedule
from manyhosts.training.state import RunState

_NOWHERE = -1
_TOLD_BY_ALL: dict[str, type[Event]] = {kind.__name__: kind for kind in (StepDone, EpochDone, ValidationDone)}
"""What every worker knows to tell; the rest is the leader's alone."""


class Records(Protocol):
    """What the run writes and says, as far as going on needs it."""

    started: RunStarted | None

    def remembered(self) -> list[Event]:
        """What was told last, oldest first."""

    def tell(self, event: Event) -> None:
        """Remember it and tell the listeners."""

    def take_lead(self) -> None:
        """Be the leader from now on, and tell what every worker knows and the last leader has not written."""

    def copy_records(self) -> None:
        """Where hosts share no disk, see that another one has the records, too. Every worker calls this."""

    def open_samples(self) -> None:
        """Note samples under the present rank."""

    def flush(self) -> bool:
        """Have everything that was told on the disk. Whether it is there."""


def why_not_survive(parts: Parts) -> str:
    """Why the workers that are left would not have everything that a run needs to go on; empty where they would."""
    world = parts.world
    if world.backend != "gloo" or world.device.type != "cpu":
        return "on GPUs nobody knows which step is whole"  # NCCL's collectives come back before they are done
    if not isinstance(parts.strategy, Survivable):
        return "the strategy does not say what else each worker holds"
    return ""


def can_survive(parts: Parts) -> bool:
    """Whether the workers that are left go on without one that is lost."""
    return parts.world.membership is not None and not why_not_survive(parts)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker is."""

    step: int
    """Steps finished; -1 for one whose state is of no use."""
    duties: int
    """Of what is due after that step, how much is done."""
    tried: int
    """The step that broke off; 0 where none did."""
    lost_snapshot: int
    new: int = 0
    """Whether it lacks what the others hold of other trainers, too."""
    trusted: int = _NOWHERE
    """The last step that is not in doubt, where some are; -1 where none is."""

    @property
    def progress(self) -> tuple[int, int]:
        """What is compared."""
        return self.step, self.duties


def farthest(all_progress: list[WorkerProgress]) -> int:
    """The rank whose state is taken by those that are behind."""
    return max(range(len(all_progress)), key=lambda rank: (all_progress[rank].progress, -rank))


class Recovery(Rendezvous):
    """Takes one worker through the changes of the workers while it trains."""

    def __init__(
        self,
        calls: CollectiveCalls,
        provider: StateProvider,
        snapshot_schedule: SnapshotSchedule,
        records: Records,
        *,
        state: RunState,
        begin: Callable[[Loop], None],
        most: int,
    ) -> None:
        """`most`: any number of workers up to this gives the same bits; 0: each gives its own.

        `begin` takes up the newest snapshot and tells where the run begins; every worker calls it.
        """
        super().__init__(calls, most=most, run=None)
        self.provider, self.parts, self.snapshot_schedule, self.records = (
            provider,
            provider.parts,
            snapshot_schedule,
            records,
        )
        self.state, self.begin = state, begin
        assert isinstance(self.parts.strategy, Survivable), "can_survive() comes before"
        self.strategy: Survivable = self.parts.strategy
        self._loop: Loop | None = None
        self.size = self.world.size
        """How many trained together the last time that all was well."""
        self.lost = ""
        """What went with those that are gone, in words."""

    @property
    def loop(self) -> Loop:
        """The one that is taken through."""
        assert self._loop is not None, "use() comes before"
        return self._loop

    def use(self, loop: Loop) -> None:
        """Take `loop` through the changes."""
        self._loop = loop

    def join(self) -> None:
        """Come to those that train, and take their state.

        Raises:
            Passed: they have finished this call.
            CommunicationError: they are no more.
        """
        self.stand_nowhere()
        super().join()

    def stand_nowhere(self) -> None:
        """What this worker has of this training is of no use to others."""
        self.state.step = _NOWHERE

    def let_go(self) -> bool:
        """Have nothing under way in the group that is left. Whether a snapshot is lost by it."""
        self.strategy.let_go()
        return self.snapshot_schedule.abandon()

    def progress(self) -> int:
        """Steps finished."""
        return self.state.step

    def meet(self, group: Group, *, lost: bool) -> None:
        """Be in the new group, and as far as the farthest in it.

        Raises:
            NobodyHasIt: all are new.
        """
        world, loop = self.world, self.loop
        led = world.is_leader and not world.apart
        world.enter(group)
        loop.read_numbers(all_of_them=True)  # so that the state is that of the step that was finished
        loop.change_granted = False  # what it granted has happened
        lost = lost or (world.is_leader and not led and self._half_saved())
        all_progress = self._standings(lost=lost)
        new = [rank for rank, found in enumerate(all_progress) if found.new]
        doubts = [found.trusted for found in all_progress if found.trusted != _NOWHERE]
        loop.trusted = min(doubts) if doubts else None  # also for those who did not hear the verdict
        source = farthest(all_progress)
        if all_progress[source].step == _NOWHERE:
            self.give_to_new(new)
            self.begin(loop)  # nobody had come to the first step
        else:
            self._catch_up(group, all_progress, source, new)
        self.size = world.size
        self._tell(
            group, redone=max(0, max(worker_progress.tried for worker_progress in all_progress) - self.state.step)
        )
        self.lost = ""
        self.records.copy_records()

    def _catch_up(self, group: Group, all_progress: list[WorkerProgress], source: int, new: list[int]) -> None:
        """Be as far as worker `source`, with all that it holds."""
        world, loop = self.world, self.loop
        own = all_progress[world.rank]
        loop.settle(finished=all_progress[source].step > own.step)
        epoch, stream = self.state.position.epoch, self.state.stream
        self.calls.hand_over(new, source, but=self.provider)
        self._hand_over(all_progress, source, loop)
        before = stream if epoch == self.state.position.epoch else {}
        self.state.stream = self.parts.source.met(self.state.stream, before)
        self.calls.new = False
        self.parts.recut(self.parts.batch)
        lost_now = self.strategy.meet(source, new=own.step == _NOWHERE, gone=self._gone(group))
        self.lost = "; ".join(dict.fromkeys(filter(None, [self.lost, lost_now])))
        share_optimizers(self.parts)
        self.provider.group = group.number
        if any(worker_progress.lost_snapshot for worker_progress in all_progress):
            self.snapshot_schedule.saved_at, loop.save_again = _NOWHERE, True
            loop.duties_done = min(loop.duties_done, len(loop.duties) - 1)
        loop.under_way, loop.tried, loop.inconsistent = 0, 0, False
        loop.first_steps.stream_is_new = False  # a new worker would not compare it
        if world.is_leader:
            loop.began = time.perf_counter() - self.state.seconds
        self.records.open_samples()

    def _gone(self, group: Group) -> int:
        """How many of those that trained are no more."""
        return max(0, self.size - (group.size - len(group.newcomers)))

    def _half_saved(self) -> bool:
        """Whether the snapshot that was begun last will never be whole: the one who was to name it is gone."""
        saved_at = self.snapshot_schedule.saved_at
        return saved_at >= 0 and not (self.snapshot_schedule.store.folder / f"step-{saved_at:08d}").exists()

    def _standings(self, *, lost: bool) -> list[WorkerProgress]:
        loop = self.loop
        step = _NOWHERE if loop.inconsistent else self.state.step
        tried = max(loop.tried, loop.under_way)
        trusted = _NOWHERE if loop.trusted is None else loop.trusted
        own = torch.tensor([step, loop.duties_done, tried, lost, self.calls.new, trusted], dtype=torch.int64)
        return [WorkerProgress(*row) for row in self.world.stack(own).tolist()]

    # State from one to the other.

    def _hand_over(self, all_progress: list[WorkerProgress], source: int, loop: Loop) -> None:
        behind = [rank for rank, found in enumerate(all_progress) if found.progress != all_progress[source].progress]
        if self.world.rank == source:
            apart = flatten(self._everything(loop)) if behind else None
            for rank in behind:
                assert apart is not None, "it is taken apart where somebody is behind"
                transfer.give(self.world, rank, json.dumps(apart.nodes), apart.tensors)
        elif self.world.rank in behind:
            loop.inconsistent = True  # until all of it is here
            text, tensors = transfer.take(self.world, source)
            self._take_up(unflatten(json.loads(text), tensors), loop)
            loop.inconsistent = False

    def _everything(self, loop: Loop) -> dict[str, Any]:
        before = loop.before
        return {
            "kept": self.snapshot_schedule.everything(self.state, own=True),
            "strategy": self.strategy.shared_state(),
            "stream": dict(self.state.stream),
            "batch": self.parts.batch,
            "started": None if self.records.started is None else dataclasses.asdict(self.records.started),
            "recent": [_to_plain(event) for event in self._last_told()],
            "loop": {
                "duties_done": loop.duties_done,
                "ends_epoch": loop.ends_epoch,
                "before": [before.step, before.epochs, before.seconds],
                "granted": loop.stop_signals.granted,
                "number": loop.stop_signals.number,
                "saved_at": self.snapshot_schedule.saved_at,
                "best_saved_at": self.snapshot_schedule.best_saved_at,
            },
        }

    def _last_told(self) -> list[Event]:
        """What a leader that is behind by a step has not told; more than a step no worker is ever behind."""
        found = [event for event in self.records.remembered() if type(event).__name__ in _TOLD_BY_ALL]
        return [event for event in found if event.step >= self.state.step]

    def _take_up(self, given: dict[str, Any], loop: Loop) -> None:
        new = RunState.from_dict(given["kept"]["run"], given["stream"])
        was_here = self.state.step != _NOWHERE
        self.snapshot_schedule.take_up(given["kept"], own=was_here and loop.exchanges)
        if not (was_here and loop.exchanges):
            self.strategy.take_shared(given["strategy"])
        seen = {(type(event), event.step) for event in self.records.remembered()}
        self.state.become(new)
        self.parts.batch = given["batch"]
        if self.records.started is None and given["started"] is not None:
            self.records.started = RunStarted(**given["started"])
        place = given["loop"]
        loop.duties_done, loop.ends_epoch = place["duties_done"], place["ends_epoch"]
        loop.before = Progress(*place["before"])
        loop.stop_signals.granted, loop.stop_signals.number = place["granted"], place["number"]
        self.snapshot_schedule.saved_at, self.snapshot_schedule.best_saved_at = (
            place["saved_at"],
            place["best_saved_at"],
        )
        for event in map(_from_plain, given["recent"]):
            if was_here and (type(event), event.step) not in seen:
                self.records.tell(event)  # the leader may be among those that were behind

    # What is said of it.

    def _tell(self, group: Group, *, redone: int) -> None:
        if not self.world.is_leader:
            return
        self.records.take_lead()
        now = time.time()
        if group.reason:
            lost_s = max(0.0, now - self.loop.since)
            self.records.tell(
                Recovered(
                    step=self.state.step,
                    reason=group.reason,
                    how=group.how,
                    lost=self.lost,
                    steps_redone=redone,
                    seconds_lost=lost_s,
                    time=now,
                )
            )
        else:
            self.records.tell(Note(text=f"goes on {group.how}", step=self.state.step, time=now))
        self.records.flush()  # the next failure may come soon, and to this worker


def told_by_all(events: Iterable[Event]) -> list[Event]:
    """Those that a new leader tells, where the last one has not written them."""
    return [event for event in events if type(event).__name__ in _TOLD_BY_ALL]


def _to_plain(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **dataclasses.asdict(event)}


def _from_plain(plain: dict[str, Any]) -> Event:
    kind = _TOLD_BY_ALL[plain.pop("kind")]
    if kind is StepDone:
        plain["timing"] = StepTiming(**plain["timing"])
    return kind(**plain)
