"""What all mappings share: each kind is reported once, by rank 0, and what cannot be mapped is an error."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from manyhosts.errors import ConfigError

_noted: set[str] = set()


def note(mapping: str) -> None:
    """Report that `mapping` was made, if it is the first of its kind."""
    if mapping in _noted:
        return
    _noted.add(mapping)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"rehearsal: {mapping}\n")


def refuse(what: str) -> NoReturn:
    """End the rehearsal of a script that needs what no CPU has.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{what} cannot be rehearsed on a CPU",
        where="--rehearse",
        fix="make it depend on a setting of the script that a rehearsal can switch off, or run on a machine with a GPU",
    )


def replace(owner: Any, **functions: Any) -> None:
    """Put `functions` in the place of those of the same names in `owner`, a module or a class of torch."""
    for name, function in functions.items():
        setattr(owner, name, function)
