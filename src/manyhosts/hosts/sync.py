"""Brings the working directory to a host, and the run directory back: only what changed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from manyhosts.errors import LaunchError
from manyhosts.hosts import disks
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.files import Files
from manyhosts.records import run_directory, run_lock

_OF_EACH_MACHINE = (run_lock.NAME, run_directory.HEAD, disks.MARKS)
"""What is in a run directory and is not fetched."""

Tell = Callable[[int, int], None]
"""Is told now and then how many bytes of how many have gone."""
_TELL_S = 5.0
_BEGINS = b"manyhosts-archive "
"""Stands before what is fetched: a login shell may have said something."""
_AFTER = 'printf %s "$0"; exec "$@"'
"""For sh: say what stands before the command, and run it."""
_HARMLESS = ("file changed as we read it", "File removed before we read it")
_WENT_AWAY = (23, 24)
"""What rsync ends with, also, where a file was removed while it ran."""


def bring(connection: Connection, files: Files, *, with_rsync: bool, tell: Tell | None = None) -> None:
    """Make `files` on the host what they are here.

    Raises:
        LaunchError: the host did not take them, or one cannot be read.
    """
    folder = files.folder
    if not connection.ask("make", path=str(folder)):
        raise LaunchError(
            f"host {connection.host} cannot write to {folder}",
            where=f"host {connection.host}",
            fix="the same folder is used on all hosts: start from one that you may write to everywhere",
        )
    if with_rsync and not connection.chats:
        _bring_with_rsync(connection, files, tell)
        return
    states = {}
    for path in files.paths:
        with contextlib.suppress(FileNotFoundError):
            states[path] = (folder / path).lstat()
    wanted = connection.ask(
        "differing",
        folder=str(folder),
        files={path: [state.st_size, state.st_mtime_ns] for path, state in states.items()},
        timeout_s=60,
    )
    if wanted:

        def pack(stream: IO[bytes]) -> None:
            total, gone, told = sum(states[path].st_size for path in wanted), 0, time.monotonic()
            with tarfile.open(fileobj=stream, mode="w|") as archive:
                for path in wanted:
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        archive.add(folder / path, arcname=path, recursive=False)
                    gone += states[path].st_size
                    if tell is not None and time.monotonic() - told > _TELL_S:
                        told = time.monotonic()
                        tell(gone, total)

        _stream(connection, ["tar", "--extract", "--directory", str(folder)], pack, sends=True)


def fetch(connection: Connection, folder: Path, *, only: str = ".", with_rsync: bool) -> None:
    """Bring `only`, a folder below `folder` of the host, here to the same place. One that is not there is no trouble.

    Raises:
        LaunchError: it did not come.
    """
    source = folder / only
    if not connection.ask("exists", path=str(source)):
        return
    source.mkdir(parents=True, exist_ok=True)
    if with_rsync and not connection.chats:
        excluded = [f"--exclude=/{name}" for name in _OF_EACH_MACHINE]
        words = ["rsync", "--archive", *excluded, "--rsh", connection.shell]
        done = _run([*words, f"{connection.rsync_host}:{source}/", f"{source}/"], b"")
        if done.returncode != _WENT_AWAY[1]:
            _see(connection, done.returncode, done.stderr.decode(errors="replace").splitlines())
        return

    def unpack(stream: IO[bytes]) -> None:
        window = b""
        while not window.endswith(_BEGINS):
            if not (byte := stream.read(1)):
                raise tarfile.ReadError("it sent nothing")  # where there is an exit code, that says why
            window = window[-len(_BEGINS) :] + byte
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(source, filter="data")

    excluded = [f"--exclude=./{name}" for name in _OF_EACH_MACHINE]
    tar = ["tar", "--create", "--directory", str(source), *excluded, "."]
    _stream(connection, ["sh", "-c", _AFTER, _BEGINS.decode(), *tar], unpack, sends=False)


def rsync_here() -> bool:
    """Whether this machine has rsync."""
    return shutil.which("rsync") is not None


def _bring_with_rsync(connection: Connection, files: Files, tell: Tell | None) -> None:
    folder, paths = files.folder, files.paths
    words = ["rsync", "--archive", "--files-from=-", "--from0", "--rsh", connection.shell]
    words += ["--info=progress2"] if tell is not None and _rsync_tells() else []
    while True:
        content = "\0".join(paths).encode(errors="surrogateescape")
        done = _run([*words, f"{folder}/", f"{connection.rsync_host}:{folder}/"], content, tell, files.size)
        still_here = [path for path in paths if (folder / path).is_symlink() or (folder / path).exists()]
        if done.returncode not in _WENT_AWAY or len(still_here) == len(paths):
            break
        paths = still_here
    _see(connection, done.returncode, done.stderr.decode(errors="replace").splitlines())


@functools.cache
def _rsync_tells() -> bool:
    """Whether this machine's rsync says how far it is: since 3.1, and that of macOS never."""
    said = subprocess.run(["rsync", "--version"], capture_output=True, text=True).stdout
    found = re.match(r"rsync +version v?(\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (3, 1)


def _run(
    words: Sequence[str], content: bytes, tell: Tell | None = None, total: int = 0
) -> subprocess.CompletedProcess[bytes]:
    """Run rsync. `tell` hears how far it is, of `total` bytes."""
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as said:
        names.write(content)
        names.seek(0)
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=names, stdout=pipe, stderr=said, start_new_session=True) as rsync:
            assert rsync.stdout is not None, "it was asked for as a pipe"
            told = time.monotonic()
            while chunk := os.read(rsync.stdout.fileno(), 1 << 16):
                amounts = re.findall(rb"([\d,.]+) +\d+%", chunk)
                if tell is not None and amounts and time.monotonic() - told > _TELL_S:
                    told = time.monotonic()
                    tell(int(re.sub(rb"\D", b"", amounts[-1])), total)
        said.seek(0)
        return subprocess.CompletedProcess(list(words), rsync.returncode, b"", said.read())


def _stream(connection: Connection, words: Sequence[str], work: Callable[[IO[bytes]], None], *, sends: bool) -> None:
    """Run `words` on the host while `work` writes its standard input, or reads its output.

    Raises:
        LaunchError: either side failed.
    """
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    there = subprocess.Popen(
        connection.command(shlex.join(words)),
        stdin=pipe if sends else nothing,
        stdout=nothing if sends else pipe,
        stderr=pipe,
        start_new_session=True,
    )
    stream = there.stdin if sends else there.stdout
    assert stream is not None, "it was asked for as a pipe"
    said: deque[str] = deque(maxlen=50)
    reading = threading.Thread(target=_listen, args=(there.stderr, said), daemon=True)  # or a full pipe stops both
    reading.start()
    trouble: Exception | None = None
    try:
        work(stream)
    except BrokenPipeError:
        pass  # the other side has ended, and says why
    except (OSError, tarfile.TarError) as cause:
        trouble = cause
    with contextlib.suppress(OSError):
        stream.close()
    code = there.wait()
    reading.join()
    if isinstance(trouble, OSError):  # here, so the other side's words are of what follows from it
        raise LaunchError(
            f"files could not be brought to or from host {connection.host}: {trouble.strerror}",
            where=str(trouble.filename or "this machine"),
            fix="see that the disk here has room and that the file may be read and written; what a run does not need"
            " can be named in .manyhostsignore",
        ) from trouble
    if code == 1 and said and all(line.endswith(_HARMLESS) for line in said):
        return
    _see(connection, code, said)
    if trouble is not None:
        _see(connection, 1, [str(trouble)])


def _listen(stream: IO[bytes] | None, said: deque[str]) -> None:
    assert stream is not None, "it was asked for as a pipe"
    with stream:
        for line in stream:
            said.append(line.decode(errors="replace").rstrip())


def _see(connection: Connection, code: int, said: Sequence[str]) -> None:
    if code != 0:
        last = next((line for line in reversed(said) if line.strip()), f"exit code {code}")
        raise LaunchError(
            f"files could not be brought to or from host {connection.host}: {last.strip()}",
            where=f"host {connection.host}",
            fix="see that its disk is not full and that you may write there; --no-sync leaves this step out",
        )
