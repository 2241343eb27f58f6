"""A job as a file: how the first node of an engine's job learns what to run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.launchers.job import Job


def text_of(job: Job) -> str:
    """`job` as JSON."""
    return json.dumps(asdict(job), default=str, indent=1) + "\n"


def load(path: Path) -> Job:
    """The job that `text_of` has written to `path`.

    Raises:
        ConfigError: there is no such file, or it is of another version of manyhosts.
    """
    try:
        return of_text(path.read_text(), where=str(path))
    except OSError as cause:
        raise _unreadable(cause, str(path)) from cause


def of_text(text: str, *, where: str) -> Job:
    """The job that `text_of` has written.

    Raises:
        ConfigError: it is of another version of manyhosts.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        for name in ("folder", "run_dir"):
            found[name] = Path(found[name])
        for name in ("arguments", "preload", "hosts", "show"):
            found[name] = tuple(found[name])
        found["words"] = tuple(found.get("words", ()))
        found["workers_of"] = {int(node): count for node, count in found["workers_of"].items()}
        return Job(**found)
    except (ValueError, KeyError, TypeError) as cause:
        raise _unreadable(cause, where) from cause


def _unreadable(cause: Exception, where: str) -> ConfigError:
    fix = "see that all nodes have it, and the same version of manyhosts"
    return ConfigError(f"cannot read what to run: {cause}", where=where, fix=fix)
