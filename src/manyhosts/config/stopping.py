"""When a run stops before its duration is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyhosts.config.arguments import OF_EARLY_STOPPING, answering
from manyhosts.config.kinds import check_kinds
from manyhosts.errors import ConfigError


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
        if self.mode not in ("min", "max", None):
            raise ConfigError(
                f"mode is {self.mode!r}", where="early_stopping.mode", fix='use "max" (accuracy) or "min" (loss)'
            )
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
        assert self.mode is not None or self.metric == "loss", f"nobody has settled which {self.metric} is better"
        if best is None:
            return True
        return value > best + self.min_delta if self.mode == "max" else value < best - self.min_delta
