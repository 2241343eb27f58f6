"""Start a script on several workers from Python; `mh.launch.run`, which takes functions too, is built on this."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.launchers import scripts
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.launchers.named_runs import keep_handle
from manyhosts.records.run_directory import claimed, drop_if_empty


def run(  # noqa: PLR0913  # what `manyhosts run` takes
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    workers: int = 1,
    hosts: Sequence[str] = (),
    nodes: int = 1,
    restarts: int = 0,
    hang_timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    display: Display | None = None,
) -> int:
    """Run `script` on `workers` workers of each of `hosts`, or of `nodes` nodes here, as `manyhosts run` does.

    `hang_timeout_s`: how long workers may get no further. 0: for ever. None: 600 s where they use mh.Trainer.

    Returns:
        0, or 130 if it was interrupted.

    Raises:
        ConfigError: there is no such script, or a number makes no sense.
        ManyhostsError: workers failed; the error is that of the one that failed first.
    """
    program = os.fspath(script)
    scripts.check(program, "script")
    job = Job(
        program=program,
        arguments=tuple(arguments),
        folder=Path.cwd(),
        run_dir=Path(run_dir).absolute() if run_dir is not None else claimed(new_run_dir(program)),
        nodes=len(hosts) or nodes,
        hosts=tuple(hosts),
        workers_per_node=workers,
        restarts=restarts,
        hang_timeout_s=hang_timeout_s,
        environment=dict(environment or {}),
        preload=scripts.preload(program, "script"),
        uses_manyhosts=scripts.uses_manyhosts(program, "script"),
    )
    try:
        scripts.check_run_dir(job)
        keep_handle(job.run_dir, "")
        return LAUNCHERS.load("ssh" if hosts else "local")().run(job, display)
    finally:
        if run_dir is None:
            drop_if_empty(job.run_dir)


def new_run_dir(program: str) -> Path:
    """`runs/SCRIPT-TIME` under the working directory, which `run_directory.claimed` makes."""
    stem = Path(program).stem.rpartition(".")[2] or "run"
    return Path.cwd() / "runs" / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
