"""`manyhosts prove`: tries the promises on a script."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from manyhosts.cli.progress import Progress
from manyhosts.cli.where import numbers
from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import scripts
from manyhosts.listeners.paint import paint
from manyhosts.table import nearest

_INTERRUPTED = 130
_WIDTH = 79
_SOME = 2
"""The least number of steps: one before a kill and one after it."""


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--workers", default="1,2,3", show_default=True, metavar="A,B,C", help="Numbers of workers to compare.")
@click.option("--steps", type=int, default=20, show_default=True, metavar="N", help="Optimizer steps of a trial.")
@click.option(
    "--only",
    "promises",
    multiple=True,
    metavar="PROMISE",
    help="Try this promise alone; may be given more than once: workers, micro, resume, samples, ranks.",
)
@click.option("--set", "settings", multiple=True, metavar="K=V", help="A setting of mh.Trainer or mh.Data, overridden.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def prove(script: str, workers: str, steps: int, as_json: bool, dry_run: bool, **words: Any) -> int:
    """Try the promises on SCRIPT: the same answer on 1, 2 and 3 workers, in smaller pieces, and after a resume.

    SCRIPT is run as it is, several times, for a few steps, in a temporary directory; everything after it is its own.
    Where a promise does not hold you get the first step and tensor that differ, by how much, and why.

    Exit codes: 0 every promise holds, 1 one does not, or the script failed, 2 the request was wrong.
    """
    from manyhosts.cli.prove_screen import print_proof
    from manyhosts.prove import prove as proving
    from manyhosts.prove.trials import Asked, planned
    from manyhosts.trials.runs import Interrupted

    scripts.check(script, "script")
    if steps < _SOME:
        raise ConfigError(f"--steps is {steps}", where="--steps", fix=f"give {_SOME} or more")
    asked = Asked(
        script=script,
        arguments=tuple(words["arguments"]),
        folder=Path.cwd(),
        workers=numbers(workers, "--workers"),
        steps=steps,
        promises=_known(words["promises"]),
        settings=overrides.parse(words["settings"]),
    )
    if dry_run:
        for setup in planned(asked, proving.names(asked)):
            print(f"{setup}, {steps} steps: {script}")
        return 0
    counted = itertools.count(1)
    try:
        with contextlib.closing(Progress(sys.stderr, silent=as_json)) as progress:
            proof = proving.prove(
                asked, lambda trial: progress.show(paint(f"trial {next(counted)}: {trial}"[:_WIDTH], "dim"))
            )
    except Interrupted:
        return _INTERRUPTED
    if as_json:
        print(json.dumps(proof.to_json(), indent=1))
    else:
        print_proof(proof, sys.stdout)
    return 0 if proof.holds else 1


def _known(promises: Sequence[str]) -> tuple[str, ...]:
    """The names of promises, each checked.

    Raises:
        ConfigError: there is no such promise.
    """
    from manyhosts.prove.promises import PROMISES

    for name in promises:
        if name not in PROMISES:
            fix = f"{nearest(name, PROMISES)}known: {', '.join(PROMISES)}"
            raise ConfigError(f"there is no promise named {name!r}", where="--only", fix=fix)
    return tuple(promises)
