"""The page of a run: what came out, curves, where the time went, what happened when, and how to do it again."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from manyhosts.listeners.figures import amount, figures, number, rate
from manyhosts.records import provenance
from manyhosts.records.run_record import RunRecord
from manyhosts.report import held_out, pictures
from manyhosts.report.page import Section, as_typed, page, pairs, paragraphs
from manyhosts.report.run import Run
from manyhosts.report.run_sections import (
    current_facts,
    curves,
    happenings,
    time_line,
    where_time_went,
    workers_by_steps,
)  # fmt: skip
from manyhosts.report.strips import Piece, Strip, legend, strips
from manyhosts.study.columns import COLOURS, SHORT
from manyhosts.study.times import CAUSES
from manyhosts.units import bytes_in_words, seconds_in_words

_MUCH = 0.01
"""Of the time of all steps and what lies between them: less than that is not worth a sentence."""
_NOT_BEGUN = "Its workers have not begun to train, so there is nothing to show yet."


def run_page(run: Run) -> str:
    """The complete page, of a run that may be under way, over, broken off, or not begun."""
    sections = [
        Section("", pairs(result(run))),
        Section("Curves", curves(run)),
        Section("On held-out data", held_out.section(run.directory.path)),
        Section("Where the time went", _total(run) + where_time_went(run)),
        Section("Workers and steps", workers_by_steps(run)),
        Section("What happened", time_line(run) + happenings(run)),
        Section("The first batch", pictures.of(run.directory.first_batch)),
        Section("Settings", _settings(run.record)),
        Section("Versions and hosts", _versions(run.record)),
        Section("How to do it again", _again(run)),
    ]
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return page(f"A run of {run.script}", f"{under(run)} · page made {made}", sections)


def under(run: Run) -> str:
    """One line below a title."""
    if run.record is None:
        return _NOT_BEGUN
    record = run.record
    where = f" on {amount(len(record.hosts), 'host')}" if len(record.hosts) > 1 else ""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
    return (
        f"{amount(record.workers, 'worker')}{where} ({record.strategy}) · started {started} · {run.directory.path.name}"
    )


def result(run: Run) -> list[tuple[str, str]]:
    """What came out."""
    summary = run.summary
    if summary is None or run.status == "running":
        return current_facts(run)
    found = [("status", run.status + (f": {run.reason}" if run.reason else ""))]
    found.append(("trained", f"{amount(summary.epochs, 'epoch')}, {amount(summary.steps, 'step')}"))
    found.append(("time of training", seconds_in_words(summary.seconds)))
    if summary.samples_per_second:
        found.append(("speed of steps", rate(summary.samples_per_second)))
    if summary.train_loss is not None:
        found.append(("training loss, last epoch", number(summary.train_loss)))
    if summary.validation:
        found.append(("validation", figures(summary.validation, ", ")))
    if summary.best:
        best = figures({summary.best["metric"]: summary.best["value"]}, "")
        found.append(("best validation", f"{best} at step {summary.best['step']:,}"))
    if summary.test:
        found.append(("test", figures(summary.test, ", ")))
    if summary.restarts:
        cost = f"{amount(summary.steps_redone, 'step')} redone, {seconds_in_words(summary.seconds_lost)} lost"
        cost += f", {amount(summary.samples_lost, 'sample')} computed again" if summary.samples_lost else ""
        found.append(("restarts", f"{summary.restarts}: {cost}"))
    if summary.bytes_sent_per_step:
        found.append(("sent", f"{bytes_in_words(summary.bytes_sent_per_step)} per step, by rank 0"))
    if summary.weights_sha256:
        found.append(("hash of the weights", summary.weights_sha256))
    return found


def _total(run: Run) -> str:
    """One bar of all the time from start to end, with what lies between the steps."""
    if not run.history.steps or run.spent is None:
        return ""
    seconds = run.spent.seconds
    total = sum(max(0.0, value) for value in seconds.values()) or 1.0
    pieces, at = [], 0.0
    again = run.summary is not None and (run.summary.restarts or len(run.history.periods) > 1)
    lost = run.summary.seconds - total if again and run.summary is not None else 0.0
    for cause in CAUSES:
        share = max(0.0, seconds[cause]) / total
        if share:
            words = f"{SHORT[cause]}: {seconds_in_words(seconds[cause])}, {100 * share:.1f} %"
            pieces.append(Piece(at, at + share, COLOURS[cause], words))
        at += share
    seen = [cause for cause in CAUSES if seconds[cause] > 0.0005 * total]
    keys = [(f"{SHORT[cause]} {100 * seconds[cause] / total:.1f} %", COLOURS[cause]) for cause in seen]
    after = [f"Beyond that {seconds_in_words(lost)} went to work that was lost, and to the time down."]
    drawn = strips([Strip("start to end", pieces, seconds_in_words(total))], label="The time of the entire run")
    return drawn + legend(keys) + paragraphs([*after[: lost > _MUCH * total], "Each step, on average:"])


def settings_of(record: RunRecord) -> dict[str, str]:
    """Every setting that has a value, nested ones as `snapshots.every`."""
    found: dict[str, str] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(f"{prefix}{name}.", value)
            elif value is not None:
                found[f"{prefix}{name}"] = str(value).lower() if isinstance(value, bool) else str(value)

    add("", record.settings)
    return found


def _settings(record: RunRecord | None) -> str:
    return pairs(sorted(settings_of(record).items())) if record else ""


def _versions(record: RunRecord | None) -> str:
    if record is None:
        return ""
    found = [(name, version or "in no repository") for name, version in record.versions.items()]
    found += [("hosts", ", ".join(record.hosts)), ("workers", str(record.workers))]
    return pairs([*found, ("backend", record.backend or "none: one worker talks to no one")])


def _again(run: Run) -> str:
    lines, said = again(run)
    return as_typed("\n".join(lines)) + paragraphs(said) if lines else ""


def again(run: Run) -> tuple[list[str], list[str]]:
    """What to type, and what else is to be known; nothing of a run that has not begun."""
    record = run.record
    if record is None:
        return [], []
    commit, changed, _ = (record.versions.get("git_commit") or "").partition("+changes")
    lines = [f"git checkout {commit}"] if commit else []
    given = [word for key, text in record.overrides.items() for word in ("--set", f"{key}={text}")]
    given += [word for name in record.environment for word in ("--env", name)]
    module, _ = provenance.module_of(run.directory.path)
    program = ["-m", module] if module else [record.script]
    lines.append(shlex.join(["manyhosts", "run", *_where(record), *given, *program, *record.arguments]))
    said = []
    if changed:
        said.append("Files of the repository differed from that commit when it ran.")
        if (run.directory.path / provenance.NAME / provenance.DIFF).exists():
            said.append("They are in its provenance/changes.diff, which `manyhosts reproduce` uses.")
    if record.environment:
        said.append("Variables that --env gave are named without their values, which are kept nowhere: set them first.")
    if len(record.hosts) > 1:
        said.append("An engine that placed the workers (Slurm, say) is named again with --on.")
    kept = [path for path in sorted(run.directory.path.glob("trainer-*")) if (path / "run.json").exists()]
    if kept:
        said.append(f"The script made more trainers, which have pages of their own: {', '.join(p.name for p in kept)}.")
    return lines, said


def _where(record: RunRecord) -> list[str]:
    """The options that place as many workers."""
    hosts = len(record.hosts)
    if hosts == 1:
        return ["--workers", str(record.workers)]
    each = ["--workers-per-node", str(record.workers // hosts)] if record.workers % hosts == 0 else []
    return ["--hosts", ",".join(record.hosts), *each]
