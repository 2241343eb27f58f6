"""Loggers for Weights & Biases and MLflow. Neither talks to a network unless asked; each takes its own package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from manyhosts.errors import ConfigError
from manyhosts.listeners.loggers import Logger, Row, path_of

_WELL = ("completed", "stopped early")
_MOST = 1000
"""Values that MLflow takes in one call."""


class WandbLogger(Logger):
    """Writes a run of Weights & Biases, in files that `wandb sync` sends later, or with `mode="online"` at once.

    With a `name` a run that is resumed is continued under it; steps that are made again are drawn again.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        folder: str | Path = ".",
    ) -> None:
        """`folder`: where the folder `wandb` with the files goes.

        Raises:
            ConfigError: wandb is not installed, there is no such mode, or `folder` is no path.
        """
        super().__init__()
        _see_that_there_is("wandb", "mh.WandbLogger")
        if mode not in ("offline", "online"):
            raise ConfigError(f"mode is {mode!r}", where="mh.WandbLogger(mode=…)", fix='use "offline" or "online"')
        self.project, self.name, self.mode = project, name, mode
        self.folder = path_of(folder, where="mh.WandbLogger(folder=…)")
        self._run: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        """Log `rows`, drawn against `step`."""
        if self._run is None:
            self._run = self._begin()
        for row in rows:
            self._run.log({**row.values, "step": row.step})

    def close(self) -> None:
        """Write what is left, and end the run."""
        super().close()
        if self._run is not None:
            self._run.finish(exit_code=0 if self.status in _WELL else 1)
            self._run = None

    def _begin(self) -> Any:
        wandb: Any = importlib.import_module("wandb")
        self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self.project,
            name=self.name,
            id=self.name,
            resume="allow" if self.name else None,
            mode=self.mode,
            dir=str(self.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("*", step_metric="step")
        return run


class MLflowLogger(Logger):
    """Writes a run of MLflow's into a database, in a file of SQLite's unless asked otherwise.

    With a `name` a run that is resumed is continued under it; steps that are made again are drawn again.
    """

    every_s = 5.0

    def __init__(self, experiment: str, *, name: str | None = None, uri: str = "sqlite:///mlflow.db") -> None:
        """`uri`: of the tracking store, such as `http://host:5000`.

        Raises:
            ConfigError: mlflow is not installed.
        """
        super().__init__()
        _see_that_there_is("mlflow", "mh.MLflowLogger")
        self.experiment, self.name, self.uri = experiment, name, uri
        self._client: Any = None
        self._run_id = ""
        self._begins_at = 0

    def begin_at(self, step: int) -> None:
        """A run that begins is one of its own; one that is resumed continues under its name."""
        self._begins_at = step

    def write(self, rows: Sequence[Row]) -> None:
        """Log `rows`."""
        entities: Any = importlib.import_module("mlflow.entities")
        if self._client is None:
            self._begin()
        values = [
            entities.Metric(name, value, int(1000 * row.time), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(values), _MOST):
            self._client.log_batch(self._run_id, metrics=values[first : first + _MOST])

    def close(self) -> None:
        """Write what is left, and end the run."""
        super().close()
        if self._client is not None:
            ended = "FINISHED" if self.status in _WELL else "KILLED" if self.status == "interrupted" else "FAILED"
            self._client.set_terminated(self._run_id, status=ended)
            self._client = None

    def _begin(self) -> None:
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient(self.uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        named = f"attributes.run_name = '{self.name}'"
        is_new = self._begins_at == 0  # another run may have had the name
        earlier = client.search_runs([experiment], named, max_results=1) if self.name and not is_new else []
        run = earlier[0] if earlier else client.create_run(experiment, run_name=self.name)
        self._run_id, self._client = run.info.run_id, client
        client.update_run(self._run_id, status="RUNNING")


def _see_that_there_is(package: str, who: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{who} takes {package}, which is not installed", where=who, fix=f"pip install {package}")
