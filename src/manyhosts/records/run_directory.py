"""Where everything of one run is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json

VARIABLE = "MANYHOSTS_RUN_DIR"
"""Names the run directory to the workers of `manyhosts run`."""
UNASKED = "MANYHOSTS_RUN_DIR_UNASKED"
"""Set where no one asked for that directory, so that a script may choose another."""
SEPARATE_DISKS = "MANYHOSTS_DISKS_APART"
"""Set where not all hosts share that directory: there are several of that name, on disks of their own."""
DISK = "MANYHOSTS_DISK"
"""A number of the disk that has a host's run directory: the same on hosts that share it. Unset: each has its own."""
HEAD = "head.json"
"""Lies in that directory for a head that takes the run over: its secret, and where its head listens."""


def check_is_folder(text: str, *, where: str) -> None:
    """See that a run directory that somebody has named is no address of an object store, and none of a shell alone.

    Raises:
        ConfigError: it is one.
    """
    if text.startswith("~"):
        raise ConfigError(
            f"{text!r} begins with ~, for which no shell has put the home directory",
            where=where,
            fix=f"write {os.path.expanduser(text)}",
        )
    if re.match(r"[a-z][a-z0-9+]*:/", text):
        raise ConfigError(
            f"{text!r} is the address of a store, but a record grows line by line, which takes a disk",
            where=where,
            fix="leave it on the disk, and have snapshots and the record copied there: --set snapshots.to=ADDRESS",
        )


def content_hash(script: Path) -> str:
    """The sha256 of a script's content; empty where there is no such file."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError:
        return ""


def has_content(record: Mapping[str, object], script: Path) -> bool:
    """Whether `run.json` is of a script with the content of this one, wherever it was and however it was called."""
    return bool(record.get("script_sha256")) and record["script_sha256"] == content_hash(script)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run, by their names in docs: each may or may not be there yet."""

    path: Path

    @classmethod
    def choose(cls, script: Path, variables: Mapping[str, str] | None = None) -> RunDirectory:
        """What `MANYHOSTS_RUN_DIR` names, or else a new `runs/<script>-<time>` below the working directory.

        Raises:
            ConfigError: nothing can be made there.
        """
        chosen = (os.environ if variables is None else variables).get(VARIABLE)
        if chosen:
            return cls(Path(chosen))
        return cls(claimed(Path("runs", f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}")))

    @property
    def run_json(self) -> Path:
        """What was asked: see `records.run_record`."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """What happened, line by line: see `records.metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What came out: see `records.summary`."""
        return self.path / "summary.json"

    @property
    def first_batch(self) -> Path:
        """Some samples of the first batch, where they are pictures: see `records.first_batch`."""
        return self.path / "first-batch.npz"

    @property
    def snapshots(self) -> Path:
        """The folder of what the run can continue from."""
        return self.path / "snapshots"

    @property
    def best(self) -> Path:
        """The best model by the watched metric."""
        return self.path / "best"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """The folder of what `--profile` has kept; there where it has."""
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        """The folder of what the workers printed."""
        return self.path / "logs"

    @property
    def interruption(self) -> Path:
        """An empty file that is there where somebody ended the run: one that has not trained has no other record."""
        return self.logs / "interrupted"

    def log(self, host: str, rank: int) -> Path:
        """What one worker printed."""
        return self.logs / f"{host}-{rank}.log"

    def samples(self, rank: int) -> Path:
        """Which samples one worker took in each step, where that was asked for."""
        return self.logs / f"samples-{rank}.jsonl"

    def set_aside(self) -> str:
        """Keep the best model and the records of a training whose snapshots are gone, before another one begins here.

        Returns the folder that has them; empty where there is no such model, nor the record of an end.
        """
        if not self.best.is_dir() and not self.summary.exists():
            return ""
        kept = self.path / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        kept.mkdir(exist_ok=True)
        for record in (self.metrics, self.run_json):  # these say how the training before broke off
            if record.exists():
                shutil.copy2(record, kept)
        for found in (self.best, self.summary):  # moved, so that a start that breaks off finds nothing to keep again
            if found.exists():
                found.rename(kept / found.name)
        return str(kept)

    def open_for(self, script: Path) -> RunDirectory:
        """Make the directory, for a run of `script`. One that is there already is resumed.

        Raises:
            ConfigError: it is the run of another script, something is where its folders go, or it cannot be made.
        """
        try:
            is_known = self.run_json.exists()
        except OSError as cause:  # a name that is too long, a folder that may not be looked into
            raise _cannot_make(self.path, cause) from cause
        if is_known:
            record = read_json(self.run_json)
            before = str(record.get("script", ""))
            if Path(before).name != script.name and not has_content(record, script):
                raise ConfigError(
                    f"this is the run directory of {before}, not of {script}, which has another name and other content",
                    where=str(self.path),
                    fix="choose another with --run-dir DIR, or leave that out to begin a new run; a script that was "
                    "renamed resumes its run before it is changed",
                )
        for folder in (self.snapshots, self.best, self.tensorboard, self.profile, self.logs):
            if os.path.lexists(folder) and not folder.is_dir():
                raise ConfigError(
                    f"{folder.name} in the run directory is a file, and the run keeps a folder of that name there",
                    where=str(folder),
                    fix="move it away, or choose another run directory with --run-dir DIR",
                )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise _cannot_make(self.path, cause) from cause
        return self


def claimed(base: Path) -> Path:
    """A new folder called `base`, or `base-2` and so on: two runs may start in the same second.

    Raises:
        ConfigError: nothing can be made there.
    """
    count, path = 1, base
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
            except FileExistsError:
                count += 1
                path = base.with_name(f"{base.name}-{count}")
            else:
                return path
    except OSError as cause:
        raise _cannot_make(path.absolute(), cause) from cause


def drop_if_empty(path: Path) -> None:
    """Remove what `claimed` has made, where the run never began."""
    with contextlib.suppress(OSError):  # it holds something, as a rule
        path.rmdir()


def _cannot_make(path: Path, cause: OSError) -> ConfigError:
    return ConfigError(
        f"cannot make the run directory: {cause.strerror or cause}",
        where=str(path),
        fix=f"choose another with --run-dir DIR, or {VARIABLE}=DIR where no launcher starts the script",
    )
