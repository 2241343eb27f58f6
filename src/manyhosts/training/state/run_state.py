"""Where a run is: everything besides model and optimizer that it needs to continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from manyhosts.data.order import Position


@dataclass(slots=True)
class RunState:
    """Changed by the loop alone; kept complete in every snapshot."""

    step: int = 0
    """Optimizer steps done."""
    position: Position = field(default_factory=Position)
    stream: Mapping[str, Any] = field(default_factory=dict)
    """What this worker's stream needs besides the position; empty for map-style datasets."""
    seconds: float = 0.0
    """Time spent, over all restarts, by rank 0's clock."""
    epoch_loss: float = 0.0
    """Sum of the losses of the samples of the epoch under way."""
    epoch_weight: float = 0.0
    """What those samples count together: their number, unless the loss is another mean than over samples."""
    epoch_samples: int = 0
    epoch_seconds: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    """The last validation's values."""
    validated_at: int = -1
    validation_due: bool = False
    """Whether the validation of this step was cut off: where the run continues from here, it begins with it."""
    best: float | None = None
    best_step: int = -1
    stopping_best: float | None = None
    """The best value of the metric that early stopping watches, which may be another one."""
    validations_without_gain: int = 0
    left_out: tuple[int, ...] = ()
    """Steps that went wrong before the run went back to before them: their samples are not trained on."""
    counts_by: str = ""
    """What a look at the loss before the first step has found pieces to count by; empty before it."""
    ended: str = ""
    """Why early stopping ended the run; empty while it has not."""

    def become(self, other: RunState) -> None:
        """Be as `other`, for all that hold this one."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(other, entry.name))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a snapshot; `stream`, which differs from worker to worker, is kept separately."""
        return {
            "step": self.step,
            "epoch": self.position.epoch,
            "sample": self.position.sample,
            "seconds": self.seconds,
            "epoch_loss": self.epoch_loss,
            "epoch_weight": self.epoch_weight,
            "epoch_samples": self.epoch_samples,
            "epoch_seconds": self.epoch_seconds,
            "validation": dict(self.validation),
            "validated_at": self.validated_at,
            "validation_due": self.validation_due,
            "best": self.best,
            "best_step": self.best_step,
            "validations_without_gain": self.validations_without_gain,
            "left_out": list(self.left_out),
            "counts_by": self.counts_by,
            "ended": self.ended,
            **({} if self.stopping_best == self.best else {"stopping_best": self.stopping_best}),
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any], stream: Mapping[str, Any]) -> RunState:
        """What `to_dict` gave."""
        plain: dict[str, Any] = {"epoch_weight": float(kept["epoch_samples"]), "stopping_best": kept.get("best")}
        plain |= {key: value for key, value in kept.items() if key not in ("epoch", "sample", "left_out")}
        return cls(
            position=Position(kept["epoch"], kept["sample"]),
            stream=stream,
            left_out=tuple(kept.get("left_out", ())),
            **plain,
        )
