"""File transfer by ssh: brings the working directory, the script and data to hosts, and fetches records and logs."""

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

from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.errors import LaunchError
from manyhosts.hosts import data, disks, remote_probe, version_check
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.containers import Container
from manyhosts.hosts.data import Data
from manyhosts.hosts.disks import HERE, Disks
from manyhosts.hosts.files import Files
from manyhosts.launchers.ssh.host import Host, of_all
from manyhosts.records import run_directory, run_lock
from manyhosts.units import bytes_in_words

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


_WORTH_A_WORD_BYTES = 10_000_000


class RunFiles:
    """Those of one run; none before `choose`."""

    def __init__(self, job: Job, container: Container | None, display: Display) -> None:
        self._job, self._container, self._display = job, container, display
        self._files: Files | None = None
        self._data: Data | None = None

    def choose(self) -> None:
        """See what there is here."""
        job = self._job
        if job.sync:
            needed = job.program if job.kind == "script" else ""
            leave_out = [job.run_dir, *(job.folder / path for path in job.bring)]
            leave_out += [Path(self._container.image)] if self._container and self._container.is_file else []
            self._files = Files.to_bring(job.folder, leave_out=leave_out, needed=needed)
        if job.bring:
            self._data = Data.read(job.folder, job.bring, self._display.warn)

    def bring(self, lacking: Sequence[Host]) -> None:
        """Bring hosts what they lack, all at the same time.

        Raises:
            LaunchError: a host does not take it.
        """
        if lacking and self._files is not None:
            for note in self._files.notes():
                self._display.warn(f"manyhosts: {note}")
            if self._files.size > _WORTH_A_WORD_BYTES:
                names, size = ", ".join(host.name for host in lacking), bytes_in_words(self._files.size)
                words = f"manyhosts: {len(self._files.paths)} files, {size}: what {names} lack is brought there"
                self._display.warn(words)
        of_all(lacking, self.bring_to)

    def bring_to(self, host: Host) -> None:
        """Bring one host what it lacks.

        Raises:
            LaunchError: it does not take it.
        """
        if self._files is not None:

            def report(gone: int, total: int) -> None:
                at = f"{bytes_in_words(gone)} of {bytes_in_words(total)}"
                self._display.warn(f"manyhosts: {at} are on {host.name}")

            bring(host.connection, self._files, progress=report)
        if self._data is not None:
            data.bring(host.connection, host.facts["executable"], self._data, self._display.warn)

    def _has_script(self, host: Host) -> bool:
        return self._job.kind != "script" or bool(host.connection.ask("exists", path=self._script))

    @property
    def _script(self) -> str:
        """Where it is to be on every host."""
        return str(self._job.folder / self._job.program)

    def see_script(self, hosts: Sequence[Host]) -> None:
        """See that all of `hosts` have the script.

        Raises:
            LaunchError: one has not.
        """
        names = [host.name for host in hosts]
        version_check.see_that_all_have(self._script, names, of_all(hosts, self._has_script), synced=self._job.sync)

    def see_that_none_has_changed(self) -> None:
        """See that a host which comes late is brought what the others were.

        Raises:
            LaunchError: a file is another one by now.
        """
        if self._files is not None:
            self._files.see_that_none_has_changed()


_STILL_THERE_S = 8.0
"""How long a host has at the end of a run to say that it is there: one that was lost is not waited for long."""

_NAMED = 3
"""What stays on a host is named, up to so many."""


def fetch_record(run_dir: Path, here: Sequence[Host], disks: Disks, connections: list[Connection]) -> list[str]:
    """Bring the run directory of the host that led here, and the logs of the others: each disk's once.

    Returns what could not be brought, in words. `connections` is kept, where a host is reached again.
    """
    path = str(run_dir / "summary.json")
    if not here:
        return []

    def has(host: Host) -> bool | None:
        with contextlib.suppress(LaunchError, OSError):
            if not host.still_answers():  # ssh has given a host up that was cut off for a while
                host.connect_again(connections)
            return bool(host.connection.ask("exists", path=path, timeout_s=_STILL_THERE_S))
        return None

    have = dict(zip((host.node for host in here), of_all(here, has), strict=True))
    # The first host; or, where the run continued without it and ended on another one's disk, that one.
    led = disks.of(next((node for node, found in have.items() if found), here[0].node))
    by_disk: dict[int, Host] = {}
    for host in sorted(here, key=lambda host: have[host.node] is None):  # those that answer first
        by_disk.setdefault(disks.of(host.node), host)
    by_disk.pop(disks.of(HERE), None)

    def fetch_from(host: Host) -> str:
        stays = f"manyhosts: the record on {host.name} stays there, in {run_dir}"
        if have[host.node] is None:
            return f"{stays}: it does not answer"
        only = "." if disks.of(host.node) == led else "logs"
        try:
            left = fetch(host.connection, run_dir, only=only)
        except (LaunchError, OSError) as trouble:
            return f"{stays}: {trouble}".partition("\n")[0]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"manyhosts: on {host.name} stay, in {run_dir}: {', '.join(left[:_NAMED])}{more}" if left else ""

    return list(filter(None, of_all(list(by_disk.values()), fetch_from)))
