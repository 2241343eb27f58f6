"""Where, when and of what a figure was recorded, and how busy the machine was: three sentences at its head."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def describe(python: Path, packages: Sequence[str]) -> str:
    """Cores, processor, system and the versions that `python` has of `packages`; date, commit and load."""
    code = (
        f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {list(packages)}))"
    )
    versions = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"Machine: {len(os.sched_getaffinity(0))} cores of {_processor()}, "
        f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}, {versions}. "
        f"Recorded: {recorded()}."
    )


def recorded() -> str:
    """The date, the commit, and the condition: how many processes wanted a core in the minute before."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    return f"{day}, commit {commit()}, load {load:.1f} of {cores} cores in the minute before its end"


def origin() -> dict[str, str]:
    """Machine, date and commit, for a line of a record."""
    machine = f"{len(os.sched_getaffinity(0))} cores of {_processor()}"
    return {"machine": machine, "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit()}


def origins(lines: Iterable[Mapping[str, Any]], what: str) -> str:
    """On which machines, when and at which commits `lines` were recorded, as `Machine:` and `Recorded:`."""
    found = [line["recorded"] for line in lines]
    machines = Counter(each["machine"] for each in found)
    days, commits = sorted({each["date"] for each in found}), list(dict.fromkeys(each["commit"] for each in found))
    reported = "; ".join(f"{name} ({count} {what})" for name, count in machines.most_common())
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Machine: {reported}. Recorded: {when}, commit {', '.join(commits)}"


def commit() -> str:
    """The commit that is checked out, with `+` where files differ from it; `unknown` outside of git."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()

    short = git("rev-parse", "--short=10", "HEAD")
    return (short + ("+" if git("status", "--porcelain", "-uno") else "")) if short else "unknown"


def _processor() -> str:
    """The name that the system gives its processor."""
    table = Path("/proc/cpuinfo")
    names = [line for line in table.read_text().splitlines() if line.startswith("model name")] if table.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()
