"""Cgroups for tests: processes that may have so much memory together, by the kernel's own word."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def cgroup_with(limit_bytes: int | None) -> Iterator[Path]:
    """A cgroup whose processes may have so much memory together; the test is left out where none can be made."""
    v1 = Path("/sys/fs/cgroup/memory")
    top, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v1.parent, "memory.max")
    group = top / f"manyhosts-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        if not (group / name).exists():
            pytest.skip("the cgroups of this machine do not count memory")
        if limit_bytes is not None:
            (group / name).write_text(str(limit_bytes))
        for no_swap in ("memory.swap.max", "memory.swappiness"):
            if (group / no_swap).exists():
                (group / no_swap).write_text("0")
        if subprocess.run(["sh", "-c", f"echo $$ > {group}/cgroup.procs"], capture_output=True, check=False).returncode:
            pytest.skip("no process can be put into a cgroup here")
        yield group
    finally:
        for _ in range(100):  # its processes have ended, and the kernel has yet to see that
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def within(group: Path, words: Sequence[str]) -> list[str]:
    """The command `words` as one that runs in `group`, with all that it starts."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
