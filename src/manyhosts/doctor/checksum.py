"""Whether two hosts have the same file or folder: its size and a hash of its content, of a sample where that is large.

Runs on the hosts, with the standard library of Python 3.8 or newer alone.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

MOST_BYTES = 256 << 20
"""What is read of one path at most; of more, a sample."""
_PIECES = 64
_PIECE_BYTES = 1 << 20
_MOST_FILES = 200_000


def of_path(path: str) -> dict[str, Any] | None:
    """What is at `path`, or None where nothing is.

    `kind` (file, folder), `bytes`, `files`, `sha256`; `sampled` says that of the content only pieces, evenly spread,
    were read, while names and sizes count in full. `trouble`: it cannot be read.
    """
    try:
        if os.path.isdir(path):
            return _of_folder(path)
        if not os.path.exists(path):
            return None
        size = os.path.getsize(path)
        digest = hashlib.sha256(str(size).encode())
        _add(digest, path, size, MOST_BYTES)
    except OSError as error:
        return {"trouble": error.strerror or str(error)}
    return {"kind": "file", "bytes": size, "files": 1, "sha256": digest.hexdigest(), "sampled": size > MOST_BYTES}


def _of_folder(path: str) -> dict[str, Any]:
    found = []
    for place, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            full = os.path.join(place, name)
            found.append((os.path.relpath(full, path), os.stat(full).st_size))
            if len(found) > _MOST_FILES:
                return {"trouble": f"it has more than {_MOST_FILES} files; name a folder below it"}
    total = sum(size for _, size in found)
    digest = hashlib.sha256()
    for name, size in found:
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
    sampled = total > MOST_BYTES
    chosen = found if not sampled else found[:: max(1, len(found) // _PIECES)]
    for name, size in chosen:
        _add(digest, os.path.join(path, name), size, MOST_BYTES // len(chosen) if sampled else size)
    facts = {"kind": "folder", "bytes": total, "files": len(found), "sha256": digest.hexdigest()}
    return {**facts, "sampled": sampled}


def _add(digest: Any, path: str, size: int, most: int) -> None:
    """Add the content of a file; of one that is larger than `most`, pieces evenly spread over it."""
    with open(path, "rb") as file:
        if size <= most:
            while chunk := file.read(_PIECE_BYTES):
                digest.update(chunk)
            return
        count = max(2, min(_PIECES, most // _PIECE_BYTES))
        for number in range(count):
            file.seek((size - _PIECE_BYTES) * number // (count - 1) if size > _PIECE_BYTES else 0)
            digest.update(file.read(min(_PIECE_BYTES, size)))
