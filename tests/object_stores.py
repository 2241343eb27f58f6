"""An object store in this process, as fsspec sees one, whose network fails, breaks off or lags at a chosen call.

What it is like: an object is there whole or not at all, large ones come in parts that nobody sees before the last,
there is no rename and no append, and a list may be older than the objects.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

ADDRESS = "trial://bucket/run"


class Crash(BaseException):
    """Stands for a process that is killed: no Exception, so nothing on the way catches it."""


class Unreachable(Exception):
    """What a library raises where the network is gone: no OSError."""


class Store:
    """The objects, and what is to go wrong."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: list[str] = []
        """Uploads that broke off: paid for, and seen by nobody."""
        self.log: list[str] = []
        self.writes = 0
        self.crash_at: int | None = None
        self.away = False
        """Nobody answers."""
        self.fails = 0
        """So many of the next calls fail."""
        self.stale: dict[str, bytes] | None = None
        """What lists show, where they are out of date."""
        self.denied: set[str] = set()
        """Kinds of calls that are not allowed."""
        self.buckets = {"bucket"}

    def about_to(self, kind: str, path: str, *, writes: bool = False) -> None:
        self.log.append(f"{kind} {path}")
        if writes:
            self.writes += 1
            if self.writes == self.crash_at:
                raise Crash(self.log[-1])
        if self.fails:
            self.fails -= 1
            raise Unreachable("Connection reset by peer")
        if self.away:
            raise Unreachable("Connect timeout on endpoint")
        if kind in self.denied:
            raise PermissionError(f"Access Denied: {kind}")
        if path.partition("/")[0] not in self.buckets:
            raise FileNotFoundError("The specified bucket does not exist")

    def names(self) -> list[str]:
        return sorted(name.removeprefix("bucket/run/") for name in self.objects)

    def manifests(self) -> list[str]:
        return [name for name in self.names() if name.endswith("manifest.json")]

    def flip(self, name: str) -> None:
        [path] = [path for path in self.objects if name in path]
        content = bytearray(self.objects[path])
        content[-1] ^= 1
        self.objects[path] = bytes(content)


class TrialFileSystem(AbstractFileSystem):
    protocol = "trial"
    store = Store()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.store.about_to("put", path, writes=True)
        self.store.objects[path] = bytes(value)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.store.about_to("upload", rpath, writes=True)
        content = Path(lpath).read_bytes()
        self.store.parts.append(rpath)
        self.store.about_to("complete", rpath, writes=True)
        self.store.parts.remove(rpath)
        self.store.objects[rpath] = content

    def rm_file(self, path: str) -> None:
        self.store.about_to("remove", path, writes=True)
        if self.store.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.store.about_to("read", path)
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        return self.store.objects[path][start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.store.about_to("ask", path)
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.store.objects[path]), "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        self.store.about_to("list", path)
        listed = self.store.objects if self.store.stale is None else self.store.stale
        below = {name: content for name, content in listed.items() if name.startswith(f"{path}/")}
        if not below:
            raise FileNotFoundError(path)
        found = {}
        for name, content in below.items():
            first, deeper, _ = name.removeprefix(f"{path}/").partition("/")
            kind = {"type": "directory", "size": 0} if deeper else {"type": "file", "size": len(content)}
            found[first] = {"name": f"{path}/{first}", **kind}
        return list(found.values())

    def modified(self, path: str) -> datetime.datetime:
        self.store.about_to("ask when", path)
        return datetime.datetime.now(datetime.UTC)


@contextmanager
def trial_store() -> Iterator[Store]:
    fsspec.register_implementation("trial", TrialFileSystem, clobber=True)
    TrialFileSystem.store = Store()
    yield TrialFileSystem.store


def empty_disk(run: Path) -> None:
    shutil.rmtree(run)
