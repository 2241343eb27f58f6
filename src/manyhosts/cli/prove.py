"""`manyhosts prove`: tests the promises on a script, and shows one line per promise, and why one does not hold."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from manyhosts.cli.progress import Progress
from manyhosts.cli.run_options import see_arguments
from manyhosts.cli.where import numbers
from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import scripts
from manyhosts.listeners.paint import Colour, paint, writable
from manyhosts.table import nearest
from manyhosts.units import seconds_in_words

if TYPE_CHECKING:
    from manyhosts.prove.promises import Verdict
    from manyhosts.prove.prove import Proof


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
    from manyhosts.prove import prove as proving
    from manyhosts.prove.trials import Asked, planned
    from manyhosts.trials.runs import Interrupted

    scripts.check(script, "script")
    see_arguments(script, words["arguments"])
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


_COLUMNS = 80
_SIGNS: dict[str, tuple[str, Colour]] = {
    "holds": ("✓", "green"), "fails": ("✗", "red"), "not judged": ("-", "yellow")
}  # fmt: skip
_PLAIN = {"✓": "ok  ", "✗": "FAIL"}


def print_proof(proof: Proof, stream: TextIO) -> None:
    """Print everything, in colours on a terminal."""
    from manyhosts.prove.promises import PROMISES

    colour = stream.isatty()
    numbers = [str(count) for count in proof.asked.workers]
    counted = f"{', '.join(numbers[:-1])} and {numbers[-1]}" if numbers[1:] else numbers[0]
    lines = [f"{proof.asked.script}: {proof.trials} trials of {proof.asked.steps} steps, "
             f"{seconds_in_words(proof.seconds)}", ""]  # fmt: skip
    lines += busy(proof, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1)
    if lost := [verdict.promise for verdict in proof.verdicts if verdict.promise in proof.given_up]:
        asked = ", ".join(verdict.promise for verdict in proof.verdicts)
        text = f"asked for: {asked}; of these the script's strategy does not keep: {', '.join(lost)}"
        lines += [*textwrap.wrap(text, _WIDTH - 2, initial_indent=" ", subsequent_indent=" "), ""]
    for verdict in proof.verdicts:
        lines += _line(verdict, PROMISES[verdict.promise][0].format(workers=counted), colour=colour)
    for verdict in proof.verdicts:
        if verdict.status == "fails":
            lines += _why(verdict, colour=colour)
    text = "\n".join(lines) + "\n"
    encoding = stream.encoding
    if writable("✓", encoding) != "✓":
        for sign, word in _PLAIN.items():
            text = text.replace(sign, word)
    stream.write(writable(text, encoding))


def busy(proof: Proof, load: float, cores: int) -> list[str]:
    """That the machine was busy, where something fails: what waits for a core looks like what waits for a worker."""
    most = max(proof.asked.workers) + 1  # a trial of our own is among them
    if load <= cores + most or all(each.status != "fails" for each in proof.verdicts):
        return []
    text = (
        f"careful: {load:.0f} processes wanted the {cores} cores in the minute before; a trial that waits for a core "
        "may look like one that hangs in a collective. Prove it again when the machine is quiet."
    )
    return [*textwrap.wrap(text, _COLUMNS - 2, initial_indent=" ", subsequent_indent=" "), ""]


def _line(verdict: Verdict, promise: str, *, colour: bool) -> list[str]:
    sign, painted = _SIGNS[verdict.status]
    lines = [f" {paint(sign, painted) if colour else sign} {promise}"]
    note = textwrap.wrap(verdict.note, _COLUMNS - 4)
    return [*lines, *(f"   {paint(line, 'dim') if colour else line}" for line in note)]


def _why(verdict: Verdict, *, colour: bool) -> list[str]:
    lines = [
        "",
        paint(f"{verdict.promise}: {verdict.where}", "bold") if colour else f"{verdict.promise}: {verdict.where}",
    ]
    if verdict.departure is not None:
        lines += _wrapped("first:", str(verdict.departure))
    if verdict.cause is not None:
        lines += _wrapped("cause:", verdict.cause.what)
        lines += _wrapped("seen:", verdict.cause.evidence)
        lines += _wrapped("fix:", verdict.cause.fix)
    return lines


def _wrapped(word: str, text: str) -> Sequence[str]:
    """`text` after `word`, in lines that are indented alike."""
    parts = textwrap.wrap(text, _COLUMNS - 10, break_long_words=False, break_on_hyphens=False)
    return [f"  {word if not number else '':<7} {part}" for number, part in enumerate(parts)]
