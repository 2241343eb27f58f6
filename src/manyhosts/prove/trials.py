"""Runs the script, again and again: with so many workers, so many steps, under such settings, and reads the traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhosts.config import overrides
from manyhosts.control import variables
from manyhosts.control.job import Job
from manyhosts.errors import ManyhostsError
from manyhosts.launchers import scripts
from manyhosts.prove.conduct import TrialConfig
from manyhosts.prove.trace import Trace, imported
from manyhosts.records.run_record import RunRecord
from manyhosts.trials.forked import LocalTrialRunner

_INSIDE = "manyhosts.prove.in_worker"
_TRAINING = ("manyhosts.training.trainer", "manyhosts.data.data", _INSIDE, "manyhosts.prove.in_worker.recorder")
"""Loaded once per trial for all its workers."""
_NEVER = "1000000000 steps"
_HANG_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person wants to know, and of which script."""

    script: str
    arguments: tuple[str, ...] = ()
    folder: Path
    """Where the script is started, absolute."""
    workers: tuple[int, ...] = (1, 2, 3)
    steps: int = 20
    promises: tuple[str, ...] = ()
    """Empty: all."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """As `--set` gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How one trial differs from others."""

    workers: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    """Overrides besides those that were asked for."""
    double: bool = False
    no_dropout: bool = False
    set_draws: bool = False
    draw_rows: bool = False
    freeze_batch_norm: bool = False
    experiments: bool = False
    seeds_alike: bool = False
    resumed: bool = False
    """Killed in the middle and started again."""
    again: int = 0
    """Distinguishes a repetition from the first time."""

    def with_settings(self, **settings: Any) -> Setup:
        """The same under other settings."""
        return replace(self, settings=(*self.settings, *((key, str(value)) for key, value in settings.items())))

    def __str__(self) -> str:
        words = [f"{self.workers} worker{'s' * (self.workers != 1)}"]
        words += [f"{key}={value}" for key, value in self.settings]
        words += ["killed and resumed"] if self.resumed else []
        words += ["again"] if self.again else []
        words += ["in float64"] if self.double else []
        words += ["without dropout"] if self.no_dropout else []
        words += ["random numbers set" + " for each sample" * self.draw_rows] if self.set_draws else []
        words += ["BatchNorm frozen"] if self.freeze_batch_norm else []
        words += ["experiments"] if self.experiments else []
        words += ["equal seeds"] if self.seeds_alike else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What came of one setup."""

    setup: Setup
    trace: Trace
    error: ManyhostsError | None
    """Why it did not run to its end; None where it did."""
    output: tuple[str, ...]
    """The last lines of its workers."""
    seconds: float
    not_tried: str = ""
    """What the run said that it could not try of the loss; empty where it could."""


class Trials:
    """Every trial that was asked for, each run once."""

    def __init__(self, asked: Asked, folder: Path, stage: LocalTrialRunner, report: Callable[[str], None]) -> None:
        """`folder` takes all that the trials write. `report` is called with what each trial is, before it begins."""
        self.asked, self.folder, self.stage, self.report = asked, folder, stage, report
        self.done: dict[Setup, Trial] = {}
        self.warmed = False
        """Whether what the script imports is loaded already in what its workers are forked from."""

    def run(self, setup: Setup) -> Trial:
        """The trial of `setup`, which is run where it has not been yet.

        Raises:
            Interrupted: by Ctrl-C.
        """
        if setup not in self.done:
            self.report(str(setup))
            began = time.perf_counter()
            trial = self._resumed(setup) if setup.resumed else self._once(setup, self._place())
            self.done[setup] = replace(trial, seconds=time.perf_counter() - began)
        return self.done[setup]

    def _place(self) -> Path:
        return self.folder / f"{len(self.done):02}"

    def _resumed(self, setup: Setup) -> Trial:
        place = self._place()
        self._once(setup, place, traces="killed", die_after=self.asked.steps // 2 + 1)
        return self._once(setup, place, traces="resumed")

    def _once(self, setup: Setup, place: Path, *, traces: str = "trace", die_after: int | None = None) -> Trial:
        job = self.job(setup, place, traces=traces, die_after=die_after)
        error, output = self.stage.run(job, hang_s=_HANG_S)
        if not self.warmed:
            self.warmed = True
            self.stage.warm(imported(place / traces))
        trace = Trace.read(place / traces)
        found = Trial(setup=setup, trace=trace, error=error, output=tuple(output), seconds=0.0)
        with suppress(ManyhostsError):  # a script without mh.Trainer has no record
            looked = RunRecord.read(place / "run" / "run.json").same_answer
            return replace(found, not_tried=looked.get("text", "") if looked.get("outcome") == "not tried" else "")
        return found

    def job(self, setup: Setup, place: Path, *, traces: str = "trace", die_after: int | None = None) -> Job:
        """The options of `manyhosts run` for this setup."""
        asked = self.asked
        conduct = TrialConfig(
            folder=str(place / traces),
            steps=asked.steps,
            die_after=die_after,
            double=setup.double,
            no_dropout=setup.no_dropout,
            set_draws=setup.set_draws,
            draw_rows=setup.draw_rows,
            freeze_batch_norm=setup.freeze_batch_norm,
            experiments=setup.experiments,
            seeds_alike=setup.seeds_alike,
        )
        strategy = dict(setup.settings).get("strategy", "")
        settings = {
            "duration": f"{asked.steps} steps",
            "validate_every": _NEVER,
            "snapshots.every": f"{max(1, asked.steps // 2)} steps",
            "snapshots.to": "none",
            **{key: value for key, value in asked.settings.items() if not overrides.lacks(strategy, key)},
            **dict(setup.settings),
            **({"precision": "fp32"} if setup.double else {}),
            **({"loader_workers": "0"} if setup.experiments else {}),
        }
        return Job(
            program=asked.script,
            arguments=asked.arguments,
            folder=asked.folder,
            run_dir=place / "run",
            workers_per_node=setup.workers,
            environment={
                **overrides.to_environment(settings),
                **conduct.environment(),
                variables.FIRST: _INSIDE,
            },
        )


def make_stage(asked: Asked) -> LocalTrialRunner:
    """What the workers of all trials are forked from: it has loaded what the script needs."""
    return LocalTrialRunner(scripts.preload(asked.script, "script", own=_TRAINING), asked.folder)


def planned(asked: Asked, promises: Sequence[str]) -> list[Setup]:
    """The trials that are run where every promise holds, in order; to find out why one does not takes more."""
    setups = [Setup(workers=count) for count in asked.workers if {"workers", "ranks", "samples"} & {*promises}]
    if "micro" in promises:
        setups += [Setup(workers=1), Setup(workers=1).with_settings(micro_batch_size="HALF")]
    if "resume" in promises:
        most = resuming_workers(asked)
        setups += [Setup(workers=most), Setup(workers=most, resumed=True)]
    return list(dict.fromkeys(setups))


def resuming_workers(asked: Asked) -> int:
    """On how many workers a kill and a resume are tried: two where that is one of the numbers."""
    return 2 if 2 in asked.workers else max(asked.workers)
