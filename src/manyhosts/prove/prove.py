"""Which promises hold for one script: runs what is needed, in a temporary directory, one trial after another."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.config.strategies import gives_up
from manyhosts.errors import ConfigError
from manyhosts.prove.promises import PROMISES, Verdict
from manyhosts.prove.trials import Asked, Setup, Trials, make_stage
from manyhosts.trials.forked import LocalTrialRunner

NOT_KEPT = "the strategy does not keep this, by its design; asked for by name it is tried"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was found."""

    asked: Asked
    verdicts: tuple[Verdict, ...]
    trials: int
    seconds: float
    given_up: tuple[str, ...] = ()
    """The promises that the script's strategy does not keep, by its design: those are tried only where they are asked
    for by name."""

    @property
    def holds(self) -> bool:
        """Whether everything holds that was asked for by name, and nothing fails."""
        return all(
            verdict.status == "holds" or (verdict.status == "not judged" and verdict.promise not in self.asked.promises)
            for verdict in self.verdicts
        )

    def to_json(self) -> Mapping[str, Any]:
        """For `--json`."""
        return {
            "script": self.asked.script,
            "workers": self.asked.workers,
            "steps": self.asked.steps,
            "holds": self.holds,
            "asked": list(names(self.asked)),
            "given_up": list(self.given_up),
            "promises": [verdict.to_json() for verdict in self.verdicts],
            "trials": self.trials,
            "seconds": round(self.seconds, 1),
        }


def names(asked: Asked) -> tuple[str, ...]:
    """The promises to try, in the order in which they are printed."""
    return tuple(name for name in PROMISES if not asked.promises or name in asked.promises)


def prove(asked: Asked, report: Callable[[str], None], stage: LocalTrialRunner | None = None) -> Proof:
    """Try the promises on a script. `report` is called with what each trial is, before it begins.

    `stage` is what workers are forked from, where one is there already; it stays.

    Raises:
        ConfigError: the script makes no optimizer step.
        ManyhostsError: the script fails by itself, on the first number of workers.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhosts-prove-", ignore_cleanup_errors=True))
        if stage is None:
            stage = make_stage(asked)
            stack.callback(stage.close)
        trials = Trials(asked, Path(folder), stage, report)
        first = trials.run(Setup(workers=asked.workers[0]))
        if first.error is not None and not first.trace.untried:
            raise first.error
        if not first.trace.steps and first.error is None:
            raise ConfigError(
                "the script ends without an optimizer step, so there is nothing to compare",
                where=asked.script,
                fix="name the script that trains, with the arguments that make it train",
            )
        strategy = first.trace.strategy
        lost = () if strategy is None else gives_up(strategy)
        verdicts = tuple(
            Verdict(promise=name, status="not judged", note=NOT_KEPT)
            if name in lost and name not in asked.promises
            else PROMISES[name][1](trials)
            for name in names(asked)
        )
        seconds = time.perf_counter() - began
        return Proof(asked=asked, verdicts=verdicts, trials=len(trials.done), seconds=seconds, given_up=lost)
