"""What a host has for a run: disk, memory, GPUs, descriptors, time, processes ended for want of memory; and variables.

Needs the standard library alone, of Python 3.8 or newer, because it is also sent to hosts that have nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""What changes how workers communicate and compute. No other variable leaves the host."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
SHARED_MEMORY = "/dev/shm"  # noqa: S108  # only read, nothing is made there


def gather(run_dir: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, in some milliseconds. `environment` is what workers would find."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "time_s": time.time(),
        "cores": cores(),
        "cpu_quota": cpu_quota(),
        "load": os.getloadavg()[0],
        "memory": memory(),
        "disks": {"run directory": disk(run_dir), "temporary files": disk(os.environ.get("TMPDIR", "/tmp"))},  # noqa: S108
        "shared_memory": disk(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None,
        "descriptors": {"limit": soft, "most": hard},
        "environment": variables(environment),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "has_gpus": os.path.isdir("/proc/driver/nvidia/gpus"),
    }


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: str = "/") -> float | None:
    """How many cores' worth of time this process may use: the least of its cgroup and those around it. None: any."""
    found = []
    for place in _cgroups(root, "", "sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(place, "cpu.max")) as file:
            quota, period = file.read().split()
            found.append(int(quota) / int(period))  # the word `max` is no number: no limit
    for place in _cgroups(root, "cpu", "sys/fs/cgroup/cpu"):
        quota_us = _number_in(os.path.join(place, "cpu.cfs_quota_us"))
        period_us = _number_in(os.path.join(place, "cpu.cfs_period_us"))
        if quota_us and period_us and quota_us > 0:
            found.append(quota_us / period_us)
    return min(found) if found else None


def _cgroups(root: str, controller: str, base: str) -> list[str]:
    """Folders of this process's cgroup and of those around it, for a controller of version 1, or of version 2."""
    base, own = os.path.join(root, base), ""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(root, "proc/self/cgroup")) as table:
        for line in table:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                own = path.strip("/")
    parts = own.split("/") if own else []
    return [os.path.join(base, *parts[:end]) for end in range(len(parts) + 1)]


def memory() -> dict[str, int] | None:
    """Total and available bytes; of the container, where it has less. None: unknown."""
    try:
        with open("/proc/meminfo") as table:
            lines = dict(line.split(":", 1) for line in table)
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most = _number_in(limit)
        if most is not None and most < total:
            total, available = most, min(available, max(0, most - (_number_in(used) or 0)))
    return {"total": total, "available": available}


def disk(path: str) -> dict[str, Any]:
    """What is free where `path` is, or would be made."""
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    state = os.statvfs(place)
    return {
        "path": path,
        "free": state.f_bavail * state.f_frsize,
        "total": state.f_blocks * state.f_frsize,
        "files_left": state.f_favail if state.f_files else None,
        "writable": os.access(place, os.W_OK),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that matter. Of a proxy only that it is set, and what it leaves out: its address may hold a password."""
    found = {name: environment[name] for name in VARIABLES if name in environment}
    for name in _spellings(PROXIES):
        if environment.get(name):
            found[name] = "set"
    for name in _spellings(("no_proxy",)):
        if name in environment:
            found[name] = environment[name]
    return found


def _spellings(names: Iterable[str]) -> list[str]:
    return [spelling for name in names for spelling in (name, name.upper())]


def _number_in(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # the word `max`, too
        return None


CHOSEN = "CUDA_VISIBLE_DEVICES"
_LIMIT_S = 10


def count(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """The NVIDIA GPUs that `environment` lets workers use: those that it names, else those that are there.

    The driver's own tables are asked first, then nvidia-smi, then the devices that a container was given.
    """
    if CHOSEN in environment:
        return named(environment[CHOSEN])
    if found := len(list((root / "proc/driver/nvidia/gpus").glob("*"))):
        return found
    nodes = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return _by_nvidia_smi(environment) or len(nodes)


def named(devices: str) -> int:
    """How many GPUs `CUDA_VISIBLE_DEVICES` names."""
    return len([device for device in devices.split(",") if device.strip() not in ("", "-1")])


def _by_nvidia_smi(environment: Mapping[str, str]) -> int:
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return 0
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)) if done.returncode == 0 else 0


_THREADS, _MOST_STACK = 12, 8 << 20
"""Threads that a worker starts in a run, and the bytes of a stack unless a smaller limit is set."""
_MOUNT = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc")


@dataclass(frozen=True)  # without slots, which Python 3.8 does not know
class Kills:
    """How many processes the kernel has ended for want of memory."""

    own: int | None
    """Of this process's cgroup and those below it; None where it has no such counter."""
    machine: int
    """Of the machine; 0 where the kernel does not say."""


def kills(mount: Path = _MOUNT, proc: Path = _PROCESS) -> Kills:
    """What the counters say now. The two folders are where the kernel shows cgroups and processes."""
    own = None
    for folder, is_v2 in _folders(mount, proc)[:1]:
        own = _entry(folder / ("memory.events" if is_v2 else "memory.oom_control"), "oom_kill")
    return Kills(own, _entry(proc / "vmstat", "oom_kill") or 0)


def limit_bytes(mount: Path = _MOUNT, proc: Path = _PROCESS) -> tuple[int, bool]:
    """How much memory processes like this one may have together, and whether a cgroup says so; else the machine's.

    0: unknown.
    """
    limits = [
        _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        for folder, is_v2 in _folders(mount, proc)
    ]
    total = (_entry(proc / "meminfo", "MemTotal:") or 0) * 1024
    least = min((limit for limit in limits if limit is not None), default=total)
    return (least, True) if 0 < least < (total or least + 1) else (total, False)


def counts_addresses() -> bool:
    """Whether this process may have so many bytes of addresses and no more (`ulimit -v`), used or not."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _stack_bytes() -> int:
    """What a thread that begins reserves of its process's limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return soft if 0 < soft < _MOST_STACK else _MOST_STACK


def memory_left(share: int = 1, mount: Path = _MOUNT, proc: Path = _PROCESS) -> int | None:
    """Bytes that one of `share` processes like this one may still use; None where unknown.

    The least of what the machine has, what its cgroups allow, and what this process may have by its own limits, of
    which threads that are yet to begin (for connections, messages, snapshots) reserve their stacks. What a
    cgroup keeps of files that were read counts as free: the kernel lets go of it.
    """
    available = _entry(proc / "meminfo", "MemAvailable:")
    together = [] if available is None else [available * 1024]
    for folder, is_v2 in _folders(mount, proc):
        most = _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if most is not None and used is not None:
            files = _entry(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file") or 0
            together.append(max(0, most - used + files))
    alone = []
    for limit, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft, _ = resource.getrlimit(limit)
        used = _entry(proc / "self" / "status", name)
        if soft != resource.RLIM_INFINITY and used is not None:
            alone.append(max(0, soft - used * 1024 - _THREADS * _stack_bytes()))
    return min([*(each // share for each in together), *alone], default=None)


def _folders(mount: Path, proc: Path) -> list[tuple[Path, bool]]:
    """The cgroup of this process and those above it, the nearest first; each with whether it is of version 2.

    In a container the path may be that of the host, and what is mounted is the container's own cgroup.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, sign = (mount, "memory.events") if not controllers else (mount / "memory", "memory.oom_control")
        own = top / path.lstrip("/")
        found = [folder for folder in (own, *own.parents) if folder.is_relative_to(top) and (folder / sign).exists()]
        if found:
            return [(folder, not controllers) for folder in found]
    return []


def _entry(path: Path, name: str) -> int | None:
    """The value of `name` in a table of the kernel."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name] and len(words) > 1:
                return int(words[1])
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # the word `max` is no number: no limit
        return int(path.read_text())
    return None
