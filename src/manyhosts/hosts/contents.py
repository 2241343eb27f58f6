"""What files hold, by hash: computed once for each state of a file, and remembered between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int], object]
"""Called with the number of further bytes read."""
_CHUNK_BYTES = 1 << 20


class Hashes:
    """SHA-256 of files. One whose size, time and number are those of before is not read again."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` is the file that remembers; by default one in the user's folder for such things."""
        self._cache = place_of_cache() if cache is None else cache
        self._known: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._cache.read_text())
            self._known = known if isinstance(known, dict) else {}
        self._is_new = False

    def of(self, path: Path, progress: Progress | None = None) -> str:
        """The hash of what a file holds, as 64 hexadecimal digits.

        Raises:
            OSError: it cannot be read.
        """
        state = os.stat(path)
        name, stamp = str(path), [state.st_size, state.st_mtime_ns, state.st_ino]
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == stamp:
            if progress is not None:
                progress(state.st_size)
            return str(known[-1])
        digest = hash_of(path, progress)
        self._known[name] = [*stamp, digest]
        self._is_new = True
        return digest

    def keep(self) -> None:
        """Remember them for the next run. Where that is not possible, they are computed again then."""
        if not self._is_new:
            return
        half = self._cache.with_name(f"{self._cache.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps({name: known for name, known in self._known.items() if os.path.exists(name)}))
            half.replace(self._cache)


def hash_of(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of what a file holds.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def place_of_cache() -> Path:
    """Where the hashes of this user's files are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "manyhosts", "hashes.json")
