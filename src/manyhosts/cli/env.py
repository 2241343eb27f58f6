"""`manyhosts env`: what hosts have installed, written down; and recipes of containers that have the same."""

from __future__ import annotations

from pathlib import Path

import click

from manyhosts.cli.doctor import examined, places
from manyhosts.cli.where import Where
from manyhosts.errors import LaunchError

_TRACE = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")


@click.group()
def env() -> None:
    """Record what hosts have installed, and compare hosts with that record."""


@env.command()
@places
@click.option("--output", default="manyhosts.lock", show_default=True, metavar="FILE", help="Where to write it.")
@_TRACE
def lock(output: str, trace: bool, **words: str | None) -> int:
    """Write down what hosts have: Python, every package, cores, GPUs.

    It takes the words that `run` takes to say where. From then on `manyhosts doctor` compares hosts with
    manyhosts.lock of the working directory: another version is an error, other hardware a warning.
    """
    from manyhosts.doctor import lock as locks

    found = examined(Where(**words))  # type: ignore[arg-type]  # click's words by name
    if isinstance(found, int):
        return found
    lost = [finding for finding in found.findings if finding.check == "reach"]
    if lost or not found.hosts:
        what = lost[0].what if lost else "no host was reached"
        raise LaunchError(what, where="--hosts", fix="mend that first: a lock holds all hosts that are named")
    locks.write(Path(output), found.hosts)
    print(f"{output}: {', '.join(host['name'] for host in found.hosts)}")
    return 0


@env.command()
@click.option("--output", default=".", metavar="FOLDER", help="Where to write it.  [default: here]")
@_TRACE
def container(output: str, trace: bool) -> int:
    """Write a Dockerfile, and the versions it installs, of what manyhosts.lock says."""
    from manyhosts.doctor import lock as locks

    for path in locks.write_recipe(Path(output), locks.read(Path(locks.NAME))):
        print(path)
    return 0
