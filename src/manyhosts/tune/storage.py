"""Where Optuna keeps a search: SQLite beside the runs, a database by URL, or a journal file on a shared disk."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.launchers import extras

SAMPLERS = ("tpe", "cmaes", "random", "grid")
PRUNERS = ("median", "hyperband", "none")
_SILENT_S = 60.0
"""A trial whose search has shown no sign of life for so long, by the clock here, is nobody's any more."""


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
    that rises; whoever waits compares numbers, for the clocks of two machines differ.
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
