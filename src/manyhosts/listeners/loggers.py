"""Loggers, each a listener: the values of steps, validations and tests, gathered and written together.

    trainer = mh.Trainer(…, listeners=[mh.CSVLogger("values.csv"), mh.MLflowLogger("digits")])

All call a value alike: `train/loss`, `train/lr`, `train/gradient_norm`, `validation/accuracy`, `test/loss`.
"""

from __future__ import annotations

import csv
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.events import Event, Recovered, RunEnded, RunStarted, StepDone, TestDone, ValidationDone

_LOG = logging.getLogger("manyhosts")


@dataclass(frozen=True, slots=True)
class Row:
    """What one event has to be drawn."""

    step: int
    time: float
    """In seconds since the Unix epoch."""
    values: Mapping[str, float]


def row_of(event: Event) -> Row | None:
    """The values of an event; None where it has none."""
    match event:
        case StepDone():
            values = {"train/loss": event.loss, "train/lr": event.lr}
            if event.gradient_norm is not None:
                values["train/gradient_norm"] = event.gradient_norm
            if event.timing.total > 0:
                values["train/samples_per_second"] = event.samples / event.timing.total
            values |= {f"train/{name}": value for name, value in event.values.items()}
        case ValidationDone():
            values = {f"validation/{name}": value for name, value in event.values.items()}
        case TestDone():
            values = {f"test/{name}": value for name, value in event.values.items()}
        case _:
            return None
    return Row(event.step, event.time, values)


class Logger:
    """Gathers rows, and has them written every few seconds, at the end of a run, and after a test."""

    every_s = 1.0

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self.status = ""
        """How the run has ended; empty until then."""
        self._written_at = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        if isinstance(event, RunStarted) or (isinstance(event, Recovered) and event.rewound):
            self.write_rest()
            self.begin_at(event.step)
        if isinstance(event, RunEnded):
            self.status = event.status
        if (row := row_of(event)) is not None:
            self._rows.append(row)
        is_due = time.monotonic() - self._written_at >= self.every_s
        if is_due or isinstance(event, RunEnded | TestDone):
            self.write_rest()

    def write_rest(self) -> None:
        """Write what was gathered."""
        rows, self._rows, self._written_at = self._rows, [], time.monotonic()
        if rows:
            self.write(rows)

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self.write_rest()

    def begin_run(self, run_dir: Path) -> None:
        """What comes is of the run in `run_dir`."""

    def begin_at(self, step: int) -> None:
        """The run begins, or is resumed, after `step`: what later steps had is reported again."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write `rows`, in their order."""
        raise NotImplementedError


def path_of(given: str | Path, *, where: str) -> Path:
    """What a script gives as a path.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"the path is a {type(given).__name__}", where=where, fix="give a text or a Path")
    return Path(given)


class CSVLogger(Logger):
    """Writes a table with a line for each step, validation and test, and a column for each value.

    A run that is resumed continues the table after its snapshot. The table is on the disk before each snapshot. That of
    another run, begun before, is set aside as `values-RUN-NUMBER.csv`, and taken up where that one is resumed.
    """

    def __init__(self, path: str | Path) -> None:
        """`path`: of the table of the run that was begun last.

        Raises:
            ConfigError: it is no path.
        """
        super().__init__()
        self._path, self._run = path_of(path, where="mh.CSVLogger(path)"), ""
        self._columns: list[str] = []
        self._has_old_test = False
        """Whether a test that the table has may be made again: a run that is over was begun again."""

    def flush(self) -> None:
        """Have every line in the file."""
        self.write_rest()

    @property
    def path(self) -> Path:
        """Of this run's table: another run may have been begun meanwhile, whose table is in its place."""
        return self._path if self._owner() in ("", self._run) else self._place_of(self._run)

    def begin_run(self, run_dir: Path) -> None:
        """Have the table of this run in its place, and that of another one out of it."""
        self._run, before = str(run_dir), self._owner()
        if not self._run or before == self._run:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._owner_file.write_text(self._run)  # first: a run that continues writes to its own table from now on
        if before and self._path.exists():
            os.replace(self._path, self._place_of(before))
            _LOG.warning("%s had the values of %s: they are in %s now", self._path, before, self._place_of(before))
        if self._place_of(self._run).exists():
            os.replace(self._place_of(self._run), self._path)

    @property
    def _owner_file(self) -> Path:
        """Names the run whose table is in the place."""
        return self._path.with_name(f".{self._path.name}.run")

    def _owner(self) -> str:
        try:
            return self._owner_file.read_text()
        except OSError:
            return ""

    def _place_of(self, run_dir: str) -> Path:
        number = zlib.crc32(run_dir.encode())  # runs of one name in two folders are two
        return self._path.with_name(f"{self._path.stem}-{Path(run_dir).name}-{number:08x}{self._path.suffix}")

    def begin_at(self, step: int) -> None:
        """Leave of the table what is true of the run until `step`."""
        kept = [row for row in self._read() if int(row["step"]) <= step] if step else []
        self._has_old_test = bool(kept)
        self._columns = self._columns if kept else ["step", "time"]
        self._replace(kept)

    def write(self, rows: Sequence[Row]) -> None:
        """Add lines; a new column has the table written again."""
        lines = [{"step": str(row.step), "time": f"{row.time:.3f}", **_texts(row.values)} for row in rows]
        if self._has_old_test and (tested := [line["step"] for line in lines if _is_test(line)]):
            self._replace([row for row in self._read() if row["step"] not in tested or not _is_test(row)])
            self._has_old_test = False
        old = self._read() if not self._columns else None
        if new := [name for name in dict.fromkeys(key for line in lines for key in line) if name not in self._columns]:
            before = self._read() if old is None else old
            self._columns += [name for name in new if name not in self._columns]
            self._replace(before)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(lines)

    def _read(self) -> list[dict[str, str]]:
        """The lines of the file, complete ones alone: a process that was killed may have left a part of one."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        found = [row for row in reader if row.get("step", "").isdigit()]
        self._columns = list(reader.fieldnames or [])
        return found

    def _replace(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_name(f".{self.path.name}.half")
        with half.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(half, self.path)


def _is_test(line: Mapping[str, str]) -> bool:
    return any(text for name, text in line.items() if name.startswith("test/"))


def _texts(values: Mapping[str, float]) -> dict[str, str]:
    return {name: repr(float(value)) for name, value in values.items()}
