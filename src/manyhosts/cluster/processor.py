"""Which make of processor this machine has: kernels add in another order on another one."""

from __future__ import annotations

import platform
from pathlib import Path

_KEYS = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU architecture", "CPU part")
_VECTOR_FLAGS = ("mmx", "sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "asimd", "sve", "sme", "bf16", "i8mm")
"""Beginnings of the flags by which kernels are chosen. Others depend on the version of the operating system."""


def processor(cpuinfo: str | None = None) -> tuple[str, str]:
    """The name of the processor, and everything about it by which a library chooses its kernels.

    `cpuinfo` is the content of /proc/cpuinfo. Where there is none, what Python knows has to do.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
    first = cpuinfo.strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    vector = sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    known = [f"{key} {facts[key]}" for key in _KEYS if key in facts]
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, ", ".join([platform.machine(), *(known or [name]), *vector])
