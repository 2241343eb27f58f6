"""A file of records as TensorBoard reads them: each with its length, and checksums of both.

TensorBoard has a writer of its own. To import it takes 0.15 s of the interpreter's time, taken from the first steps of
every run, for it brings all that TensorBoard draws and reads.
"""

from __future__ import annotations

import struct
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reversed."""
_MASK = 0xA282EAD8
"""What the format adds to a checksum, so that one of data that holds checksums is no worse."""


class RecordFile:
    """Adds records to a new file."""

    def __init__(self, path: Path) -> None:
        """Make `path`, which must not exist."""
        self._file = path.open("xb")

    def add(self, record: bytes) -> None:
        """Add one."""
        length = struct.pack("<Q", len(record))
        self._file.write(length + _masked(length) + record + _masked(record))

    def flush(self) -> None:
        """Have all of them with the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._file.close()


def crc32c(data: bytes) -> int:
    """The checksum of `data` by Castagnoli's polynomial, 32 bits."""
    found = 0xFFFFFFFF
    for byte in data:
        found = _OF_BYTE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    found = crc32c(data)
    return struct.pack("<I", (found >> 15 | found << 17 & 0xFFFFFFFF) + _MASK & 0xFFFFFFFF)


def _of_byte(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
    return number


_OF_BYTE = [_of_byte(number) for number in range(256)]
