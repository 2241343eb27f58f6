"""A job as a file: how the first node of an engine's job learns what to run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manyhosts.control import plan
from manyhosts.control.job import HIDDEN, Job
from manyhosts.control.plan import Later
from manyhosts.errors import ConfigError


def text_of(job: Job) -> str:
    """`job` as JSON, with all its variables: for its owner alone."""
    return plan.text_of(asdict(job))


def hidden(job: Job) -> dict[str, str]:
    """The variables whose values are shown nowhere."""
    return {name: value for name, value in job.environment.items() if name in job.hidden}


def without_hidden(job: Job) -> Job:
    """`job` without the values that are shown nowhere: of variables the names, of what was typed the names, too."""
    environment = {**job.environment, **dict.fromkeys(hidden(job), HIDDEN)}
    words = list(job.words)
    for number, word in enumerate(words[: len(words) - len(job.arguments) - 1]):  # what comes after is the script's
        option, between, given = word.partition("=")
        if option == "--env" and "=" in given:
            words[number] = f"--env={given.partition('=')[0]}"  # by name, as it may be typed
        elif number and words[number - 1] == "--env" and between:
            words[number] = option
    return replace(job, environment=environment, words=tuple(words))


def shown(job: Job) -> dict[str, Any]:
    """`job` as what becomes its file, for a plan: values that are shown nowhere are filled in by `values_of`."""
    content, public = asdict(job), without_hidden(job)
    content["environment"] |= {name: Later(f"variable {name}", HIDDEN) for name in hidden(job)}
    content["words"] = [
        word if word == given else Later(f"word {number}", f"{word}={HIDDEN}")
        for number, (word, given) in enumerate(zip(public.words, job.words, strict=True))
    ]
    return content


def values_of(job: Job) -> dict[str, str]:
    """What `shown` leaves out, for `plan.filled`."""
    words = {f"word {number}": word for number, word in enumerate(job.words)}
    return {**words, **{f"variable {name}": value for name, value in hidden(job).items()}}


def write_hidden(text: str, path: Path) -> None:
    """Write `text` so that only its owner can read it."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # it may have been there before
        file.write(text)


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
        for name in ("words", "hidden", "bring", "for_trainer"):
            found[name] = tuple(found.get(name, ()))
        found["workers_of"] = {int(node): count for node, count in found["workers_of"].items()}
        return Job(**found)
    except (ValueError, KeyError, TypeError) as cause:
        raise _unreadable(cause, where) from cause


def _unreadable(cause: Exception, where: str) -> ConfigError:
    fix = "see that all nodes have it, and the same version of manyhosts"
    return ConfigError(f"cannot read what to run: {cause}", where=where, fix=fix)
