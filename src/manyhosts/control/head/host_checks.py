"""Whether a host is fit for a run, from what it has told of its condition: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manyhosts.cluster.findings import Finding, Level
from manyhosts.units import bytes_in_words, seconds_in_words

MIB, GIB = 1 << 20, 1 << 30
CLOCK_S = 5.0
"""How far a clock may be off before files, certificates and logs of hosts tell different stories."""
_LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "has every GPU kernel waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "has every collective checked against all workers"),
    "NCCL_P2P_DISABLE": ("1", "has GPUs of one host talk through its memory"),
    "NCCL_SHM_DISABLE": ("1", "has GPUs of one host talk over the network"),
    "NCCL_IB_DISABLE": ("1", "leaves InfiniBand unused"),
}


def findings(host: str, told: Mapping[str, Any], *, offset_s: float = 0, unsure_s: float = 0) -> list[Finding]:
    """What is wrong with `host`.

    Its clock is `offset_s` seconds ahead of ours, known up to `unsure_s` seconds in both directions.
    """
    return [
        *_of_disks(host, told["disks"]),
        *_of_memory(host, told["memory"], told["shared_memory"]),
        *_of_descriptors(host, told["descriptors"]),
        *_of_clock(host, offset_s, unsure_s),
        *_of_variables(host, told),
    ]


def _of_disks(host: str, disks: Mapping[str, Any]) -> Iterator[Finding]:
    for name, disk in disks.items():
        where = f"host {host}, {disk['path']}"
        if not disk["writable"]:
            level: Level = "error"
            what = f"host {host} cannot write where the {name} {'is' if name == 'run directory' else 'are'}"
            fix = "give a --run-dir that is writable there" if name == "run directory" else "mount it so that it is"
            yield Finding(level=level, check="disk", what=what, where=where, fix=fix)
        elif disk["free"] < GIB or (disk["files_left"] is not None and disk["files_left"] < 1000):
            level = "error" if disk["free"] < 64 * MIB or disk["files_left"] == 0 else "warning"
            left = bytes_in_words(disk["free"]) + " are left"
            if disk["free"] >= GIB:
                left = f"{disk['files_left']} more files fit"
            what = f"the disk of host {host} is nearly full: {left} for the {name}"
            fix = f"see `du -xh {disk['path']} | sort -h | tail` there, or put the {name} on another disk"
            fix += " (--run-dir)" if name == "run directory" else " (TMPDIR)"
            yield Finding(level=level, check="disk", what=what, where=where, fix=fix)


def _of_memory(host: str, memory: Mapping[str, int] | None, shared: Mapping[str, Any] | None) -> Iterator[Finding]:
    if memory is not None and memory["available"] < GIB:
        yield Finding(
            level="error" if memory["available"] < 256 * MIB else "warning",
            check="memory",
            what=f"host {host} has {bytes_in_words(memory['available'])} of memory left of"
            f" {bytes_in_words(memory['total'])}",
            where=f"host {host}",
            fix="see who has it: `ps aux --sort=-rss | head` there",
        )
    if shared is not None and shared["free"] < 512 * MIB:
        yield Finding(
            level="warning" if shared["free"] < 32 * MIB else "note",
            check="shared memory",
            what=f"host {host} has {bytes_in_words(shared['free'])} of shared memory left; DataLoader workers hand"
            " batches over through it",
            where=f"host {host}, {shared['path']}",
            fix="`mount -o remount,size=8G /dev/shm` there; in a container, start it with --ipc=host or --shm-size=8g",
        )


def _of_descriptors(host: str, descriptors: Mapping[str, int]) -> Iterator[Finding]:
    limit = descriptors["limit"]
    if 0 <= limit < 1024:
        yield Finding(
            level="error" if limit < 128 else "warning",
            check="descriptors",
            what=f"processes of host {host} may have {limit} files and connections open, which many workers exceed",
            where=f"host {host}",
            fix="`ulimit -n 65536` there, for good in /etc/security/limits.conf",
        )


def _of_clock(host: str, offset_s: float, unsure_s: float) -> Iterator[Finding]:
    if abs(offset_s) - unsure_s > CLOCK_S:
        yield Finding(
            level="warning",
            check="clock",
            what=f"the clock of host {host} is {seconds_in_words(abs(offset_s))}"
            f" {'ahead of' if offset_s > 0 else 'behind'} this machine's",
            where=f"host {host}",
            fix="`timedatectl set-ntp true` there, and see `timedatectl` for what it says of its time server",
        )


def _of_variables(host: str, told: Mapping[str, Any]) -> Iterator[Finding]:
    found: Mapping[str, str] = told["environment"]

    def finding(level: Level, what: str, fix: str) -> Finding:
        return Finding(level=level, check="environment", what=what, where=f"host {host}, environment", fix=fix)

    if found.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and told["has_gpus"]:
        what = f"CUDA_VISIBLE_DEVICES is empty on host {host}, so no worker sees its GPUs"
        yield finding("warning", what, "unset CUDA_VISIBLE_DEVICES, or name the GPUs: CUDA_VISIBLE_DEVICES=0,1")
    threads = found.get("OMP_NUM_THREADS", "1").partition(",")[0].strip()
    if not threads.isdecimal() or not 1 <= int(threads) <= 2 * told["cores"]:
        what = f"OMP_NUM_THREADS is {threads!r} on host {host}, which has {told['cores']} cores"
        yield finding("warning", what, "unset it: the cores are then shared out between the workers")
    yield from _of_interfaces(finding, host, found, told)
    for name, (bad, effect) in _SLOW.items():
        if found.get(name, "").upper() == bad:
            yield finding("warning", f"{name}={found[name]} on host {host} {effect}: slow", f"unset {name}")
    left = [name for name in _LEFT_OVER if name in found]
    if left:
        what = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set on host {host} already"
        fix = f"`unset {' '.join(left)}`: manyhosts run sets its own, but `python train.py` alone waits for others"
        yield finding("note", what, fix)
    proxied = any(name.lower().endswith("_proxy") and value == "set" for name, value in found.items())
    if proxied and not any(name.lower() == "no_proxy" for name in found):
        what = f"a web proxy is set on host {host}, and no_proxy is not: requests to other hosts go through it"
        yield finding("note", what, "name your hosts in no_proxy")


def _of_interfaces(
    finding: Callable[[Level, str, str], Finding], host: str, found: Mapping[str, str], told: Mapping[str, Any]
) -> Iterator[Finding]:
    there = told["interfaces"]
    names = [name.strip() for name in found.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    missing = [name for name in names if name not in there]
    fix = "unset it: manyhosts then takes the one that leads to the other hosts; there are: " + ", ".join(there)
    if missing:
        what = f"GLOO_SOCKET_IFNAME names {missing[0]}, an interface that host {host} does not have"
        yield finding("error", what, fix)
    wanted = found.get("NCCL_SOCKET_IFNAME", "")
    names = [name.strip() for name in wanted.lstrip("=").split(",") if name.strip()]
    if names and not wanted.startswith("^"):  # NCCL takes beginnings of names, but for those behind a =
        exact = wanted.startswith("=")
        if not any(one == name or (not exact and one.startswith(name)) for one in there for name in names):
            what = f"NCCL_SOCKET_IFNAME names {wanted}, an interface that host {host} does not have"
            yield finding("error" if told["has_gpus"] else "warning", what, fix)
