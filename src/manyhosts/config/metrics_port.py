"""`manyhosts run --metrics-port 9400`: where rank 0 serves its metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhosts.errors import ConfigError

VARIABLE = "MANYHOSTS_METRICS_PORT"
WHERE = "--metrics-port"
_HERE = "127.0.0.1"
_HIGHEST = 65535


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """An address of rank 0's host, and a port of it."""

    port: int
    address: str = _HERE

    @classmethod
    def parse(cls, text: str) -> MetricsPort:
        """Read `9400`, for processes of the same host, or `0.0.0.0:9400`, for everybody who reaches it.

        Raises:
            ConfigError: it is none of these.
        """
        address, sign, port = text.strip().rpartition(":")
        if not port.isdecimal() or not 0 < int(port) <= _HIGHEST or (sign and not address):
            raise ConfigError(
                f"cannot read {text!r} as a port", where=WHERE, fix="write it as 9400, or with an address: 0.0.0.0:9400"
            )
        return cls(int(port), address.strip("[]") or _HERE)

    def to_environment(self) -> dict[str, str]:
        """The variable that carries it to the workers."""
        return {VARIABLE: f"{self.address}:{self.port}"}


def asked(environment: Mapping[str, str] = os.environ) -> MetricsPort | None:
    """What this worker was asked for.

    Raises:
        ConfigError: the variable cannot be read.
    """
    text = environment.get(VARIABLE)
    return MetricsPort.parse(text) if text else None
