"""Handles: words that name a job from any terminal, `slurm://4711` or `local:///home/me/runs/first`."""

from __future__ import annotations

from typing import cast

from manyhosts.errors import ConfigError
from manyhosts.launchers.background import Background
from manyhosts.launchers.detached import Engine
from manyhosts.launchers.launcher import LAUNCHERS, Launcher


def engine(launcher: Launcher, target: str) -> Engine:
    """Who keeps the jobs of `launcher`: its engine, or where that keeps none a process on this machine."""
    return cast(Engine, launcher) if isinstance(launcher, Engine) else Background(target, launcher)


def of_handle(handle: str) -> tuple[Engine, str]:
    """The engine of a handle such as `slurm://4711`, and the job's name there.

    Raises:
        ConfigError: this is no handle.
    """
    kind, separator, name = handle.partition("://")
    if not separator or not name or kind not in LAUNCHERS.names():
        raise ConfigError(
            f"{handle!r} is no handle of a job",
            where="HANDLE",
            fix="give what `manyhosts run --detach` printed, such as slurm://4711",
        )
    return engine(LAUNCHERS.load(kind)(), kind), name
