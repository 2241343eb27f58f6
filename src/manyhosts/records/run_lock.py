"""One run at a time in a run directory: `lock.json` names the process that runs in it, for as long as it lives.

What starts a run takes the lock before it writes anything else: the head of `manyhosts run`, or rank 0 of a
script that no one launched. All processes of one start know its token: its workers, restarts and later ranks 0 pass.

An owner of this machine lives as long as its process does. One of another machine, or of another container, shows that
it lives by touching the file every second: a process that wants the directory watches the file, by its own clock alone,
because the clocks of two machines differ. `docs/decisions/0028` says why.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from manyhosts.errors import ConfigError
from manyhosts.records.run_owner import Owner, read

NAME = "lock.json"
VARIABLE = "MANYHOSTS_RUN_START"
"""The token of a run, in the environment of its workers. It is no secret."""
BEAT_S = 1.0
"""How often an owner shows that it lives."""
SILENT_S = 10.0
"""An owner elsewhere that has shown nothing for so long is dead."""
_SETTLE_S = 0.5
"""On a disk without locks: how long two that came at the same moment wait to see which of them wrote last."""
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class RunLock:
    """The lock of one run directory, held by this process until `release`, or until the process ends."""

    def __init__(self, path: Path, owner: Owner) -> None:
        """`take` makes it."""
        self.path, self.owner = path, owner
        self.lost: Owner | None = None
        """Who has taken the directory while this process was stopped for long, and was taken for dead."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="manyhosts-run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See that the directory is still this run's.

        Raises:
            ConfigError: another run has it.
        """
        if self.lost is not None:
            raise self.lost.refusal(self.path.parent)

    def release(self) -> None:
        """Let others run in the directory. Safe to call twice; a forked process lets go of nothing."""
        if self._over.is_set() or not self.owner.is_this_process:
            return
        self._over.set()
        self._thread.join()
        _held.pop(self.path, None)
        with contextlib.suppress(OSError), _guarded(self.path, create=False):
            found = read(self.path)
            if found is not None and found.is_this_process:
                self.path.unlink()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):
                found = read(self.path)
                if found is not None and self._is_succeeded_by(found):
                    self.lost = found
                    return
                if found is None or self._is_ours(found):  # else rank 0 of this run holds it, and shows that it lives
                    os.utime(self.path)

    def _is_succeeded_by(self, found: Owner) -> bool:
        """Whether the directory belongs to another run, or to another head of this one."""
        both_launch = self.owner.launches and found.launches
        return found.token != self.owner.token or (both_launch and not self._is_ours(found))

    def _is_ours(self, found: Owner) -> bool:
        return (found.process, found.since) == (self.owner.process, self.owner.since)


_held: dict[Path, RunLock] = {}
_tokens: dict[int, str] = {}
"""By process: what is forked is no part of the run."""


def new_token() -> str:
    """A token for one more start."""
    return os.urandom(8).hex()


def token_of_this_run() -> str:
    """What all processes of one start know: given by a launcher, else drawn by this process, once."""
    return os.environ.get(VARIABLE) or _tokens.setdefault(os.getpid(), new_token())


def take(run_dir: Path, token: str, *, launches: bool = False, succeeds: bool = False) -> RunLock | None:
    """Take the lock of `run_dir`, which is made where it is not there; None where another of this start holds it.

    `succeeds`: another head of the same start held it, and must not live any more.

    Raises:
        ConfigError: another run is in progress in it.
        OSError: the disk takes no lock.
    """
    path = run_dir.absolute() / NAME
    held = _held.get(path)
    if held is not None and held.owner.is_this_process and held.lost is None:
        if launches:
            raise held.owner.refusal(run_dir)
        return held
    silent = None
    mine = Owner.here(token, launches=launches)
    while True:
        with _guarded(path) as is_guarded:
            found = read(path)
            is_of_start = found is not None and found.token == token
            is_head = found is not None and found.launches and found.may_live
            if is_of_start and is_head and not succeeds:
                return None
            is_of_start &= not is_head
            if found is None or is_of_start or found == silent or not found.may_live:
                path.write_text(json.dumps(asdict(mine), indent=1) + "\n")
                break
        _see_silent(path, found)
        silent = found
    if not is_guarded:
        time.sleep(_SETTLE_S)
        found = read(path)
        if found is not None and (found.token != token or (succeeds and found != mine)):
            raise found.refusal(run_dir)
    _held[path] = RunLock(path, mine)
    return _held[path]


@contextlib.contextmanager
def shut(run_dir: Path, token: str) -> Iterator[bool]:
    """Within, no one takes the lock of `run_dir`: others wait.

    For the end of a run whose owner is gone: its workers may still write there. Several processes may do so at a time.
    Gives False where another run than that of `token` has the directory, or is taking it, or where the disk has no
    lock to be shut.
    """
    path = run_dir.absolute() / NAME
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        found = None
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = read(path) if _is_at(file, path) else None
        yield found is not None and found.token == token
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


@contextlib.contextmanager
def alone_in(run_dir: Path, name: str) -> Iterator[bool]:
    """Within, no other process does in `run_dir` what goes by this name. Gives False where the disk has no locks.

    Raises:
        OSError: the disk takes no file.
    """
    path = run_dir.absolute() / name
    with _guarded(path) as is_guarded:
        try:
            yield is_guarded
        finally:
            path.unlink(missing_ok=True)


def steal_lock(run_dir: Path, token: str) -> bool:
    """Whether the owner of `run_dir`, of the start `token`, no longer runs there; one that is back later, cannot.

    An owner elsewhere that has shown no sign of life for some beats finds another owner in the file, and ends. Called
    where the lock is `shut`.
    """
    path = run_dir.absolute() / NAME
    found = read(path)
    if found is None or found.token != token:
        return False
    if found.is_here:
        return not found.launches or not found.may_live
    before, deadline = _touched(path), time.monotonic() + SILENT_S / 2
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 4)
        if _touched(path) != before:
            return False
    nobody = Owner.here(new_token(), launches=False)
    path.write_text(json.dumps(asdict(replace(nobody, began="never")), indent=1) + "\n")
    return True


def is_anothers(run_dir: Path, token: str) -> bool:
    """Whether a run of another start than `token` has taken `run_dir`. False where nothing can be read."""
    found = owner_of(run_dir)
    return found is not None and found.token != token


def owner_of(run_dir: Path) -> Owner | None:
    """Who the lock of `run_dir` names, alive or not; None where there is none, or nothing can be read."""
    try:
        return read(run_dir.absolute() / NAME)
    except OSError:
        return None


def goes_on(run_dir: Path) -> bool:
    """Whether somebody runs in `run_dir`. Where that is a process of another host, it is watched for some seconds."""
    try:
        see_that_free(run_dir)
    except ConfigError:
        return True
    return False


def see_that_free(run_dir: Path, token: str = "") -> None:
    """See that no run is in progress in `run_dir`, without a trace. Workers of the start `token` may be there still.

    Raises:
        ConfigError: one is.
    """
    path = run_dir.absolute() / NAME
    try:
        found = read(path)
    except OSError:
        return
    if found is None or found.token == os.environ.get(VARIABLE) or (found.token == token and not found.launches):
        return
    if found.may_live:
        _see_silent(path, found)


def _see_silent(path: Path, owner: Owner) -> None:
    """Return when `owner`, if it is on another machine, has given no sign of life for `SILENT_S`.

    Raises:
        ConfigError: it has given one, or it is here.
    """
    if owner.is_here:
        raise owner.refusal(path.parent)
    before, deadline = _touched(path), time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 4)
        now = _touched(path)
        if now is None or read(path) != owner:
            return  # it has ended, or another one was quicker: the caller looks again
        if now != before:
            raise owner.refusal(path.parent)


def _touched(path: Path) -> int | None:
    """When the file was touched last. It is opened, for a network disk reports changes only then."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _guarded(path: Path, *, create: bool = True) -> Iterator[bool]:
    """Within, no one else reads or writes the file who guards it, too. Gives False on a disk without locks.

    Raises:
        OSError: there is no such file, or none can be made.
    """
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
        try:
            is_guarded = _locked(file)
            if is_guarded and not _is_at(file, path):
                continue  # its owner has removed it meanwhile
            yield is_guarded
            return
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it
            os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as cause:
        if cause.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


@atexit.register
def _release_all() -> None:
    for lock in list(_held.values()):
        lock.release()
