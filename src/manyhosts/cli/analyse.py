"""`manyhosts analyse`: the best model of a run on held-out data, with intervals; two runs by a paired test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from manyhosts.cli.columns import print_columns
from manyhosts.errors import ConfigError
from manyhosts.launchers.named_runs import directory_of
from manyhosts.records.chosen_run import run_directory

_MANYHOSTS = (sys.executable, "-P", "-m", "manyhosts.cli.main")


@click.command()
@click.option(
    "--data", default="test", show_default=True, metavar="SET", help="test, validation, train; of several test/NAME."
)
@click.option("--snapshot", default="best", show_default=True, help="best, last, or a step.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Workers on this machine.")
@click.option(
    "--slice", "slices", multiple=True, metavar="NAME", help="By a function of a sample, or a list, of SCRIPT."
)
@click.option("--resamples", type=click.IntRange(50), default=1000, show_default=True, help="For the intervals.")
@click.option("--worst", type=click.IntRange(0), default=16, show_default=True, help="Samples that are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print what analysis.json holds.")
@click.option("--trace", is_flag=True, help="Show where in manyhosts an error was raised.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]")
def analyse(runs: tuple[str, ...], as_json: bool, trace: bool, workers: int, **asked: Any) -> int:
    """Evaluate the best model of RUN on held-out data: each sample once, distributed over the workers.

    Loss and every metric with intervals, precision and recall of each class, confusion, calibration, and the samples
    that it is most wrong about. With a second RUN (or the same one, written RUN@STEP) a paired test says whether the
    difference between both is real.

    Writes analysis.json into RUN; `manyhosts report` puts it on the page.
    """
    from manyhosts.analysis import analyse as analysing

    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} runs are named", where="RUN", fix="name one, or two to compare")
    (folder, snapshot), *others = [_named(word, asked["snapshot"]) for word in runs]
    for directory in (folder, *(other for other, _ in others)):
        run_directory(directory)
    request = analysing.Request(**{**asked, "snapshot": snapshot})
    if not as_json:
        print("the script is run up to its fit, then the model on its data …", file=sys.stderr, flush=True)
    try:
        found = analysing.analyse(folder, request, to=folder, command=_MANYHOSTS, workers=workers)
        for directory, step in others:
            with tempfile.TemporaryDirectory(prefix="manyhosts-") as scratch:
                of_other = replace(request, snapshot=step, slices=(), worst=0)
                analysing.analyse(directory, of_other, to=Path(scratch), command=_MANYHOSTS, workers=workers)
                names = (runs[0], runs[1])
                reported = analysing.compare(folder, Path(scratch), folder, resamples=request.resamples, names=names)
                found = {**found, "comparison": reported}
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, os.path.relpath(folder / analysing.NAME))
    return 0


def _named(word: str, snapshot: str) -> tuple[Path, str]:
    run, at, step = word.rpartition("@")
    return (directory_of(run), step) if at and not Path(word).exists() else (directory_of(word), snapshot)


def _print(found: dict[str, Any], place: str) -> None:
    print(f"{found['samples']:,} {found['data']} samples, weights of step {found['step']:,}, 95 % intervals")
    ends = ("value", "low", "high")
    values = found["values"].items()
    rows = [[name, *(f"{each[key]:.4f}" if key in each else "" for key in ends)] for name, each in values]
    print_columns(("value", "", "from", "to"), rows, numbers=("", "from", "to"))
    if found["kind"] == "classes":
        print()
        heads = ("class", "precision", "recall", "f1", "samples")
        rows = [
            [str(each["class"]), *(f"{each[key]:.4f}" for key in heads[1:4]), str(each["samples"])]
            for each in found["classes"]
        ]
        print_columns(heads, rows, numbers=heads[1:])
        print(f"\nconfidence departs from accuracy by {found['calibration']['expected_error']:.4f} on average")
    for name, rows_of in found["slices"].items():
        print()
        print_columns(
            (name, "samples", "loss", "accuracy", "from", "to"),
            [
                [each["slice"], str(each["samples"]), f"{each['loss']:.4f}"]
                + [f"{each[key]:.4f}" if key in each else "" for key in ("accuracy", "low", "high")]
                for each in rows_of
            ],
        )
    if found["worst"]:
        print("\nmost wrong about " + ", ".join(str(each["index"]) for each in found["worst"]))
    if "comparison" in found:
        print(f"\n{found['comparison']['verdict']}")
    print(place)
