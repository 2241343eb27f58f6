"""`manyhosts.toml`: what a team would type again and again to name its machines, in a table with a name.

    [lab]
    hosts = ["a", "b", "c"]
    workers-per-node = 2
    env = { DATA = "/data" }

Keys are the command line's options without their dashes; `o`, `env` and `set` are tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.table import nearest

FILE = "manyhosts.toml"


def read(wanted: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file and the table that `wanted` names: a table of the nearest `manyhosts.toml`, or a file that is one.

    The nearest is that of `folder`, or of the folder closest above it.

    Raises:
        ConfigError: there is no such file or table, or it cannot be read.
    """
    if wanted.endswith(".toml"):
        return Path(wanted), _load(Path(wanted))
    found = next((each / FILE for each in (folder, *folder.parents) if (each / FILE).is_file()), None)
    if found is None:
        raise ConfigError(
            f"there is no {FILE} for --cluster {wanted}",
            where=f"{folder} and the folders above it",
            fix=f"write one with a table [{wanted}], or name a file: --cluster FILE.toml",
        )
    tables = _load(found)
    table = tables.get(wanted)
    if not isinstance(table, dict):
        known = [name for name, content in tables.items() if isinstance(content, dict)]
        names = ", ".join(known) or "none"
        raise ConfigError(
            f"there is no cluster named {wanted!r}", where=str(found), fix=f"{nearest(wanted, known)}it has: {names}"
        )
    return found, table


def words(
    table: Mapping[str, Any], where: str, known: Iterable[str], lists: Iterable[str], several: Container[str] = ()
) -> dict[str, Any]:
    """What the table says, as a command line would: texts, numbers, yes or no, and `K=V` for the options in `lists`.

    Of the options in `several`, which may be given several times, all that a list has.

    Raises:
        ConfigError: a key is none of `known`, or its value is of a kind that it cannot have.
    """
    known, lists = sorted(known), set(lists)
    said: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            fix = f"{nearest(key, known)}it may hold: {', '.join(known)}"
            raise ConfigError(f"there is no option named {key!r}", where=where, fix=fix)
        if key in lists:
            if not isinstance(value, dict) or not all(isinstance(each, str | int | float) for each in value.values()):
                raise ConfigError(f"{key} is {value!r}", where=where, fix=f'write it as {key} = {{ NAME = "value" }}')
            said[key] = tuple(f"{name}={_text(each)}" for name, each in value.items())
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            said[key] = tuple(value) if key in several else ",".join(value)
        elif isinstance(value, str | int | float):
            said[key] = value
        else:
            raise ConfigError(f"{key} is {value!r}", where=where, fix="give a text, a number, true or false")
    return said


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is no text"
        raise ConfigError(f"cannot read {path.name}: {reason}", where=str(path), fix="name another file") from cause
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path.name} is no TOML: {cause}", where=str(path), fix="mend that line") from cause
