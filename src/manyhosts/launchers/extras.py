"""Clients of engines that are installed by those who use them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from manyhosts.errors import LaunchError


def load(module: str, *, what: str, package: str) -> Any:
    """The module of that name. `what` it is, at the beginning of a sentence; the `package` that has it.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise LaunchError(
            f"{what} is not installed here",
            where=sys.executable,
            fix=f"{sys.executable} -m pip install {package}",
        ) from cause
