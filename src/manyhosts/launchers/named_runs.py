"""What a person names a run by: its directory, the handle that `run --detach` printed, or `last`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.launchers import background, detached
from manyhosts.launchers.detached import Jobs, State, Status
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.records import run_lock
from manyhosts.records.atomic_file import write_json
from manyhosts.records.chosen_run import no_run
from manyhosts.records.json_text import parsed
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.summary import Summary

LAST = "last"
METAVAR = "RUN"
"""How help calls an argument that is read by this file."""
_RUNS = "runs"
_HANDLE = Path("detached", "handle.json")
_LOOK_S = 0.1
_ENDS_WITHIN_S = 120.0
_UNTRAINED = "no training is on record: the script ended before it, or has no mh.Trainer; its log says more"
INTERRUPTED = "interrupted; no training is on record"
_STATES: dict[str, State] = {"completed": "done", "stopped early": "done", "interrupted": "cancelled"}


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run as somebody has named it."""

    directory: Path | None
    """None where the record of that handle is not on this machine."""
    handle: str
    """Empty where the run was started in a terminal, which keeps it."""

    @property
    def jobs(self) -> tuple[Jobs, str]:
        """What knows its state, and the name of the run there."""
        if self.handle:
            return background.of_handle(self.handle)
        assert self.directory is not None, "a run without a handle is named by its directory"
        return InTerminal(), str(self.directory)


def named(word: str) -> NamedRun:
    """The run that `word` names: a directory, a handle such as `slurm://4711`, or `last`.

    Raises:
        ConfigError: there is no run in `runs` yet, or this is the handle of no engine.
    """
    if word == LAST:
        path = _newest()
        return NamedRun(path, handle_of(path))
    kind, separator, place = word.partition("://")
    if not separator:
        path = Path(word).absolute()
        return NamedRun(path, handle_of(path))
    if kind not in LAUNCHERS.names() or not place:
        background.of_handle(word)  # which says what a handle is
    here = Path(place).absolute()
    if (here / "detached").is_dir():
        return NamedRun(here, word)
    found = [path for path in runs_in(Path.cwd() / _RUNS) if handle_of(path) == word]
    return NamedRun(found[0] if found else None, word)


def directory_of(word: str) -> Path:
    """The directory of the run that `word` names; one that is named as such need not be there.

    Raises:
        ConfigError: as `named`, or the record of that handle is not on this machine.
    """
    run = named(word)
    if run.directory is None:
        raise ConfigError(
            f"the run directory of {word} is not known here",
            where=METAVAR,
            fix=f"name the directory, or ask in the folder whose {_RUNS} has it",
        )
    return run.directory


def directory_or_store(word: str) -> str:
    """As `directory_of`, where the address of an object store is allowed, too."""
    kind, separator, _ = word.partition("://")
    is_named = word == LAST or (separator and kind in LAUNCHERS.names())
    return str(directory_of(word)) if is_named else word


def keep_handle(run_dir: Path, handle: str) -> None:
    """Remember that the run in `run_dir` is known by `handle`; empty: that the terminal has it which starts it now.

    Where nothing can be written here, the run is named by its handle alone.
    """
    with contextlib.suppress(OSError):
        if handle:
            write_json(run_dir / _HANDLE, {"handle": handle})
        else:
            (run_dir / _HANDLE).unlink(missing_ok=True)


def keep_interruption(run_dir: Path, *, interrupted: bool) -> None:
    """Remember that somebody ended the run in `run_dir`, or forget it: a script that has not trained has no record."""
    with contextlib.suppress(OSError):
        if interrupted:
            if run_dir.is_dir():
                RunDirectory(run_dir).logs.mkdir(exist_ok=True)  # it may have ended before there was a log
            RunDirectory(run_dir).interruption.touch()
        else:
            RunDirectory(run_dir).interruption.unlink(missing_ok=True)


def was_interrupted(run_dir: Path) -> bool:
    """Whether somebody ended the run in `run_dir`, as `keep_interruption` has it."""
    return RunDirectory(run_dir).interruption.exists()


def keep_failure(run_dir: Path, what: str) -> None:
    """Leave how a script failed that no one launched, and that had not begun to train, as an agent leaves it."""
    logs = RunDirectory(run_dir).logs
    with contextlib.suppress(OSError):  # there are no logs where the directory was refused
        (logs / f"{socket.gethostname()}-0-error-0.json").write_text(json.dumps({"message": {"message": what}}))


def ended_detached(run_dir: Path) -> tuple[str, str]:
    """How a run in the background ended, and why, as its head has left it; nothing where none is known to have."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        left = parsed((run_dir / "detached" / "state.json").read_bytes())
        known = {"failed": "failed", "cancelled": "interrupted"}
        if handle_of(run_dir) and left["state"] in known:
            return known[left["state"]], str(left["reason"])
    return "", ""


def failed_early(run_dir: Path) -> str:
    """How a script failed that had not begun to train, by what its workers left next to their logs; else empty."""
    for left in sorted(RunDirectory(run_dir).logs.glob("*-error-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            what = parsed(left.read_bytes())["message"]["message"]
            return f"{what}, before training began; its log is in {left.parent}"
    return ""


def handle_of(run_dir: Path) -> str:
    """What `run --detach` printed for the run in `run_dir`; empty where a terminal keeps it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parsed((run_dir / _HANDLE).read_bytes())["handle"])
    return ""


def runs_in(folder: Path) -> list[Path]:
    """The run directories directly below `folder`, the one begun last first."""
    found = [(_begun(path), path) for path in folder.glob("*") if _is_run(path)] if folder.is_dir() else []
    return [path for _, path in sorted(found, reverse=True)]


def _newest() -> Path:
    runs = Path.cwd() / _RUNS
    found = runs_in(runs)
    if not found:
        raise ConfigError(
            f"there is no run in {_RUNS} yet, so none is the last",
            where=str(runs),
            fix="name the directory of a run, or ask in the folder where it was started",
        )
    return found[0]


def _is_run(path: Path) -> bool:
    names = ("run.json", "metrics.jsonl", run_lock.NAME, str(_HANDLE), "summary.json", "logs")
    try:
        return path.is_dir() and any((path / name).exists() for name in names)
    except PermissionError:  # another user's
        return False


def _begun(path: Path) -> float:
    """When it was begun, or begun again, in seconds since the Unix epoch, as far as its directory shows."""
    moments = [0.0]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        moments.append(float(parsed((path / "run.json").read_bytes())["started"]))
    with contextlib.suppress(OSError):
        moments.append((path / _HANDLE).stat().st_mtime)
    if (owner := run_lock.owner_of(path)) is not None:
        moments.append(owner.since)
    return max(moments) or path.stat().st_mtime


class InTerminal:
    """Runs that a terminal keeps, or has kept: known by their directory, and by what it holds."""

    def __init__(self, wait: Callable[[float], None] = time.sleep) -> None:
        self._wait = wait

    def send(self, plan: Plan) -> str:
        """A run is never sent to a terminal."""
        raise AssertionError(f"{plan.job.run_dir}: a run of a terminal is started there")

    def status(self, name: str) -> Status:
        """What its record and its lock say.

        Raises:
            ConfigError: there is no run in that directory.
        """
        directory = self._run(name)
        owner, hosts = run_lock.owner_of(directory.path), ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            hosts = ",".join(parsed(directory.run_json.read_bytes())["hosts"])
        log = str(directory.logs) if directory.logs.is_dir() else ""
        if owner is not None and run_lock.goes_on(directory.path):
            return Status(state="running", reason=f"process {owner.process} on {owner.host}", hosts=hosts, log=log)
        try:
            summary = Summary.of_last_start(directory.path)
        except ConfigError:
            if was_interrupted(directory.path):
                return Status(state="cancelled", reason=INTERRUPTED, hosts=hosts, log=log)
            if not directory.run_json.exists() and (failed := failed_early(directory.path)):
                return Status(state="failed", reason=failed, hosts=hosts, log=log)
            reason = "no end is on record: it broke off" if directory.run_json.exists() else _UNTRAINED
            return Status(state="unknown", reason=reason, hosts=hosts, log=log)
        return Status(state=_STATES.get(summary.status, "failed"), reason=summary.reason, hosts=hosts, log=log)

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What its workers have printed, each line after the name of its log where there are several.

        Raises:
            ConfigError: there is no run in that directory.
        """
        folder = self._run(name).logs
        if not folder.is_dir():
            fix = "start it with `manyhosts run`, which keeps what it prints"
            raise ConfigError("a script that started itself printed to its own terminal", where=name, fix=fix)
        readers: dict[Path, Callable[[], str]] = {}
        rests: dict[Path, str] = {}
        while True:
            is_last = not follow or not run_lock.goes_on(folder.parent)
            paths = sorted(folder.glob("*.log"))
            for path in paths:
                read = readers.setdefault(path, detached.growing(path))
                *lines, rests[path] = (rests.get(path, "") + read()).split("\n")
                if is_last and rests[path]:
                    lines.append(rests[path])
                yield from (f"{path.stem}: {line}" if len(paths) > 1 else line for line in lines)
            if is_last:
                return
            self._wait(_LOOK_S)

    def cancel(self, name: str) -> None:
        """Do what Ctrl-C in its terminal does, and wait until it has ended.

        Raises:
            ConfigError: there is no run in that directory, or its process is on another machine.
            LaunchError: it does not end.
        """
        path = self._run(name).path
        owner = run_lock.owner_of(path)
        if owner is None or not run_lock.goes_on(path):
            return
        if not owner.is_here:
            raise ConfigError(
                f"this run is process {owner.process} on {owner.host}", where=name, fix=f"ask on {owner.host}"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.process, signal.SIGTERM)
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while owner.may_live:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the run has not ended within {_ENDS_WITHIN_S:.0f} s",
                    where=f"process {owner.process} on {owner.host}",
                    fix=f"its logs in {path / 'logs'} say what it waits for; `kill -9` of that process ends it",
                )
            self._wait(_LOOK_S)

    def _run(self, name: str) -> RunDirectory:
        path = Path(name)
        if not _is_run(path):
            fix = f"give the directory of a run, the handle that `manyhosts run --detach` printed, or `{LAST}`"
            if (path / "study.json").exists():
                points = shlex.quote(str(path / "points"))
                fix = f"it is a study: manyhosts watch {name}, or name one of its runs: manyhosts runs {points}"
            raise no_run(path, "this folder holds no run", fix=fix)
        return RunDirectory(path)
