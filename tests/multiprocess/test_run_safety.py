"""A run listens on its own interface only, and to nobody who does not know its secret."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import agents, family, start, wait_until

pytestmark = pytest.mark.multiprocess

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
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (0, "ended well\n"), err


def listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    connections = [c for process in processes for c in process.net_connections("tcp")]
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


def test_nothing_of_ours_listens_on_all_interfaces(head: subprocess.Popen[str]) -> None:
    addresses = listening(family(head))
    assert addresses
    assert {address for address, _ in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize(
    "words",
    [
        {"message": "hello", "node": 0, "token": "0" * 32},
        {"message": "hello", "node": 0},
        {"message": "ended", "rank": 0, "generation": 0, "code": 1, "signal": 0},
        {"message": "hello", "node": 0, "token": ["?"]},
    ],
    ids=["wrong_token", "no_token", "no_hello", "strange_token"],
)
def test_stranger_is_hung_up_on(head: subprocess.Popen[str], words: dict[str, object]) -> None:
    [address] = listening(family(head)[:1])
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(json.dumps(words).encode() + b"\n")
        assert connection.recv(1) == b"", "no answer, only the end"


def test_secret_is_in_no_command_line_no_worker_and_no_file(head: subprocess.Popen[str], tmp_path: Path) -> None:
    processes = family(head)
    [agent] = agents(processes)
    token = agent.environ()["MANYHOSTS_TOKEN"]
    assert len(token) == 32
    below = [process for process in processes if process.pid not in (head.pid, agent.pid)]
    assert [process for process in below if token in str(process.environ())] == []
    assert [process for process in processes if token in str(process.cmdline())] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_text(errors="replace")] == []
