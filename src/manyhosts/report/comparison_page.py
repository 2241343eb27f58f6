"""The page of several runs: what came out of each, which settings differ, and their curves on the same axes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from manyhosts.listeners.figures import amount, number
from manyhosts.report.curves import Curve, figure, grid
from manyhosts.report.page import Section, page, paragraphs, table
from manyhosts.report.run import Run
from manyhosts.report.run_page import settings_of
from manyhosts.units import seconds_in_words

_NOTHING = "-"


def comparison_page(runs: Sequence[Run]) -> str:
    """The page of `runs`, two or more, in the order in which they are given."""
    names = names_of(runs)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    sections = [
        Section("What came out", table(list(zip(*results(runs, names), strict=True)), kind="named")),
        Section("What differs", _differences(runs, names)),
        Section("Curves against steps", _curves(runs, names, column=1)),
        Section("Curves against time", _curves(runs, names, column=0)),
        Section(
            "Which run is which", table([["run", "directory"], *zip(names, _places(runs), strict=True)], kind="told")
        ),
    ]
    return page(f"{amount(len(runs), 'run')} compared", f"{', '.join(names)} · page made {made}", sections)


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short name for each, which no other has: the last words of its path, as few as make it unique."""
    paths = [run.directory.path.absolute().parts for run in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-1:])} ({place})" for place, parts in enumerate(paths, start=1)]


def results(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """A row for each run."""
    summaries = [run.summary for run in runs]
    validated = sorted({name for each in summaries if each for name in each.validation})
    tested = sorted({name for each in summaries if each for name in each.test})
    head = ["run", "status", "workers", "steps", "epochs", "time", "samples/s", "restarts", "training loss"]
    rows = [[*head, *(f"validation {name}" for name in validated), "best", *(f"test {name}" for name in tested)]]
    for run, name, found in zip(runs, names, summaries, strict=True):
        if found is None:
            rows.append([name, run.status, *[_NOTHING] * (len(rows[0]) - 2)])
            continue
        rows.append(
            [
                *(name, run.status, str(found.workers), f"{found.steps:,}", f"{found.epochs:,}"),
                seconds_in_words(found.seconds),
                _NOTHING if found.samples_per_second is None else f"{found.samples_per_second:,.0f}",
                str(found.restarts),
                _number(found.train_loss),
                *(_number(found.validation.get(each)) for each in validated),
                f"{number(found.best['value'])} at {found.best['step']:,}" if found.best else _NOTHING,
                *(_number(found.test.get(each)) for each in tested),
            ]
        )
    return rows


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    """A row for each setting, version or place that is not the same in all runs."""
    facts = [_facts(run) for run in runs]
    every = sorted({key for each in facts for key in each})
    differ = [key for key in every if len({each.get(key) for each in facts}) > 1]
    if not differ:
        return paragraphs(["Script, arguments, settings, versions and hosts are the same."])
    rows = [[key, *(each.get(key, _NOTHING) for each in facts)] for key in differ]
    return table([["setting", *names], *rows], kind="named wrapped")


def _facts(run: Run) -> dict[str, str]:
    """Everything that was asked of a run."""
    if run.record is None:
        return {}
    record = run.record
    versions = {f"version of {name}": version or _NOTHING for name, version in record.versions.items()}
    return {
        **settings_of(record),
        **versions,
        "script": record.script,
        "arguments": " ".join(record.arguments) or _NOTHING,
        "workers": str(record.workers),
        "hosts": ", ".join(record.hosts),
        "backend": record.backend or "none",
        "strategy in use": record.strategy,
    }


def _curves(runs: Sequence[Run], names: Sequence[str], *, column: int) -> str:
    """Training loss, every validated value, learning rate and speed: of all runs, against time (0) or steps (1)."""
    below, full = ("step", True) if column else ("seconds of training", False)
    titles = sorted({name for run in runs for _, _, values in run.history.validations for name in values})
    found = [
        figure(
            "Training loss",
            [_curve(name, run.history.loss.points(), column) for name, run in zip(names, runs, strict=True)],
            x=below,
            integral_x=full,
        )
    ]
    for title in titles:
        validated = [
            Curve(name, [(each[:2][column], each[2][title]) for each in run.history.validations if title in each[2]])
            for name, run in zip(names, runs, strict=True)
        ]
        found.append(figure(f"Validation {title}", validated, x=below, integral_x=full))
    speeds = [_curve(name, run.history.speed.points(), column) for name, run in zip(names, runs, strict=True)]
    found.append(figure("Speed of steps, in samples per second", speeds, x=below, integral_x=full))
    if column:
        rates = [_curve(name, run.history.rate.points(), column) for name, run in zip(names, runs, strict=True)]
        found.append(figure("Learning rate", rates, x=below, integral_x=full))
    return grid(found) or paragraphs(["None of them has a step on record."])


def _curve(name: str, blocks: Sequence[tuple[float, int, float]], column: int) -> Curve:
    return Curve(name, [(float(block[column]), block[2]) for block in blocks])


def _places(runs: Sequence[Run]) -> list[str]:
    return [str(run.directory.path.absolute()) for run in runs]


def _number(value: float | None) -> str:
    return _NOTHING if value is None else number(value)
