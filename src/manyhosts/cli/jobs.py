"""`manyhosts status|logs|cancel RUN`: runs here or elsewhere, asked after from any terminal."""

from __future__ import annotations

import json

import click

from manyhosts.launchers import named_runs
from manyhosts.launchers.detached import Status

_TRACE = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
_ENDED = ("done", "failed", "cancelled")
_RUN = click.argument("run", metavar=named_runs.METAVAR)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_TRACE
@_RUN
def status(run: str, as_json: bool, trace: bool) -> int:
    """Show the state of RUN: waiting, running, done, failed, cancelled or unknown.

    RUN is a run directory, the handle that `run --detach` printed, or `last`.
    """
    chosen = named_runs.named(run)
    jobs, name = chosen.jobs
    found = jobs.status(name)
    if as_json:
        print(
            json.dumps(
                {"handle": chosen.handle, "directory": chosen.directory and str(chosen.directory), **found.to_json()}
            )
        )
        return 0
    print(_line(found))
    return 0


def _line(found: Status) -> str:
    return " · ".join(word for word in (found.state, found.reason, found.hosts, found.log) if word)


@click.command()
@click.option("--follow", is_flag=True, help="Continue until the job is over.")
@_TRACE
@_RUN
def logs(run: str, follow: bool, trace: bool) -> int:
    """Print what RUN has printed.

    RUN is a run directory, the handle that `run --detach` printed, or `last`.
    """
    jobs, name = named_runs.named(run).jobs
    for line in jobs.logs(name, follow=follow):
        print(line, flush=True)
    return 0


@click.command()
@_TRACE
@_RUN
def cancel(run: str, trace: bool) -> int:
    """End RUN as Ctrl-C does, and show its state. One that has ended before is left as it is.

    RUN is a run directory, the handle that `run --detach` printed, or `last`.
    """
    jobs, name = named_runs.named(run).jobs
    before = jobs.status(name)
    if before.state in _ENDED:
        print(f"it has ended before: {_line(before)}")
        return 0
    jobs.cancel(name)
    print(_line(jobs.status(name)))
    return 0
