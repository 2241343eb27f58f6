"""Memory that is let go of goes back to the machine at once: for trainings that would not fit otherwise.

The C library of Linux keeps pieces of up to 32 MB for later, and in a training that gathers and lets go of parameters
in every step they fit nothing else: beside 344 MB of tensors such a worker had up to 142 MB of them.
"""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3
"""In the words of glibc's malloc.h."""
_BYTES = 1 << 20


def give_back_at_once() -> None:
    """From now on, for pieces of a megabyte and more; where the C library has no such choice, nothing."""
    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BYTES)
    except (OSError, AttributeError, TypeError):
        return
