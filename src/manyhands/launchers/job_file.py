"""A job as a file: how the first node of an engine's job learns what to run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhands.errors import ConfigError
from manyhands.launchers.job import Job


def text_of(job: Job) -> str:
    """`job` as JSON."""
    return json.dumps(asdict(job), default=str, indent=1) + "\n"


def load(path: Path) -> Job:
    """The job that `text_of` has written to `path`.

    Raises:
        ConfigError: there is no such file, or it is of another version of manyhands.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        for name in ("folder", "run_dir"):
            found[name] = Path(found[name])
        for name in ("arguments", "preload", "hosts"):
            found[name] = tuple(found[name])
        return Job(**found)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ConfigError(
            f"cannot read what to run: {cause}",
            where=str(path),
            fix="see that all nodes have this file and the same version of manyhands",
        ) from cause
