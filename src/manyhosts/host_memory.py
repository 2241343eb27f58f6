"""Memory of this process that its host could use."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """What the allocator keeps of memory that is free goes back to the system, where it is the C library of GNU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
