"""Going back to a snapshot in the middle of a run: from a step that went wrong, or from steps that are in doubt.

The steps after the snapshot are done again, with the same bits. When a step comes again that went wrong nothing is
computed: its samples are passed over, it keeps its number, and the schedule moves on.

In doubt are steps after workers were found to compute wrongly, and the others continue without them. What was found in
a step is found before its update. But steps in which nothing of such a worker was compared may have carried its errors
into the weights of all, so the run goes back to the newest snapshot from before them. Snapshots that are later are set
aside, on every disk, before anything else: whatever ends the run now, no one continues from them.
"""

from __future__ import annotations

import time

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import TrainingError
from manyhosts.events import Note, Recovered
from manyhosts.snapshot.separate_disks import first_of_disk
from manyhosts.snapshot.set_aside import newest_step, set_aside
from manyhosts.training.loop.loop import Loop
from manyhosts.training.loop.numbers import BadStep
from manyhosts.training.state.run_state import RunState
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule

MOST_IN_A_ROW = 3
"""So many steps after one snapshot are passed over; then it is not the samples that are bad."""


def from_bad_step(bad: BadStep, loop: Loop) -> Recovered:
    """Have the parts as the newest snapshot has them. Every worker calls this. Returns what is to be reported.

    Raises:
        TrainingError: there is no snapshot, or this one has been gone back to too often.
    """
    began, state, snapshot_schedule = time.monotonic(), loop.training.state, loop.training.snapshot_schedule
    _wait_for_all(snapshot_schedule, loop.training.parts.world)
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
    how = f", without the samples of step {bad.step}"
    return _resume_at(found, loop, began, f"{bad.trouble} in step {bad.step} ({bad.where})", how, last=bad.step - 1)


def from_doubt(trusted: int, loop: Loop) -> Recovered | Note:
    """Be at the newest snapshot up to the step that is trusted. Every worker calls this. Returns what to report."""
    began, training, world = time.monotonic(), loop.training, loop.training.parts.world
    step, snapshot_schedule = training.state.step, training.snapshot_schedule
    keep_from_resuming(snapshot_schedule, world, trusted)
    steps = f"steps {trusted + 1} to {step}"
    # An older snapshot may have been pruned; where none is left there is nothing but to continue, and to say so.
    if max(gather_plain(world, newest_step(snapshot_schedule.store.folder))) < 0:
        training.trusted = None
        text = f"no one had checked the work of the worker that was left out in {steps}, and no snapshot is from before"
        return Note(text=f"{text} them: what it did there is in the weights", step=step, time=time.time())
    training.inconsistent = True
    found, _ = snapshot_schedule.restore()
    training.trusted = None
    reason = f"a worker was left out whose work in {steps} no one had checked"
    return _resume_at(found, loop, began, reason, last=step)


def keep_from_resuming(snapshot_schedule: SnapshotSchedule, world: World, trusted: int) -> None:
    """Set aside the snapshots from after step `trusted`. Every worker calls this."""
    _wait_for_all(snapshot_schedule, world)
    if first_of_disk(world):
        set_aside(snapshot_schedule.store.folder, after=trusted)
    world.barrier()


def _wait_for_all(snapshot_schedule: SnapshotSchedule, world: World) -> None:
    snapshot_schedule.finish()
    world.barrier()  # what the leader was writing has its name now


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
