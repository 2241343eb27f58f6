"""What the workers of one trial have written of their steps, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.config.strategies import Strategy, kind_of
from manyhosts.planner.plan import strategy_of

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """The lines of one trial, by worker."""

    begins: Mapping[int, Line] = field(default_factory=dict)
    """Rank → where its training began, and what was asked for."""
    steps: Mapping[int, Mapping[int, Line]] = field(default_factory=dict)
    """Step → rank → what that worker has done in it; of a step that was done twice the second time."""
    experiments: Mapping[int, Line] = field(default_factory=dict)
    """Rank → what `inside.experiments` has found there."""

    @classmethod
    def read(cls, folder: Path) -> Trace:
        """Everything in `folder`; nothing where no worker came to write."""
        begins: dict[int, Line] = {}
        steps: dict[int, dict[int, Line]] = {}
        experiments: dict[int, Line] = {}
        for path in sorted(folder.glob("trace-*.jsonl")):
            rank = int(path.stem.partition("-")[2])
            for line in _lines(path):
                if line["kind"] == "begin":
                    begins[rank] = line
                elif line["kind"] == "experiments":
                    experiments[rank] = line
                else:
                    steps.setdefault(line["step"], {})[rank] = line
        return cls(begins, dict(sorted(steps.items())), experiments)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the script asked of mh.Trainer, overrides laid over it; nothing of a script without one."""
        return next((line.get("settings", {}) for line in self.begins.values()), {})

    @property
    def strategy(self) -> Strategy | None:
        """What it was asked for, where that is a strategy which may give up promises by its design."""
        words = self.settings.get("strategy", {})
        return strategy_of(words) if hasattr(kind_of(words.get("name", "")), "gives_up") else None

    @property
    def untried(self) -> str:
        """Why a trial of this kind of training shows nothing; empty where it does."""
        return next((line["untried"] for line in self.begins.values() if "untried" in line), "")

    @property
    def is_plain(self) -> bool:
        """Whether the script has no mh.Trainer."""
        return any(line.get("plain") for line in self.begins.values())

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once: samples are drawn by weights, or in an order of the script's."""
        return any(line.get("repeats") for line in self.begins.values())

    @property
    def drew(self) -> bool:
        """Whether a forward pass drew random numbers."""
        return any(line.get("drew") for lines in self.steps.values() for line in lines.values())

    @property
    def left(self) -> str:
        """What was drawn in a forward pass and could not be set to one value; empty where all was."""
        return next((line["left"] for lines in self.steps.values() for line in lines.values() if line.get("left")), "")

    @property
    def ends(self) -> set[str]:
        """The states of the generators of NumPy and Python after a forward pass, where these were set."""
        return {each for lines in self.steps.values() for line in lines.values() for each in line.get("ends", ())}

    @property
    def drawn(self) -> set[str]:
        """The shapes that each forward pass drew, where each sample had numbers of its own."""
        return {each for lines in self.steps.values() for line in lines.values() for each in line.get("drawn", ())}

    @property
    def has_batch_norm(self) -> bool:
        """Whether there is a BatchNorm layer in the model."""
        return any(line.get("batch_norm") for line in self.begins.values())

    def of(self, step: int) -> Line:
        """What the worker with the lowest rank wrote of `step`."""
        lines = self.steps[step]
        return lines[min(lines)]

    def taken(self, step: int) -> list[int]:
        """The samples that all workers together computed in `step`, sorted."""
        return sorted(index for line in self.steps[step].values() for index in line.get("own", ()))

    def data(self, step: int) -> Mapping[str, str]:
        """Sample → the hash of its content, over all workers."""
        return {index: digest for line in self.steps[step].values() for index, digest in line.get("data", {}).items()}


def imported(folder: Path) -> list[str]:
    """The modules that the first worker's script has imported; none where it did not come to say so."""
    path = folder / "imports.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def _lines(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return  # a worker was killed in the middle of its last line
