"""The names of the ways to send less, and which code stands behind them."""

from __future__ import annotations

from typing import Any

from manyhands.errors import ConfigError
from manyhands.table import Table, nearest

_FOLDER = "manyhands.communication.compression"

COMPRESSIONS: Table[Any] = Table(
    kind="compression",
    group="manyhands.compressions",
    own={name: f"{_FOLDER}.{name}:make" for name in ("bf16", "fp16", "int8", "powersgd", "topk")},
)
"""Name → a function that is given the `DDP` value and makes the compression."""


def check_name(name: str) -> None:
    """Raise ConfigError where no compression has that name."""
    known = ["none", *COMPRESSIONS.names()]
    if name not in known:
        raise ConfigError(
            f"there is no compression named {name!r}",
            where="DDP(compression=…)",
            fix=f"{nearest(name, known)}known: {', '.join(known)}; or give a function of your own",
        )
