"""The trials of a search as Optuna's storage has them, of every process that ran some; and one that is under way.

The storage is SQLite next to the runs, a database by URL, or a journal file on a shared disk. Trials that were left are
run again.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.launchers import extras
from manyhosts.records import run_lock
from manyhosts.records.atomic_file import read_json
from manyhosts.records.follower import Follower
from manyhosts.trials.runs import LOOK_S, Place, Signals, Trial
from manyhosts.tune import search
from manyhosts.tune.asked import Asked, Slot
from manyhosts.tune.search import Parameter

RUNS = "trials"
_TO_RESUME = ("interrupted", "stopped")
SAMPLERS = ("tpe", "cmaes", "random", "grid")
PRUNERS = ("median", "hyperband", "none")
_SILENT_S = 60.0
"""A trial whose search has shown no sign of life for so long, by the clock here, is no one's any more."""


def library() -> Any:
    """Optuna.

    Raises:
        LaunchError: it is not installed.
    """
    found = extras.load("optuna", what="Optuna, which chooses what is tried,", package="optuna")
    found.logging.set_verbosity(found.logging.ERROR)
    warnings.filterwarnings("ignore", category=found.exceptions.ExperimentalWarning)
    return found


def open_study(
    folder: Path, storage: str | None, name: str, *, maximise: bool, sampler: str, pruner: str, seed: int
) -> Any:
    """The Optuna study `name`, new or as it was left.

    `storage`: an SQLAlchemy URL, or `journal:FILE`; None: `optuna.db` in `folder`.

    Raises:
        ConfigError: it cannot be opened, or holds a search in the other direction.
        LaunchError: Optuna, or the sampler's package, is not installed.
    """
    optuna = library()
    direction = "maximize" if maximise else "minimize"
    try:
        study = optuna.create_study(
            storage=_opened(optuna, folder, storage), study_name=name, direction=direction, load_if_exists=True
        )
    except Exception as cause:  # SQLAlchemy's, the database driver's, the disk's
        fix = "give journal:FILE, or a URL as in sqlite:///FILE or postgresql://USER@HOST/NAME"
        what = f"the storage cannot be opened: {str(cause).splitlines()[0]}"
        raise ConfigError(what, where="--storage", fix=fix) from cause
    if study.direction.name != direction.upper():
        fix = "give another --study or --run-dir"
        raise ConfigError(f"the search {name!r} is to {study.direction.name.lower()}", where="--metric", fix=fix)
    # A search that continues must not draw again what it has drawn.
    study.sampler = _sampler(optuna, sampler, seed + len(study.get_trials(deepcopy=False)))
    study.pruner = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
    }[pruner]()
    return study


def _opened(optuna: Any, folder: Path, storage: str | None) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    if storage is not None and storage.startswith("journal:"):
        backend = optuna.storages.journal.JournalFileBackend(storage.removeprefix("journal:"))
        return optuna.storages.JournalStorage(backend)
    return optuna.storages.RDBStorage(storage or f"sqlite:///{folder.absolute() / 'optuna.db'}")


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=4)
    if name == "cmaes":
        extras.load("cmaes", what="cmaes, which the sampler CMA-ES needs,", package="cmaes")
        return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=seed)


class Heartbeats:
    """Which trials of a storage that several searches share are under way, and which were left by a search that died.

    Optuna has heartbeats in databases alone, and only where it runs the trials itself. Here each search writes a number
    that rises; waiting processes compare numbers, for the clocks of two machines differ.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, float]] = {}

    def is_dead(self, trial: Any) -> bool:
        """Whether its number has not changed for a minute, by the clock of this process."""
        beat, now = trial.user_attrs.get("heartbeat"), time.monotonic()
        before = self._seen.get(trial.number)
        if before is None or before[0] != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - before[1] > _SILENT_S


class KeptTrials:
    """What is known of every trial, also after the process that began it was killed."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        """Open the storage.

        Raises:
            ConfigError: it cannot be opened, or holds another search.
            LaunchError: Optuna is not installed.
        """
        self.asked, self.folder = asked, folder
        self.optuna = library()
        self.states = self.optuna.trial.TrialState
        self.study = open_study(
            folder, asked.storage, asked.name, maximise=asked.maximise, sampler=asked.sampler, pruner=asked.pruner,
            seed=asked.seed,
        )  # fmt: skip
        now = json.loads(json.dumps(asked.in_common()))
        before = dict(self.attribute("asked", now))
        before.setdefault("environment", now["environment"])  # searches of before have not kept it
        if differs := [key for key in now if before.get(key) != now[key]]:
            raise ConfigError(
                f"this search was begun with another {differs[0].replace('_sha256', ' (its text has changed)')}: its "
                "trials cannot be compared",
                where=str(folder),
                fix="give another --run-dir (and --study, in a storage that is shared), or ask as before",
            )
        self.study.set_user_attr("asked", now)

    def attribute(self, name: str, otherwise: Any) -> Any:
        """What is kept under `name` for the entire search."""
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
        """The one with the best value, or None. One that failed has none that counts."""
        ended = [each for each in self.all() if each.user_attrs.get("status") != "failed"]
        valued = [each for each in ended if each.user_attrs.get("best") is not None]
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

    def complete_s(self) -> list[float]:
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
                while run_lock.goes_on(self.folder / RUNS / str(each.user_attrs.get("run", each.number))):
                    signals.check()
                    time.sleep(LOOK_S)
                self.leave(each)
            elif each.user_attrs.get("status") in _TO_RESUME:
                self._once_more(each)

    def leave(self, trial: Any) -> None:
        """Give up a trial that no one runs any more, and have its run resumed by another one."""
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


@dataclass(slots=True)
class UnderWay:
    """A trial whose run is in progress."""

    trial: Any
    slot: Slot
    place: Place
    run: Trial
    follower: Follower
    before: float
    """Seconds that it had taken when it was interrupted."""
    seen: dict[int, float] = field(default_factory=dict)
    """Optimizer step of each validation → value."""
    steps: tuple[int, int] = (0, 0)
    """How far it is, and how far it goes; 0: not known."""
    asked_to_end: str = ""
    """`pruned` or `stopped`."""
    ended_since: float = 0.0
    begun: float | None = None
    """When its workers were there, where a scheduler starts them."""

    def seconds(self, *, waits: bool) -> float:
        """What it has cost so far, this time."""
        now = time.monotonic()
        return now - (self.begun or now) if waits else self.run.seconds

    def was_stopped(self) -> bool:
        """Whether a signal ended it, rather than a fault of its own: the run itself says so."""
        with contextlib.suppress(ConfigError):
            return str(read_json(self.place.run.summary).get("status")) == "interrupted"
        return self.run.process.returncode in (130, 143, -2, -15)
