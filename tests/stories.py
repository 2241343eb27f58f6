"""Made-up runs: events with round numbers, so that a test can reckon by hand what must come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhosts.config.settings import Settings
from manyhosts.config.stopping import EarlyStopping
from manyhosts.config.strategies import DDP
from manyhosts.events import (
    EpochDone,
    RunEnded,
    RunStarted,
    SnapshotSaved,
    StepDone,
    StepTiming,
    TestDone,
    ValidationDone,
)
from manyhosts.records.run_record import RunRecord, plain_settings

BEGIN = 1_000_000.0
"""The time at which every story starts."""


def started(step: int = 0, *, time: float | None = None, **changes: Any) -> RunStarted:
    fields = {"steps_per_epoch": 4, "total_steps": 12, "epoch": step // 4}
    return RunStarted(step=step, time=BEGIN + step if time is None else time, **{**fields, **changes})


def stepped(
    step: int, *, loss: float | None = None, time: float | None = None, seconds: float = 1.0, **changes: Any
) -> StepDone:
    """Step `step` (from 1) of epochs of four steps; the first lasts from BEGIN to a second later."""
    timing = StepTiming(
        total=seconds,
        compute=0.5 * seconds,
        communication_exposed=0.25 * seconds,
        data_wait=0.125 * seconds,
        snapshot_stall=0.0,
        other=0.125 * seconds,
    )
    fields = {"lr": 0.1, "samples": 8, "gradient_norm": None, "bytes_sent": 1000, "epoch": (step - 1) // 4}
    return StepDone(
        step=step,
        loss=1 / step if loss is None else loss,
        time=BEGIN + step if time is None else time,
        timing=timing,
        **{**fields, **changes},
    )


def epoch_done(step: int, **changes: Any) -> EpochDone:
    fields = {"epoch": step // 4 - 1, "train_loss": 0.5, "seconds": 4.0, "samples": 32, "time": BEGIN + step}
    return EpochDone(step=step, **{**fields, **changes})


def validated(step: int, *, best: bool = True, time: float | None = None, **values: float) -> ValidationDone:
    time = BEGIN + step if time is None else time
    return ValidationDone(step=step, epoch=(step - 1) // 4, values=values, best=best, seconds=0.5, time=time)


def snapshot_saved(step: int, *, time: float | None = None) -> SnapshotSaved:
    path = Path(f"snapshots/step-{step:08d}")
    time = BEGIN + step if time is None else time
    return SnapshotSaved(step=step, path=path, bytes=10, seconds=0.1, stall_seconds=0.01, time=time)


def ended(step: int, *, status: str = "completed", reason: str = "all done", time: float | None = None) -> RunEnded:
    time = BEGIN + step if time is None else time
    return RunEnded(step=step, epoch=step // 4, status=status, reason=reason, weights_sha256="ab" * 32, time=time)


def was_tested(step: int, **values: float) -> TestDone:
    return TestDone(step=step, values=values, seconds=0.2, time=BEGIN + step + 1)


def record(**settings: Any) -> RunRecord:
    """Of a run on two workers of one host, where early stopping watches the accuracy."""
    chosen = {"batch_size": 8, "duration": "3 epochs", "strategy": DDP()}
    chosen["early_stopping"] = EarlyStopping("accuracy", "max")
    return RunRecord(
        script="train.py",
        settings=plain_settings(Settings(**{**chosen, **settings})),
        seed=0,
        versions={"manyhosts": "0.1.0"},
        hosts=["here"],
        workers=2,
        strategy="ddp",
        backend="gloo",
        started=BEGIN,
    )
