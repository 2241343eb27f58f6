"""A complete study: what was asked, every point, the fits and the verdict; and `study.json`, which holds it all."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from manyhosts.control.agent import warm
from manyhosts.errors import ConfigError
from manyhosts.records import run_lock
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.study import fits
from manyhosts.study.points import MOST_POINTS, Asked, Point, command
from manyhosts.study.rows import Row, Size, compared, read, samples_per_second, sizes
from manyhosts.study.verdict import Verdict, verdict_on
from manyhosts.trials.runs import (
    LOOK_S,
    Interrupted,
    Outcome,
    Place,
    Signals,
    Trial,
    hash_of,
    hashes_of,
    outcome_of,
)

SCHEMA_VERSION = 1
NAME = "study.json"
POINTS = "points"
"""The folder of the runs, below that of the study."""
_NO_RECORD = (
    "the run ended well, and its record is no longer complete\n  where: {folder}\n"
    "  fix:   delete that folder: the same command then runs it again"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is known so far."""

    asked: Asked
    folder: Path
    rows: tuple[Row, ...]
    price: float | None = None
    """What one machine costs in an hour."""

    @property
    def sizes(self) -> dict[tuple[tuple[str, str], ...], list[Size]]:
        """By variant: every size that ended well, the smallest first."""
        return sizes(self.rows)

    def fits(self) -> dict[tuple[tuple[str, str], ...], dict[str, fits.Fit]]:
        """By variant: the laws that its points are enough for."""
        found = {}
        for varied, group in self.sizes.items():
            rows = [row for size in group for row in size.rows]
            found[varied] = fits.fits([row.times or 1 for row in rows], [row.speed_up or 1 for row in rows])
        return found

    def verdicts(self) -> dict[tuple[tuple[str, str], ...], Verdict]:
        """By variant: what limits it, and what to do."""
        laws = self.fits()
        return {varied: verdict_on(group, laws[varied], self.asked, self.price) for varied, group in self.sizes.items()}

    def verdict(self) -> str:
        """All of them in words."""
        found = self.verdicts()
        if not found:
            return "No size has ended well, so there is nothing to compare."
        titled = [f"{title_of(varied)}: {each.text}" if varied else each.text for varied, each in found.items()]
        return "\n\n".join([*self._fastest(), *titled])

    def _fastest(self) -> list[str]:
        """Where settings were varied: which of them is the fastest, and by how much."""
        tops = [(max(_rate(size) for size in group), varied) for varied, group in self.sizes.items()]
        (first, varied), *rest = sorted(tops, reverse=True)
        if not rest:
            return []
        second, after = rest[0]
        return [
            f"{title_of(varied)} is the fastest: {first:.3g} samples/s at its best size, {first / second:.2f} times as "
            f"many as {title_of(after)}."
        ]

    def to_json(self) -> dict[str, Any]:
        """What `study.json` holds."""
        variants = [
            {"settings": dict(varied), **{law: fit.to_json() for law, fit in found.items()}}
            for varied, found in self.fits().items()
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "asked": recorded(self.asked),
            "price": self.price,
            "points": [row.to_json() for row in self.rows],
            "fits": variants,
            "verdict": self.verdict(),
            "advice": [{"settings": dict(varied), **verdict.to_json()} for varied, verdict in self.verdicts().items()],
        }


def title_of(varied: Sequence[tuple[str, str]]) -> str:
    """What distinguishes a variant from others: `strategy=ddp, compression=bf16`; empty where nothing is varied."""
    return ", ".join(f"{key}={value}" for key, value in varied)


def _rate(size: Size) -> float:
    """Samples in a second, over all seeds."""
    return size.mean([samples_per_second(row.measured.spent) for row in size.rows if row.measured]) or 0.0


def recorded(asked: Asked) -> dict[str, Any]:
    """What two studies in one folder must have in common, and the sizes."""
    return {
        "script": asked.script,
        "script_sha256": hash_of(asked.script),
        "arguments": list(asked.arguments),
        "budget": asked.budget,
        "settings": dict(asked.settings),
        "where": list(asked.where),
        "workers": list(asked.workers),
        "nodes": list(asked.nodes),
        "workers_per_node": asked.workers_per_node,
        "hosts": list(asked.hosts),
        "environment": hashes_of(asked.environment),
        "vary": {key: list(values) for key, values in asked.vary.items()},
        "repeat": asked.repeat,
        "weak": asked.weak,
    }


_IN_COMMON = {
    "script_sha256": "the script has changed since",
    "arguments": "the script had other arguments",
    "budget": "--budget was {before}",
    "settings": "--set was {before}",
    "where": "its runs were started with {before}",
    "environment": "--env gave other values",
}


def see_that_same(asked: Asked, folder: Path) -> None:
    """See that what `folder` holds can be compared with what is asked: sizes, variants and seeds may be added.

    Raises:
        ConfigError: it cannot, or there are far too many points.
    """
    names = [point.name for point in asked.points()]
    if len(names) > MOST_POINTS:
        raise ConfigError(f"this study has {len(names)} runs", where="--vary", fix=f"ask for {MOST_POINTS} at most")
    if double := [name for name in names if names.count(name) > 1]:
        fix = "give values that differ in letters or digits"
        raise ConfigError(f"two runs would be kept in one folder, {double[0]}", where="--vary", fix=fix)
    if not (folder / NAME).exists():
        return
    before, now = read_json(folder / NAME).get("asked", {}), recorded(asked)
    hosts, known = now["hosts"], before.get("hosts", [])
    in_common = {**_IN_COMMON, "hosts": "its hosts were {before}"}
    for key, words in in_common.items():
        is_more = key == "hosts" and hosts[: len(known)] == known[: len(hosts)]  # a size takes the first of them
        if not is_more and before.get(key, now[key] if key == "environment" else None) != now[key]:
            differs = words.format(before=before.get(key) or "not given")
            raise ConfigError(
                f"this folder holds a study that cannot be compared: {differs}",
                where=str(folder),
                fix="give another folder with --run-dir DIR, or ask as before",
            )


_OF_NO_MATTER = ("duration", "seed")
"""Settings that change no step's time."""


def see_that_of(folder: Path, script: str, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
    """See that the study in `folder` has measured steps of this script, as it is now and with these settings.

    Raises:
        ConfigError: it has not, or there is no study.
    """
    studied = asked_in(folder)
    before = read_json(folder / NAME)["asked"].get("script_sha256")

    def counting(given: Mapping[str, str]) -> dict[str, str]:
        return {key: value for key, value in given.items() if key not in _OF_NO_MATTER}

    if before != hash_of(script):
        same_name = Path(studied.script).name == Path(script).name
        what = f"{studied.script}, which has changed since" if same_name else f"{studied.script}, not of {script}"
    elif list(studied.arguments) != list(arguments):
        what = f"{script} with the arguments {shlex.join(studied.arguments) or '(none)'}"
    elif counting(studied.settings) != counting(settings):
        what = f"{script} with " + (" ".join(f"--set {k}={v}" for k, v in studied.settings.items()) or "no --set")
    else:
        return
    raise ConfigError(
        f"the study is of {what}, so its steps are others",
        where=str(folder),
        fix="ask for the same, or run a study of this",
    )


def in_folder(folder: Path) -> Study:
    """The study that `folder` holds, read again.

    Raises:
        ConfigError: there is none, or another version of manyhosts wrote it.
    """
    return known(asked_in(folder), folder, read_json(folder / NAME).get("price"))


def asked_in(folder: Path) -> Asked:
    """What was asked of the study that `folder` holds.

    Raises:
        ConfigError: there is none, or another version of manyhosts wrote it.
    """
    if not (folder / NAME).exists():
        raise ConfigError(
            f"there is no study in {folder}", where=str(folder), fix="give the folder that `manyhosts study` made"
        )
    found = read_json(folder / NAME, version=SCHEMA_VERSION)
    try:
        asked = found["asked"]
        return Asked(
            script=asked["script"],
            arguments=tuple(asked["arguments"]),
            workers=tuple(asked["workers"]),
            nodes=tuple(asked["nodes"]),
            workers_per_node=asked["workers_per_node"],
            hosts=tuple(asked["hosts"]),
            environment=tuple(asked.get("environment") or ()),
            where=tuple(asked["where"]),
            budget=asked["budget"],
            repeat=asked["repeat"],
            settings=asked["settings"],
            vary={key: tuple(values) for key, values in asked["vary"].items()},
            weak=asked.get("weak"),
        )
    except (KeyError, TypeError) as cause:
        raise ConfigError(
            f"{NAME} lacks what was asked: {cause}", where=str(folder / NAME), fix="run the study again in that folder"
        ) from cause


def known(asked: Asked, folder: Path, price: float | None = None) -> Study:
    """What the folder of a study says at the moment."""
    rows = []
    for point in asked.points():
        place = Place(folder / POINTS, point.name)
        outcome = outcome_of(place)
        measured = read(place, outcome)
        if outcome.done and measured is None:
            outcome = replace(outcome, status="failed", reason=_NO_RECORD.format(folder=place.run.path))
        rows.append(Row(point=point, place=place, outcome=outcome, measured=measured))
    return Study(asked=asked, folder=folder, rows=tuple(compared(rows)), price=price)


def study(asked: Asked, folder: Path, program: Sequence[str], progress: Progress, price: float | None = None) -> Study:
    """Run what is not done yet, each as `program run …`, and write `study.json` after each point.

    Raises:
        ConfigError: the folder holds another study, or one is in progress in it.
        Interrupted: by a signal; what is known by then is in `study.json`.
    """
    see_that_same(asked, folder)
    lock = run_lock.take(folder, run_lock.new_token(), launches=True)
    try:
        write(known(asked, folder, price))
        for _ in _run_all(asked, folder / POINTS, program, progress):
            write(known(asked, folder, price))
        found = known(asked, folder, price)
        write(found)
        return found
    except Interrupted:
        write(known(asked, folder, price))
        raise
    finally:
        if lock is not None:
            lock.release()


class Progress(Protocol):
    """Hears how the study continues."""

    def begins(self, point: Point, place: Place) -> None:
        """A run is about to be started, or one that another study has left running is waited for."""

    def goes_on(self, seconds: float) -> None:
        """The run under way has taken so long."""

    def ends(self, point: Point, outcome: Outcome, *, before: bool) -> None:
        """A run has ended; `before`: it was done already."""


def _run_all(asked: Asked, folder: Path, program: Sequence[str], progress: Progress) -> Iterator[None]:
    """Run every point that is not done, in order, with `program run …`. Gives control back after each.

    Raises:
        Interrupted: by Ctrl-C, SIGTERM or SIGHUP, when the run under way has ended.
    """
    with Signals() as signals:
        points = asked.points()
        for point in points:
            place = Place(folder, point.name)
            signals.check()
            _let_end(point, place, progress, signals)
            outcome = outcome_of(place)
            if outcome.done:
                progress.ends(point, outcome, before=True)
                continue
            progress.begins(point, place)
            stays_s = _stays_s(asked, point, points)
            launched = outcome.launched if place.run.metrics.exists() else time.time()
            Outcome(status="interrupted", launched=launched).write(place)  # found so after a power cut
            trial = Trial(
                [*program, *command(asked, point, str(place.run.path), warm=stays_s > 0)],
                place.log,
                environment={warm.VARIABLE: str(stays_s)} if stays_s else {},
            )
            trial.wait(signals, progress.goes_on)
            outcome = trial.outcome(place, launched, interrupted=signals.came)
            outcome.write(place)
            progress.ends(point, outcome, before=False)
            yield
            if not outcome.done:
                signals.check()  # also after the last run


_BETWEEN_RUNS_S = 60.0
_NO_OTHER_S = 0.1


def _stays_s(asked: Asked, point: Point, points: Sequence[Point]) -> float:
    """How long what a run's workers are forked from waits for the next run of its size; 0: there is no other one."""
    same = [other for other in points if other.size == point.size]
    if len(same) == 1 or not asked.is_here or not warm.IS_POSSIBLE:
        return 0.0
    return _BETWEEN_RUNS_S if point != same[-1] else _NO_OTHER_S


def _let_end(point: Point, place: Place, progress: Progress, signals: Signals) -> None:
    """Where a study was killed its run may still be under way: it is waited for, and nothing is done twice."""
    began = time.monotonic()
    while True:
        try:
            run_lock.see_that_free(place.run.path)
        except ConfigError:
            if time.monotonic() - began < LOOK_S:
                progress.begins(point, place)
            signals.check()
            progress.goes_on(time.monotonic() - began)
            time.sleep(LOOK_S)
        else:
            return


def write(study: Study) -> None:
    """Put `study.json` into the folder, completely or not at all."""
    write_json(study.folder / NAME, study.to_json())
