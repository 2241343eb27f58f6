"""Events: immutable records of what happened in a run, for its listeners.

The loop of `training.loop` with each event in its place:

    RunStarted
    while no stop rule gives a reason:
        StepDone                        after every optimizer step
        [EpochDone]                     when the step was the last one of its epoch
        [WorkersTimed]                  every few seconds, where there are several workers
        [ValidationDone]                when `validate_every` is due, and after the last step
        [SnapshotSaved]                 when `snapshots.every` is due
    [WorkersTimed]                      for the rest of the steps
    RunEnded
    [TestDone]                          when the user calls `trainer.test()`

A listener is anything callable with one event. Listeners run on rank 0 only, and cannot change training:
their order never matters, and one that fails is named, and misses the event that it failed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Where the wall time of one optimizer step went, in seconds. The parts add up to `total`."""

    total: float
    compute: float
    """Forward, backward, clipping and update."""
    communication_exposed: float
    """Waiting for other workers or for bytes that no computation hid."""
    data_wait: float
    """Waiting for the next batch."""
    snapshot_stall: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """Training begins, or continues from a snapshot at `step` > 0."""

    step: int
    epoch: int
    steps_per_epoch: int | None
    """None where the training set is a stream, whose length is unknown."""
    total_steps: int | None
    """None where the duration is a time."""
    time: float
    resumed_from: str = ""
    seconds_done: float = 0.0
    """Of training before, which count where the duration is a time."""
    epochs_done: float = 0.0
    """With the fraction of the current one; integers only for a stream."""
    workers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One optimizer step. `loss` is the mean over the global batch."""

    step: int
    epoch: int
    """The epoch that the step belongs to, from 0."""
    loss: float
    lr: float
    samples: int
    """Samples in the global batch."""
    gradient_norm: float | None
    """Before clipping. Where gradients are not clipped one step in 20 has it, and the others have None."""
    timing: StepTiming
    bytes_sent: int
    """Payload handed to the network by this worker in this step."""
    time: float
    """Seconds since the Unix epoch."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What a `step` function of the user returned in addition to the loss: means over the global batch."""
    exchange_seconds: float = 0.0
    """From the first gradient's leaving to the last sum's arrival, hidden or not; 0 where that is not known (GPUs)."""
    weight: float | None = None
    """What the batch counts in the mean of the epoch; None: its samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone:
    """Every sample of the training set was seen again."""

    step: int
    epoch: int
    train_loss: float
    """Mean over the samples of this epoch."""
    seconds: float
    samples: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationDone:
    """The validation set was evaluated, each sample once. `values` holds `loss` and every metric."""

    step: int
    epoch: int
    values: Mapping[str, float]
    best: bool
    """The watched metric was never better."""
    seconds: float
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSaved:
    """A snapshot is complete and has its name."""

    step: int
    path: Path
    bytes: int
    seconds: float
    """From the copy out of the model to the rename."""
    stall_seconds: float
    """How long it stalled training."""
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCopied:
    """A snapshot, or the best model, is complete in the remote copy that `snapshots.to` names, too."""

    step: int
    address: str
    bytes: int
    seconds: float
    """From reading it on the disk to its last object."""
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSkipped:
    """A snapshot could not be written, or could not be read and the one before it was taken."""

    step: int
    path: Path
    reason: str
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Training continued after a failure, with what that cost."""

    step: int
    reason: str
    """What failed, in one sentence with host and rank."""
    how: str
    """How it continued: from a snapshot, or with the workers that were left."""
    steps_redone: int
    seconds_lost: float
    time: float
    lost: str = ""
    """What of the training went with the workers that were lost, in words; empty where nothing did."""
    samples_lost: int = 0
    """Samples of the steps that were redone from a snapshot."""
    rewound: bool = False
    """Whether it is the numbers that failed: the run went back to the snapshot of `step`, and left samples out."""
    workers: int = 0
    """How many there are now; 0 where they are those of before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something worth saying once, such as which BatchNorm is in use."""

    text: str
    step: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossLooked:
    """Whether the loss is a mean, so that the answer does not depend on how a batch is cut: what a look has found."""

    outcome: str
    """`mean`, `no mean` (of a batch in one piece: where it is cut, the run ends), or `not tried`."""
    text: str
    """Why it could not be tried and what to do, or what is wrong; empty for a mean."""
    step: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """A host, a worker or a link between hosts holds the others up, or does so no more."""

    step: int
    text: str
    """What is said of it."""
    what: str
    """`worker` for what a worker does itself in a step, `link` for the network between hosts."""
    who: str
    """`host b`, `rank 3 on host b`, `the link to host c`, `the link between hosts b and c`."""
    factor: float
    """How many times slower than the others it is; 1.0: no more."""
    time: float
    cause: str = ""
    """The likely one: `data`, `compute`, `thermal` or `network`; empty where it is slow no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTimes:
    """What a step took one worker: means over steps, in seconds."""

    rank: int
    host: str
    samples: int
    """Of a step, on this worker."""
    total: float
    compute: float
    communication_exposed: float
    """Waiting for other workers or for bytes that no computation hid."""
    data_wait: float
    snapshot_stall: float
    hot: float = 0.0
    """The share of the time, 0 to 1, in which its host has slowed a processor down because it was too hot."""
    worker: int = -1
    """Its number among all workers that the run ever had, which it keeps where ranks change; -1 where none is known."""

    @property
    def own(self) -> float:
        """Seconds of a step in which it did not wait for other workers."""
        return self.compute + self.data_wait


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersTimed:
    """What the last steps took every worker, by rank: `steps` of them, of which `step` is the last."""

    step: int
    steps: int
    workers: tuple[WorkerTimes, ...]
    communication: float
    """Seconds of a step in which even the worker that waited least waited: no slow worker is to blame for these."""
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionChosen:
    """`compression="auto"` has measured, and continues with `compression`."""

    step: int
    compression: str
    why: str
    """In one line."""
    bandwidth: float
    """Bytes that each worker could send in a second of a large exchange, as probed."""
    latency: float
    """Seconds that an exchange of next to nothing takes, as probed."""
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """Training is over; `status` and `reason` are those of `summary.json`."""

    step: int
    epoch: int
    status: str
    reason: str
    weights_sha256: str
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TestDone:
    """The test set was evaluated, each sample once."""

    step: int
    values: Mapping[str, float]
    seconds: float
    time: float
    weights: str = ""
    """`"best"` or `"last"`; empty where unknown."""
    weights_step: int = -1
    """The step that these weights are of; -1 where unknown."""


Event = (
    RunStarted
    | StepDone
    | EpochDone
    | ValidationDone
    | SnapshotSaved
    | SnapshotCopied
    | SnapshotSkipped
    | Recovered
    | Note
    | LossLooked
    | Slowdown
    | WorkersTimed
    | CompressionChosen
    | RunEnded
    | TestDone
)


class Listener(Protocol):
    """Anything that can be called with an event."""

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
