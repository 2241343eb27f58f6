"""Handles: words that name a job from any terminal, `slurm://4711` or `local:///home/me/runs/first`."""

from __future__ import annotations

from typing import cast

from manyhosts.errors import ConfigError
from manyhosts.launchers.background import Background
from manyhosts.launchers.detached import Jobs
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.launcher import LAUNCHERS


def jobs_of(engine: Engine) -> Jobs:
    """Who keeps the jobs of `engine`: itself, or where it keeps none a process on this machine."""
    return cast(Jobs, engine) if isinstance(engine, Jobs) else Background(engine)


def of_handle(handle: str) -> tuple[Jobs, str]:
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
    return jobs_of(LAUNCHERS.load(kind)()), name
