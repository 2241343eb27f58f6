"""Whatever strangers send to the head of a run, and however many they are: it goes on to the same weights."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import environment, wait_until

from manyhosts.launchers import job_file
from manyhosts.launchers.head.entrance import MOST_STRANGERS
from manyhosts.launchers.job import Job
from manyhosts.launchers.kubernetes import manifest

pytestmark = pytest.mark.multiprocess

TRAINS = """
import os, time
import torch
from torch import nn
import manyhosts as mh

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 0:
            open("begun", "w").close()
            while not os.path.exists("go on"):
                time.sleep(0.05)
        return torch.full((4,), index / 64), torch.tensor([index * index / 4096])

mh.Trainer(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=Squares(), batch_size=16),
).fit("2 epochs")
"""
_MANY = 2000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def start(folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Two nodes of an engine's job; the first of them is the head, at a port that anybody can see."""
    folder.mkdir()
    (folder / "script.py").write_text(TRAINS)
    job = Job(program="script.py", folder=folder, run_dir=folder / "run", nodes=2)
    nodes = []
    for index in range(2):
        own = {
            manifest.JOB: job_file.text_of(job),
            manifest.HEAD: f"127.0.0.1:{port}",
            manifest.ADDRESS: "127.0.0.1",
            manifest.TOKEN: "5e" * 16,
            "JOB_COMPLETION_INDEX": str(index),
        }
        words = [sys.executable, "-P", "-m", "manyhosts.launchers.kubernetes.node"]
        nodes.append(
            subprocess.Popen(
                words, env={**environment(), **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return nodes


def weights_of(nodes: list[subprocess.Popen[str]], folder: Path) -> str:
    told = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    return str(json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"])


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def is_hung_up_on(connection: socket.socket) -> bool:
    """Whether the head closes it; what it has said before does not count."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def nonsense() -> Iterator[bytes]:
    chance = random.Random(4)
    hello = b'{"message": "hello", "node": 0, "token": '
    yield b"[" * 60_000 + b"\n"
    yield b'{"message":' * 20_000 + b"\n"
    yield hello + '"\N{SNOWMAN}"}\n'.encode()
    yield hello + b'"\\ud800"}\n'
    yield hello + b"9" * 5000 + b"}\n"
    yield hello + b"[" * 3000 + b"]" * 3000 + b"}\n"
    yield b"{}\n[]\n0\n\n"
    yield b"x" * (1 << 20)
    yield b"\x16\x03\x01\x02\x00\x01" + b"\0" * 600  # the beginning of a TLS handshake that leads nowhere
    for _ in range(40):
        yield chance.randbytes(chance.choice([1, 10, 1000, 100_000])) + b"\n"


def speak_nonsense(port: int) -> None:
    for words in nonsense():
        with call(port) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
            assert is_hung_up_on(connection), words[:60]


def come_in_crowds(port: int, head: psutil.Process) -> None:
    """2,000 at once that say nothing; then one more is still turned away in time, and none of them is left."""
    before = head.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(_MANY):
            stack.enter_context(call(port))
        assert head.num_fds() <= before + MOST_STRANGERS + 1
        with call(port) as last:
            last.sendall(b"nonsense\n")
            assert is_hung_up_on(last)
        wait_until(lambda: head.num_fds() <= before, "the head waits for none of them any more")


def write_slowly(port: int) -> None:
    connections = [call(port) for _ in range(10)]
    until = time.monotonic() + 60
    while connections and time.monotonic() < until:
        for connection in list(connections):
            connection.settimeout(0.01)
            try:
                connection.sendall(b" ")
                gone = connection.recv(1) == b""
            except TimeoutError:
                gone = False
            except ConnectionError:
                gone = True
            if gone:
                connection.close()
                connections.remove(connection)
        time.sleep(0.2)
    assert not connections, "one who says a byte now and then is not listened to for ever"


def take_all_files(port: int, head: psutil.Process) -> None:
    """The head may open no more files: it waits until it may, and does not turn in circles meanwhile."""
    most = head.rlimit(psutil.RLIMIT_NOFILE)
    head.rlimit(psutil.RLIMIT_NOFILE, (head.num_fds() + 3, most[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(call(port))
        time.sleep(0.5)
        begin = sum(head.cpu_times()[:2])
        time.sleep(1.5)
        assert sum(head.cpu_times()[:2]) - begin < 0.7
    head.rlimit(psutil.RLIMIT_NOFILE, most)


def test_strangers_change_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MANY + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MANY + 200), hard))
    undisturbed, disturbed = free_port(), free_port()
    expected = start(tmp_path / "undisturbed", undisturbed)
    (tmp_path / "undisturbed" / "go on").touch()
    folder = tmp_path / "disturbed"
    nodes = start(folder, disturbed)
    try:
        begun = folder / "begun"
        wait_until(lambda: begun.exists() or nodes[0].poll() is not None, "it trains", timeout_s=90)
        head = psutil.Process(nodes[0].pid)
        speak_nonsense(disturbed)
        write_slowly(disturbed)
        come_in_crowds(disturbed, head)
        take_all_files(disturbed, head)
    finally:
        (folder / "go on").touch()
        got, wanted = weights_of(nodes, folder), weights_of(expected, tmp_path / "undisturbed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert got == wanted
