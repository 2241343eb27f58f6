"""TensorBoard's event files, written without TensorBoard: its import costs 0.2 s of a core at the start of each run.

A file is a row of records: the length of the data, the data, a checksum (CRC-32C) behind each of both. The data is an
`Event` of TensorBoard's `event.proto` in the wire format of protocol buffers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_START = 1
"""`SessionLog.START`: what stands behind it replaces what earlier files tell of the same steps."""


class EventFile:
    """One file of points. Its name sorts after those of earlier runs, also of the same second."""

    def __init__(self, folder: Path) -> None:
        """Make `folder` if need be, and a new file in it.

        Raises:
            OSError: that cannot be.
        """
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._write(_event(float(seconds), 0, _bytes(3, b"brain.Event:2")))

    def add(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """A point of every curve in `values`; `when` in seconds since the Unix epoch."""
        points = [_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()]
        self._write(_event(when, step, _bytes(5, b"".join(points))))

    def forget_after(self, step: int, when: float) -> None:
        """Have TensorBoard forget what an earlier file tells of steps that are done once more."""
        self._write(_event(when, step + 1, _bytes(7, _whole(1, _START))))

    def flush(self) -> None:
        """Have every point with the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))


def _event(when: float, step: int, what: bytes) -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, when) + _whole(2, step) + what


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # too large for 32 bits
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest ones first; the highest bit says that more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_ROWS = [_row(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
    """CRC-32C of `data`, rotated and shifted as the format wants it."""
    found, rows = 0xFFFFFFFF, _ROWS
    for byte in data:
        found = found >> 8 ^ rows[(found ^ byte) & 0xFF]
    found ^= 0xFFFFFFFF
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)
