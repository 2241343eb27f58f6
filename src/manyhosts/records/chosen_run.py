"""Which run, and which of its snapshots, a word on the command line names."""

from __future__ import annotations

import shlex
import time
from difflib import get_close_matches
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records.manifest import NAME, found_in
from manyhosts.records.run_directory import RunDirectory


def run_directory(named: str | Path) -> RunDirectory:
    """The run directory that a word on the command line names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(named)
    directory = RunDirectory(path.absolute())
    if not directory.run_json.exists():
        raise without_training(directory) or no_run(path, "there is no run.json in this folder")
    return directory


def no_run(path: Path, holds: str, *, fix: str = "give the directory of a run, such as runs/train-…") -> ConfigError:
    """What to say of a `path` that is no run's directory, and which of those near it may be meant.

    `holds`: what a folder has in it, or not; `fix`: what to give where no run is near.
    """
    what = holds if path.is_dir() else "this is a file" if path.exists() else "there is no such folder"
    if path.is_dir() and (inside := _runs_in(path)):
        fix = f"name a run in it: the newest is {inside[-1]}, and `manyhosts runs {shlex.quote(str(path))}` lists them"
    elif found := next((each for each in path.parents if path.exists() and (each / "run.json").exists()), None):
        fix = f"name its run: {found}"
    elif not path.exists():
        there = {each.name: each for folder in (path.parent / "runs", path.parent) for each in _runs_in(folder)}
        if near := get_close_matches(path.name, there, 1):
            found = there[near[0]]
            fix = f"did you mean {found}? `manyhosts runs {shlex.quote(str(found.parent))}` lists what is there"
    return ConfigError(what, where=str(path), fix=fix)


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, the newest last."""
    found = [each for each in folder.glob("*/run.json") if each.is_file()]
    return [each.parent for each in sorted(found, key=lambda each: each.stat().st_mtime)]


def without_training(directory: RunDirectory) -> ConfigError | None:
    """What is known of a run that has logs and no record: it ended before training began. None where it has none."""
    if not directory.logs.is_dir():
        return None
    if directory.interruption.exists():
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(directory.interruption.stat().st_mtime))
        what = f"the run was interrupted before its first step, at {moment}: only what its workers printed is kept"
        fix = f"start it again with the command that began it and --run-dir {directory.path}, or read the files in logs"
    else:
        what = "nothing but what the workers printed is on record here: no training by mh.Trainer began"
        fix = "read the files in its folder logs: the script ended before it trained, or trains by other means"
    return ConfigError(what, where=str(directory.path), fix=fix)


def snapshot_of(directory: RunDirectory, snapshot: str | Path = "best") -> Path:
    """The folder of the snapshot that is named: `"best"`, `"last"`, a step such as `"400"`, or a folder.

    `"best"` is the newest where the run has kept no best model.

    Raises:
        ConfigError: there is none.
    """
    steps = [each for each in found_in(directory.snapshots) if each.how != "half" and each.step >= 0]
    if (Path(snapshot) / NAME).exists():
        return Path(snapshot)
    if snapshot == "best" and (directory.best / NAME).exists():
        return directory.best
    if snapshot in ("best", "last"):
        if steps:
            return steps[0].path
        raise ConfigError(
            "there is no best model and no snapshot here", where=str(directory.path), fix="let the run come to its end"
        )
    for each in steps:
        if str(snapshot) in (str(each.step), each.path.name):
            return each.path
    known = ", ".join(str(each.step) for each in steps) or "none"
    raise ConfigError(
        f"there is no snapshot {str(snapshot)!r}",
        where=str(directory.path),
        fix=f'"best", "last" or a step of: {known}',
    )
