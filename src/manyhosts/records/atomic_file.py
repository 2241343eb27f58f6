"""Small files that are complete or absent: written next to their place and moved there by one rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.json_text import parsed


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path`. A crash leaves what was there before, never a part of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it has its name, or a power cut leaves an empty file
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Put `value` at `path` as JSON that a person can read too. Plain values only; NaN is refused."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, *, version: int | None = None, written_by: str = "") -> dict[str, Any]:
    """The JSON object at `path`, of the schema `version` where one is given; `written_by` says where to look.

    Raises:
        ConfigError: there is no such file, it holds something else, or another version of manyhosts wrote it.
    """
    try:
        value = parsed(path.read_bytes())
    except FileNotFoundError as cause:
        raise ConfigError(
            f"there is no {path.name}", where=str(path.parent), fix="give the directory of a run, such as runs/train-…"
        ) from cause
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"cannot read {path.name}: {cause}", where=str(path), fix="restore the file, or give another run directory"
        ) from cause
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path.name} holds a {type(value).__name__}, not an object",
            where=str(path),
            fix="restore the file, or give another run directory",
        )
    if version is not None and value.get("schema_version") != version:
        raise ConfigError(
            f"{path.name} has schema version {value.get('schema_version')}, and this manyhosts reads {version}",
            where=str(path),
            fix=f"read it with the version of manyhosts that wrote it{written_by}",
        )
    return value
