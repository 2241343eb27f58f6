"""What a worker is to measure in place of training: plain values that travel in one variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "MANYHOSTS_MEASURE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one start of the script is for."""

    workers: tuple[int, ...] = (1,)
    """Numbers of workers that will be predicted: the parts of a batch that those have are measured."""
    seconds: float = 20.0
    """About how long the measurement may take, once the script has come to `fit`."""
    patience_s: float = 120.0
    """After so long the script has to have come there."""
    together: bool = False
    """Several workers, who compute at the same time and then measure the network between them."""

    uncut: bool = False
    """Whether each worker is to hold the entire model, though the script has it cut into parts."""

    def environment(self) -> Mapping[str, str]:
        """The variable that carries this to a worker."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Request:
        """The one of this worker."""
        found = json.loads(os.environ[VARIABLE])
        return cls(**{**found, "workers": tuple(found["workers"])})
