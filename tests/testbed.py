"""What tests of several hosts share: which programs they need, and what a host must not have more of afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from manyhosts.lab import Host
from manyhosts.lab.folder import PLACE

SCRIPTS = str(Path(__file__).parent)
"""Hosts see the scripts of the tests wherever the project is cloned, below /tmp, say, of which each has its own."""
GRACE_S = 5.0
NO_NEWS = ("/tmp/pytest-of-", "/tmp/torchinductor_")  # what was brought there on purpose, and a cache of torch's
WRITABLE = ("/tmp", "/run", "/dev/shm", "/var/tmp")


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips where one of `programs` is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: make testbed-packages")


def still_there(host: Host, before: set[str]) -> list[str]:
    """What is new, after whatever is just ending had time to do so."""
    deadline = time.monotonic() + GRACE_S
    while (new := traces(host) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(new)


def traces(host: Host) -> set[str]:
    found = {f"process {pid}: {words}" for pid, words in host.processes().items()}
    found |= {f"listening port {port}" for port in host.ports()}
    files = {f"{folder}/{name}" for folder in WRITABLE for name in os.listdir(host.path(folder))}
    return found | {f"file {path}" for path in files if not path.startswith(NO_NEWS)}


def traces_here() -> set[str]:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.splitlines()
    found = {f"interface {line.split(': ')[1]}" for line in links}
    found |= {f"file {path}" for path in Path("/run/netns").glob("*")}
    return found | {f"file {path}" for path in PLACE.glob("*") if not anothers(path.name.partition("-")[0])}


def anothers(owner: str) -> bool:
    """Whether a lab belongs to somebody else on this machine, who is at work."""
    family = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    return not owner.isdigit() or (psutil.pid_exists(int(owner)) and int(owner) not in family)
