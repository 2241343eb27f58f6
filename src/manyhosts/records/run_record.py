"""`run.json`: what a run was asked to do, with what, and where. Enough to do it again."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.records.atomic_file import read_json, write_json

SCHEMA_VERSION = 1


GIVEN = "MANYHOSTS_ENV"
"""The variable that names those that `--env` has given, with commas between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What `run.json` holds."""

    script: str
    arguments: Sequence[str] = ()
    settings: Mapping[str, Any]
    """Every plain setting as it was used, `--set` included: see `plain_settings`."""
    seed: int
    versions: Mapping[str, str | None]
    """Of manyhosts, torch and python; `git_commit` of the script's repository, None where it is in none."""
    hosts: Sequence[str]
    """One name per host, in the order of their ranks."""
    workers: int
    strategy: str
    backend: str | None
    """None where there is one worker, which talks to no one."""
    started: float
    """Seconds since the Unix epoch."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """What `--set` asked for, as it was typed."""
    environment: Sequence[str] = ()
    """The names of the variables that `--env` gave the workers; their values are shown nowhere."""
    same_answer: Mapping[str, str] = field(default_factory=dict)
    """What the last look at the loss has found: `outcome` (see `events.LossLooked`) and `text`; empty before it."""
    script_sha256: str = ""
    """Of the script's content, by which a run is known when its script was moved or renamed; empty without a file."""
    schema_version: int = field(default=SCHEMA_VERSION)

    def write(self, path: Path) -> None:
        """Write the record to `path`, completely or not at all."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """The record at `path`.

        Raises:
            ConfigError: there is none, or it was written by another version of manyhosts and cannot be understood.
        """
        fields = read_json(path, version=SCHEMA_VERSION, written_by=" (see `versions` in the file)")
        known = {entry.name: entry for entry in dataclasses.fields(cls)}
        missing = [name for name, entry in known.items() if name not in fields and not _has_default(entry)]
        if missing:
            raise ConfigError(
                f"run.json lacks {', '.join(missing)}", where=str(path), fix="restore the file, or begin a new run"
            )
        return cls(**{name: value for name, value in fields.items() if name in known})


def plain_settings(settings: Any) -> dict[str, Any]:
    """Settings, a frozen dataclass, as nested plain values; a section that has a name (the strategy) keeps it.

    Floors: what was asked (`config`) is not known here, so this takes any dataclass.
    """
    plain: dict[str, Any] = {"name": settings.name} if isinstance(getattr(type(settings), "name", None), str) else {}
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if callable(value):  # a function of the user's own, by its name
            value = getattr(value, "__qualname__", type(value).__name__)
        plain[entry.name] = plain_settings(value) if dataclasses.is_dataclass(value) else value
    return plain


def versions_for(script: Path) -> dict[str, str | None]:
    """The versions that a run of `script` depends on, found without importing torch."""
    return {
        "manyhosts": _version("manyhosts"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "git_commit": git_commit(script),
    }


def git_commit(script: Path) -> str | None:
    """The commit that `script`'s repository is at, with `+changes` where files differ; None where there is none."""
    folder = script.resolve().parent
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=True, env=quiet
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changes else head


def _has_default(entry: dataclasses.Field[Any]) -> bool:
    return entry.default is not dataclasses.MISSING or entry.default_factory is not dataclasses.MISSING


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
