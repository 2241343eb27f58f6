"""`manyhosts reproduce`: runs a run again from its record, and compares the weights bit for bit."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import METAVAR, directory_of

if TYPE_CHECKING:
    from manyhosts.reproduce.differences import Difference

_DIFFERENT = 1
_MANYHOSTS = (sys.executable, "-P", "-m", "manyhosts.cli.main")


@click.command()
@click.option("--here", is_flag=True, help="With the code as it is now, where it was, in place of a fresh checkout.")
@click.option("--dry-run", is_flag=True, help="Say what differs and what would be run, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; what the run says goes to stderr.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("run", metavar=METAVAR)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
def reproduce(run: str, here: bool, dry_run: bool, as_json: bool, trace: bool, options: tuple[str, ...]) -> int:
    """Run RUN again from its record, and see whether the same weights come out, bit for bit.

    The code is put into a fresh folder: its commit, with the changes that were not committed. Settings, arguments,
    seed and workers are those of the run; OPTIONS of `manyhosts run` after -- replace the workers, as in
    `-- --hosts a,b`. What differs is named: code, data, versions, hardware.

    Exit codes: 0 the same weights, 1 other weights or the script failed, 2 the request was wrong.
    """
    from manyhosts.reproduce.again import Again, see

    _check(options)
    again = Again(directory_of(run), options=options)
    with again.code(here=here) as root:
        say = _to_stderr if as_json else _to_stdout
        say(f"code: {'as it is now in ' + again.found.code.root if here else see(again.found)}")
        for note in again.notes():
            say(f"note: {note}")
        before = again.differences_before(root)
        _show(before, say)
        if dry_run:
            say(again.command(root))
            if as_json:
                reported = [{"kind": each.kind, "what": each.what} for each in before]
                print(json.dumps({"run": str(again.run_dir), "then": again.then, "differences": reported}))
            return 0
        found = again(root, _MANYHOSTS, quiet=as_json)
        _show([each for each in found.differences if each not in before], say)
    if as_json:
        print(json.dumps({**asdict(found), "is_equal": found.is_equal}))
    elif found.code == 0:
        print(_verdict(found.is_equal, found.then, found.now, bool(found.differences)))
        print(found.again)
    return found.code or (0 if found.is_equal else _DIFFERENT)


_PLACES = ("--workers", "--workers-per-node", "--nodes", "--hosts", "--hostfile", "--on", "--cluster")
_OTHERS = (
    *("-o", "--ports", "--no-sync", "--bring", "--no-check", "--encrypt", "--head-timeout", "--hang-timeout"),
    *("--restarts", "--show", "--no-prefix", "--log-size", "--env", "--profile", "--metrics-port", "--warm"),
)
"""Options of `run` that change nothing of what is recorded; values of variables are not."""


def _check(options: Sequence[str]) -> None:
    """See that `options` say where the run is made again, and change nothing else of it.

    Raises:
        ConfigError: they do not.
    """
    names = [word.partition("=")[0] for word in options if word.startswith("-")]
    if other := [name for name in names if name not in (*_PLACES, *_OTHERS)]:
        raise ConfigError(
            f"{other[0]} would change more than where the run is made again",
            where=f"-- {shlex.join(options)}",
            fix=f"leave it out; after -- may come: {', '.join((*_PLACES, *_OTHERS))}",
        )
    if options and not set(names) & set(_PLACES):
        fix = "say it too, as in -- --workers 2"
        raise ConfigError("it is not said where the workers are", where=f"-- {shlex.join(options)}", fix=fix)


def _verdict(is_equal: bool, then: str, now: str, differs: bool) -> str:
    if is_equal:
        return f"the same weights, bit for bit: sha256 {now}"
    why = "see what differs above" if differs else "nothing on record differs: something draws without a seed"
    return f"other weights: sha256 {now or 'unknown'}, and was {then}; {why}"


def _show(found: Iterable[Difference], say: Callable[[str], None]) -> None:
    for each in found:
        say(f"{each.kind} differs: {each.what}")


def _to_stdout(text: str) -> None:
    print(text, flush=True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
