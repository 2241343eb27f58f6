"""The trainer of a finished run without its training: the script is run up to `fit`, and the weights are loaded.

For whatever works on a trained model: export, serving, analysis. The script makes model, data and metrics as it did for
the run; `fit` is never entered, nothing is trained and nothing is written.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from manyhosts.config import overrides
from manyhosts.config.settings import Settings
from manyhosts.control.agent.worker import run_main
from manyhosts.data.data import Data
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.records import provenance
from manyhosts.records.chosen_run import run_directory, snapshot_of
from manyhosts.records.manifest import Facts
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.snapshot.load import Loaded, load, newest_complete
from manyhosts.training.process_session import ProcessSession
from manyhosts.training.run import Run
from manyhosts.training.session import Session
from manyhosts.training.state.registry import put_average, put_one_by_one

_KEPT = ("seed", "precision", "evaluation_batch_size", "micro_batch_size", "batch_size", "batch_size_per_worker")
"""Settings of the run that decide what a model answers, or how the script's data is read."""
_WITHOUT = {"compile": "false", "activation_checkpointing": "none", "audit": "none", "balance": "even"}
"""Settings for training alone, some of which need several workers."""
_SECOND_TRAINER = re.compile(r"trainer-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run whose script has come to `fit`, with the weights of one snapshot in its model."""

    trainer: Session
    """As the script made it: `model` is placed and has the weights; `components`, `loss`, `user_step` and `metrics` are
    ready; `validate`, `test` and `predict` work."""
    directory: RunDirectory
    record: RunRecord
    """What `run.json` holds."""
    snapshot: Path
    """The folder that the weights are from."""
    facts: Facts
    """Where in the run that snapshot is."""
    names: Mapping[str, Any]
    """The names of the script's main module, such as functions of it."""
    named: str = ""
    """Which of the models of an `mh.Run` is `model`; empty: all of them, or that of an `mh.Trainer`."""

    @property
    def model(self) -> nn.Module:
        """In evaluation mode."""
        models = self.trainer.model
        return models[self.named] if self.named and isinstance(models, nn.ModuleDict) else models

    def with_model(self, name: str) -> TrainedRun:
        """The same with one of the models of an `mh.Run`: that of this name, or where it is empty the only one.

        Raises:
            ConfigError: there is none of this name, or there are several and none is named.
        """
        if not isinstance(self.trainer, Run):
            if name:
                raise ConfigError(
                    f"an mh.Trainer has one model, and none is called {name!r}", where="--model", fix="leave it out"
                )
            return self
        known = list(self.trainer.models)
        if name not in known and (name or len(known) > 1):
            raise ConfigError(
                f"there is no model {name!r} in this run" if name else "there are several models in this run",
                where="--model",
                fix=f"name one of {', '.join(known)}",
            )
        return replace(self, named=name or known[0])

    @property
    def data(self) -> Data:
        """The script's `mh.Data`: `train`, `validation`, `test`, `collate`."""
        return self.trainer.data

    @property
    def settings(self) -> Settings:
        """Those that the trainer was made with."""
        return self.trainer.settings

    def take(self, snapshot: Path) -> Facts:
        """Put the weights of another snapshot of this run into the model, in place. All workers call this.

        Raises:
            SnapshotError: it is damaged, or of another model; the model is as it was then.
        """
        return _take(self.trainer, snapshot).facts


@contextmanager
def open_run(
    run_dir: str | Path, *, snapshot: str | Path = "best", strategy: str = "single", weights: bool = True
) -> Iterator[TrainedRun]:
    """Within, the trainer of the run in `run_dir` with the weights of one of its snapshots, in this process.

    `snapshot`: see `snapshot_of`. Any strategy and number of workers may have saved it. `strategy`: how the model is
    placed here; another than `"single"` is for a process that is one of several workers. `weights=False`: the model is
    left as the script makes it. The script runs in the working directory of now. At most one run is open at a time.

    Raises:
        ConfigError: there is no such run or snapshot, or the script does not come to `fit`.
        SnapshotError: the snapshot is damaged, or of another model than the script makes now.
    """
    directory = run_directory(run_dir)
    record = RunRecord.read(directory.run_json)
    chosen = snapshot_of(directory, snapshot)
    script = Path(record.script)
    if not script.exists():
        raise ConfigError(
            f"the script of this run is gone: {script}",
            where=str(directory.run_json),
            fix="put it back: it makes the model that the weights belong to; what mh.launch.run was given has no "
            "script, and its model is kept by trainer.save in it",
        )
    with ProcessSession.separate(), _as_started(record, strategy):
        second = _SECOND_TRAINER.fullmatch(directory.path.name)
        reached = _stop_at_fit(int(second[1]) if second else 1)
        sys.argv = [str(script), *record.arguments]
        module, folder = provenance.module_of(directory.path)
        sys.path[:0] = [folder] if module else []
        try:
            run_main(module or str(script), "module" if module else "script")
        except (_AtFit, SystemExit) as ended:
            if not reached:
                raise _without_fit(script) from ended
        if not reached:
            raise _without_fit(script)
        trainer = reached[0]
        trainer.model.eval()
        loaded = _take(trainer, chosen) if weights else load(chosen)
        trainer.components.weighing.take_up(_counts_by(loaded, directory))
        yield TrainedRun(
            trainer=trainer,
            directory=directory,
            record=record,
            snapshot=chosen,
            facts=loaded.facts,
            names=dict(vars(sys.modules["__main__"])),
        )


class _AtFit(BaseException):
    """Leaves the script; nothing that it catches on its way."""


def _stop_at_fit(number: int) -> list[Session]:
    """Have the first `fit` of the session of now leave the script. The list has its trainer, once it is there."""
    reached: list[Session] = []

    def stop(trainer: Session) -> NoReturn:
        if trainer.number != number:
            raise ConfigError(
                f"the script trains with trainer {trainer.number} before it makes trainer {number}, whose run this is",
                where="Trainer.fit",
                fix="make a script that makes this model alone, and train it in a run of its own",
            )
        reached.append(trainer)
        raise _AtFit

    ProcessSession.current().in_place_of_fit = stop
    return reached


@contextmanager
def _as_started(record: RunRecord, strategy: str) -> Iterator[None]:
    """Within, a script may be run as if it were the command, and a trainer takes what the run was given on its command
    line, but for what is for training alone. Afterwards all of that is as before.
    """
    main, path, argv, original = sys.modules["__main__"], list(sys.path), sys.argv, sys.orig_argv
    before = {name: os.environ[name] for name in [overrides.VARIABLE] if name in os.environ}
    kept = {key: str(value) for key in _KEPT if (value := record.settings.get(key)) is not None}
    os.environ.update(overrides.to_environment({**kept, **_WITHOUT, "virtual_workers": "none", "strategy": strategy}))
    try:
        yield
    finally:
        sys.modules["__main__"], sys.path[:], sys.argv, sys.orig_argv = main, path, argv, original
        os.environ.pop(overrides.VARIABLE, None)
        os.environ.update(before)


def _take(trainer: Session, path: Path) -> Loaded:
    """Put the weights in the snapshot at `path` into the model and the loss: one tensor after another.

    Raises:
        SnapshotError: one worker or more cannot read it; the model is as it was then, on all.
        RuntimeError: it went away meanwhile; the model is neither the one nor the other.
    """
    components, loaded, error = trainer.components, None, None
    trainer.speaks = False  # its weights are those of a snapshot, of which the caller says which
    try:
        loaded = load(path, components.fits())
    except SnapshotError as found:
        error = found
    if components.world.any(error is not None) or loaded is None:
        raise error or SnapshotError("another worker cannot read it", where=str(path), fix="see what that one says")
    try:
        put_one_by_one(components, loaded.stored)
        put_average(components, loaded.stored, path)
    except (SnapshotError, OSError) as cause:
        raise RuntimeError(f"the snapshot changed while it was read: {cause}") from cause
    return loaded


def _counts_by(loaded: Loaded, directory: RunDirectory) -> str:
    """What the run has found its loss to be a mean over; a best model does not say it, and the newest snapshot does."""
    run = loaded.state.get("run", {})
    if not run and (newest := newest_complete(directory.snapshots, content=False)) is not None:
        run = load(newest.path).state.get("run", {})
    return str(run.get("counts_by", ""))


def _without_fit(script: Path) -> ConfigError:
    return ConfigError(
        "the script ends without calling Trainer.fit, so there is no model to take",
        where=str(script),
        fix="type this in the folder where the run was started: its script runs again, with the run's arguments",
    )
