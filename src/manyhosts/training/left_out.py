"""After workers were found to compute wrongly: the others go on without them, from the last step that all agree on.

What was found in a step is found before its update. But steps in which nothing of such a worker was compared may have
carried its errors into the weights of all, so the run goes back to the newest snapshot from before them. Snapshots that
are later are set aside, on every disk, before anything else: whatever ends the run now, nobody goes on from them.
"""

from __future__ import annotations

import time

import torch

from manyhosts.communication.world import World
from manyhosts.events import Note, Recovered
from manyhosts.snapshot.separate_disks import first_of_disk
from manyhosts.snapshot.set_aside import newest_step, set_aside
from manyhosts.strategies.audit import WrongBits
from manyhosts.training.loop import Loop
from manyhosts.training.snapshot_schedule import SnapshotSchedule


def tell_head(wrong: WrongBits, world: World) -> None:
    """Have those that are wrong left out. They themselves say nothing, and wait to be ended."""
    assert world.membership is not None, "only then do the others go on"
    if world.rank in wrong.guilty:
        return
    for rank, what in sorted(wrong.guilty.items()):
        world.membership.accuse(rank, what)


def keep_from_resuming(snapshot_schedule: SnapshotSchedule, world: World, trusted: int) -> None:
    """Set aside the snapshots from behind step `trusted`. Every worker calls this."""
    snapshot_schedule.finish()
    world.barrier()  # what the leader was writing has its name now
    if first_of_disk(world):
        set_aside(snapshot_schedule.store.folder, after=trusted)
    world.barrier()


def go_back(loop: Loop, snapshot_schedule: SnapshotSchedule) -> Recovered | Note:
    """Be at the newest snapshot up to the step that is trusted. Every worker calls this. Returns what is to be told."""
    began, state, world = time.time(), loop.state, loop.parts.world
    trusted = loop.at.trusted
    assert trusted is not None, "called where something is doubted"
    keep_from_resuming(snapshot_schedule, world, trusted)
    # An older snapshot may have been pruned; where none is left there is nothing but to go on, and to say so.
    newest = torch.tensor([newest_step(snapshot_schedule.store.folder)], device=world.device)
    if int(world.stack(newest).max()) < 0:
        loop.doubt(None)
        text = (
            f"nobody had checked the work of the worker that was left out in steps {trusted + 1} to {state.step}, and"
        )
        text += " no snapshot is from before them: what it did there is in the weights"
        return Note(text=text, step=state.step, time=time.time())
    loop.hold_nothing()
    reached, reached_s = state.step, state.seconds
    found, _ = snapshot_schedule.restore()
    snapshot_schedule.best_saved_at = -1  # the best model may be of one of the steps that are done again
    state.become(found)
    state.seconds = reached_s  # the clock goes on, and limits on time with it
    loop.stand()
    loop.doubt(None)
    return Recovered(
        step=state.step,
        reason=f"a worker was left out whose work in steps {trusted + 1} to {reached} nobody had checked",
        how=f"from the snapshot of step {state.step}",
        steps_redone=reached - state.step,
        seconds_lost=max(0.0, reached_s - found.seconds) + time.time() - began,
        rewound=True,
        time=time.time(),
    )
