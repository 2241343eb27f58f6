"""The page of a study: verdict, plots, tables, what failed, and how to do it again."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records.run_record import RunRecord
from manyhosts.report.page import Section, as_typed, folded, page, pairs, paragraphs, picture, table
from manyhosts.study import columns, plots
from manyhosts.study.points import amount, command
from manyhosts.study.study import POINTS, Study


def study_page(study: Study) -> str:
    """The complete page. Plots are drawn again where matplotlib is installed; else a sentence says how to have them."""
    sections = [Section("", f'<div class="verdict">{paragraphs(study.verdict().split(chr(10) * 2))}</div>')]
    if study.sizes:
        sections += [
            Section("Plots", _plots(study)),
            Section("Speed", table(columns.speed(study))),
            Section("Lost of the ideal speed, in percent", table(columns.lost(study)) + _note(study)),
            Section("What was learned", table(columns.results(study))),
            Section("Laws of scaling", table(columns.laws(study))),
        ]
    failed = columns.failures(study)
    sections += [
        Section("Failed, or not run", "".join(paragraphs([point]) + as_typed(why) for point, why in failed)),
        Section("How to do it again", _again(study)),
    ]
    count = len(study.rows)
    under = amount(count, "run") + (f", {len(failed)} of them failed or not run" if failed else "")
    return page(f"How {study.asked.script.rpartition('/')[2]} scales", under, sections)


def _note(study: Study) -> str:
    note = columns.note_on_lost(study)
    return paragraphs([note]) if note else ""


def _plots(study: Study) -> str:
    if not plots.is_possible():
        return paragraphs([plots.MISSING[0].upper() + plots.MISSING[1:]])
    with tempfile.TemporaryDirectory(prefix="manyhosts-report-") as folder:
        pictures = [picture(plot.svg.read_bytes(), plot.title) for plot in plots.draw(study, Path(folder))]
    return f'<div class="plots">{"".join(pictures)}</div>'


def _again(study: Study) -> str:
    """The commands of all runs, and with what they ran."""
    facts: list[tuple[str, str]] = []
    records = _records(study)
    if records:
        record = records[0]
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items() if version)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
        backends = sorted({each.backend for each in records if each.backend})
        hosts = sorted({host for each in records for host in each.hosts})
        facts = [("first run", when), ("versions", versions), ("backend", ", ".join(backends) or "none")]
        facts.append(("hosts", ", ".join(hosts)))
    commands = [
        shlex.join(["manyhosts", *command(study.asked, row.point, f"{POINTS}/{row.point.name}")]) for row in study.rows
    ]
    return (pairs(facts) if facts else "") + folded(amount(len(commands), "command"), as_typed("\n".join(commands)))


def _records(study: Study) -> list[RunRecord]:
    """Of all runs that have begun, the first one first."""
    known = [record for row in study.rows if (record := _record(row.place.run.run_json)) is not None]
    return sorted(known, key=lambda record: record.started)


def _record(path: Path) -> RunRecord | None:
    with contextlib.suppress(ConfigError):
        return RunRecord.read(path)
    return None
