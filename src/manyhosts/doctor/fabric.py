"""Networks of a host other than Ethernet, and links between its GPUs: InfiniBand, RoCE, EFA and NVLink.

Runs on the hosts, with the standard library of Python 3.8 or newer alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from typing import Any

SYSFS = "/sys"
_LIMIT_S = 15
_GPU = re.compile(r"^GPU (\d+):")
_LINK = re.compile(r"^\s*Link \d+: ([\d.]+) GB/s")


def probe() -> dict[str, Any]:
    """`rdma`: one entry for each port of each adapter; `nvlink`: one for each GPU that has such links."""
    return {"rdma": _ports(), "nvlink": _nvlinks()}


def _ports() -> list[dict[str, Any]]:
    found = []
    adapters = os.path.join(SYSFS, "class", "infiniband")
    for adapter in _listed(adapters):
        own = os.path.join(adapters, adapter)
        for port in _listed(os.path.join(own, "ports")):
            facts = os.path.join(own, "ports", port)
            found.append(
                {
                    "adapter": adapter,
                    "port": port,
                    "kind": _kind(own, _read(facts, "link_layer")),
                    "rate": _read(facts, "rate"),  # 200 Gb/sec (4X HDR)
                    "state": _read(facts, "state").partition(":")[2].strip(),  # 4: ACTIVE
                    "interfaces": _listed(os.path.join(own, "device", "net")),
                }
            )
    return found


def _kind(adapter: str, layer: str) -> str:
    """What an adapter is usually called. One whose link is Ethernet speaks RoCE; Amazon's says nothing of its link."""
    with contextlib.suppress(OSError):
        if os.path.basename(os.readlink(os.path.join(adapter, "device", "driver"))) == "efa":
            return "EFA"
    return {"Ethernet": "RoCE", "InfiniBand": "InfiniBand"}.get(layer, layer or "RDMA")


def _nvlinks() -> list[dict[str, Any]]:
    """GPU by GPU, how many of its links are up, and what they carry together in a second, in each direction."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "nvlink", "--status"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []  # faults of the driver are reported with the GPUs
    found: list[dict[str, Any]] = []
    for line in done.stdout.decode(errors="replace").splitlines():
        gpu, link = _GPU.match(line), _LINK.match(line)
        if gpu:
            found.append({"gpu": int(gpu.group(1)), "links": 0, "bandwidth": 0.0})
        elif link and found:
            found[-1]["links"] += 1
            found[-1]["bandwidth"] += float(link.group(1)) * 1e9
    return [each for each in found if each["links"]]


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read().strip()
    except OSError:
        return ""
