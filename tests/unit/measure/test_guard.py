"""A worker that has measured ends at once, and what it has started ends with it."""

from __future__ import annotations

import subprocess
import sys

import psutil

LEAVES = """
import multiprocessing, signal, time
from manyhosts.measure.in_worker.guard import leave

def raises(*_):
    raise RuntimeError("DataLoader worker is killed by signal")

signal.signal(signal.SIGCHLD, raises)  # as torch's loader does
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
leave()
"""


def test_loader_processes_end_with_a_worker_that_has_measured() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True, check=True, timeout=30)
    try:
        psutil.Process(int(done.stdout)).wait(timeout=20)
    except psutil.NoSuchProcess:
        return
