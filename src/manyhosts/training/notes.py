"""What is told once, when a run begins: where it begins, and what is worth saying."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.elastic.recovery import why_not_survive
from manyhosts.events import Note, RunStarted
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.training.build import counted_workers
from manyhosts.training.loop import Loop
from manyhosts.training.progress import reached, total_steps
from manyhosts.units import Duration

if TYPE_CHECKING:
    from manyhosts.training.run import Run


def announce(run: Run, loop: Loop) -> None:
    """Tell where `run` begins, and with what."""
    state, limit, loaded, journal = run.state, loop.limit, run.loaded, run.journal
    per_epoch = run.parts.source.steps_per_epoch
    now = time.time()
    journal.resume_samples(state.step)
    journal.started = RunStarted(
        step=state.step,
        epoch=state.position.epoch,
        steps_per_epoch=per_epoch,
        total_steps=total_steps(limit, per_epoch),
        time=now,
        resumed_from="" if loaded is None else str(loaded.path),
    )
    journal.tell(journal.started)
    for skipped in loaded.skipped if loaded is not None else []:
        journal.tell(skipped)
    for text in notes(run, loop):
        journal.tell(Note(text=text, step=state.step, time=now))


def notes(run: Run, loop: Loop) -> list[str]:
    """One sentence for each thing that the person who started `run` may not expect."""
    settings, parts, world = run.settings, run.parts, run.world
    found = [] if run.snapshot_schedule.second is None else list(run.snapshot_schedule.second.notes)
    found += about_resume(run)
    if (virtual := settings.virtual_workers) is not None:
        threads = torch.get_num_threads()
        found.append(
            f"each batch is cut into {virtual} parts (threads: {threads}), for the same bits on 1 to {virtual} "
            "workers; BatchNorm sees one part"
        )
    elif isinstance(parts.batch_norm, GlobalBatch):
        found.append("BatchNorm sees the batch of all workers; batch_norm='local' is faster and another model")
    elif world.size > 1 and settings.batch_norm == "local":
        found.append("BatchNorm sees each worker's own samples, so the number of workers changes the model")
    if settings.audit is not None:
        found.append(f"{100 * settings.audit:.3g} % of the parts are computed again by another worker (audit)")
    if (most := settings.micro_batch_size) is not None and most * counted_workers(settings, world) < parts.batch:
        layers = [name for name, each in parts.model.named_modules() if isinstance(each, _BatchNorm)]
        if layers:
            found.append(
                f"BatchNorm ({layers[0]!r}) sees micro-batches and not the whole batch, so micro_batch_size={most} "
                "changes the model"
            )
    if isinstance(parts.strategy, LocalUpdates) and (about_rate := parts.strategy.about_rate(parts.optimizer)):
        found.append(about_rate)
    if run.recovery is None and world.membership is not None:
        why = why_not_survive(parts) or "nobody can go on since a call before this one"
        found.append(f"if a worker is lost, all end ({why}); --restarts N goes on from the newest snapshot")
    if run.loaded is not None and (reached(loop.limit, loop.progress()) or run.state.ended):
        why = run.state.ended or f"it is {Duration.parse(settings.duration)} long already"
        found.append(f"this run is finished ({why}); ask for a longer one, or choose another run directory")
    return found


def about_resume(run: Run) -> list[str]:
    """What has changed since the snapshot that `run` goes on from, and what will not be noticed when it goes on."""
    found = run.snapshot_schedule.changes.told()
    if run.world.is_leader and (unknown := run.parts.data_identity().get("unknown")):
        found.append(f"no sample of the training set is compared when the run goes on: {unknown}")
    return found
