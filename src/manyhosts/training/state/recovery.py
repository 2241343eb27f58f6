"""One training, for what takes a worker through changes of the workers (see `elastic`) or back to a snapshot.

A step that broke off is put back (the buffers, what a compression keeps; parameters change in the update alone) or,
where another worker has finished it and each has something of its own, finished. What is equal on all workers is taken
from the farthest by those that lag; what each has of its own the strategy sees to. From there on each worker
reads its part of each batch, which is another one where the number of workers is.

Rank 0 says what happened. If rank 0 died, the new one takes over its files: what the other had reported
and not yet written, every worker still remembers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhosts.cluster.membership import Group
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.device import backend_for
from manyhosts.elastic.work import NO_STATE, WorkerProgress
from manyhosts.errors import TrainingError
from manyhosts.events import Event, Note, Recovered, RunStarted
from manyhosts.snapshot.separate_disks import first_of_disk
from manyhosts.snapshot.set_aside import newest_step, set_aside
from manyhosts.training.loop.loop import Loop
from manyhosts.training.loop.numbers import BadStep
from manyhosts.training.setup.build import Components
from manyhosts.training.state.registry import TrainerState
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule
from manyhosts.training.telemetry.run_log import from_plain, to_plain, told_by_all


def why_not_survive(components: Components) -> str:
    """Why the workers that are left would not have everything that a run needs to continue; empty where they would."""
    world = components.world
    if world.backend != backend_for(world.device):
        return f"{world.backend} between GPUs does not report which collective was cut off"
    if why := components.strategy.why_all_end():
        return why
    if components.strategy.has_own and components.precision.scaler is not None:
        return "under fp16 workers ask each other for overflows in the midst of an update"
    return ""


_WRITTEN_AFTER_S = 5.0
"""An event is in rank 0's files sooner: see `records.line_file`."""


class SharedTraining:
    """What one worker does in it: an `elastic.work.Work`."""

    def __init__(self, provider: TrainerState, loop: Loop, *, begin: Callable[[], None]) -> None:
        """`begin` takes up the newest snapshot and reports where the run begins; every worker calls it."""
        self.provider, self.loop, self._begin = provider, loop, begin
        self.training, self.components, self.run = loop.training, provider.components, loop.training.state
        self.records = loop.training.run_log
        self.size = self.components.world.size
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
        world = self.components.world
        self._led = world.is_rank_0 and not world.is_joining
        self.components.strategy.let_go()
        return self.training.snapshot_schedule.abandon()

    def progress(self) -> WorkerProgress:
        """How far this worker is, with the numbers of all its steps read."""
        self.loop.enter_group()
        return WorkerProgress(
            step=NO_STATE if self.training.inconsistent else self.run.step,
            done_actions=self.training.done_actions,
            tried=max(self.training.tried, self.training.under_way),
            lost_snapshot=int(self.components.world.is_rank_0 and not self._led and self._half_saved()),
            trusted=NO_STATE if self.training.trusted is None else self.training.trusted,
        )

    def _half_saved(self) -> bool:
        """Whether the snapshot that was begun last will never be complete: the one who was to name it is gone."""
        schedule = self.training.snapshot_schedule
        return schedule.saved_at >= 0 and not schedule.path_of(schedule.saved_at).exists()

    def compare(self, progress: Sequence[WorkerProgress]) -> None:
        """Know which steps are in doubt, also where this worker did not hear the verdict."""
        doubts = [found.trusted for found in progress if found.trusted != NO_STATE]
        self.training.trusted = min(doubts) if doubts else None

    def begin(self) -> None:
        """No one had come to the first step."""
        self._begin()
        self.size = self.components.world.size

    def settle(self, *, finished: bool) -> None:
        """End the step that broke off."""
        self.loop.stepper.settle(finished=finished)
        self._epoch, self._stream = self.run.position.epoch, self.run.stream

    def met(self, group: Group, source: int, progress: Sequence[WorkerProgress]) -> None:
        """Train with the workers of now, each of which is as far as worker `source`."""
        run, loop, world = self.run, self.loop, self.components.world
        before = self._stream if self._epoch == run.position.epoch else {}
        run.stream = self.components.batches.source.met(run.stream, before)
        new = progress[world.rank].step == NO_STATE
        gone = max(0, self.size - (group.size - len(group.newcomers)))
        lost_now = self.provider.resync(source, new=new, gone=gone)
        self.lost = "; ".join(dict.fromkeys(filter(None, [self.lost, lost_now])))
        loop.resume(save_again=self._see_to_saved(any(each.lost_snapshot for each in progress)))
        self.records.open_samples()
        self.size = world.size

    def _see_to_saved(self, snapshot_lost: bool) -> bool:
        """Have all workers agree on what is on the disk, and write a lost best model again.

        Training may have continued since: then its loss is reported. Returns whether one is lost, also where only
        some workers had begun it, who would not begin it again while the others do.
        """
        run, schedule, world = self.run, self.training.snapshot_schedule, self.components.world
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
        """All that is equal on all workers, and what rank 0 may not have written.

        `but_parts`: without what workers with another part of the model have otherwise.
        """
        # none ever lags by more than a step, but a new one may lead soon, in the place of one with lines to write
        from_step, since = self.run.step, time.time() - _WRITTEN_AFTER_S
        remembered = told_by_all(self.records.remembered())
        started = self.records.started
        return {
            **self.provider.everything(but_parts=but_parts),
            "stream": dict(self.run.stream),
            "started": None if started is None else dataclasses.asdict(started),
            "recent": [to_plain(event) for event in remembered if event.step >= from_step or event.time >= since],
            "loop": self.loop.place(),
        }

    def take_state(self, given: Mapping[str, Any]) -> None:
        """Be where the worker is that gave `state`."""
        self.training.inconsistent = True  # until all of it is here
        own_step = self.run.step
        was_here = own_step != NO_STATE
        self.provider.take_up(given, own=was_here and self.components.strategy.has_own)
        remembered = self.records.remembered()
        seen: set[tuple[type[Event], int | None]] = {(type(each), each.step) for each in remembered}
        if self.records.started is None and given["started"] is not None:
            self.records.started = RunStarted(**given["started"])
        for event in map(from_plain, given["recent"]):
            if was_here and event.step >= own_step and (type(event), event.step) not in seen:
                self.records.emit(event)  # rank 0 may be among those that lagged
            elif not was_here and not remembered:
                self.records.recent.append(event)
        self.loop.take_place(given["loop"])


# Going back to a snapshot in the middle of a run: from a step that went wrong, or from steps that are in doubt.
#
# The steps after the snapshot are done again, with the same bits. When a step comes again that went wrong nothing is
# computed: its samples are passed over, it keeps its number, and the schedule moves on.
#
# In doubt are steps after workers were found to compute wrongly, and the others continue without them. What was found
# in a step is found before its update. But steps in which nothing of such a worker was compared may have carried its
# errors into the weights of all, so the run goes back to the newest snapshot from before them. Snapshots that are later
# are set aside, on every disk, before anything else: whatever ends the run now, no one continues from them.

MOST_IN_A_ROW = 3
"""So many steps after one snapshot are passed over; then it is not the samples that are bad."""


def rewind_from_bad_step(bad: BadStep, loop: Loop) -> Recovered:
    """Have the parts as the newest snapshot has them. Every worker calls this. Returns what is to be reported.

    Raises:
        TrainingError: there is no snapshot, or this one has been gone back to too often.
    """
    began, state, snapshot_schedule = time.monotonic(), loop.training.state, loop.training.snapshot_schedule
    _wait_for_all(snapshot_schedule, loop.training.components.world)
    found, loaded = snapshot_schedule.restore()
    if loaded is None:
        raise TrainingError(
            f"{bad.trouble} in step {bad.step}, and there is no snapshot to go back to",
            where=bad.where,
            fix="make room for snapshots in the run directory; what was printed above says why there is none",
        )
    before = [step for step in state.left_out if step > found.step]
    if len(before) >= MOST_IN_A_ROW:
        raise TrainingError(
            f"{bad.trouble} in step {bad.step}, after {len(before)} others after the snapshot of step {found.step}",
            where=bad.where,
            fix="look at those samples, lower the learning rate, or set clip_gradients",
        )
    found.left_out = tuple(sorted({*state.left_out, bad.step}))
    reason, how = f"{bad.trouble} in step {bad.step} ({bad.where})", f", without the samples of step {bad.step}"
    return _resume_at(found, loop, began, reason, how, last=bad.step - 1)


def rewind_from_doubt(trusted: int, loop: Loop) -> Recovered | Note:
    """Be at the newest snapshot up to the step that is trusted. Every worker calls this. Returns what to report."""
    began, training, world = time.monotonic(), loop.training, loop.training.components.world
    step, snapshot_schedule = training.state.step, training.snapshot_schedule
    keep_from_resuming(snapshot_schedule, world, trusted)
    steps = f"steps {trusted + 1} to {step}"
    # An older snapshot may have been pruned; where none is left there is nothing but to continue, and to say so.
    if max(gather_plain(world, newest_step(snapshot_schedule.store.folder))) < 0:
        training.trusted = None
        text = (
            f"no one had checked the work of the worker that was left out in {steps}, and no snapshot is from before "
            "them: what it did there is in the weights"
        )
        return Note(text=text, step=step, time=time.time())
    training.inconsistent = True
    found, _ = snapshot_schedule.restore()
    training.trusted = None
    return _resume_at(found, loop, began, f"a worker was left out whose work in {steps} no one had checked", last=step)


def keep_from_resuming(snapshot_schedule: SnapshotSchedule, world: World, trusted: int) -> None:
    """Set aside the snapshots from after step `trusted`. Every worker calls this."""
    _wait_for_all(snapshot_schedule, world)
    if first_of_disk(world):
        set_aside(snapshot_schedule.store.folder, after=trusted)
    world.barrier()


def _wait_for_all(snapshot_schedule: SnapshotSchedule, world: World) -> None:
    snapshot_schedule.finish()
    world.barrier()  # what rank 0 was writing has its name now


def _resume_at(found: RunState, loop: Loop, began: float, reason: str, how: str = "", *, last: int) -> Recovered:
    """Be where a snapshot is, after step `last`, but for the clock: that continues, and limits on time with it."""
    state = loop.training.state
    reached_s, lost_s = state.seconds, max(0.0, state.seconds - found.seconds) + time.monotonic() - began
    state.become(found)
    state.seconds = reached_s
    loop.be_at_snapshot()
    return Recovered(
        step=state.step,
        reason=reason,
        how=f"from the snapshot of step {state.step}{how}",
        steps_redone=last - state.step,
        seconds_lost=lost_s,
        rewound=True,
        time=time.time(),
    )
