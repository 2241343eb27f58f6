"""Memory that is let go of goes back to the machine at once: for trainings that would not fit otherwise.

The C library of Linux keeps pieces of up to 32 MB for later, and in a training that gathers and lets go of parameters
in every step they fit nothing else: beside 344 MB of tensors such a worker had up to 142 MB of them.
"""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""In the words of glibc's malloc.h."""
_BYTES = 1 << 20


def give_back_at_once() -> None:
    """From now on, for pieces of a megabyte and more; where the C library has no such choice, nothing."""
    _set(_MMAP_THRESHOLD, _BYTES)


def take_from_one_place() -> None:
    """From now on, for all threads: otherwise each reserves 64 MB of addresses when it begins, of which it uses little.

    For processes whose addresses are counted (`ulimit -v`).
    """
    _set(_ARENA_MAX, 1)


def _set(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).mallopt(option, value)
    except (OSError, AttributeError, TypeError):
        return
