"""How a worker of a trial is to behave, and where it writes its trace: plain values that travel in one variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "MANYHOSTS_PROVE"
UNTRIED = "could not be tried, because "
"""How the refusal of a trial begins that says nothing against the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialConfig:
    """What differs between the workers of one trial and those of another."""

    folder: str
    """Where each worker writes `trace-<rank>.jsonl`."""
    steps: int
    """After so many optimizer steps the workers end."""
    die_after: int | None = None
    """All workers kill themselves after this step, once a snapshot is there."""
    double: bool = False
    """Compute in float64, without dropout: what differs then is not rounding."""
    no_dropout: bool = False
    """Leave dropout out."""
    set_draws: bool = False
    """What a forward pass draws is one value for all samples, so that it does not depend on how a batch is cut."""
    freeze_batch_norm: bool = False
    """BatchNorm uses its running statistics in training, too."""
    seeds_alike: bool = False
    """The script's own random numbers begin alike on all ranks, as `torch.manual_seed` in it would have them."""
    experiments: bool = False
    """Before the first step: read samples twice, compute a piece twice and in halves, write what comes out, and end."""

    def environment(self) -> Mapping[str, str]:
        """The variable that carries this to a worker."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> TrialConfig:
        """The one of this worker."""
        return cls(**json.loads(os.environ[VARIABLE]))
