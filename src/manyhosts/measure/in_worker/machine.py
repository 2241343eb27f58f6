"""What a worker's machine has: cores, threads, memory and what a copy takes; and what processes take of its cores."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from manyhosts import device

_START_OF_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's share of the memory is written: cgroup versions 2 and 1."""
_COPIES = 5
_MOST_BYTES = 64 << 20
"""That are copied: more than a processor keeps near, and little compared with a model."""


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


def copy_s_per_byte(where: torch.device, unit: int, total: int) -> float:
    """Seconds that it takes to copy a byte of `total`, in pieces of `unit` bytes, into memory that was just got.

    As in a step each piece is another one, so none of them is near yet.
    """
    total = min(total, _MOST_BYTES)
    pieces = [torch.ones(min(unit, total) // 4 + 1, device=where) for _ in range(max(1, total // unit))]
    times = []
    for _ in range(_COPIES):
        device.wait_for(where)
        begin = time.perf_counter()
        copies = [piece.clone() for piece in pieces]
        device.wait_for(where)
        times.append(time.perf_counter() - begin)
        del copies
    return statistics.median(times) / sum(piece.nbytes for piece in pieces)
