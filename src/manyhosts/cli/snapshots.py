"""`manyhosts snapshots`: what a run can be resumed from, and whether it is complete."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from manyhosts.cli.columns import print_columns
from manyhosts.config.snapshots import is_address
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.launchers.named_runs import LAST, directory_or_store
from manyhosts.snapshot import condition
from manyhosts.snapshot.condition import Condition
from manyhosts.snapshot.location import Folder, SnapshotLocation
from manyhosts.snapshot.objects.client import PROBE, Client, StoreTrouble
from manyhosts.snapshot.objects.location import ObjectStoreLocation
from manyhosts.units import bytes_in_words, seconds_in_words

_HEADS = ("snapshot", "step", "epoch", "size", "age", "condition")
_folder = click.argument("folder", metavar="RUN", callback=lambda *given: directory_or_store(given[-1]))
_one = click.argument("name", default="", metavar="[SNAPSHOT]")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_trace = click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")


class _OfRun(click.Group):
    """Its verbs take a run; so `snapshots RUN`, without one, is answered with what lists them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word not in self.commands and (word == LAST or "/" in word or Path(word).is_dir()):
            what = f"{word} is what to look at, and what to do with it is missing"
            raise ConfigError(what, fix=f"to list its snapshots: manyhosts snapshots ls {shlex.quote(word)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_OfRun)
def snapshots() -> None:
    """What a run can be resumed from, and whether it is complete.

    RUN is a run directory, its folder of snapshots, one snapshot, the handle that `run --detach` printed, `last`, or
    the address of an object store that `snapshots.to` names, such as s3://bucket/path.
    """


@snapshots.command()
@_folder
@click.option("--quick", is_flag=True, help="Look at sizes only: finds no flipped bit, but takes no time.")
@_as_json
@_trace
def ls(folder: str, quick: bool, as_json: bool, trace: bool) -> int:
    """List the snapshots of RUN, the newest first, each with its condition."""
    with _reached(folder) as location:
        found = condition.look(location, content=not quick)
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    elif found:
        print_columns(_HEADS, [_row(one, quick=quick) for one in found], numbers=_HEADS[1:5])
    else:
        print(f"There are no snapshots in {folder}.")
    return 0


@snapshots.command()
@_folder
@_one
@_as_json
@_trace
def show(folder: str, name: str, as_json: bool, trace: bool) -> int:
    """Say what is in SNAPSHOT: a name, a step, or `best`; the newest complete one if none is named."""
    with _reached(folder) as location:
        chosen = condition.look_at_one(location, name)
    text = condition.describe(chosen)  # which refuses one that is damaged
    print(chosen.manifest.to_text() if as_json and chosen.manifest else text)
    return 0


@snapshots.command()
@_folder
@_as_json
@_trace
def verify(folder: str, as_json: bool, trace: bool) -> int:
    """Read every byte of every snapshot of RUN. Exit code 0: all are complete; 2: some are not, and each is named."""
    with _reached(folder) as location:
        found = condition.look(location)
    if not found:
        raise SnapshotError("there are no snapshots here", where=folder, fix="name a run directory that has some")
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    else:
        for one in found:
            print(f"{one.name}: {one.reason or 'complete'}")
    return 2 if any(one.kind in ("damaged", "newer") for one in found) else 0


@snapshots.command()
@_folder
@click.option("--keep", type=int, required=True, metavar="N", help="How many of the newest complete ones stay.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@_as_json
@_trace
def prune(folder: str, keep: int, dry_run: bool, as_json: bool, trace: bool) -> int:
    """Remove all but the newest N complete snapshots, and what is half-written or damaged. `best` stays."""
    if keep < 1:
        raise ConfigError(
            f"--keep is {keep}, but the last complete snapshot is never removed", where="--keep", fix="give 1 or more"
        )
    with _reached(folder) as location:
        gone = condition.superfluous(condition.look(location), keep=keep)
        if not dry_run:
            condition.remove(location, gone)
    if as_json:
        print(json.dumps([one.to_json() for one in gone], indent=1))
        return 0
    verb = "Would remove" if dry_run else "Removed"
    for one in gone:
        print(f"{verb} {one.name} ({one.reason or f'older than the newest {keep}'}, {bytes_in_words(one.bytes)})")
    if not gone:
        print("There is nothing to remove.")
    return 0


@contextmanager
def _reached(place: str) -> Iterator[SnapshotLocation]:
    """What lies where a person has named: a folder, or the address of an object store."""
    if not is_address(place) and not (Path(place) / PROBE).exists():
        yield Folder(Path(place))
        return
    try:
        yield ObjectStoreLocation(Client(place))
    except StoreTrouble as trouble:
        raise SnapshotError(
            f"the store does not answer: {trouble.strerror}", where=place, fix="see that this machine reaches it"
        ) from trouble


def _row(one: Condition, *, quick: bool) -> Sequence[str]:
    facts = one.manifest.facts if one.manifest else None
    step = facts.step if facts else one.found.step
    return (
        one.name,
        str(step) if step >= 0 else "",
        str(facts.epoch) if facts else "",
        bytes_in_words(one.bytes),
        seconds_in_words(max(0.0, time.time() - one.manifest.time)) if one.manifest else "",
        one.reason or ("sizes right" if quick else "complete"),
    )
