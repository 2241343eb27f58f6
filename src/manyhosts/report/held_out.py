"""What `manyhosts analyse` has found of a run, for its page and its card."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.listeners.figures import number
from manyhosts.records.atomic_file import read_json
from manyhosts.report import pictures
from manyhosts.report.curves import Curve, figure, grid
from manyhosts.report.page import paragraphs, table
from manyhosts.report.strips import shade

_MOST_CLASSES = 30


def read(folder: Path) -> dict[str, Any] | None:
    """What is in `analysis.json` of a run directory; None where there is none that can be read."""
    with contextlib.suppress(ConfigError):
        found = read_json(folder / "analysis.json", version=1)
        return found if found.keys() >= {"samples", "data", "step", "resamples", "values", "slices", "worst"} else None
    return None


def section(folder: Path) -> str:
    """The part of the page; empty where no one has looked yet."""
    found = read(folder)
    if found is None:
        return ""
    parts = [paragraphs([*([found["comparison"]["verdict"]] if "comparison" in found else []), where(found)])]
    parts.append(table(values(found)))
    if "classes" in found:
        parts += [table(classes(found)), _confusion(found), _calibration(found)]
    parts += [table(slices(name, rows)) for name, rows in found["slices"].items()]
    worst = pictures.of(folder / "analysis-worst.npz")
    if worst or found["worst"]:
        caption = "The samples that it is most wrong about, by index: what it says, for what it is."
        parts.append(paragraphs([caption]) + (worst or table(_worst(found))))
    return "".join(parts)


def where(found: Mapping[str, Any]) -> str:
    """Of what the numbers are."""
    return (
        f"{found['samples']:,} {found['data']} samples, each once, by the weights of step {found['step']:,};"
        f" intervals hold 95 %, by {found['resamples']:,} resamples."
    )


def values(found: Mapping[str, Any]) -> list[list[str]]:
    """Loss and metrics with their intervals."""
    rows = [["value", "", "from", "to"]]
    for name, each in found["values"].items():
        rows.append([name, *(_figure(each[key]) if key in each else "" for key in ("value", "low", "high"))])
    return rows


def classes(found: Mapping[str, Any]) -> list[list[str]]:
    """Precision, recall, F1 and count of each class; of very many, those that are recognised least."""
    chosen = sorted(found["classes"], key=lambda each: each["recall"])[:_MOST_CLASSES]
    chosen = found["classes"] if len(found["classes"]) <= _MOST_CLASSES else chosen
    rows = [["class", "precision", "recall", "F1", "samples"]]
    rows += [
        [str(each["class"]), *(_figure(each[key]) for key in ("precision", "recall", "f1")), f"{each['samples']:,}"]
        for each in chosen
    ]
    return rows


def slices(name: str, found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Of each slice: count, loss, and accuracy with its interval where there are classes."""
    rows = [[name, "samples", "loss", "accuracy", "from", "to"]]
    for each in found:
        shares = [_figure(each[key]) if key in each else "" for key in ("accuracy", "low", "high")]
        rows.append([each["slice"], f"{each['samples']:,}", _figure(each["loss"]), *shares])
    return rows


def _worst(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["sample", "loss", "says", "is"]]
    for each in found["worst"]:
        rows.append(
            [str(each["index"]), _figure(each["loss"]), str(each.get("predicted", "")), str(each.get("target", ""))]
        )
    return rows


def _confusion(found: Mapping[str, Any]) -> str:
    """A table whose cells are the darker the more samples of their row are in them."""
    counts = found["confusion"]
    if len(counts) > _MOST_CLASSES:
        return paragraphs([f"The confusion of {len(counts)} classes is in analysis.json."])
    head = "".join(f'<th scope="col">{label}</th>' for label in range(len(counts)))
    body = ""
    for label, row in enumerate(counts):
        full = sum(row) or 1
        cells = "".join(
            f'<td style="background:{shade(0.75 * count / full) if count else "none"}">{count or ""}</td>'
            for count in row
        )
        body += f'<tr><th scope="row">{label}</th>{cells}</tr>'
    return (
        paragraphs(["Confusion: in each row the samples of a class, in each column what they were taken for."])
        + f'<div class="wide" tabindex="0"><table><thead><tr><th scope="col">{escape("is / taken for")}</th>{head}</tr>'
        + f"</thead><tbody>{body}</tbody></table></div>"
    )


def _calibration(found: Mapping[str, Any]) -> str:
    bins = found["calibration"]["bins"]
    reported = Curve("accuracy", [(each["confidence"], each["accuracy"]) for each in bins])
    even = Curve("as confident as right", [(0.0, 0.0), (1.0, 1.0)])
    words = f"Confidence departs from accuracy by {_figure(found['calibration']['expected_error'])} on average."
    counts = Curve("samples", [(each["confidence"], each["samples"]) for each in bins])
    drawn = [figure("Calibration", [reported, even], x="confidence"), figure("Samples", [counts], x="confidence")]
    return paragraphs([words]) + grid(drawn)


def _figure(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)
