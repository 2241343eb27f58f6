"""Going back: from a step whose numbers went wrong to the last snapshot, to go on without that step's samples.

The steps between the snapshot and the bad one are done again, with the same bits. When the bad one comes again nothing
is computed: its samples are passed over, it keeps its number, and the schedule moves on.
"""

from __future__ import annotations

import time

from manyhosts.errors import TrainingError
from manyhosts.events import Recovered
from manyhosts.training.bad_steps import BadStep
from manyhosts.training.loop import Loop
from manyhosts.training.snapshot_schedule import SnapshotSchedule

MOST_IN_A_ROW = 3
"""So many steps after one snapshot are passed over; then it is not the samples that are bad."""


def go_back(bad: BadStep, loop: Loop, snapshot_schedule: SnapshotSchedule) -> Recovered:
    """Have the parts as the newest snapshot has them. Every worker calls this. Returns what is to be told.

    Raises:
        TrainingError: there is no snapshot, or this one has been gone back to too often.
    """
    began, state, world = time.time(), loop.state, loop.parts.world
    snapshot_schedule.finish()
    world.barrier()  # what the leader was writing has its name now
    reached_s = state.seconds
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
            f"{bad.trouble} in step {bad.step}, after {len(before)} others behind the snapshot of step {found.step}",
            where=bad.where,
            fix="look at those samples, lower the learning rate, or set clip_gradients",
        )
    left_out = tuple(sorted({*state.left_out, bad.step}))
    redone = bad.step - 1 - found.step
    lost_s = max(0.0, reached_s - found.seconds) + time.time() - began
    state.become(found)
    state.left_out, state.seconds = left_out, reached_s  # the clock goes on, and limits on time with it
    loop.stand()
    return Recovered(
        step=state.step,
        reason=f"{bad.trouble} in step {bad.step} ({bad.where})",
        how=f"from the snapshot of step {state.step}, without the samples of step {bad.step}",
        steps_redone=redone,
        seconds_lost=lost_s,
        rewound=True,
        time=time.time(),
    )
