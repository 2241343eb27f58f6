"""Has workers look at runs on held-out data, and holds two of them against each other."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from manyhosts.analysis import statistics
from manyhosts.control import variables
from manyhosts.errors import ConfigError
from manyhosts.launchers import extras
from manyhosts.records import provenance
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.records.numbers import from_words, to_words

NAME, ARRAYS = "analysis.json", "analysis.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be looked at."""

    data: str = "test"
    snapshot: str = "best"
    resamples: int = 1000
    """Of a bootstrap."""
    worst: int = 16
    """Samples that are shown."""
    slices: Sequence[str] = ()
    """Functions or lists of the script, by name."""


def analyse(run_dir: Path, request: Request, *, to: Path, command: Sequence[str], workers: int) -> dict[str, Any]:
    """Look at the run in `run_dir`, and put `analysis.json` into `to`. Returns what is in it.

    `command`: what starts manyhosts.

    Raises:
        subprocess.CalledProcessError: the workers ended with an error, which they have said.
        LaunchError: scikit-learn is not installed.
    """
    extras.load("sklearn", what="scikit-learn, which does the statistics,", package="scikit-learn")
    asked = {**asdict(request), "slices": list(request.slices), "run": str(run_dir), "to": str(to)}
    with tempfile.TemporaryDirectory(prefix="manyhosts-") as scratch:
        file = Path(scratch, "request.json")
        file.write_text(json.dumps(asked))
        words = ["run", "--workers", str(workers), "--no-prefix", "--run-dir", str(Path(scratch, "run"))]
        subprocess.run(
            [*command, *words, "-m", "manyhosts.analysis.in_worker", str(file)],
            cwd=_folder(run_dir),
            stdout=subprocess.DEVNULL,
            env={**os.environ, variables.NOT_RESUMED: "1"},
            check=True,
        )
    return cast(dict[str, Any], from_words(read_json(to / NAME)))


def compare(first: Path, second: Path, to: Path, *, resamples: int, names: tuple[str, str]) -> dict[str, Any]:
    """Hold what was found of two models on the same samples against each other; written to the `analysis.json` of `to`.

    Raises:
        ConfigError: the samples are not the same.
    """
    with np.load(first / ARRAYS) as one, np.load(second / ARRAYS) as other:
        ours, theirs = ({name: found[name] for name in found.files} for found in (one, other))
    if not np.array_equal(ours["targets"], theirs["targets"]):
        raise ConfigError(
            "the two were not given the same samples: their targets differ",
            where=f"{names[0]}, {names[1]}",
            fix="compare runs of scripts that hold out the same data, in the same order",
        )
    kinds = {str(each.get("loss", "")) for each in (ours, theirs)}
    if len(kinds) > 1:
        _make_alike(ours, theirs, where=f"{names[0]}, {names[1]}")
    draws = statistics.resamples(len(ours["targets"]), resamples)
    reported = {"first": names[0], "second": names[1], **statistics.paired(ours, theirs, draws, names=names)}
    found = read_json(to / NAME)
    write_json(to / NAME, {**found, "comparison": to_words(reported)})
    return reported


def _make_alike(*found: dict[str, Any], where: str) -> None:
    """Have the losses of two models be the same thing: squared errors of numbers, and whether a class was right.

    Raises:
        ConfigError: the models were trained by different losses, and predict neither.
    """
    for each in found:
        if "right" in each:
            each["losses"] = 1.0 - each["right"]
        elif "predicted" in each:
            gaps = each["predicted"].astype(float) - each["targets"]
            each["losses"] = np.square(gaps).reshape(len(gaps), -1).mean(1)
        else:
            raise ConfigError(
                "the two have different losses, whose values cannot be compared",
                where=where,
                fix="compare runs of one loss, or by metrics of each",
            )


def _folder(run_dir: Path) -> str:
    """Where the script ran, as far as that is known and there; else the working directory."""
    try:
        folder = provenance.read(run_dir).folder
    except ConfigError:
        return os.getcwd()
    return folder if Path(folder).is_dir() else os.getcwd()
