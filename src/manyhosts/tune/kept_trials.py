"""The trials of a search as Optuna's storage has them, whoever has run them; those that were left are run again."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records import run_lock
from manyhosts.trials.runs import LOOK_S, Signals
from manyhosts.tune import search, storage
from manyhosts.tune.asked import Asked
from manyhosts.tune.search import Parameter

RUNS = "trials"
_TO_RESUME = ("interrupted", "stopped")


class KeptTrials:
    """What is known of every trial, also after the process that began it was killed."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        """Open the storage.

        Raises:
            ConfigError: it cannot be opened, or holds another search.
            LaunchError: Optuna is not installed.
        """
        self.asked, self.folder = asked, folder
        self.optuna = storage.library()
        self.states = self.optuna.trial.TrialState
        self.study = storage.open_study(
            folder, asked.storage, asked.name, maximise=asked.maximise, sampler=asked.sampler, pruner=asked.pruner,
            seed=asked.seed,
        )  # fmt: skip
        now = json.loads(json.dumps(asked.in_common()))
        before = self.attribute("asked", now)
        if differs := [key for key in now if before.get(key) != now[key]]:
            raise ConfigError(
                f"this search was begun with another {differs[0].replace('_sha256', ' (its text has changed)')}: its "
                "trials cannot be compared",
                where=str(folder),
                fix="give another --run-dir (and --study, in a storage that is shared), or ask as before",
            )
        self.study.set_user_attr("asked", now)

    def attribute(self, name: str, otherwise: Any) -> Any:
        """What is kept under `name` for the whole search."""
        return self.study.user_attrs.get(name, otherwise)

    def all(self) -> list[Any]:
        """Those that wait for their turn, too."""
        return list(self.study.get_trials(deepcopy=False))

    def begun(self) -> list[Any]:
        """Each once, though its run was taken over by another trial."""
        left = self.attribute("left", [])
        return [each for each in self.all() if each.state.name != "WAITING" and each.number not in left]

    def ended(self) -> list[Any]:
        """Those of `begun` that are over."""
        return [each for each in self.begun() if each.state.is_finished()]

    def best(self) -> Any:
        """The one with the best value, or None."""
        valued = [each for each in self.all() if each.user_attrs.get("best") is not None]
        sign = 1 if self.asked.maximise else -1
        return max(valued, key=lambda each: sign * each.user_attrs["best"], default=None)

    def importance(self) -> dict[str, float]:
        """How much the value depends on each parameter, by Optuna's PED-ANOVA; empty where trials do not say it."""
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        # Of too few trials that have a parameter in common it says an error, or warns and calls all of them equal.
        with contextlib.suppress(RuntimeError, ValueError, UserWarning), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return dict(self.optuna.importance.get_param_importances(self.study, evaluator=evaluator))
        return {}

    def seconds(self, *, without: Iterable[int]) -> float:
        """Spent on all but the trials with these numbers, and on a range test."""
        own = set(without)
        spent = sum(float(each.user_attrs.get("seconds", 0.0)) for each in self.all() if each.number not in own)
        return spent + float(self.attribute("range test seconds", 0.0))

    def whole_s(self) -> list[float]:
        """How long each took that ran to its end, rising."""
        done = [each.user_attrs for each in self.all() if each.user_attrs.get("status") == "completed"]
        return sorted(each["seconds"] + each.get("before", 0.0) for each in done)

    def to_json(self) -> list[dict[str, Any]]:
        """As `tune.json` lists them."""
        return [
            {
                "number": each.number,
                "settings": dict(each.params),
                "status": "running" if each.state.name == "RUNNING" else each.user_attrs.get("status", "failed"),
                "value": each.user_attrs.get("best"),
                "seconds": each.user_attrs.get("seconds", 0.0),
            }
            for each in self.all()
            if each.state.name != "WAITING"
        ]

    def take_over(self, signals: Signals) -> None:
        """Trials that a search in this folder left: their runs are waited for, and are resumed."""
        for each in self.begun():
            mine = each.user_attrs.get("folder", str(self.folder) if self.asked.storage is None else "")
            if mine != str(self.folder):
                continue
            if each.state.name == "RUNNING":
                while _is_held(self.folder / RUNS / str(each.user_attrs.get("run", each.number))):
                    signals.check()
                    time.sleep(LOOK_S)
                self.leave(each)
            elif each.user_attrs.get("status") in _TO_RESUME:
                self._once_more(each)

    def leave(self, trial: Any) -> None:
        """Give up a trial that nobody runs any more, and have its run resumed by another one."""
        try:
            self.study._storage.set_trial_user_attr(trial._trial_id, "status", "interrupted")
            self.study.tell(trial.number, state=self.states.FAIL)
        except (ValueError, RuntimeError):
            return  # another search that shares the storage was first
        self._once_more(trial)

    def enqueue_grid(self, parameters: Sequence[Parameter]) -> None:
        """Have every combination tried that was not."""
        tried = [each.system_attrs.get("fixed_params", each.params) for each in self.all()]
        for chosen in search.grid(parameters):
            if chosen not in tried:
                self.study.enqueue_trial(chosen)

    def _once_more(self, trial: Any) -> None:
        if not trial.params:
            return
        kept = trial.user_attrs
        spent = kept.get("seconds", 0.0) + kept.get("before", 0.0)
        self.study.enqueue_trial(trial.params, user_attrs={"run": kept.get("run", str(trial.number)), "before": spent})
        self.study.set_user_attr("left", [*self.attribute("left", []), trial.number])


def _is_held(path: Path) -> bool:
    """Whether a run continues in it."""
    try:
        run_lock.see_that_free(path)
    except ConfigError:
        return True
    return False
