"""One training, as those see it who take a worker through changes of the workers: see `elastic`.

A step that broke off is put back (the buffers, what a compression keeps; parameters change in the update alone) or,
where another worker has finished it and each has something of its own, finished. What is equal on all workers is taken
from the farthest by those that are behind; what each has of its own the strategy sees to. From there on each worker
reads its part of each batch, which is another one where the number of workers is.

The leader says what happened. If the leader died, the new one takes over its files: what the other had reported
and not yet written, every worker still remembers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhosts.cluster.membership import Group, PartOfCopy
from manyhosts.device import backend_for
from manyhosts.elastic.work import NO_STATE, WorkerProgress
from manyhosts.events import Event, RunStarted
from manyhosts.strategies.strategy import Elastic, InCopies
from manyhosts.training.loop.loop import Loop
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.registry import TrainerState
from manyhosts.training.telemetry.run_log import from_plain, to_plain, told_by_all


def why_not_survive(parts: Parts) -> str:
    """Why the workers that are left would not have everything that a run needs to continue; empty where they would."""
    world = parts.world
    if world.backend != backend_for(world.device):
        return f"{world.backend} between GPUs does not tell which exchange was cut off"
    strategy = parts.strategy
    if not strategy.traits.survives_loss:
        return "no worker holds the entire model"
    if isinstance(strategy, InCopies):
        if why := strategy.why_all_end():
            return why
        if parts.precision.scaler is not None:
            return "under fp16 workers ask each other for overflows in the midst of an update"
    return ""


def layout_of(parts: Parts) -> PartOfCopy | None:
    """This worker's place, where several make one copy of the model and there are several copies."""
    strategy = parts.strategy
    return strategy.layout() if strategy.traits.survives_loss and isinstance(strategy, InCopies) else None


class SharedTraining:
    """What one worker does in it: an `elastic.work.Work`."""

    def __init__(self, provider: TrainerState, loop: Loop, *, begin: Callable[[], None]) -> None:
        """`begin` takes up the newest snapshot and tells where the run begins; every worker calls it."""
        self.provider, self.loop, self._begin = provider, loop, begin
        self.training, self.parts, self.run = loop.training, provider.parts, loop.training.state
        self.records = loop.training.run_log
        assert isinstance(self.parts.strategy, Elastic), "why_not_survive() comes before"
        self.strategy: Elastic = self.parts.strategy
        self.size = self.parts.world.size
        """How many trained together the last time that all was well."""
        self.lost = ""
        self._led = False
        """Whether this worker led the group that was left."""
        self._epoch, self._stream = 0, self.run.stream
        """Of this worker itself, before it took those of the farthest."""

    @property
    def since(self) -> float:
        """When what is being done now was begun."""
        return self.training.since

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    done = step

    def stand_nowhere(self) -> None:
        """What this worker has of this training is of no use to others."""
        self.run.step = NO_STATE
        self.training.inconsistent = True

    def let_go(self) -> bool:
        """Have nothing under way in the group that is left. Whether a snapshot is lost by it."""
        world = self.parts.world
        self._led = world.is_leader and not world.apart
        self.strategy.let_go()
        return self.training.snapshot_schedule.abandon()

    def progress(self) -> WorkerProgress:
        """How far this worker is, with the numbers of all its steps read."""
        self.loop.enter_group()
        return WorkerProgress(
            step=NO_STATE if self.training.inconsistent else self.run.step,
            done_actions=self.training.done_actions,
            tried=max(self.training.tried, self.training.under_way),
            lost_snapshot=int(self.parts.world.is_leader and not self._led and self._half_saved()),
            trusted=NO_STATE if self.training.trusted is None else self.training.trusted,
        )

    def _half_saved(self) -> bool:
        """Whether the snapshot that was begun last will never be complete: the one who was to name it is gone."""
        saved_at = self.training.snapshot_schedule.saved_at
        return saved_at >= 0 and not (self.training.snapshot_schedule.store.folder / f"step-{saved_at:08d}").exists()

    def compare(self, progress: Sequence[WorkerProgress]) -> None:
        """Know which steps are in doubt, also where this worker did not hear the verdict."""
        doubts = [found.trusted for found in progress if found.trusted != NO_STATE]
        self.training.trusted = min(doubts) if doubts else None

    def begin(self) -> None:
        """No one had come to the first step."""
        self._begin()
        self.size = self.parts.world.size

    def settle(self, *, finished: bool) -> None:
        """End the step that broke off."""
        self.loop.stepper.settle(finished=finished)
        self._epoch, self._stream = self.run.position.epoch, self.run.stream

    def met(self, group: Group, source: int, progress: Sequence[WorkerProgress]) -> None:
        """Train with the workers of now, each of which is as far as worker `source`."""
        run, loop, world = self.run, self.loop, self.parts.world
        before = self._stream if self._epoch == run.position.epoch else {}
        run.stream = self.parts.source.met(run.stream, before)
        new = progress[world.rank].step == NO_STATE
        gone = max(0, self.size - (group.size - len(group.newcomers)))
        lost_now = self.provider.meet(source, new=new, gone=gone)
        self.lost = "; ".join(dict.fromkeys(filter(None, [self.lost, lost_now])))
        snapshot_lost = self._see_to_saved(any(each.lost_snapshot for each in progress))
        loop.resume(save_again=snapshot_lost)
        self.records.open_samples()
        self.size = world.size

    def _see_to_saved(self, snapshot_lost: bool) -> bool:
        """Have all workers agree on what is on the disk, and write a lost best model once more.

        Training may have continued since: then its loss is reported. Returns whether one is lost, also where only
        some workers had begun it, who would not begin it again while the others do.
        """
        run, schedule, world = self.run, self.training.snapshot_schedule, self.parts.world
        own = [schedule.saved_at, schedule.best_saved_at, int(schedule.lacks_best(run))]
        saved_at, best_saved_at, lacks_best = world.stack(torch.tensor(own, device=world.device)).T.tolist()
        if snapshot_lost := snapshot_lost or len(set(saved_at)) > 1:
            schedule.saved_at = NO_STATE
        if run.validated_at == run.step == run.best_step:
            if any(lacks_best) or len(set(best_saved_at)) > 1:
                schedule.best_saved_at = NO_STATE
                self.loop.after_step.keep_best()
        elif any(lacks_best):
            lost = f"the model of step {run.best_step}, the best so far, which was being written"
            self.lost = "; ".join(filter(None, [self.lost, lost]))
        return snapshot_lost

    # State from one to the other.

    def state(self, *, but_parts: bool = False) -> dict[str, Any]:
        """All that is equal on all workers, and what a leader that is behind by a step has not reported.

        `but_parts`: without what workers with another part of the model have otherwise.
        """
        recent = [event for event in told_by_all(self.records.remembered()) if event.step >= self.run.step]
        started = self.records.started
        return {
            **self.provider.everything(but_parts=but_parts),
            "stream": dict(self.run.stream),
            "started": None if started is None else dataclasses.asdict(started),
            "recent": [to_plain(event) for event in recent],  # more than a step no worker is ever behind
            "loop": self.loop.place(),
        }

    def take_state(self, given: Mapping[str, Any]) -> None:
        """Be where the worker is that gave `state`."""
        self.training.inconsistent = True  # until all of it is here
        was_here = self.run.step != NO_STATE
        has_own = self.loop.exchanges or not self.parts.strategy.traits.holds_full_model
        self.provider.take_up(given, own=was_here and has_own)
        seen: set[tuple[type[Event], int | None]] = {(type(each), each.step) for each in self.records.remembered()}
        if self.records.started is None and given["started"] is not None:
            self.records.started = RunStarted(**given["started"])
        for event in map(from_plain, given["recent"]):
            if was_here and (type(event), event.step) not in seen:
                self.records.tell(event)  # the leader may be among those that were behind
        self.loop.take_place(given["loop"])
