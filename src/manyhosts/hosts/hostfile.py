"""Names of hosts, as people write them: `a,b,c`, or a file with a host on each line and `slots=` for its workers.

A host is `name`, `user@name`, `user@name:port`, an address, or `[address]:port` for one of IPv6.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from manyhosts.errors import ConfigError

_WRITE = "write names, addresses, user@name or user@name:port; an address of IPv6 with a port as [fd00::1]:22"
_WRITE_LINE = (
    "write name, name slots=4, or name port=2222, on each line; an address of IPv6 between brackets: [fd00::1]"
)
_MOST_SLOTS = 512
"""More are a port that was meant: a hostfile has workers after a colon, as Open MPI's."""
_HOST = re.compile(
    r"(\[(?P<inside>[\w:.%]+)\]|(?P<name>[^:\[\]\s]+))(:(?P<port>\d+))?|(?P<bare>[\w.%]*:[\w.%]*:[\w:.%]*)", re.ASCII
)


def in_words(text: str) -> tuple[str, ...]:
    """The hosts of `--hosts a,b,c`.

    Raises:
        ConfigError: there are none.
    """
    hosts = tuple(word.strip() for word in text.split(",") if word.strip())
    if not hosts:
        raise ConfigError("no host is named", where="--hosts", fix="write them as --hosts a,b,c")
    for host in hosts:
        _see(host, "--hosts")
    return hosts


def in_file(path: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The hosts of a file, and how many workers each is to have; nothing where the file does not say so.

    Lines as `name`, `name slots=4`, `name:4` or `name port=2222 slots=4`; what follows a # is not read.

    Raises:
        ConfigError: there is no such file, a line cannot be read, or some hosts have slots and others not.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(
            f"cannot read the hostfile: {getattr(cause, 'strerror', None) or 'it is no text'}",
            where=str(path),
            fix="give a file with a host on each line",
        ) from cause
    slots: dict[str, int | None] = {}
    said = set[str]()
    """Those of which a line says how many workers they are to have."""
    for number, line in enumerate(lines, start=1):
        if not line.partition("#")[0].split():
            continue
        where = f"{path}, line {number}"
        name, count = _of_line(line.partition("#")[0].strip(), where)
        if name in slots and (count is not None or name in said):
            fix = "name it once: name slots=2 gives it two workers"
            raise ConfigError(f"{name} is named twice", where=where, fix=fix)
        said |= {name} if count is not None else set()
        # A scheduler's file names a host once for each worker that it is to have.
        slots[name] = (slots[name] or 1) + 1 if name in slots else count
    if not slots:
        raise ConfigError("no host is named", where=str(path), fix="write a host on each line")
    if not said and any(slots.values()):
        slots = {name: count or 1 for name, count in slots.items()}
    counts = tuple(count for count in slots.values() if count is not None)
    if counts and len(counts) < len(slots):
        without = ", ".join(name for name, count in slots.items() if count is None)
        raise ConfigError(
            f"some hosts have slots, and others none: {without}",
            where=str(path),
            fix="say how many workers each host is to have, or say it of none",
        )
    return tuple(slots), counts


def _of_line(line: str, where: str) -> tuple[str, int | None]:
    """The host of a line, and how many workers it is to have."""
    words = line.split()
    name, count, port = words[0], "", ""
    if found := re.fullmatch(r"([^:]+|.*\]):([^:\]]*)", name):  # not an address of IPv6 without brackets
        name, count = found.groups()
    if count and any(word.startswith("slots=") for word in words[1:]):
        raise ConfigError(f"{line!r} says twice how many workers", where=where, fix=_WRITE_LINE)
    for word in words[1:]:
        count = word.removeprefix("slots=") if word.startswith("slots=") else count
        port = word.removeprefix("port=") if word.startswith("port=") else port
        if not word.startswith(("slots=", "port=", "max_slots=", "max-slots=")):
            raise ConfigError(f"cannot read {word!r} of {line!r}", where=where, fix=_WRITE_LINE)
    if count and (not re.fullmatch(r"[1-9]\d*", count) or int(count) > _MOST_SLOTS):
        fix = f"{_WRITE_LINE}; at most {_MOST_SLOTS} slots"
        if count.isdecimal() and int(count) > _MOST_SLOTS and f":{count}" in words[0]:
            fix = f"{count} would be workers; where it is a port: {name} port={count}"
        raise ConfigError(f"cannot read {line!r}", where=where, fix=fix)
    if port:
        name = f"[{name}]:{port}" if ":" in name and "[" not in name else f"{name}:{port}"
    try:
        _see(name, where)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=_WRITE_LINE) from error
    return name, int(count) if count else None


def destination(host: str, where: str = "--hosts") -> tuple[str, str]:
    """Where ssh is to go, as `user@name`, and at which port, where `host` says one: `user@name:22`, `[fd00::1]:22`.

    Raises:
        ConfigError: it is written otherwise.
    """
    user, at, rest = host.rpartition("@")
    found = _HOST.fullmatch(rest)
    address = found["inside"] or found["bare"] if found is not None else ""
    if found is None or not (_is_address(address) if address else _may_be_looked_up(found["name"])):
        raise ConfigError(f"{host!r} is no name of a host", where=where, fix=_WRITE)
    port = found["port"] or ""
    if port and not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{host!r} names a port that there is not", where=where, fix=_WRITE)
    return f"{user}{at}{address or found['name']}", port


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _may_be_looked_up(name: str) -> bool:
    try:
        return bool(name.encode("idna"))  # as `getaddrinfo` does: no empty or long part, no mark of direction
    except UnicodeError:
        return False


def _see(host: str, where: str) -> None:
    if host.startswith("-") or not host.isprintable():  # ssh would take it for an option
        raise ConfigError(f"{host!r} is no name of a host", where=where, fix=_WRITE)
    try:
        destination(host)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=error.fix) from None
