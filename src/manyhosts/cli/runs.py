"""`manyhosts runs`: what runs there are, their state, what they have cost, and the best that came out."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from manyhosts.cli.columns import print_columns
from manyhosts.errors import ConfigError
from manyhosts.listeners.figures import figures
from manyhosts.units import seconds_in_words

if TYPE_CHECKING:
    from manyhosts.report.run_list import ListedRun

_HEADS = ("run", "state", "workers", "begun", "steps", "trained for", "worker-hours", "best")
_NUMBERS = frozenset({"workers", "steps", "trained for", "worker-hours"})


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("folder", default="runs", metavar="[FOLDER]")
def runs(folder: str, as_json: bool, trace: bool) -> int:
    """List the runs in FOLDER (default: runs), the newest first: state, time spent, best validation.

    Every verb that takes a RUN takes its directory, the handle that `run --detach` printed, or `last`: the first line
    of this list. The runs of a study are in its folder points.
    """
    from manyhosts.report.run_list import listed

    place = Path(folder).absolute()
    if not place.is_dir():
        what = "this is a file, and no folder of runs" if place.exists() else "there is no such folder"
        raise ConfigError(what, where=str(place), fix="start a run, or name the folder that has some")
    if (place / "run.json").exists():
        run, others = shlex.quote(folder), shlex.quote(str(Path(folder).parent))
        fix = f"to see it: manyhosts status {run}; runs next to it: manyhosts runs {others}"
        raise ConfigError("this is a run itself, and no folder of runs", where=str(place), fix=fix)
    found = listed(place)
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=1))
    elif found:
        print_columns(_HEADS, [_row(run) for run in found], numbers=_NUMBERS)
    else:
        print(f"There are no runs in {folder}.")
    return 0


def _row(run: ListedRun) -> list[str]:
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)) if run.started else ""
    best = f"{figures({run.best['metric']: run.best['value']}, '')} at step {run.best['step']:,}" if run.best else ""
    return [
        os.path.relpath(run.directory),
        run.state,
        str(run.workers or ""),
        begun,
        f"{run.steps:,}",
        seconds_in_words(run.seconds),
        f"{run.worker_seconds / 3600:.2g}",
        best,
    ]
