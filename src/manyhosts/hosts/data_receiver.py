"""Takes data on one host: a program that is sent through ssh, and needs Python alone.

It receives the list of files that there are to be (path, size, hash), says which contents it lacks, and takes those:

    to it    {"folder", "files": {path: [size, sha256, time of the last change in ns]}}     one line
    from it  {"hashed": bytes}                                    now and then, while it reads what is there
    from it  {"lacks": {sha256: bytes that have come before}, "free": bytes, "others": [path]}
    to it    {"sha256", "size", "from": bytes} and the bytes      for each content that it lacks; then {"end": true}
    from it  {"has": sha256}                                      when it is complete and on the disk
    from it  {"placed": number of files}                          or, at any time, {"trouble": text}

What has come of a content stays when the connection is lost, and the next one continues from there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MARK = "manyhosts-keeper "
FOLDER = ".manyhosts-data"
"""Below the project's folder: contents that are on their way, and what is known of files that have come."""
_INDEX = "index.json"
_CHUNK_BYTES = 1 << 20
_TELL_S = 2.0

State = list[int]
"""Of a file: its size, its time of the last change in ns."""


class DataReceiver:
    """The data below one folder of this host."""

    def __init__(self, folder: str, files: dict[str, list[Any]], say: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._files, self._say = folder, files, say
        self._store = os.path.join(folder, FOLDER)
        os.makedirs(self._store, exist_ok=True)
        self._index: dict[str, list[Any]] = {}
        """Path → its state when its content was known, and the hash of that; of files that have come by us: True."""
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self._store, _INDEX)) as file:
            self._index = dict(json.load(file))
        self._hashed, self._reported = 0, time.monotonic()

    def look(self) -> dict[str, Any]:
        """Which contents are not here, and which files would have to be overwritten that have not come by us."""
        here = {path: self._hash_of(path) for path in self._files}
        lacks: dict[str, int] = {}
        others = []
        for path, (_, digest, _changed) in self._files.items():
            if here[path] and here[path] != digest and not self._came_by_us(path):
                others.append(path)
            if not self._where(digest):
                lacks[digest] = self._come_of(digest)
        self._keep()
        return {"lacks": lacks, "free": shutil.disk_usage(self._store).free, "others": sorted(others)}

    def take(self, digest: str, size: int, start: int, stream: BinaryIO) -> None:
        """Take the bytes of a content from `start` on.

        Raises:
            EOFError: the other side is gone; what has come stays.
            OSError: it cannot be written, or what has come has another hash.
        """
        half = self._half(digest)
        with open(half, "r+b" if start else "wb") as file:
            file.truncate(start)
            file.seek(start)
            left = size - start
            while left:
                chunk = stream.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise EOFError
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        if _hash(half, lambda _: None) != digest:
            os.unlink(half)
            raise OSError("it has changed while it was brought, or came to harm on its way")
        os.replace(half, self._complete(digest))
        self._say({"has": digest})

    def place(self) -> int:
        """Give every content its paths. Returns how many files there are.

        Nothing is overwritten before all that has to be copied from it is: files may have exchanged their names.
        """
        missing = [path for path, (_, digest, _changed) in self._files.items() if self._hash_of(path) != digest]
        halves, staged = [], []
        for path in missing:
            digest = self._files[path][1]
            os.makedirs(os.path.dirname(self._path(path)), exist_ok=True)
            if os.path.exists(self._complete(digest)):
                staged.append(path)
            else:
                shutil.copyfile(self._path(self._where(digest)), f"{self._path(path)}.manyhosts-half")
                halves.append(path)
        for path in halves:
            self._name(f"{self._path(path)}.manyhosts-half", path)
        last = {self._files[path][1]: path for path in staged}
        for path in staged:
            source = self._complete(self._files[path][1])
            if last[self._files[path][1]] != path:
                shutil.copyfile(source, f"{self._path(path)}.manyhosts-half")
                source = f"{self._path(path)}.manyhosts-half"
            self._name(source, path)
        self._keep()
        return len(self._files)

    def _name(self, half: str, path: str) -> None:
        target = self._path(path)
        _, digest, changed = self._files[path]
        os.utime(half, ns=(changed, changed))
        try:
            os.replace(half, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.move(half, f"{target}.manyhosts-half")  # its folder is on another disk
            os.replace(f"{target}.manyhosts-half", target)
        self._index[path] = [*self._state(path), digest, True]

    def _where(self, digest: str) -> str:
        """A file that has this content now, of whatever name; empty where there is none."""
        for path, known in self._index.items():
            if known[2] == digest and known[:2] == self._state(path):
                return path
        return ""

    def _hash_of(self, path: str) -> str:
        """The hash of a file that is here; empty where there is none."""
        state = self._state(path)
        if not state:
            return ""
        known = self._index.get(path)
        if known is not None and known[:2] == state:
            return str(known[2])
        if state[0] != self._files[path][0] and state[0] not in {each[0] for each in self._files.values()}:
            return f"of another size: {state[0]}"
        digest = _hash(self._path(path), self._read)
        self._index[path] = [*state, digest, False]
        return digest

    def _came_by_us(self, path: str) -> bool:
        known = self._index.get(path)
        return known is not None and known[:2] == self._state(path) and bool(known[3])

    def _state(self, path: str) -> State:
        try:
            found = os.stat(self._path(path))
        except OSError:
            return []
        return [found.st_size, found.st_mtime_ns]

    def _read(self, count: int) -> None:
        self._hashed += count
        if time.monotonic() - self._reported > _TELL_S:
            self._reported = time.monotonic()
            self._say({"hashed": self._hashed})

    def _come_of(self, digest: str) -> int:
        with contextlib.suppress(OSError):
            return os.path.getsize(self._half(digest))
        with contextlib.suppress(OSError):
            os.replace(self._complete(digest), self._half(digest))  # it was complete, and never placed
            return os.path.getsize(self._half(digest))
        return 0

    def _keep(self) -> None:
        half = os.path.join(self._store, f"{_INDEX}.half")
        with open(half, "w") as file:
            json.dump(self._index, file)
        os.replace(half, os.path.join(self._store, _INDEX))

    def _path(self, path: str) -> str:
        return os.path.join(self._folder, path)

    def _half(self, digest: str) -> str:
        return os.path.join(self._store, f"{digest}.half")

    def _complete(self, digest: str) -> str:
        return os.path.join(self._store, digest)


def _hash(path: str, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            report(len(chunk))
    return digest.hexdigest()


def say(content: dict[str, Any]) -> None:
    """One line for the launcher."""
    sys.stdout.write(MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


def serve(stream: BinaryIO) -> None:
    """Hear what there is to be, take what is lacking, and put everything in its place."""
    asked = json.loads(stream.readline())
    keeper = DataReceiver(asked["folder"], asked["files"], say)
    say(keeper.look())
    while line := stream.readline():
        reported = json.loads(line)
        if reported.get("end"):
            say({"placed": keeper.place()})
            return
        keeper.take(reported["sha256"], reported["size"], reported["from"], stream)


def main() -> None:
    """Serve the standard input; what goes wrong is said, and ends it."""
    try:
        serve(sys.stdin.buffer)
    except EOFError:
        sys.exit(1)
    except OSError as error:
        say({"trouble": f"{error.strerror}: {error.filename}" if error.filename else str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
