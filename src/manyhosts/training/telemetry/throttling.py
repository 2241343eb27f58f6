"""How much of the time this host has slowed a processor down because it was too hot, as the kernel counts it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")
_COUNTERS = "cpu[0-9]*/thermal_throttle/*_throttle_total_time_ms"
"""Milliseconds since the start of the system, of each core and of the chip that it is on: Linux from 5.5, on Intel."""


class Throttling:
    """Of the processors of this host. Where the kernel does not count, they are never found to be slowed down."""

    def __init__(self, system: Path = SYSTEM) -> None:
        self._counters = sorted(system.glob(_COUNTERS))
        self._last_ms, self._since = self._read(), time.monotonic()

    def share(self) -> float:
        """Of the time since the last call, or the beginning: the share, 0 to 1, of the processor it was longest for."""
        before, since = self._last_ms, self._since
        self._last_ms, self._since = self._read(), time.monotonic()
        passed_ms = 1000 * (self._since - since)
        most = max((ms - before.get(path, ms) for path, ms in self._last_ms.items()), default=0)
        return min(1.0, max(0.0, most / passed_ms)) if passed_ms > 0 else 0.0

    def _read(self) -> dict[Path, int]:
        found = {}
        for path in self._counters:
            with contextlib.suppress(OSError, ValueError):
                found[path] = int(path.read_text())
        return found
