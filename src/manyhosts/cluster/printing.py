"""Printing once, however many workers run the script."""

from __future__ import annotations

import builtins
from typing import Any

from manyhosts.cluster.place import Place


def print(*values: Any, **options: Any) -> None:  # public as `mh.print`
    """As Python's own `print`, on rank 0 only."""
    if Place.from_environment().rank == 0:
        builtins.print(*values, **options)  # noqa: T201  # the user asked for it
