"""What is reported once, when a run begins: where it begins, and what is worth saying."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhosts.communication.batch_norm import GlobalBatch
from manyhosts.events import RunStarted
from manyhosts.records.metrics import lost_steps
from manyhosts.snapshot.load import Loaded
from manyhosts.training.loop.training import Training, reached, total_steps
from manyhosts.training.setup.build import Components, counted_workers
from manyhosts.training.state.snapshot_schedule import SnapshotSchedule


def announce(training: Training, loaded: Loaded | None, *, why_not_survive: str) -> None:
    """Report where a run begins, and with what. `loaded`: the snapshot; `why_not_survive`: see `notes`."""
    state, run_log = training.state, training.run_log
    per_epoch, place = training.components.batches.source.steps_per_epoch, training.now()
    run_log.resume_samples(state.step)
    run_log.started = RunStarted(
        step=state.step,
        epoch=state.position.epoch,
        steps_per_epoch=per_epoch,
        total_steps=total_steps(training.limit, per_epoch, place),
        time=time.time(),
        resumed_from="" if loaded is None else str(loaded.path),
        seconds_done=state.seconds,
        epochs_done=place.epochs,
        workers=training.components.world.size,
    )
    run_log.emit(run_log.started)
    for skipped in loaded.skipped if loaded is not None else []:
        run_log.emit(skipped)
    # All of them before the first is written: one says what the records lack.
    for text in list(notes(training, is_resumed=loaded is not None, why_not_survive=why_not_survive)):
        run_log.say(text, state.step)


def notes(training: Training, *, is_resumed: bool, why_not_survive: str) -> Iterator[str]:
    """One sentence for each thing that the person who started a run may not expect.

    `why_not_survive`: why no one continues where a worker is lost; empty where the others do.
    """
    settings, components, snapshot_schedule = training.settings, training.components, training.snapshot_schedule
    finished = (training.state.ended or reached(training.limit, training.now())) if is_resumed else ""
    if snapshot_schedule.second is not None:
        yield from snapshot_schedule.second.notes
    yield from about_batch(components)
    yield from about_resume(components, snapshot_schedule, finished)
    if (virtual := settings.virtual_workers) is not None:
        yield (
            f"each batch is cut into {virtual} parts (threads: {torch.get_num_threads()}), for the same bits on 1 to "
            f"{virtual} workers; BatchNorm sees one part"
        )
    elif isinstance(components.batch_norm, GlobalBatch):
        yield "BatchNorm sees the batch of all workers; batch_norm='local' is faster, but trains another model"
    elif components.world.size > 1 and settings.batch_norm == "local":
        yield "BatchNorm sees each worker's own samples, so the number of workers changes the model"
    if settings.audit is not None:
        yield f"{100 * settings.audit:.3g} % of the parts are computed again by another worker (audit)"
    most, counted = settings.micro_batch_size, counted_workers(settings, components.strategy.mesh)
    layers = [name for name, each in components.model.named_modules() if isinstance(each, _BatchNorm)]
    if layers and most is not None and most * counted < components.batches.size:
        yield (
            f"BatchNorm ({layers[0]!r}) sees micro-batches and not the entire batch, so micro_batch_size={most} "
            "changes the model"
        )
    yield from about_warm_up(training)
    if about_rate := components.strategy.about_rate(components.optimizer):
        yield about_rate
    yield from about_loss(components, why_not_survive)
    if finished:
        said = snapshot_schedule.changes.said
        unused = f", so these new settings are not used: {', '.join(said)}" if said else ""
        yield f"this run is finished ({finished}){unused}; ask for a longer one, or choose another run directory"


def about_loss(components: Components, why_not_survive: str) -> Iterator[str]:
    """What a lost worker costs, where that is more than its own work."""
    if components.world.membership is None:
        return
    if why_not_survive:
        yield f"if a worker is lost, all end ({why_not_survive}); --restarts N continues from the newest snapshot"
    elif (layout := components.strategy.layout()) is not None:
        copies = components.strategy.mesh.size("replicate")
        yield (
            f"the model is in {copies} copies of {layout.parts} workers: if a worker is lost, training continues in "
            "the other copies, and its own waits for the worker that takes its place"
        )


def about_warm_up(training: Training) -> Iterator[str]:
    """That it is longer than the run."""
    warmup, per_epoch = training.components.warmup.steps, training.components.batches.source.steps_per_epoch
    steps = total_steps(training.limit, per_epoch, training.now())
    if steps is not None and warmup > steps:
        yield f"the warm-up takes {warmup} steps and the run {steps}: the learning rate never comes to its full value"


def about_batch(components: Components) -> Iterator[str]:
    """That there are fewer samples than a batch has."""
    samples = getattr(getattr(components.batches.source, "order", None), "length", components.batches.size)
    if samples < components.batches.size:
        count = "1 sample" if samples == 1 else f"{samples} samples"
        yield f"the train set has {count}, and a batch {components.batches.size}: an epoch is one step of all of it"


def about_resume(components: Components, snapshot_schedule: SnapshotSchedule, finished: str) -> Iterator[str]:
    """What has changed since the snapshot that a run continues from, and what will not be noticed when it continues.

    `finished`: why it does no step, so that no change takes effect.
    """
    if not finished:
        yield from snapshot_schedule.changes.reported()
    if components.world.is_rank_0 and (
        lost := lost_steps(snapshot_schedule.directory.metrics, snapshot_schedule.saved_at)
    ):
        yield f"metrics.jsonl has no line of {lost}: somebody or a disk has lost them, and summary and report lack them"
    if components.world.is_rank_0 and (unknown := components.batches.identity().get("unknown")):
        yield f"no sample of the training set is compared when the run continues: {unknown}"
