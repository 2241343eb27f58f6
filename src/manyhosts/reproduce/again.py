"""Runs a run again: its code in a fresh folder, with its words, and its weights compared."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers.launch import new_run_dir
from manyhosts.records import provenance
from manyhosts.records.provenance import Provenance
from manyhosts.records.run_record import RunRecord
from manyhosts.report.run import WELL, read_run
from manyhosts.reproduce import checkout
from manyhosts.reproduce.differences import Difference, differences
from manyhosts.units import Duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What came of it."""

    run: str
    again: str
    """The directory of the new run."""
    then: str
    """sha256 of the weights at the end of the run."""
    now: str
    code: int
    """The exit code of the new run."""
    differences: Sequence[Difference]

    @property
    def is_equal(self) -> bool:
        """Whether both ended with the same weights, bit for bit."""
        return bool(self.now) and self.then == self.now


class Again:
    """A run that is to be run again."""

    def __init__(self, run_dir: Path, *, options: Sequence[str] = ()) -> None:
        """`options`: of `manyhosts run`, for other workers or hosts than as many workers here.

        Raises:
            ConfigError: there is no such run, it did not end well, or its record is not enough.
        """
        run = read_run(run_dir)
        if run.record is None or run.summary is None or run.status not in WELL or not run.summary.weights_sha256:
            raise ConfigError(
                f"this run has no weights to compare with: {run.status}{': ' * bool(run.reason)}{run.reason}",
                where=str(run_dir),
                fix="let it come to its end: the same command continues with it",
            )
        self.run_dir, self.then = run_dir, run.summary.weights_sha256
        self.record, self.found = run.record, provenance.read(run_dir)
        self._steps, self._options = run.summary.steps, options
        self.run_dir_again = new_run_dir(self.record.script)

    @contextmanager
    def code(self, *, here: bool) -> Iterator[Path]:
        """Within, the folder that has the code: a fresh one, or with `here` the one it was in, as it is now.

        Raises:
            ConfigError: it cannot be had.
        """
        if here:
            yield Path(self.found.code.root)
            return
        with tempfile.TemporaryDirectory(prefix="manyhosts-") as scratch:
            place = Path(scratch, Path(self.found.code.root).name or "code").resolve()
            checkout.make(self.run_dir, self.found, place)
            yield place

    def words(self, root: Path) -> list[str]:
        """`run` with everything that this run was given, for the code in `root`."""
        found, words = self.found, ["run", "--run-dir", str(self.run_dir_again)]
        words += self._options or ["--workers", str(self.record.workers)]
        reported = json.loads(found.environment.get(overrides.VARIABLE, "{}"))
        if Duration.parse(str(self.record.settings["duration"])).seconds is not None:
            reported["duration"] = f"{self._steps} steps"  # a clock would end it elsewhere
        for key, value in reported.items():
            words += ["--set", f"{key}={value}"]
        is_module = found.kind == "module"
        program = found.program if is_module else str(root / provenance.below(Path(found.code.root), found.program))
        return [*words, *(["-m"] if is_module else []), program, *found.arguments]

    def notes(self) -> list[str]:
        """What is to be known before."""
        changed, left, hosts = self.found.changed_on_resume, self.found.data_left_out, len(self.record.hosts)
        resumed = f"the run was resumed after its {' and '.join(changed)} had changed: here all is as at its beginning"
        known = (
            (bool(changed), resumed),
            (
                hosts > 1 and not self._options,
                f"the run had {hosts} hosts, and all {self.record.workers} workers are here now",
            ),
            (left > 0, f"{left:,} files were read beyond those that the record lists"),
        )
        return [text for is_so, text in known if is_so]

    def differences_before(self, root: Path) -> list[Difference]:
        """What is not as it was, as far as files tell."""
        return differences(self.run_dir, self.found, checkout.now(self.found, root))

    def __call__(self, root: Path, manyhosts: Sequence[str], *, quiet: bool) -> Reproduction:
        """Run it by the command `manyhosts`, with the code in `root`, and compare. `quiet`: it speaks on stderr."""
        code = subprocess.call(
            [*manyhosts, *self.words(root)],
            cwd=self._folder(root),
            env=self._environment(root),
            stdout=sys.stderr if quiet else None,
        )
        reported, now = self.differences_before(root), ""
        if code == 0:
            again = read_run(self.run_dir_again)
            now = "" if again.summary is None else again.summary.weights_sha256
            reported = differences(self.run_dir, self.found, provenance.read(self.run_dir_again))
            record = RunRecord.read(self.run_dir_again / "run.json")
            if len(record.hosts) != len(self.record.hosts):
                reported.append(Difference("hardware", f"hosts: {len(record.hosts)}, and was {len(self.record.hosts)}"))
        return Reproduction(
            run=str(self.run_dir),
            again=str(self.run_dir_again),
            then=self.then,
            now=now,
            code=code,
            differences=reported,
        )

    def command(self, root: Path) -> str:
        """What is run, for a person."""
        return f"cd {shlex.quote(str(self._folder(root)))} && {shlex.join(['manyhosts', *self.words(root)])}"

    def _folder(self, root: Path) -> Path:
        folder = root / provenance.below(Path(self.found.code.root), self.found.folder)
        if not folder.is_dir():
            raise ConfigError(
                "the working directory of the run is gone", where=str(folder), fix="make it again: the script ran in it"
            )
        return folder

    def _environment(self, root: Path) -> dict[str, str]:
        found = self.found
        own = [str(root / provenance.below(Path(found.code.root), path)) for path in found.search_path]
        paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in found.environment.items() if name != overrides.VARIABLE}
        threads = {"OMP_NUM_THREADS": found.hardware.get("threads", "1")}
        return {**os.environ, **threads, **kept, "PYTHONPATH": os.pathsep.join(paths)}


def see(found: Provenance) -> str:
    """The code of a run in a few words."""
    commit = f"commit {found.code.commit[:12]}" if found.code.commit else "the files that the record has kept"
    return commit + (" with the changes that were not committed" if found.code.changed else "")
