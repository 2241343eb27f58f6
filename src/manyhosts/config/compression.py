"""The names of the ways to send less."""

from __future__ import annotations

from importlib.metadata import entry_points

from manyhosts.errors import ConfigError
from manyhosts.table import nearest

OWN = ("bf16", "fp16", "int8", "powersgd", "topk")
"""Those of this package: each has a file of its name."""
GROUP = "manyhosts-compressions"
"""The entry points by which other packages add theirs."""


def check_name(name: str) -> None:
    """Raise ConfigError where no compression has that name. Also where there is one worker, which sends nothing."""
    if name in ("none", "auto", *OWN):
        return  # without a look through all installed packages
    known = ["none", "auto", *sorted({*OWN, *(point.name for point in entry_points(group=GROUP))})]
    if name not in known:
        raise ConfigError(
            f"there is no compression named {name!r}",
            where="DDP(compression=…)",
            fix=f"{nearest(name, known)}known: {', '.join(known)}; or give a function of your own",
        )
