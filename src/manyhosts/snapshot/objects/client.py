"""Every call to an object store that snapshots make, one method each: the seam where tests let a network fail.

Little is asked of a store: an object written again is there completely or not at all when the call has returned. There
is no rename, no append, and a list may be out of date. Stores are reached through fsspec, which is loaded when a store
is asked for, as is the library of that store: https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from manyhosts.config.snapshots import is_address
from manyhosts.errors import ConfigError

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
_TRIES = 4
_FIRST_TRIES = 2
"""Before anything is lost, a person gets a message sooner: libraries try some times of their own, for seconds each."""
_FIRST_PAUSE_S = 0.5
_BROUGHT_BY = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
}
"""Scheme of an address → the package that knows it."""
_WITH_FOLDERS = {"file", "local", "memory"}
"""Where a folder is a thing of its own, and is left when the last file in it goes."""
_FOR_GOOD = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError, TypeError)
"""What is the same the next time."""
_NO_CREDENTIALS = (
    "Credential",
    "Authentication",
    "Unauthorized",
    "Forbidden",
    "RefreshError",
    "Signature",
    "AccessKey",
)
PROBE = "snapshots-are-kept-here.txt"
"""An object that is written at each address first, to see that this can be done."""
_PROBE_TEXT = b"What there is: manyhosts snapshots ls ADDRESS\n"


class StoreTrouble(OSError):
    """The store refused, or was not reached, several times in a row. The text is one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.strerror = sentence


class Client:
    """The objects below one address. Every call is tried again where it fails, some seconds long in all."""

    def __init__(self, address: str, *, pause: Callable[[float], None] = time.sleep) -> None:
        """
        Raises:
            ConfigError: no library for such an address is installed.
        """
        self.address = address.rstrip("/") if is_address(address) else str(Path(address).absolute())
        self._pause = pause
        self._system, self._root = _open(self.address)

    def check(self) -> None:
        """See that objects can be listed, written and read here, before anything counts on it.

        Raises:
            ConfigError: they cannot; what to do is said.
        """
        try:
            self._again(lambda: self._system.pipe_file(self._path(PROBE), _PROBE_TEXT), tries=_FIRST_TRIES)
            if self.read(PROBE) != _PROBE_TEXT:
                raise StoreTrouble("an object that was written reads otherwise")
            self.folders()
        except (OSError, NotImplementedError) as trouble:
            raise _refusal(trouble, self.address) from trouble

    def folders(self) -> list[str]:
        """The names of the folders right below the address."""
        return [name for name, entry in self._list("").items() if entry["type"] == "directory"]

    def sizes(self, folder: str) -> dict[str, int]:
        """Name → bytes of every object in `folder`, as far as the store's list knows it."""
        return {name: int(entry["size"] or 0) for name, entry in self._list(folder).items() if entry["type"] == "file"}

    def size(self, name: str) -> int:
        """How many bytes an object has, asked of itself and not of a list.

        Raises:
            FileNotFoundError: there is none.
        """
        return int(self._again(lambda: self._system.info(self._path(name)))["size"])

    def changed(self, name: str) -> float | None:
        """When an object was written, in seconds since the Unix epoch; None where the store does not say."""
        with suppress(NotImplementedError, KeyError, AttributeError):
            return float(self._again(lambda: self._system.modified(self._path(name))).timestamp())
        return None

    def read(self, name: str) -> bytes:
        """The content of a small object.

        Raises:
            FileNotFoundError: there is none.
        """
        return bytes(self._again(lambda: self._system.cat_file(self._path(name))))

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of an object, piece by piece; a piece that breaks off is asked for again.

        Raises:
            FileNotFoundError: there is none.
        """
        size = self.size(name)
        for begin in range(0, size, _PIECE_BYTES):
            yield self._range(name, begin, min(begin + _PIECE_BYTES, size))

    def _range(self, name: str, begin: int, end: int) -> bytes:
        return bytes(self._again(lambda: self._system.cat_file(self._path(name), start=begin, end=end)))

    def put(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._again(lambda: self._system.pipe_file(self._path(name), content))

    def put_file(self, name: str, path: Path) -> None:
        """Write an object with the content of a file, in many parts where it is large.

        Raises:
            FileNotFoundError: there is no such file any more.
        """
        if not path.exists():
            raise FileNotFoundError(str(path))
        with suppress(
            FileExistsError
        ):  # of a try before this one, whose answer was lost: there is one content to a name
            self._again(lambda: self._system.put_file(str(path), self._path(name)))

    def remove(self, name: str) -> None:
        """Remove one object. No error where there is none."""
        with suppress(FileNotFoundError):
            self._again(lambda: self._system.rm_file(self._path(name)))

    def remove_folder(self, folder: str) -> None:
        """Remove what is left of `folder` without its objects, where a store knows folders."""
        protocol = self._system.protocol
        if _WITH_FOLDERS & ({protocol} if isinstance(protocol, str) else set(protocol)):
            with suppress(OSError):
                self._system.rmdir(self._path(folder))

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        path = self._path(folder)

        def ask() -> list[dict[str, Any]]:
            self._system.invalidate_cache(path)
            try:
                return list(self._system.ls(path, detail=True))
            except FileNotFoundError:  # a folder without an object in it is none
                return []

        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in self._again(ask)}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _again(self, call: Callable[[], T], *, tries: int = _TRIES) -> T:
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(tries)):
            try:
                return call()
            except _FOR_GOOD:
                raise
            except Exception as trouble:  # of whatever kind the library of that store raises
                if not left or _is_about_credentials(trouble):
                    raise StoreTrouble(sentence(trouble)) from trouble
            self._pause(pause_s)
            pause_s *= 2
        raise AssertionError("the last try returns or raises")


def _open(address: str) -> tuple[Any, str]:
    """The file system of fsspec for `address`, and the path in it."""
    scheme = address.partition("://")[0] if is_address(address) else "file"
    try:
        from fsspec.core import url_to_fs

        # No list is remembered: another machine may have written since.
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        system, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as missing:
        package = _BROUGHT_BY.get(scheme, "")
        raise ConfigError(
            f"addresses with {scheme}:// need {package or 'a package'}, which is not installed here",
            where=address,
            fix=f"{sys.executable} -m pip install fsspec {package}" if package else str(missing),
        ) from missing
    except ValueError as unknown:
        raise ConfigError(
            f"{scheme}:// is no kind of address that fsspec knows" if "rotocol" in str(unknown) else sentence(unknown),
            where=address,
            fix="give s3://bucket/path, gs://…, abfs://…, or a folder",
        ) from unknown
    except Exception as trouble:  # some libraries ask the network for credentials when they are made
        raise _refusal(trouble, address) from trouble
    return system, str(root).rstrip("/")


def _refusal(trouble: Exception, address: str) -> ConfigError:
    """Why nothing can be kept at `address`, for a person who has not lost anything yet."""
    bucket = address.partition("://")[2].partition("/")[0] if is_address(address) else address
    if isinstance(trouble, PermissionError) or _is_about_credentials(trouble.__cause__ or trouble):
        what = f"the store does not let us in: {sentence(trouble)}"
        fix = "give this machine credentials that may list, read, write and remove there (for S3: `aws configure`)"
    elif isinstance(trouble, FileNotFoundError):
        what = f"there is no {bucket!r} to keep snapshots in"
        fix = "make it, or correct the address"
    else:
        what = f"no snapshots can be kept there: {sentence(trouble)}"
        fix = "see that this machine reaches the store, and at which address (for S3 that is no AWS: AWS_ENDPOINT_URL)"
    return ConfigError(what, where=address, fix=fix)


def _is_about_credentials(trouble: BaseException) -> bool:
    said = f"{type(trouble).__name__} {trouble}"
    return isinstance(trouble, PermissionError) or any(word in said for word in _NO_CREDENTIALS)


def sentence(trouble: BaseException) -> str:
    """The first line of what a library says, not too long."""
    text = getattr(trouble, "strerror", None) or str(trouble)
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), type(trouble).__name__)
    return line if len(line) <= 200 else f"{line[:199]}…"
