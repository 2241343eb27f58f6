"""A run of one machine has no port but those of its workers, and these on the loopback interface only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import agents, family, start, wait_until

# Started cold: what is forked from a process of the tests shows the environment of that one.
pytestmark = [pytest.mark.multiprocess, pytest.mark.starts_cold]

WAIT = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
open("up", "w").close()
while not os.path.exists("end"):
    time.sleep(0.01)
print("ended well")
os._exit(0)
"""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    started = start(tmp_path, WAIT)
    wait_until(lambda: (tmp_path / "up").exists() or started.poll() is not None, "the worker is up")
    yield started
    (tmp_path / "end").touch()
    out, err = started.communicate(timeout=120)
    assert (started.returncode, out) == (0, "ended well\n"), err


def listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    connections = [c for process in processes for c in process.net_connections("tcp")]
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


def test_nothing_of_ours_listens_on_all_interfaces(head: subprocess.Popen[str]) -> None:
    addresses = listening(family(head))
    assert addresses
    assert {address for address, _ in addresses} == {"127.0.0.1"}


def test_head_and_agent_of_one_machine_listen_nowhere_and_need_no_secret(head: subprocess.Popen[str]) -> None:
    processes = family(head)
    ours = [processes[0], *agents(processes)]
    assert len(ours) == 2
    assert listening(ours) == []
    assert [process for process in processes if "MANYHOSTS_TOKEN" in process.environ()] == []
