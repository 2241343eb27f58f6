"""The card of a trained model, in Markdown: what it is, from what, how well it does, and how to have it again."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from manyhosts.errors import ConfigError
from manyhosts.records import provenance
from manyhosts.records.provenance import Provenance
from manyhosts.report import held_out
from manyhosts.report.run import Run
from manyhosts.report.run_page import again, result, settings_of, under
from manyhosts.units import bytes_in_words

_MOST_FILES = 50
_IMPORTANT = ("torch", "manyhosts", "numpy", "torchmetrics", "torchvision", "transformers")


def card(run: Run) -> str:
    """The entire text.

    Raises:
        ConfigError: its workers have not begun to train.
    """
    if run.record is None or run.summary is None:
        raise ConfigError(
            "nothing has been trained here yet",
            where=str(run.directory.path),
            fix="wait for the first steps of the run",
        )
    try:
        found = provenance.read(run.directory.path)
    except ConfigError:
        found = None  # a run of an older version: the card has less
    parts = [
        f"# Model card: {run.script}",
        under(run),
        "## Results",
        *_results(run),
        "## Data",
        *(_data(found) if found else ["Nothing is on record."]),
        "## Model",
        *(_model(found) if found else ["Nothing is on record."]),
        "## Settings",
        _table([["setting", "value"], *map(list, sorted(settings_of(run.record).items()))]),
        "## Hosts and versions",
        _table([["", ""], *_hosts(run, found)]),
        "## How to do it again",
        *_again(run, found),
        "## What this card does not know",
        "What the model is meant for and what it must not be used for, whose data it was trained on and under which"
        " licence, and how it does on groups that no slice of `manyhosts analyse` names. Add it here.",
    ]
    return "\n\n".join(parts) + "\n"


def _results(run: Run) -> Iterator[str]:
    yield _table([["", ""], *map(list, result(run))])
    looked = held_out.read(run.directory.path)
    if looked is None:
        yield "Intervals, classes and calibration: `manyhosts analyse` has not looked at this run."
        return
    yield held_out.where(looked)
    yield _table(held_out.values(looked))
    if "classes" in looked:
        yield _table(held_out.classes(looked))
        yield f"Confidence departs from accuracy by {looked['calibration']['expected_error']:.4f} on average."
    for name, rows in looked["slices"].items():
        yield _table(held_out.slices(name, rows))
    if "comparison" in looked:
        yield f"Compared: {looked['comparison']['verdict']}."


def _data(found: Provenance) -> Iterator[str]:
    count = found.identity.get("length")
    said = [f"- training set: {found.described['data']}" + (f", {count:,} samples" if count is not None else "")]
    knows = "transform" in found.described["data"]
    said.append(
        f"- preprocessing: {'as the transforms above say' if knows else 'what the script does; no more is known'}"
    )
    yield "\n".join(said)
    if found.data:
        rows = [["file that was read", "size", "sha256"]]
        for name, each in list(found.data.items())[:_MOST_FILES]:
            rows.append([name, bytes_in_words(each.size), each.sha256 if each.whole else f"{each.sha256} (of ranges)"])
        yield _table(rows)
    if (more := max(0, len(found.data) - _MOST_FILES) + found.data_left_out) > 0:
        yield f"{more:,} more files were read."


def _model(found: Provenance) -> Iterator[str]:
    described = found.described
    yield "\n".join(
        [
            f"- numbers in parameters and buffers: {described['parameters']}",
            f"- optimizer: {described['optimizer']}",
            f"- schedule: {described['schedule']}",
        ]
    )
    yield f"```text\n{described['architecture']}\n```"


def _hosts(run: Run, found: Provenance | None) -> Iterator[list[str]]:
    assert run.record is not None, "card() has looked"
    yield ["workers", str(run.record.workers)]
    yield ["hosts", ", ".join(run.record.hosts)]
    yield ["backend", run.record.backend or "none: one worker"]
    for name, value in found.hardware.items() if found else ():
        if value and name != "workers":
            yield [name, value]
    yield ["python", str(run.record.versions["python"])]
    versions = found.packages if found else {name: str(version) for name, version in run.record.versions.items()}
    for name in _IMPORTANT:
        if name in versions:
            yield [name, versions[name]]


def _again(run: Run, found: Provenance | None) -> Iterator[str]:
    lines, said = again(run)
    if found is not None:
        yield "With its run directory, uncommitted changes included:"
        yield f"```bash\nmanyhosts reproduce {shlex.quote(os.path.relpath(run.directory.path))}\n```"
        digests = [[name, digest] for name, digest in sorted(found.code.files.items())]
        yield _table([["code", "sha256"], *digests])
        yield "Without it:"
    yield "```bash\n" + "\n".join(lines) + "\n```"
    yield " ".join(said)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, whose first row is its head."""
    cells = [[re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
