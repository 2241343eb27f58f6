"""`manyhosts status|logs|cancel HANDLE`: jobs that go on without this terminal."""

from __future__ import annotations

import json

import click

from manyhosts.launchers import handles

_TRACE = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_TRACE
@click.argument("handle")
def status(handle: str, as_json: bool, trace: bool) -> int:
    """Say how the job HANDLE stands: waiting, running, done, failed, cancelled or unknown."""
    jobs, name = handles.of_handle(handle)
    found = jobs.status(name)
    if as_json:
        print(json.dumps({"handle": handle, **found.to_json()}))
        return 0
    print(" · ".join(word for word in (found.state, found.reason, found.hosts, found.log) if word))
    return 0


@click.command()
@click.option("--follow", is_flag=True, help="Go on until the job is over.")
@_TRACE
@click.argument("handle")
def logs(handle: str, follow: bool, trace: bool) -> int:
    """Print what the job HANDLE has printed."""
    jobs, name = handles.of_handle(handle)
    for line in jobs.logs(name, follow=follow):
        print(line, flush=True)
    return 0


@click.command()
@_TRACE
@click.argument("handle")
def cancel(handle: str, trace: bool) -> int:
    """End the job HANDLE. A job that is over, or was cancelled before, is left as it is."""
    jobs, name = handles.of_handle(handle)
    jobs.cancel(name)
    return 0
