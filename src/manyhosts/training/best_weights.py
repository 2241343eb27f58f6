"""The weights of the best validation, where `fit` has kept them, in the model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from manyhosts.snapshot.load import load, same_model
from manyhosts.training.build import Parts
from manyhosts.training.held import copied, put_weights, state_of, weights_of
from manyhosts.training.run import Run


def best_model(run: Run | None) -> Path | None:
    """The best model's folder, here on every worker; None where the run has none."""
    if run is None:
        return None
    best = run.directory.best
    run.snapshot_schedule.store.everywhere(best, run.state.best_step)
    return best if best.exists() else None


@contextmanager
def holding(weights: Literal["best", "last"], parts: Parts, run: Run | None) -> Iterator[bool]:
    """Within, the model has its best weights, where they are asked for and kept. Gives whether it has."""
    best = best_model(run) if weights == "best" else None
    if best is None:
        yield False
        return
    now = copied(weights_of(parts))
    put_weights(parts, state_of(load(best, same_model(parts.fingerprint())), parts))
    try:
        yield True
    finally:
        put_weights(parts, now)
