"""What a person asked of a search, and what is typed for one of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.trials.runs import hash_of, hashes_of
from manyhosts.tune import search
from manyhosts.tune.budget import Budget
from manyhosts.tune.search import Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one trial at a time runs."""

    words: tuple[str, ...]
    """After `manyhosts run`: `--workers 2`, or `--hosts a,b`."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person asked of a search."""

    script: str
    arguments: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...]
    metric: str
    maximise: bool
    budget: Budget
    price_s: float | None = None
    """What one worker costs in a second."""
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int = 0
    environment: tuple[str, ...] = ()
    """As `--env` gives them."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """As `--set` gives them, for every trial."""
    slots: tuple[Slot, ...]
    workers: int
    """Of each trial."""
    is_here: bool = True
    """Whether all trials run on this machine."""
    waits_in_queue: bool = False
    """Whether a scheduler starts the trials: what they wait for it costs nothing."""
    storage: str | None = None
    name: str
    """Of the study in the storage."""
    warn: str | None = None

    def in_common(self) -> dict[str, Any]:
        """What all trials of one search share."""
        return {
            "script": Path(self.script).name,
            "script_sha256": hash_of(self.script),
            "arguments": list(self.arguments),
            "environment": hashes_of(self.environment),
            "metric": self.metric,
            "settings": dict(self.settings),
            "search": [(each.name, each.kind, list(each.choices)) for each in self.parameters],
        }

    def command(self, slot: Slot, chosen: Mapping[str, search.Value], more: Sequence[str] = ()) -> list[str]:
        """What is typed after `manyhosts` for a run with these values."""
        settings, flags = search.words(chosen)
        fixed = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        return ["run", *slot.words, *more, *fixed, *settings, self.script, *self.arguments, *flags]
