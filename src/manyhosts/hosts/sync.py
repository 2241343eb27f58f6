"""Brings the working directory to a host, and the run directory back: only what changed."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from manyhosts.errors import LaunchError
from manyhosts.hosts import disks, remote_probe
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.files import Files
from manyhosts.records import run_directory, run_lock

_OF_EACH_MACHINE = (run_lock.NAME, run_directory.HEAD, disks.MARKS)
"""What is in a run directory and is not fetched."""

Progress = Callable[[int, int], None]
"""Called now and then with the bytes sent and the bytes in all."""
_TELL_S = 5.0
_BEGINS = b"manyhosts-archive "
"""Precedes what is fetched: a login shell may have printed something."""
_AFTER = 'printf %s "$0"; exec "$@"'
"""For sh: print the first word, and run the others."""
_HARMLESS = (
    *("file changed as we read it", "File removed before we read it", "Cannot stat: No such file or directory"),
    "Exiting with failure status due to previous errors",
)
"""How tar ends what it says of a file that somebody changes or removes meanwhile."""
_LISTING_S = 60.0
_MOST_HASHED = 64 << 20
"""Bytes that are read here and there to compare content: a quarter of a second, or less."""


def bring(connection: Connection, files: Files, *, progress: Progress | None = None) -> None:
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
    states = {}
    for path in files.paths:
        with contextlib.suppress(FileNotFoundError):
            states[path] = (folder / path).lstat()
    wanted = connection.ask(
        "differing",
        folder=str(folder),
        files={path: [state.st_size, state.st_mtime_ns] for path, state in states.items()},
        contents=_contents(folder, states),
        timeout_s=_LISTING_S,
    )
    if wanted:

        def pack(stream: IO[bytes]) -> None:
            total, gone, reported = sum(states[path].st_size for path in wanted), 0, time.monotonic()
            with tarfile.open(fileobj=stream, mode="w|") as archive:
                for path in wanted:
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        archive.add(folder / path, arcname=path, recursive=False)
                    gone += states[path].st_size
                    if progress is not None and time.monotonic() - reported > _TELL_S:
                        reported = time.monotonic()
                        progress(gone, total)

        _stream(connection, ["tar", "--extract", "--directory", str(folder)], pack)


def _contents(folder: Path, states: Mapping[str, os.stat_result]) -> dict[str, str]:
    """The hashes of the smallest files, `_MOST_HASHED` bytes in all: those that were written, and few of the data.

    Size and time alone pass over a file that was changed there within a second, or got its time from a tool.
    """
    found, total = {}, 0
    for path in sorted(states, key=lambda path: states[path].st_size):
        total += states[path].st_size
        if total > _MOST_HASHED:
            break
        found[path] = remote_probe.content_of(str(folder / path))
    return found


def fetch(connection: Connection, folder: Path, *, only: str = ".") -> list[str]:
    """Bring `only`, a folder below `folder` of the host, here to the same place. One that is not there is no trouble.

    Returns what stays there, each with the reason: links that lead out of the folder, and what is no file.

    Raises:
        LaunchError: it did not come.
    """
    source = folder / only
    if not connection.ask("exists", path=str(source)):
        return []
    source.mkdir(parents=True, exist_ok=True)
    there = connection.ask("files", folder=str(source), left_out=_OF_EACH_MACHINE, timeout_s=_LISTING_S)
    wanted = remote_probe.differing(str(source), there, {})
    if not wanted:
        return []
    left: list[str] = []

    def unpack(stream: IO[bytes]) -> None:
        window = b""
        while not window.endswith(_BEGINS):
            if not (byte := stream.read(1)):
                raise tarfile.ReadError("it sent nothing")  # where there is an exit code, that says why
            window = window[-len(_BEGINS) :] + byte
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if why := _stays(member, source):
                    left.append(f"{os.path.normpath(member.name)} ({why})")
                else:
                    archive.extract(member, source, filter="data")

    names = "".join(f"./{path}\0" for path in wanted).encode(errors="surrogateescape")
    tar = ["tar", "--create", "--directory", str(source), "--no-recursion", "--null", "--files-from=-"]
    _stream(connection, ["sh", "-c", _AFTER, _BEGINS.decode(), *tar], unpack, reported=names)
    return left


def _stays(member: tarfile.TarInfo, source: Path) -> str:
    """Why it is not to be made in `source`; a link that names a place in there by its full path is made relative."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return "a pipe or a device"
    if member.issym() and os.path.isabs(member.linkname):
        target = os.path.normpath(member.linkname)
        if not Path(target).is_relative_to(source):
            return f"a link to {member.linkname}"
        member.linkname = os.path.relpath(target, source / os.path.dirname(member.name))
    try:
        tarfile.data_filter(member, str(source))
    except tarfile.FilterError:
        return f"a link to {member.linkname}" if member.linkname else "a place outside of the folder"
    return ""


def _stream(
    connection: Connection, words: Sequence[str], work: Callable[[IO[bytes]], None], reported: bytes | None = None
) -> None:
    """Run `words` on the host while `work` writes its standard input; or reads its output, if given `reported`.

    Raises:
        LaunchError: either side failed.
    """
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with tempfile.TemporaryFile() as listed:  # a pipe may be full while the other side waits for us to read
        listed.write(reported or b"")
        listed.seek(0)
        there = subprocess.Popen(
            connection.command(shlex.join(words)),
            stdin=pipe if reported is None else listed,
            stdout=nothing if reported is None else pipe,
            stderr=pipe,
            start_new_session=True,
        )
    stream = there.stdin if reported is None else there.stdout
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
    if code in (1, 2) and said and all(line.endswith(_HARMLESS) for line in said):
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
