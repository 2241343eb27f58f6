"""Runs a run again: its code in a fresh folder, with its words, and its weights compared."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.config import overrides
from manyhosts.errors import ConfigError
from manyhosts.launchers.launch import new_run_dir
from manyhosts.records import provenance
from manyhosts.records.atomic_file import read_json, write_json
from manyhosts.records.provenance import DIFF, NAME, Provenance, git
from manyhosts.records.run_directory import claimed, drop_if_empty
from manyhosts.records.run_record import RunRecord
from manyhosts.report.run import WELL, read_run
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
            check_out(self.run_dir, self.found, place, began=self.record.started)
            yield place

    def words(self, root: Path) -> list[str]:
        """`run` with everything that this run was given, for the code in `root`."""
        found, words = self.found, ["run", "--run-dir", str(self.run_dir_again)]
        words += self._options or ["--workers", str(self.record.workers)]
        reported = json.loads(found.environment.get(overrides.VARIABLE, "{}"))
        reported.pop("duration", None)  # that of the last start counts: so runs are made longer
        if "duration" in self.record.overrides:
            reported["duration"] = self.record.overrides["duration"]
        if Duration.parse(str(self.record.settings["duration"])).seconds is not None:
            reported["duration"] = f"{self._steps} steps"  # a clock would end it elsewhere
        for key, value in reported.items():
            words += ["--set", f"{key}={value}"]
        is_module = found.kind == "module"
        program = found.program if is_module else str(root / provenance.below(Path(found.code.root), found.program))
        return [*words, *(["-m"] if is_module else []), program, *self.record.arguments]

    @property
    def _set_later(self) -> list[str]:
        """What `--set` gave in the last start and not so in the first, but for the duration."""
        first, last = json.loads(self.found.environment.get(overrides.VARIABLE, "{}")), self.record.overrides
        return sorted(key for key in {*first, *last} - {"duration"} if first.get(key) != last.get(key))

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
            (
                bool(self._set_later),
                f"{', '.join(self._set_later)} had another value in a later start: here as at the first",
            ),
            (
                list(self.found.arguments) != list(self.record.arguments),
                "the script had other arguments at its first start: here those of the last",
            ),
            (left > 0, f"{left:,} files were read beyond those that the record lists"),
        )
        return [text for is_so, text in known if is_so]

    def differences_before(self, root: Path) -> list[Difference]:
        """What is not as it was, as far as files show."""
        return differences(self.run_dir, self.found, state_now(self.found, root))

    def __call__(self, root: Path, manyhosts: Sequence[str], *, quiet: bool) -> Reproduction:
        """Run it by the command `manyhosts`, with the code in `root`, and compare. `quiet`: it speaks on stderr."""
        self.run_dir_again = claimed(self.run_dir_again)
        code = subprocess.call(
            [*manyhosts, *self.words(root)],
            cwd=self._folder(root),
            env=self._environment(root),
            stdout=sys.stderr if quiet else None,
        )
        drop_if_empty(self.run_dir_again)
        reported, now = self.differences_before(root), ""
        if code == 0:
            again = read_run(self.run_dir_again)
            now = "" if again.summary is None else again.summary.weights_sha256
            reported = differences(self.run_dir, self.found, provenance.read(self.run_dir_again))
            record = RunRecord.read(self.run_dir_again / "run.json")
            if len(record.hosts) != len(self.record.hosts):
                reported.append(Difference("hardware", f"hosts: {len(record.hosts)}, and was {len(self.record.hosts)}"))
        self._say_where_code_is(root)
        return Reproduction(
            run=str(self.run_dir),
            again=str(self.run_dir_again),
            then=self.then,
            now=now,
            code=code,
            differences=reported,
        )

    def _say_where_code_is(self, root: Path) -> None:
        """Have the record of the new run name the files that the old one names: those in `root` may be gone soon."""
        own, original = str(root), self.found.code.root
        for path in (self.run_dir_again / "run.json", self.run_dir_again / provenance.NAME / "state.json"):
            if own != original and path.exists():
                write_json(path, _moved(read_json(path), own, original))

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


def _moved(value: Any, own: str, other: str) -> Any:
    """`value` with every path that is in the folder `own` in `other`."""
    if isinstance(value, dict):
        return {key: _moved(each, own, other) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, own, other) for each in value]
    is_there = isinstance(value, str) and (value == own or value.startswith(f"{own}{os.sep}"))
    return other + value[len(own) :] if is_there else value


def see(found: Provenance) -> str:
    """The code of a run in a few words."""
    commit = f"commit {found.code.commit[:12]}" if found.code.commit else "the files that the record has kept"
    return commit + (" with the changes that were not committed" if found.code.changed else "")


_NEVER = {".git", "__pycache__", ".venv", "runs"}


def check_out(run_dir: Path, found: Provenance, place: Path, *, began: float) -> None:
    """Put the code that `found` describes into the folder `place`, which is not there yet.

    What the record has no copy of (data, mostly) is linked from where it was; but for files that were written since the
    run `began`, which may be what it has made, and would be written over: those that it has read are copied.

    Raises:
        ConfigError: the repository, its commit or the changes cannot be had.
    """
    root = Path(found.code.root)
    if found.code.commit:
        _clone(root, found.code.commit, place)
        if found.code.changed:
            _apply(run_dir / NAME / DIFF, place)
    else:
        place.mkdir(parents=True)
    for name in found.code.files:
        kept = run_dir / NAME / "sources" / name
        if not Path(name).is_absolute() and kept.exists() and not found.code.commit:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, place / name)
    for path in _not_kept(root, run_dir, git_knows=bool(found.code.commit)):
        for older in _written_before(began, root, path):
            link = place / older
            if not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(root / older)
    for name in found.data:
        copy = place / name
        if not Path(name).is_absolute() and not copy.exists() and (root / name).is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy)


def _written_before(began: float, root: Path, path: Path) -> Iterator[Path]:
    """`path`, of a file or a folder below `root`, or what in it was not written since."""
    entry = root / path
    if entry.is_symlink() or not entry.is_dir():
        if entry.lstat().st_mtime < began:
            yield path
    elif any(each.lstat().st_mtime >= began for each in entry.rglob("*") if each.is_symlink() or not each.is_dir()):
        for each in sorted(entry.iterdir()):
            yield from _written_before(began, root, path / each.name)
    else:
        yield path


def _clone(root: Path, commit: str, place: Path) -> None:
    what, fix = f"commit {commit[:12]} cannot be had", "bring the repository of the run back to that path, or fetch it"
    _asked(root.parent, ["clone", "--quiet", "--shared", "--no-checkout", str(root), str(place)], root, what, fix)
    _asked(place, ["-c", "advice.detachedHead=false", "checkout", "--quiet", commit], root, what, fix)


def _apply(diff: Path, place: Path) -> None:
    what, fix = "the changes that were not committed cannot be applied", "restore that file of the run directory"
    _asked(place, ["apply", "--binary", "--whitespace=nowarn", str(diff)], diff, what, fix)


def _asked(folder: Path, words: Sequence[str], where: Path, what: str, fix: str) -> None:
    """Have git do it in `folder`; what it says where it cannot is reported of `where`."""
    try:
        git(folder, *words)
    except FileNotFoundError as cause:
        raise ConfigError("there is no git on this machine", where="PATH", fix="install git") from cause
    except (OSError, subprocess.SubprocessError) as cause:
        said = (getattr(cause, "stderr", b"") or b"").decode(errors="replace").strip()
        raise ConfigError(f"{what}: {said or cause}", where=str(where), fix=fix) from cause


def _not_kept(root: Path, run_dir: Path, *, git_knows: bool) -> Iterator[Path]:
    """Below `root`: what the record does not have. Runs are none of it, nor is what Python makes by itself."""
    if not git_knows:
        yield from _all_but_sources(root, Path(), run_dir)
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for which in (["--ignored"], []):
            words = ["ls-files", "--others", *which, "--exclude-standard", "--directory", "-z"]
            for name in filter(None, git(root, *words).decode().split("\0")):
                if not _is_left_alone(root / name, run_dir):
                    yield Path(name)


def _all_but_sources(root: Path, below: Path, run_dir: Path) -> Iterator[Path]:
    for path in sorted((root / below).iterdir()) if (root / below).is_dir() else []:
        short = below / path.name
        if _is_left_alone(path, run_dir) or path.suffix == ".py":
            continue
        if path.is_dir() and next(path.rglob("*.py"), None) is not None:
            yield from _all_but_sources(root, short, run_dir)
        else:
            yield short


def _is_left_alone(path: Path, run_dir: Path) -> bool:
    return path.name in _NEVER or run_dir.resolve().is_relative_to(path.resolve())


def state_now(found: Provenance, root: Path) -> Provenance:
    """What `found` would be, were the run to begin now with the code below `root`, as far as files show."""
    files, data = {}, {}
    for name in found.code.files:
        with contextlib.suppress(OSError):
            files[name] = provenance.sha256_of(root / name)
    for name, before in found.data.items():
        for folder in (root, Path(found.code.root)):
            with contextlib.suppress(OSError):
                data[name] = provenance.digest_of(folder / name, whole=before.whole)
                break
    hardware = {**found.hardware, **provenance.hardware_here()}
    return provenance.changed(found, root=root, files=files, data=data, hardware=hardware)
