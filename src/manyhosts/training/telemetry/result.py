"""What `fit` gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended. The same on every worker."""

    status: str
    """`completed` or `stopped early`. A run that a signal asks to stop ends the script: `fit` raises `SystemExit`."""
    reason: str
    """Why it ended, in words."""
    steps: int
    epochs: float
    validation: Mapping[str, float]
    """The last validation's values: `loss` and every metric; empty where there was none."""
    best: float | None
    """The best value of the watched metric."""
    best_step: int
    seconds: float
    """Time spent in this run, over all restarts."""
    weights_sha256: str
    """Hash over parameters and buffers in name order: equal hash, equal bits."""
    run_dir: Path
