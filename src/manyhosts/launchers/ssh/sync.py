"""Brings the working directory to a host, and the run directory back: only what changed, and what is of use there."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers.ssh import disks
from manyhosts.launchers.ssh.connection import Connection
from manyhosts.records import run_lock

IGNORE_FILE = ".manyhostsignore"
_IGNORED = (
    disks.MARKS,
    ".git",
    "runs",
    ".venv",
    "venv",
    "__pycache__",
    "*.pyc",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
)
_MOST_BYTES = 2 << 30
_DECIDING = (".py", ".so", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh")
"""Code and settings. What else changes in a working directory is what programs write there while they run."""


def ignored_patterns(folder: Path) -> list[str]:
    """What stays at home: names, or paths below `folder`, with * and ? as in a shell."""
    own = folder / IGNORE_FILE
    lines = own.read_text().splitlines() if own.exists() else []
    return [*_IGNORED, *(line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#"))]


@dataclass(frozen=True, slots=True)
class Files:
    """What is brought to hosts, and how it was when the first ones got it."""

    folder: Path
    paths: Sequence[str]
    """Below `folder`."""
    stamps: Mapping[str, tuple[int, int]]
    """Of those that say what a worker does: path → size, time of the last change in ns."""

    @classmethod
    def to_bring(cls, folder: Path, *, leave_out: Path | None = None) -> Files:
        """See `files_to_bring`."""
        paths = files_to_bring(folder, leave_out=leave_out)
        deciding = [path for path in paths if path.endswith(_DECIDING)]
        return cls(folder, paths, {path: _stamp(folder / path) for path in deciding})

    def see_that_none_has_changed(self) -> None:
        """See that a host that gets them now gets what the others have.

        Raises:
            LaunchError: one is another now.
        """
        for path, before in self.stamps.items():
            with contextlib.suppress(FileNotFoundError):
                if _stamp(self.folder / path) == before:
                    continue
            raise LaunchError(
                f"{path} is not what it was when the run began, so a host that comes now would run something else",
                where=str(self.folder / path),
                fix="put it back, or start the run again: it goes on from its newest snapshot",
            )


def _stamp(path: Path) -> tuple[int, int]:
    state = path.lstat()
    return state.st_size, state.st_mtime_ns


def files_to_bring(folder: Path, *, leave_out: Path | None = None) -> list[str]:
    """Paths below `folder` that every host needs, sorted. `leave_out` is a folder that it does not.

    Raises:
        ConfigError: they are more than 2 GiB.
    """
    found, total = [], 0
    for path, size in _walk(folder, ignored_patterns(folder), leave_out):
        found.append(path)
        total += size
        if total > _MOST_BYTES:
            raise ConfigError(
                "the working directory has more than 2 GiB to be brought to every host",
                where=str(folder),
                fix=f"name what is not needed there in {IGNORE_FILE}, or use --no-sync where the hosts share a disk",
            )
    return sorted(found)


def bring(connection: Connection, files: Files, *, with_rsync: bool) -> None:
    """Make `files` on the host what they are here.

    Raises:
        LaunchError: the host did not take them.
    """
    folder = files.folder
    if not connection.ask("make", path=str(folder)):
        raise LaunchError(
            f"host {connection.host} cannot write to {folder}",
            where=f"host {connection.host}",
            fix="the same folder is used on all hosts: start from one that you may write to everywhere",
        )
    if with_rsync:
        words = ["rsync", "--archive", "--files-from=-", "--from0", "--rsh", connection.shell]
        _run(connection, [*words, f"{folder}/", f"{connection.host}:{folder}/"], "\0".join(files.paths).encode())
        return
    states = {path: (folder / path).lstat() for path in files.paths}
    wanted = connection.ask(
        "differing",
        folder=str(folder),
        files={path: [state.st_size, state.st_mtime_ns] for path, state in states.items()},
        timeout_s=60,
    )
    if wanted:
        words = connection.command(shlex.join(["tar", "--extract", "--directory", str(folder)]))
        with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as there:
            assert there.stdin is not None, "it was asked for as a pipe"
            with tarfile.open(fileobj=there.stdin, mode="w|") as archive:
                for path in wanted:
                    archive.add(folder / path, arcname=path, recursive=False)
            _, said = there.communicate()
        _see(connection, there.returncode, said)


def fetch(connection: Connection, folder: Path, *, only: str = ".", with_rsync: bool) -> None:
    """Bring `only`, a folder below `folder` of the host, here to the same place. One that is not there is no trouble.

    Raises:
        LaunchError: it did not come.
    """
    source = folder / only
    if not connection.ask("exists", path=str(source)):
        return
    source.mkdir(parents=True, exist_ok=True)
    if with_rsync:
        excluded = [f"--exclude=/{run_lock.NAME}", f"--exclude=/{disks.MARKS}"]
        words = ["rsync", "--archive", *excluded, "--rsh", connection.shell]
        _run(connection, [*words, f"{connection.host}:{source}/", f"{source}/"], b"")
        return
    words = connection.command(shlex.join(["tar", "--create", "--directory", str(source), *excluded, "."]))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as there:
        with tarfile.open(fileobj=there.stdout, mode="r|") as archive:
            archive.extractall(source, filter="data")
        _, said = there.communicate()
    _see(connection, there.returncode, said)


def rsync_here() -> bool:
    """Whether this machine has rsync."""
    return shutil.which("rsync") is not None


def _walk(folder: Path, patterns: Sequence[str], leave_out: Path | None) -> Iterator[tuple[str, int]]:
    """Paths below `folder` that no pattern names, with their sizes. What is linked to is not followed."""
    for place, folders, files in os.walk(folder):
        here = os.path.relpath(place, folder)
        folders[:] = [name for name in folders if not _named(here, name, patterns) and Path(place, name) != leave_out]
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in [*files, *links]:
            path = os.path.normpath(os.path.join(here, name))
            state = os.lstat(os.path.join(place, name))
            if not _named(here, name, patterns):
                yield path, state.st_size


def _named(here: str, name: str, patterns: Sequence[str]) -> bool:
    path = os.path.normpath(os.path.join(here, name))
    return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _run(connection: Connection, words: Sequence[str], content: bytes) -> None:
    done = subprocess.run(words, input=content, capture_output=True, start_new_session=True)
    _see(connection, done.returncode, done.stderr)


def _see(connection: Connection, code: int, said: bytes) -> None:
    if code != 0:
        last = next(iter(reversed(said.decode(errors="replace").strip().splitlines())), f"exit code {code}")
        raise LaunchError(
            f"files could not be brought to or from host {connection.host}: {last}",
            where=f"host {connection.host}",
            fix="see that its disk is not full and that you may write there; --no-sync leaves this step out",
        )
