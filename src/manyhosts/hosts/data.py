"""Brings data to hosts by what it holds: each content once, and never again to a host that has it.

Files are compared by hash, so neither times nor names matter. What a lost connection leaves half done continues from
there, and a file gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import contents, data_receiver
from manyhosts.hosts.connection import Connection
from manyhosts.hosts.files import MUCH_BYTES
from manyhosts.units import bytes_in_words

_START = "import sys; code = sys.stdin.buffer.read(int(sys.stdin.buffer.readline())); exec(code)"
_CHUNK_BYTES = 1 << 20
_TELL_S = 5.0
_SPARE_BYTES = 64 << 20
"""What is left on a host's disk for everything else."""
_NAMED = 3

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of the data."""

    size: int
    digest: str
    """SHA-256 of what it holds, as 64 hexadecimal digits."""
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Data:
    """What every host is to have below the working directory."""

    folder: Path
    files: Mapping[str, File]
    """By path below `folder`."""

    @classmethod
    def read(cls, folder: Path, wanted: Sequence[str], warn: Warn) -> Data:
        """The files that `wanted` names, and those below the folders that it names. Links are followed.

        Raises:
            ConfigError: one is not there, cannot be read, or is outside `folder`.
        """
        hashes = contents.Hashes()
        files: dict[str, File] = {}
        reported, read = time.monotonic(), 0

        def report(count: int) -> None:
            nonlocal reported, read
            read += count
            if time.monotonic() - reported > _TELL_S:
                reported = time.monotonic()
                warn(f"manyhosts: {bytes_in_words(read)} of the data are hashed")

        for word in wanted:
            for path in _below(folder, word):
                try:
                    state = (folder / path).stat()
                    digest = hashes.of(folder / path, report)
                except OSError as cause:
                    raise ConfigError(
                        f"{path} cannot be read: {cause.strerror}",
                        where=f"--bring {word}",
                        fix="see that it may be read, and that no link in it leads nowhere",
                    ) from cause
                files[path] = File(size=state.st_size, digest=digest, changed_ns=state.st_mtime_ns)
        hashes.keep()
        return cls(folder, files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def paths(self) -> dict[str, str]:
        """Content → the first path that has it."""
        return {file.digest: path for path, file in reversed(list(self.files.items()))}


def _below(folder: Path, word: str) -> Iterator[str]:
    place = Path(os.path.normpath(folder / word))
    if not place.is_relative_to(folder) or place == folder:
        raise ConfigError(
            f"{word} is not below the working directory, so hosts have no place for it",
            where=f"--bring {word}",
            fix="name a folder that is in it"
            if place == folder
            else f"put a link to it here (ln -s {shlex.quote(str(place))} .), and bring that",
        )
    if not place.exists():
        raise ConfigError(f"there is no {word}", where=f"--bring {word}", fix="name a file or a folder that is here")
    if not place.is_dir():
        yield str(place.relative_to(folder))
        return
    seen: set[str] = set()
    for parent, folders, names in os.walk(place, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()  # a link leads back to where we were
            continue
        seen.add(real)
        folders.sort()
        for name in sorted(names):
            yield os.path.relpath(os.path.join(parent, name), folder)


def bring(connection: Connection, python: str, data: Data, warn: Warn) -> int:
    """Have a host hold `data`. Returns how many bytes were sent.

    Raises:
        LaunchError: it has no room, has other files in their place, or the connection was lost.
    """
    host = connection.host
    with _Line(connection, python) as line:
        files = {path: [file.size, file.digest, file.changed_ns] for path, file in data.files.items()}
        line.say({"folder": str(data.folder), "files": files})
        found = line.read()
        while "hashed" in found:
            warn(f"manyhosts: {host} has read {bytes_in_words(found['hashed'])} of what it has already")
            found = line.read()
        sizes = {file.digest: file.size for file in data.files.values()}
        lacks: dict[str, int] = {
            digest: start if start <= sizes[digest] else 0 for digest, start in found["lacks"].items()
        }
        _see_that_it_fits(host, data, found, sum(sizes[digest] - start for digest, start in lacks.items()))
        total = _report_transfer(host, data, lacks, sizes, warn)
        gone, reported = 0, time.monotonic()
        paths = data.paths()
        for digest, start in lacks.items():
            line.say({"sha256": digest, "size": sizes[digest], "from": start})
            for chunk in _chunks(data.folder / paths[digest], start, sizes[digest]):
                if not line.send(chunk):
                    break  # the connection is lost, which is reported below
                gone += len(chunk)
                if time.monotonic() - reported > _TELL_S:
                    reported = time.monotonic()
                    warn(f"manyhosts: {bytes_in_words(gone)} of {bytes_in_words(total)} of the data are on {host}")
            line.read()
        line.say({"end": True})
        line.read()
    return gone


def _see_that_it_fits(host: str, data: Data, found: Mapping[str, Any], total: int) -> None:
    if found["others"]:
        named = ", ".join(found["others"][:_NAMED]) + (", …" if len(found["others"]) > _NAMED else "")
        raise LaunchError(
            f"host {host} has other data under the same name, which this command has not brought there: {named}",
            where=f"host {host}, {data.folder}",
            fix="move it away there, or give the same files here",
        )
    if total + _SPARE_BYTES > found["free"]:
        raise LaunchError(
            f"host {host} has no room for the data: {bytes_in_words(total)} are to come, and"
            f" {bytes_in_words(found['free'])} are free",
            where=f"host {host}, {data.folder}",
            fix="make room there, or bring less",
        )


def _report_transfer(host: str, data: Data, lacks: Mapping[str, int], sizes: Mapping[str, int], warn: Warn) -> int:
    total = sum(sizes[digest] - start for digest, start in lacks.items())
    every = f"{len(data.files)} files of data, {bytes_in_words(data.size)}"
    if not lacks:
        warn(f"manyhosts: {host} has all {every}: nothing is sent")
        return 0
    begun = sum(lacks.values())
    rest = f", continuing after {bytes_in_words(begun)} that came before" if begun else ""
    warn(f"manyhosts: {every}: {bytes_in_words(total)} go to {host}{rest}")
    if total > MUCH_BYTES:
        paths = data.paths()
        largest = sorted(lacks, key=lambda digest: -sizes[digest])[:_NAMED]
        warn(
            "manyhosts: the largest are "
            + ", ".join(f"{paths[digest]} ({bytes_in_words(sizes[digest])})" for digest in largest)
        )
    return total


def _chunks(path: Path, start: int, size: int) -> Iterator[bytes]:
    """The bytes of a file from `start` to `size`: what it has lost meanwhile is made up for, and found by its hash."""
    left = size - start
    with path.open("rb") as file:
        file.seek(start)
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES)) or bytes(min(left, _CHUNK_BYTES))
            left -= len(chunk)
            yield chunk


class _Line:
    """A conversation with the keeper on a host."""

    def __init__(self, connection: Connection, python: str) -> None:
        self._host = connection.host
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            connection.command(connection.inside([python, "-c", _START])),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._reading = threading.Thread(target=self._listen, daemon=True)
        self._reading.start()
        program = Path(data_receiver.__file__).read_bytes()
        self.send(f"{len(program)}\n".encode() + program)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join(timeout=5)

    @property
    def _stdin(self) -> BinaryIO:
        assert self._process.stdin is not None, "it was asked for as a pipe"
        return self._process.stdin  # type: ignore[return-value]

    @property
    def _stdout(self) -> BinaryIO:
        assert self._process.stdout is not None, "it was asked for as a pipe"
        return self._process.stdout  # type: ignore[return-value]

    def say(self, content: Mapping[str, Any]) -> None:
        """Send one line."""
        self.send(json.dumps(content).encode() + b"\n")

    def send(self, words: bytes) -> bool:
        """Send bytes. Returns whether the other side is there; if not, the wait for the answer reports why."""
        try:
            self._stdin.write(words)
            self._stdin.flush()
        except OSError:
            return False
        return True

    def read(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            LaunchError: it is in trouble, or the connection is lost.
        """
        for line in self._stdout:
            if not line.startswith(data_receiver.MARK.encode()):
                continue  # what a login has to say
            found: dict[str, Any] = json.loads(line.removeprefix(data_receiver.MARK.encode()))
            if "trouble" in found:
                raise self._trouble(str(found["trouble"]))
            return found
        self._process.wait()
        self._reading.join(timeout=5)
        raise self._trouble(self._said[-1] if self._said else "the connection is lost")

    def _trouble(self, why: str) -> LaunchError:
        return LaunchError(
            f"data could not be brought to host {self._host}: {why}",
            where=f"host {self._host}",
            fix="see that its disk has room and may be written to; started again, it continues where it has stopped",
        )

    def _listen(self) -> None:
        assert self._process.stderr is not None, "it was asked for as a pipe"
        with self._process.stderr as stream:
            self._said.extend(line.decode(errors="replace").strip() for line in stream if line.strip())
