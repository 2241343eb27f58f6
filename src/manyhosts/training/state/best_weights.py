"""The weights of the best validation, where `fit` has kept them, in the model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhosts.snapshot.load import load
from manyhosts.training.fit import Fit
from manyhosts.training.setup.build import Parts
from manyhosts.training.state.frozen_base import KEY
from manyhosts.training.state.registry import copied, put_weights, state_of, weights_of


def best_model(run: Fit | None) -> Path | None:
    """The best model's folder, here on every worker; None where the run has none."""
    if run is None:
        return None
    best = run.directory.best
    run.snapshot_schedule.store.everywhere(best, run.state.best_step)
    return best if best.exists() else None


@dataclass(frozen=True, slots=True)
class Used:
    """Which weights an evaluation, a prediction or a file is of."""

    is_best: bool
    step: int
    averaged_by: str
    """The name of the callback that has averaged them; empty where none has."""

    @classmethod
    def of(cls, parts: Parts, run: Fit | None, *, is_best: bool) -> Used:
        """Those that `holding` gives."""
        step = 0 if run is None else run.state.best_step if is_best else run.state.step
        return cls(is_best, step, parts.callbacks.averaging)

    def __str__(self) -> str:
        which = f"the {'best' if self.is_best else 'last'} weights, of step {self.step}"
        return f"{which}, averaged ({self.averaged_by})" if self.averaged_by else which


@contextmanager
def holding(weights: Literal["best", "last"], parts: Parts, run: Fit | None) -> Iterator[Used]:
    """Within, the model has its best weights, where they are asked for and kept, else those of now. Says which."""
    best = best_model(run) if weights == "best" else None
    used = Used.of(parts, run, is_best=best is not None)
    if best is None:
        with parts.callbacks.evaluated(parts.trained):
            yield used
        return
    found = load(best, parts.fits())
    now = copied(parts.frozen_base.without(weights_of(parts)) if KEY in found.facts.run else weights_of(parts))
    put_weights(parts, state_of(found, parts))
    try:
        yield used
    finally:
        put_weights(parts, now)
