"""What is worth saying once, when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from manyhands.strategies.alone import Drifting
from manyhands.training.loop import Loop
from manyhands.training.marks import reached
from manyhands.training.recover import why_not_survive
from manyhands.units import Duration

if TYPE_CHECKING:
    from manyhands.training.run import Run


def notes(run: Run, loop: Loop) -> list[str]:
    """One sentence for each thing that the person who started `run` may not expect."""
    settings, parts, world = run.settings, run.parts, run.world
    found = [] if run.keeping.second is None else list(run.keeping.second.notes)
    if (virtual := settings.virtual_workers) is not None:
        threads = torch.get_num_threads()
        found.append(
            f"each batch is cut into {virtual} parts (threads: {threads}), for the same bits on 1 to {virtual} "
            "workers; BatchNorm sees one part"
        )
    elif parts.membership is not None:
        found.append("BatchNorm sees the batch of all workers; batch_norm='local' is faster and another model")
    elif world.size > 1 and settings.batch_norm == "local":
        found.append("BatchNorm sees each worker's own samples, so the number of workers changes the model")
    if isinstance(parts.strategy, Drifting) and (about_rate := parts.strategy.about_rate(parts.optimizer)):
        found.append(about_rate)
    if run.recovery is None and world.membership is not None:
        why = why_not_survive(parts) or "nobody can go on since a call before this one"
        found.append(f"if a worker is lost, all end ({why}); --restarts N goes on from the newest snapshot")
    if run.loaded is not None and (reached(loop.limit, loop.mark()) or run.state.ended):
        why = run.state.ended or f"it is {Duration.parse(settings.duration)} long already"
        found.append(f"this run is finished ({why}); ask for a longer one, or choose another run directory")
    return found
