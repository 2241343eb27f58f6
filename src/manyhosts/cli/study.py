"""`manyhosts study`: runs a script at several sizes, and reports what each size gained and why no more."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from manyhosts.cli.run_options import see_arguments
from manyhosts.cli.where import doubling, hosts_of, is_here, numbers, pairs, price_of, said_again, sizes_options
from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers import scripts
from manyhosts.listeners.paint import paint, writable
from manyhosts.records.run_directory import check_is_folder
from manyhosts.units import Duration, seconds_in_words

if TYPE_CHECKING:
    from manyhosts.study.points import Asked, Point
    from manyhosts.study.study import Study
    from manyhosts.trials.runs import Outcome, Place


_INTERRUPTED = 130
_PROGRAM = (sys.executable, "-m", "manyhosts.cli.main")
_OURS = {"duration": "--budget", "seed": "--repeat"}
"""Settings that an option of this verb says."""


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--workers", metavar="A,B,C", help="Numbers of workers on this machine, such as 1,2,4.")
@click.option("--nodes", metavar="A,B,C", help="Numbers of hosts.  [default with --hosts: 1, 2, 4, … and all of them]")
@click.option("--workers-per-node", type=int, metavar="M", help="Workers on each host.  [default: one per GPU, or 1]")
@sizes_options
@click.option("--budget", metavar="DURATION", help='How long each run trains: "10 min", "5 epochs", "200 steps".')
@click.option("--repeat", type=int, default=1, show_default=True, metavar="N", help="Runs of each size, by seed.")
@click.option("--vary", multiple=True, metavar="K=A,B", help="A setting and the values to try; may be given again.")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="A setting for all runs; see `run --set help`.")
@click.option("--proposal", metavar="JOB", help='Write a proposal for computing time: JOB is as long as "90 epochs".')
@click.option("--weak", type=int, metavar="B", help="Measure weak scaling, too: each worker has a batch of B.")
@click.option("--run-dir", metavar="DIR", help="Where the study is kept.  [default: runs/study-SCRIPT]")
@click.option("--json", "as_json", is_flag=True, help="Print study.json.")
@click.option("--dry-run", is_flag=True, help="Print the command of each run, and run nothing.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def study(script: str, as_json: bool, dry_run: bool, **words: Any) -> int:
    """Run SCRIPT at several sizes, and say what each size gained, what it lost and why, and how far it pays.

    SCRIPT is run as it is. A study that was interrupted continues where it was when the same command is given again;
    sizes, seeds and values to try may be added. DIR/study.json holds the result, DIR/points the runs, DIR/plots plots.

    Exit codes: 0 every run ended well, 1 one did not, 2 the request was wrong, 130 interrupted.
    """
    scripts.check(script, "script")
    see_arguments(script, words["arguments"])
    asked = _asked(script, words)
    price, chosen = price_of(words), words["run_dir"]
    if chosen:
        check_is_folder(chosen, where="--run-dir")
    folder = Path(chosen or Path("runs") / f"study-{Path(script).stem}").absolute()
    if dry_run:
        return _show_commands(asked, folder)
    from manyhosts.study.study import NAME
    from manyhosts.study.study import study as studying
    from manyhosts.trials.runs import Interrupted

    lines = Lines(sys.stderr, len(asked.points()), silent=as_json)
    try:
        found = studying(asked, folder, _PROGRAM, lines, price)
    except OSError as cause:
        raise ConfigError(
            f"the study cannot be kept: {cause.strerror or cause}",
            where=str(folder),
            fix="see to that disk, or choose another folder with --run-dir DIR",
        ) from cause
    except Interrupted:
        print("manyhosts: interrupted; the same command continues with what is not done", file=sys.stderr)
        return _INTERRUPTED
    note = _draw(found) if found.sizes else ""
    if words["proposal"] is not None and found.sizes:
        from manyhosts.study import proposal

        note += "".join(f"proposal: {path}\n" for path in proposal.write(found, words["proposal"]))
    if as_json:
        print((folder / NAME).read_text(), end="")
    else:
        print_study(found, sys.stdout)
        print(f"{note}study: {folder}")
    return 0 if all(row.outcome.done for row in found.rows) else 1


def _asked(script: str, words: dict[str, Any]) -> Asked:
    """The words of the command line, made sense of.

    Raises:
        ConfigError: they contradict each other, or cannot be read.
    """
    from manyhosts.study.points import Asked

    if words["budget"] is not None:
        Duration.parse(words["budget"], where="--budget")
    if words["proposal"] is not None:
        from manyhosts.study import proposal

        proposal.check(words["proposal"], words["budget"])
        if words["vary"]:
            fix = "leave --vary out: a proposal is of one way to train, set by --set"
            raise ConfigError("--proposal and --vary are both given", where="--vary", fix=fix)
        words = {**words, "budget": words["budget"] or f"{proposal.FEWEST_STEPS} steps"}
        words["repeat"] = words["repeat"] if words["repeat"] > 1 else 3  # else no point has an error
    if words["weak"] is not None and words["weak"] < 1:
        raise ConfigError(f"--weak is {words['weak']}", where="--weak", fix="give the samples of each worker")
    if words["repeat"] < 1:
        raise ConfigError(f"--repeat is {words['repeat']}", where="--repeat", fix="give 1 or more")
    settings, vary = overrides.parse(words["settings"]), _varied(words["vary"])
    for key, option in _OURS.items():
        if key in vary or (key in settings and key == "duration" and words["budget"] is not None):
            given = f"{key} is varied, which {option} is for" if key in vary else f"both {option} and {key} are given"
            raise ConfigError(given, where=option, fix=f"leave {key} out, and give {option}")
    if not settings.get("seed", "0").isdigit():
        raise ConfigError(f"seed is {settings['seed']!r}", where="--set", fix="give an integer")
    if both := sorted(settings.keys() & vary.keys()):
        raise ConfigError(f"{both[0]} is both set and varied", where="--vary", fix="leave one of them out")
    _see_that_used(settings, vary)
    hosts, each = hosts_of(words)
    workers, nodes = _sizes(words, hosts)
    return Asked(
        script=script,
        arguments=tuple(words["arguments"]),
        workers=workers,
        nodes=nodes,
        workers_per_node=each,
        hosts=hosts,
        where=tuple(said_again(words)),
        environment=tuple(words["env"]),
        budget=words["budget"],
        repeat=words["repeat"],
        settings=settings,
        vary=vary,
        weak=words["weak"],
    )


def _sizes(words: dict[str, Any], hosts: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of workers on this machine, or of hosts."""
    if words["workers"] is not None and (words["nodes"] is not None or not is_here(words, hosts)):
        raise ConfigError(
            "--workers counts workers on this machine, and hosts are counted, too",
            where="--workers",
            fix="give --nodes, and --workers-per-node as well",
        )
    if words["workers"] is not None and words["workers_per_node"] is not None:
        what = "--workers counts workers on this machine, and --workers-per-node those of each host"
        raise ConfigError(what, where="--workers-per-node", fix="leave it out, or give --nodes in place of --workers")
    if words["workers"] is not None:
        return tuple(sorted(numbers(words["workers"], "--workers"))), ()
    if words["nodes"] is None and hosts:
        return (), doubling(len(hosts))
    if words["nodes"] is None:
        raise ConfigError("no sizes are given", where="manyhosts study", fix="write --workers 1,2,4, or --nodes 1,2,4")
    nodes = tuple(sorted(numbers(words["nodes"], "--nodes")))
    if hosts and max(nodes) > len(hosts):
        raise ConfigError(
            f"--nodes asks for {max(nodes)} hosts, and {len(hosts)} are named", where="--nodes", fix="name more hosts"
        )
    return (), nodes


def _varied(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`strategy=ddp,diloco` as a setting and its values, every setting checked."""
    found: dict[str, tuple[str, ...]] = {}
    for key, text in pairs(words, "--vary").items():
        values = tuple(dict.fromkeys(value.strip() for value in text.split(",")))
        if not all(values):
            raise ConfigError(f"cannot read {key}={text!r}", where="--vary", fix=f"write it as --vary {key}=A,B")
        found[key.strip()] = values
    overrides.check_keys(found, where="--vary")
    for key, values in found.items():
        for value in values:
            overrides.check_value(key, value, where="--vary")
    return found


def _see_that_used(settings: Mapping[str, str], vary: Mapping[str, Sequence[str]]) -> None:
    """See that each setting is one of a strategy that is tried.

    Raises:
        ConfigError: no run could take it; or it is set for all, and some of them cannot.
    """
    tried = vary.get("strategy", [settings["strategy"]] if "strategy" in settings else [])
    for option, keys in (("--set", settings), ("--vary", vary)):
        for key in keys:
            lacking = [name for name in tried if overrides.lacks(name, key)]
            if len(lacking) == len(tried) and lacking:
                fix = "leave it out, or choose a strategy that has it"
            elif lacking and option == "--set":
                fix = f"write --vary {key}={settings[key]}: then it is left out where the strategy lacks it"
            else:
                continue
            raise ConfigError(f"{key!r} is no setting of the strategy {lacking[0]!r}", where=option, fix=fix)


def _draw(found: Study) -> str:
    """Draw the plots; a sentence where what draws them is not installed."""
    from manyhosts.study import plots

    if not plots.is_possible():
        return f"{plots.MISSING}\n"
    plots.draw(found, found.folder / plots.FOLDER)
    return ""


def _show_commands(asked: Asked, folder: Path) -> int:
    """The command of every run."""
    from manyhosts.study.points import command
    from manyhosts.study.study import POINTS

    for point in asked.points():
        print(shlex.join(["manyhosts", *command(asked, point, str(folder / POINTS / point.name))]))
    return 0


_WIDTH = 100
_ERASE = "\r\x1b[K"


class Lines:
    """Says which run is under way, on a terminal for as long as it is, and how each has ended."""

    def __init__(self, stream: TextIO, count: int, *, silent: bool) -> None:
        """`count`: how many runs there are."""
        self._stream, self._count, self._silent = stream, count, silent
        self._live = stream.isatty() and not silent
        self._number, self._now, self._seconds = 1, "", 0.0

    def begins(self, point: Point, place: Place) -> None:
        """A run is about to be started, or one that was left running is waited for."""
        self._now, self._seconds = str(point), 0.0
        self.goes_on(0.0)

    def goes_on(self, seconds: float) -> None:
        """The run under way has taken so long."""
        self._seconds = seconds
        if self._live:
            line = f"run {self._number} of {self._count}: {self._now}, {seconds_in_words(round(seconds))}"
            self._stream.write(_ERASE + paint(line[: _WIDTH - 1], "dim"))
            self._stream.flush()

    def ends(self, point: Point, outcome: Outcome, *, before: bool) -> None:
        """A run has ended, or was done already."""
        how = "done before" if before else f"{outcome.status}, {seconds_in_words(self._seconds)}"
        if not self._silent:
            erase = _ERASE if self._live else ""
            reason = "".join(f"\n  {line}" for line in outcome.reason.splitlines())
            text = f"{erase}run {self._number} of {self._count}: {point}: {how}{reason}\n"
            self._stream.write(writable(text, self._stream.encoding))
            self._stream.flush()
        self._number += 1


def print_study(study: Study, stream: TextIO) -> None:
    """Print everything, in colours on a terminal."""
    from manyhosts.study import columns

    def title(text: str) -> str:
        return paint(text, "bold") if stream.isatty() else text

    lines: list[str] = []
    if study.sizes:
        for name, table in (
            ("speed", columns.speed(study)),
            ("what was learned", columns.results(study)),
            ("lost of the ideal speed, in percent", columns.lost(study)),
        ):
            lines += [title(name), *in_columns(table), ""]
        if note := columns.note_on_lost(study):
            lines[-1:] = [f"  {note}", ""]
    for point, reason in columns.failures(study):
        lines += [title(f"failed, or not run: {point}"), *(f"  {line}" for line in reason.splitlines()), ""]
    for paragraph in study.verdict().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, _WIDTH), ""]
    stream.write(writable("\n".join(lines), stream.encoding))


def in_columns(table: list[list[str]]) -> list[str]:
    """The rows of a table in columns, numbers to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
