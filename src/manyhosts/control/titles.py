"""What `ps`, `top` and `nvidia-smi` show of a process of a run: its part in it, in place of a command line of Python's.

The title is written over the command line in memory, as setproctitle does; forked processes inherit it. Linux only:
elsewhere, and where the system hides that memory, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

_PR_SET_NAME = 15
_LONGEST_NAME_BYTES = 15


def set_title(title: str, name: str = "manyhosts") -> None:
    """Have `ps` show `title`, cut to the length of the command line, and `top` show `name`, cut to 15 bytes."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        first, after = _command_line()
        size = after - first
        text = title.encode()[: max(0, size - 2)]
        if first and text:
            # The last byte is no NUL: then the kernel takes everything before the first NUL for the command line.
            ctypes.memmove(first, text + b"\0" + b" " * (size - len(text) - 1), size)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_LONGEST_NAME_BYTES], 0, 0, 0)


def of_worker(rank: int, workers: int, program: str) -> None:
    """Call this process `manyhosts rank 1 of 4: train.py`, or `manyhosts 1/4` where there is little room."""
    set_title(f"manyhosts rank {rank} of {workers}: {Path(program).name}", f"manyhosts {rank}/{workers}")


def _command_line() -> tuple[int, int]:
    """Where the command line of this process begins in memory, and where it ends; zeros where that is hidden."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(after_name[45]), int(after_name[46])  # fields 48 and 49, as proc(5) counts them
