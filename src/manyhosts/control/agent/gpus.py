"""How many GPUs this host has for its workers, counted without torch: it would start CUDA in what is forked later."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
    return _by_nvidia_smi(environment) or len([path for path in (root / "dev").glob("nvidia*") if _is_gpu(path.name)])


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


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"nvidia\d+", name) is not None
