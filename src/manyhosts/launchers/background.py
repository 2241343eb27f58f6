"""Job handles (`slurm://4711`, `local:///home/me/runs/first`), and runs in the background where no engine keeps jobs.

    python -P -m manyhosts.launchers.background TARGET RUN_DIR/detached/job.json

Such a run's head is a process on this machine. It holds a lock for as long as it lives, so another process with its
number is not mistaken for it. What it prints is in `logs/detached.log` of the run directory, how it ended in
`detached/state.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from manyhosts.control import job_file
from manyhosts.control.head.failure_policy import STEP_S
from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError
from manyhosts.launchers import detached
from manyhosts.launchers.detached import Jobs, Status
from manyhosts.launchers.engine import Engine
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.records import run_lock
from manyhosts.records.atomic_file import read_json, write_json

_READY = b"ready\n"
_LOOK_S = 0.1
_LOOK_LASTS_S = 2.0
_LONGER_S = 30.0
"""How much longer than the workers' own farewell an ending run is waited for."""


class Background:
    """Keeps runs of a launcher that is the head itself, each in a process of its own; its name is its directory."""

    def __init__(self, engine: Engine, wait: Callable[[float], None] = time.sleep) -> None:
        self._target, self._wait = engine.NAME, wait

    def send(self, plan: Plan) -> str:
        """Start the head of `plan` in the background. Returns the run directory.

        Raises:
            ConfigError: this run is in progress already, or its directory cannot be written to.
            LaunchError: the process did not start.
        """
        folder, log = plan.job.run_dir / "detached", _log(plan.job.run_dir)
        run_lock.see_that_free(plan.job.run_dir)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            job_file.write_hidden(job_file.text_of(plan.job), folder / "job.json")
        except OSError as cause:
            raise ConfigError(
                f"cannot write to the run directory: {cause.strerror}",
                where=str(plan.job.run_dir),
                fix="give another --run-dir, on a disk that is writable and not full",
            ) from cause
        words = [sys.executable, "-P", "-m", "manyhosts.launchers.background", self._target, str(folder / "job.json")]
        with log.open("ab") as out:
            head = subprocess.Popen(
                words,
                cwd=plan.job.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )
        assert head.stdout is not None, "it was asked for as a pipe"
        with head.stdout:
            if head.stdout.readline() != _READY:
                head.wait()
                raise LaunchError("the head did not start", where=shlex.join(words), fix=f"{log} says why")
        head.returncode = 0  # it continues by itself: no warning that it still runs
        return str(plan.job.run_dir)

    def status(self, name: str) -> Status:
        """What its head has written down, and whether it is still there.

        Raises:
            ConfigError: there is no such run, or it is kept by another machine.
        """
        run_dir, state = _found(self._target, name)
        log = str(_log(run_dir))
        hosts = ",".join(state["hosts"])
        if _is_held(run_dir / "detached"):
            reason = f"process {state['process']} on {state['machine']}"
            return Status(state="running", reason=reason, hosts=hosts, log=log)
        if (owner := run_lock.owner_of(run_dir)) is not None and run_lock.goes_on(run_dir):
            reason = f"begun again in a terminal: process {owner.process} on {owner.host}"
            return Status(state="running", reason=reason, hosts=hosts, log=str(run_dir / "logs"))
        state = read_json(run_dir / "detached" / "state.json")  # it may have ended between the two looks
        if state["state"] == "running":
            reason = "its process has gone without a word: it was killed, or this machine was switched off"
            return Status(state="failed", reason=reason, hosts=hosts, log=log, code=3)
        return Status(state=state["state"], reason=state["reason"], hosts=hosts, log=log, code=state["code"])

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """The lines that the head has printed.

        Raises:
            ConfigError: as in `status`.
        """
        run_dir, _ = _found(self._target, name)
        read = detached.growing(_log(run_dir))
        return detached.tail(read, lambda: not follow or not _is_held(run_dir / "detached"), self._wait)

    def cancel(self, name: str) -> None:
        """Ask the head to end the run, as Ctrl-C does, and wait until it has.

        Raises:
            ConfigError: as in `status`.
            LaunchError: it does not end.
        """
        run_dir, state = _found(self._target, name)
        patience_s = job_file.load(run_dir / "detached" / "job.json").farewell_s + _LONGER_S + STEP_S
        deadline = time.monotonic() + patience_s
        if not _is_held(run_dir / "detached") and run_lock.goes_on(run_dir):
            what = "this job has ended, and its run was begun again in a terminal"
            raise ConfigError(what, where=name, fix=f"name the directory: manyhosts cancel {shlex.quote(str(run_dir))}")
        if _is_held(run_dir / "detached"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["process"], signal.SIGTERM)
        while _is_held(run_dir / "detached"):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the run has not ended within {patience_s:.0f} s",
                    where=f"process {state['process']} on {state['machine']}",
                    fix="its log says what it waits for; `kill -9` of that process ends it, and its hosts notice",
                )
            self._wait(_LOOK_S)


def main(words: list[str] | None = None) -> int:
    """Be the head of a run in the background. Returns its exit code."""
    target, path = sys.argv[1:] if words is None else words
    job = job_file.load(Path(path))
    folder = job.run_dir / "detached"
    lock = _hold(folder)
    if lock is None:
        sys.stderr.write("manyhosts: a run in this directory is in progress\n")
        return 2
    engine = LAUNCHERS.load(target)()
    own = {
        "target": target,
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "hosts": list(engine.plan(job).hosts),
        "started": time.time(),
    }

    def note(state: str, reason: str = "", code: int | None = None) -> None:
        write_json(folder / "state.json", {**own, "state": state, "reason": reason, "code": code})

    note("running")
    os.write(1, _READY)
    os.dup2(2, 1)  # the log from now on: the process that waited for the word reads no more
    try:
        code = engine.run(job)
        note({0: "done", 130: "cancelled"}.get(code, "failed"), "" if code in (0, 130) else f"exit code {code}", code)
    except ManyhostsError as error:
        sys.stderr.write(f"manyhosts: {error}\n")
        note("failed", error.what, error.exit_code)
        code = error.exit_code
    return code


def _found(target: str, name: str) -> tuple[Path, dict[str, Any]]:
    """The run directory of a run's name, and what its head has written down."""
    run_dir = Path(name).absolute()
    handle = f"{target}://{name}"
    if not (run_dir / "detached" / "state.json").exists():
        raise ConfigError(
            "there is no detached run of that name on this machine",
            where=handle,
            fix="a handle names the run directory on the machine where `manyhosts run --detach` printed it",
        )
    state = read_json(run_dir / "detached" / "state.json")
    if state["target"] != target:
        raise ConfigError(
            f"that run was started on {state['target']}", where=handle, fix=f"ask for {state['target']}://{run_dir}"
        )
    if state["machine"] != socket.gethostname() and state["state"] == "running":
        raise ConfigError(
            f"the head of that run is a process on {state['machine']}, and this is {socket.gethostname()}",
            where=handle,
            fix=f"ask on {state['machine']}",
        )
    return run_dir, state


def _log(run_dir: Path) -> Path:
    return run_dir / "logs" / "detached.log"


def _hold(folder: Path) -> BinaryIO | None:
    """The lock of a run, this process's own until it ends; None where another one has it."""
    file = (folder / "lock").open("ab")
    deadline = time.monotonic() + _LOOK_LASTS_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.01)  # another process tests the lock
        else:
            return file


def _is_held(folder: Path) -> bool:
    """Whether the head of a run lives. Many may ask at once: they share the lock while they look."""
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def jobs_of(engine: Engine) -> Jobs:
    """Who keeps the jobs of `engine`: itself, or where it keeps none a process on this machine."""
    return cast(Jobs, engine) if isinstance(engine, Jobs) else Background(engine)


def of_handle(handle: str) -> tuple[Jobs, str]:
    """The engine of a handle such as `slurm://4711`, and the job's name there.

    Raises:
        ConfigError: this is no handle.
    """
    kind, separator, name = handle.partition("://")
    if not separator or not name or kind not in LAUNCHERS.names():
        raise ConfigError(
            f"{handle!r} is no handle of a job",
            where="HANDLE",
            fix="give what `manyhosts run --detach` printed, such as slurm://4711",
        )
    return jobs_of(LAUNCHERS.load(kind)()), name


if __name__ == "__main__":
    sys.exit(main())
