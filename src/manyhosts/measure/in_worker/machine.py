"""What a worker's machine has: cores, threads, memory; and what processes take of its cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from manyhosts import device

_START_OF_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's share of the memory is written: cgroup versions 2 and 1."""


def name() -> str:
    """The same for all processes that share these cores, on whichever host of a lab or in whichever container."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        return f"{_START_OF_KERNEL.read_text().strip()} {cores}"
    except OSError:
        return socket.gethostname()


def processor_s(processes: Iterable[int]) -> float | None:
    """Seconds for which these processes have kept cores busy so far, together; None where it is not known."""
    if sys.platform != "linux":
        return None
    try:
        # A process's own clock, by its number: what clock_getcpuclockid(3) gives.
        return sum(time.clock_gettime((~process << 3) | 2) for process in processes)
    except OSError:
        return None  # one has ended


def process_bytes(processes: Iterable[int]) -> int:
    """Memory of these processes, what several have by its share (Linux: `Pss`); 0 where it is not known."""
    found = 0
    for process in processes:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            return 0
        found += 1024 * int(text.partition("\nPss:")[2].split()[0])
    return found


def give_back_memory() -> None:
    """What the allocator keeps of memory that is free goes back to the system, where it is the C library of GNU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def load() -> float:
    """Processes that ran or waited for a core in the last minute; 0 where it is not known."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def threads() -> int:
    """That torch computes with."""
    return torch.get_num_threads()


def devices(where: torch.device) -> int:
    """Accelerators that the machine has for workers; 0 where they compute on its cores."""
    return device.module(where).device_count() if device.is_asynchronous(where) else 0


def memory_bytes(where: torch.device) -> int:
    """Of the device, or of the machine, as far as this container may have it; 0 where it is not known."""
    if device.is_asynchronous(where):
        return int(device.module(where).get_device_properties(where).total_memory)
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    for path in _LIMITS:
        try:
            most = min(most, int(path.read_text()))
        except (OSError, ValueError):
            continue  # there is none, or it says "max"
    return most
