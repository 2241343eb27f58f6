"""The range that a run takes its ports from (`--ports 29500-29600`), where a firewall lets no others through.

Gloo has no setting for it: it always asks the system for any free port. libtorch calls the C library's `bind` through
an entry of its table of imported functions, as any shared library does. With `--ports` the entry is changed, in this
process alone, to a function that gives a port of the range wherever port 0 is asked for, and passes all other calls on.
Linux, 64 bits, x86 and ARM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError

VARIABLE = "MANYHOSTS_PORTS"
"""The variable that gives agents and workers the range; empty or unset where the system chooses."""
_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class Range:
    """Ports from `first` to `last`, both of them included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def numbers(self) -> range:
        """All of them."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, words: str) -> Range:
        """The range that is written as A-B.

        Raises:
            ConfigError: it is written otherwise, or runs the wrong way, or has ports that only root may open.
        """
        fix = f"write it as --ports 29500-29600, with ports from {_LOWEST} to {_HIGHEST}"
        found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", words, re.ASCII)
        if found is None:
            raise ConfigError(f"cannot read {words!r} as a range of ports", where="--ports", fix=fix)
        first, last = int(found[1]), int(found[2])
        if first > last:
            raise ConfigError(f"the range of ports {words} ends before it begins", where="--ports", fix=fix)
        if first < _LOWEST or last > _HIGHEST:
            raise ConfigError(f"the range of ports {words} has ports that a run cannot open", where="--ports", fix=fix)
        return cls(first, last)

    @classmethod
    def of(cls, words: str) -> Range | None:
        """The same, and None for an empty text."""
        return cls.parse(words) if words else None


def needed(workers: int) -> int:
    """How many ports a host with so many workers may need at once, besides those of the head and of hosts that join.

    Two for each worker, as a new group opens its port before that of the group that broke is closed; and two for the
    store, for the same reason.
    """
    return 2 * workers + 2


_LIBRARY = "libtorch_cpu.so"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_RELOCATION = struct.Struct("<QQq")
_SYMBOL_BYTES = 24
_JUMP_SLOTS = {62: 7, 183: 1026}
"""EM_X86_64 → R_X86_64_JUMP_SLOT, EM_AARCH64 → R_AARCH64_JUMP_SLOT: the kind of relocation of a called function."""
_DYNAMIC, _SIZE_OF_JUMPS, _STRINGS, _SYMBOLS, _JUMPS = 2, 2, 5, 6, 23  # PT_DYNAMIC and the tags DT_…

_Bind: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_kept: list[Any] = []
"""The function that libtorch calls: it must not be collected."""


def limit_gloo(_: object = None) -> None:
    """Change the entry, where this run has a range. Once per worker, when torch is loaded.

    Raises:
        ConfigError: this cannot be done with this torch or on this system.
    """
    ports = Range.of(os.environ.get(VARIABLE, ""))
    if ports is None or _kept:
        return
    entry = _entry_of("bind") if sys.platform == "linux" and sys.maxsize > 2**32 else 0
    if not entry or not _make_writable(entry):
        raise ConfigError(
            "this torch does not let the ports of Gloo be chosen",
            where=f"--ports {ports}",
            fix="leave --ports out, and set the range of the system: sysctl net.ipv4.ip_local_port_range",
        )
    _kept.append(_Bind(_choosing(ports)))
    ctypes.c_void_p.from_address(entry).value = ctypes.cast(_kept[0], ctypes.c_void_p).value


def _choosing(ports: Range) -> Callable[[int, int, int], int]:
    """A `bind` that takes a free port of the range where any would do.

    Two sockets that both may reuse an address can be given one port, and the second then fails to listen. So it is
    first tried without; ports that closed connections still hold for a minute come next, and each worker of a host has
    its own of these.
    """
    true_bind: Any = ctypes.CDLL(None, use_errno=True).bind
    place, places = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def bind(descriptor: int, address: int, length: int) -> int:
        asked = ctypes.string_at(address, length)
        family, port = struct.unpack_from("=H", asked)[0], asked[2:4]
        if family not in _FAMILIES or port != b"\0\0":
            return int(true_bind(descriptor, asked, length))
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.type != socket.SOCK_STREAM:
                return int(true_bind(descriptor, asked, length))
            for reuses, numbers in enumerate((ports.numbers(), ports.numbers()[place::places])):
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
                for number in numbers:
                    if true_bind(descriptor, asked[:2] + number.to_bytes(2, "big") + asked[4:], length) == 0:
                        copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        return 0
                    if ctypes.get_errno() != errno.EADDRINUSE:
                        return -1
        return -1

    return bind


def _entry_of(function: str) -> int:
    """Where in memory libtorch keeps the address of an imported `function`; 0 where that is not found."""
    base = _base_of(_LIBRARY)
    return entry_in(base, function) if base else 0


def entry_in(base: int, function: str) -> int:
    """Where the library that is in memory from `base` on keeps the address of an imported `function`; 0 if nowhere.

    Only entries that calls go through are read, of the kind that this library's machine has for them.
    """
    if ctypes.string_at(base, 6) != b"\x7fELF\x02\x01":  # 64 bits, little end first
        return 0
    jump = _JUMP_SLOTS.get(_unpacked("<H", base + 18))
    headers, size, count = _unpacked("<Q", base + 32), _unpacked("<H", base + 54), _unpacked("<H", base + 56)
    found = (_PROGRAM_HEADER.unpack(ctypes.string_at(base + headers + n * size, 56)) for n in range(count))
    dynamic = next((each for each in found if each[0] == _DYNAMIC), None)
    if jump is None or dynamic is None:
        return 0
    tags = dict(struct.iter_unpack("<QQ", ctypes.string_at(base + dynamic[3], dynamic[6])))
    if not {_JUMPS, _SIZE_OF_JUMPS, _SYMBOLS, _STRINGS} <= tags.keys():
        return 0
    # The loader of glibc has made absolute addresses of these already, that of musl has not.
    jumps, symbols, strings = (tags[tag] + (base if tags[tag] < base else 0) for tag in (_JUMPS, _SYMBOLS, _STRINGS))
    wanted = function.encode() + b"\0"
    for offset, info, _ in _RELOCATION.iter_unpack(ctypes.string_at(jumps, tags[_SIZE_OF_JUMPS])):
        name = ctypes.c_uint32.from_address(symbols + (info >> 32) * _SYMBOL_BYTES).value
        if info & 0xFFFFFFFF == jump and ctypes.string_at(strings + name, len(wanted)) == wanted:
            return int(base + offset)
    return 0


def _unpacked(form: str, address: int) -> int:
    return int(struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))[0])


def _base_of(library: str) -> int:
    """Where a library begins in the memory of this process; 0 where it is not loaded."""
    pattern = re.compile(rf"^([0-9a-f]+)-\S+ \S+ 0+ .*/{re.escape(library)}$", re.MULTILINE)
    found = pattern.search(Path("/proc/self/maps").read_text())
    return int(found[1], 16) if found else 0


def _make_writable(entry: int) -> bool:
    """See that the page of `entry` can be written; some builds protect it when all functions are found."""
    page = os.sysconf("SC_PAGESIZE")
    protect: Any = ctypes.CDLL(None, use_errno=True).mprotect
    start = entry - entry % page
    return bool(protect(ctypes.c_void_p(start), ctypes.c_size_t(page), _READ_WRITE) == 0)
