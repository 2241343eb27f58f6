"""Which model of a run is the best, and when a run stops before its duration is over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhosts.config.arguments import OF_EARLY_STOPPING, answering
from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the model of the validation that is best by `metric`, whatever early stopping looks at.

    `metric` and `mode` as in `EarlyStopping`.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        check_kinds(self, prefix="best.")
        _check_mode(self.mode, "best.mode")

    def better(self, value: float, best: float | None) -> bool:
        """Whether `value` beats `best` (None: nothing yet). `mode` is known, or the metric is the loss."""
        return _better(self, value, best, by=0.0)


@answering(OF_EARLY_STOPPING)
@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stop when `metric` has not become better for `patience` validations in a row.

    `metric` is `"loss"` or a name from `Trainer(metrics=…)`. Better means by more than `min_delta`, upward for
    `mode="max"` and downward for `mode="min"`. Without a mode it comes from the metric: lower is better for the loss,
    and what a torchmetrics metric says of itself (`higher_is_better`) for others.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] | None = None
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_kinds(self, prefix="early_stopping.")
        _check_mode(self.mode, "early_stopping.mode")
        if self.patience < 1:
            raise ConfigError(
                f"patience is {self.patience}, so the run would stop at its first validation",
                where="early_stopping.patience",
                fix="set it to 1 or more",
            )
        if self.min_delta < 0:
            raise ConfigError(
                f"min_delta is {self.min_delta}", where="early_stopping.min_delta", fix="set it to 0 or more"
            )

    def better(self, value: float, best: float | None) -> bool:
        """Whether `value` beats `best` (None: nothing yet). `mode` is known, or the metric is the loss."""
        return _better(self, value, best, by=self.min_delta)


def _check_mode(mode: str | None, where: str) -> None:
    if mode not in ("min", "max", None):
        raise ConfigError(f"mode is {mode!r}", where=where, fix='use "max" (accuracy) or "min" (loss)')


def _better(rule: Best | EarlyStopping, value: float, best: float | None, *, by: float) -> bool:
    assert rule.mode is not None or rule.metric == "loss", f"no one has settled which {rule.metric} is better"
    if best is None or math.isnan(value):
        return not math.isnan(value)
    return value > best + by if rule.mode == "max" else value < best - by
