"""The GPUs of a host and their driver, as `nvidia-smi` reports them.

Runs on the hosts, with the standard library of Python 3.8 or newer alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

_ASKED = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "memory_used": "memory.used",
    "temperature": "temperature.gpu",
    "utilization": "utilization.gpu",
    "errors": "ecc.errors.uncorrected.volatile.total",
    "slowed": "clocks_throttle_reasons.hw_slowdown",
}
"""Our word → what nvidia-smi calls it."""
_LIMIT_S = 15


def probe() -> dict[str, Any]:
    """`gpus` (one entry for each), `trouble` (why nothing could be asked; empty where there is simply no GPU)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        there = os.path.isdir("/proc/driver/nvidia/gpus")
        return {"gpus": [], "trouble": "the NVIDIA driver is there, but nvidia-smi is not" if there else ""}
    words = [program, f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"gpus": [], "trouble": f"nvidia-smi said nothing within {_LIMIT_S} s"}
    except OSError as error:
        return {"gpus": [], "trouble": f"nvidia-smi cannot be started: {error.strerror}"}
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0 or "No devices were found" in said:
        return {"gpus": [], "trouble": f"nvidia-smi says: {(said.splitlines() or [f'exit code {done.returncode}'])[0]}"}
    return {"gpus": [_gpu(line) for line in said.splitlines()], "trouble": ""}


def _gpu(line: str) -> dict[str, Any]:
    """One line of what nvidia-smi prints. What it does not know of a GPU is None."""
    values = [value.strip() for value in line.split(",")]
    found: dict[str, Any] = dict(zip(_ASKED, values))  # noqa: B905  # Python 3.8 knows no `strict`
    for name in ("memory", "memory_used", "temperature", "utilization", "errors"):
        text = str(found.get(name, ""))
        found[name] = int(text) if text.isdigit() else None
    for name in ("memory", "memory_used"):
        found[name] = found[name] * (1 << 20) if found[name] is not None else None
    found["slowed"] = found.get("slowed") == "Active"
    return found
