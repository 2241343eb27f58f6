"""The machine and the versions behind a recorded figure, in one sentence."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path


def describe(python: Path, packages: Sequence[str]) -> str:
    """Cores, processor, system and the versions that `python` has of `packages`."""
    code = (
        f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {list(packages)}))"
    )
    versions = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"Machine: {len(os.sched_getaffinity(0))} cores of {_processor()}, "
        f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}, {versions}."
    )


def _processor() -> str:
    """The name that the system gives its processor."""
    table = Path("/proc/cpuinfo")
    names = [line for line in table.read_text().splitlines() if line.startswith("model name")] if table.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()
