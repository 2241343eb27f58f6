"""Whatever strangers send to the head of a run, and however many they are: it continues to the same weights.

And one who records what its agents and it say to each other reads nothing in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from launching import HANGS_S, environment, wait_until
from preloaded import descendants
from ranks import free_port

from manyhosts.control import job_file, tls
from manyhosts.control.head.agent_starter import MOST_STRANGERS
from manyhosts.control.job import Job
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
            while not os.path.exists("continue"):
                time.sleep(0.05)
        return torch.full((4,), index / 64), torch.tensor([index * index / 4096])

mh.Trainer(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    data=mh.Data(train=Squares(), batch_size=16),
).fit("2 epochs")
"""
TOKEN, VALUE = "5e" * 16, "the value of an --env option"
_MANY = 500


class Relay:
    """Passes on what an agent and its head say to each other, on threads of its own, and keeps all of it."""

    def __init__(self, port: int) -> None:
        self.head, self.kept, self.calls = port, bytearray(), 0
        self.open: list[socket.socket] = []
        self.passes = threading.Event()
        self.passes.set()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listening.getsockname()[1])
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self.listening.accept()[0]
                try:
                    other = call(self.head)
                except OSError:
                    one.close()  # the head is not there yet, or no more
                    continue
                other.settimeout(None)
                self.calls += 1
                self.open += [one, other]
                for pair in ((one, other), (other, one)):
                    threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while words := one.recv(1 << 16):
                self.passes.wait()
                self.kept += words
                other.sendall(words)
        self.end(one, other)

    @staticmethod
    def end(*connections: socket.socket) -> None:
        for each in connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """End all connections. The agent calls again."""
        self.end(*self.open)

    def close(self) -> None:
        for each in self.open:
            each.close()
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()


def start(folder: Path, port: int, *, way: int = 0, script: str = TRAINS) -> list[subprocess.Popen[str]]:
    """Two nodes of an engine's job; the first of them is the head, at a port that anybody can see.

    `way` is the port at which the second calls the head.
    """
    folder.mkdir()
    (folder / "script.py").write_text(script)
    environment_of_workers = {"PASSWORD": VALUE}
    job = Job(program="script.py", folder=folder, run_dir=folder / "run", nodes=2, environment=environment_of_workers)
    nodes = []
    for index in range(2):
        own = {
            manifest.JOB: job_file.text_of(job),
            manifest.HEAD: f"127.0.0.1:{way if way and index else port}",
            manifest.ADDRESS: "127.0.0.1",
            manifest.TOKEN: TOKEN,
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
    reported = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], reported
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["restarts"], summary["steps_redone"]) == (0, 0)
    return str(summary["weights_sha256"])


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANGS_S)


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
    for _ in range(20):
        yield chance.randbytes(chance.choice([1, 10, 1000, 100_000])) + b"\n"


def speak_nonsense(port: int) -> None:
    """All at once: some of it might continue, and is listened to for as long as a stranger is."""

    def speak(words: bytes) -> bool:
        with call(port) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
            return is_hung_up_on(connection)

    said = list(nonsense())
    with ThreadPoolExecutor(len(said)) as pool:
        assert all(pool.map(speak, said))


def openssl(*words: object, said: str = "") -> str:
    """What `openssl` says, who is as polite as a load balancer's probe; nothing is waited for but its end."""
    command = ["openssl", *map(str, words)]
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=HANGS_S)
    return done.stdout + done.stderr


def speak_tls(port: int, folder: Path) -> None:
    """Probes, words, new keys by the thousand, an older TLS, another handshake, data before the handshake's end."""
    to, new = ("s_client", "-connect", f"127.0.0.1:{port}"), "-tls1_3"
    assert "BEGIN CERTIFICATE" in openssl(*to, new)
    for said in ("nonsense", "{}\n", "k\n" * 1000 + "Q\n", "K\n" * 1000 + "Q\n", "R\n"):
        openssl(*to, new, said=said)
    assert "alert protocol version" in openssl(*to, "-tls1_2", said="R\n")
    own, ticket, early = free_port(), folder / "ticket", folder / "early"
    (folder / "own.pem").write_text(tls.Identity().pem)
    words = ["openssl", "s_server", "-accept", str(own), "-cert", folder / "own.pem", "-early_data", "-quiet"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: can_be_called(own), "it gives tickets")
            with subprocess.Popen(
                ["openssl", "s_client", "-connect", f"127.0.0.1:{own}", new, "-sess_out", ticket],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as client:
                wait_until(ticket.exists, "it has a ticket")
                client.kill()
        finally:
            server.kill()
    early.write_text('{"message": "hello"}\n' * 100)
    assert "Early data was rejected" in openssl(*to, new, "-sess_in", ticket, "-early_data", early, said="Q\n")


def can_be_called(port: int) -> bool:
    with contextlib.suppress(OSError), call(port):
        return True
    return False


def come_in_crowds(port: int, head: psutil.Process) -> None:
    """500 at once that say nothing; then one more is still turned away in time, and none of them is left."""
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
    """The beginning of a TLS handshake, byte by byte."""
    connections = [call(port) for _ in range(10)]
    words = itertools.chain(b"\x16\x03\x01\x40\x00", itertools.repeat(0))
    until = time.monotonic() + HANGS_S
    while connections and time.monotonic() < until:
        word = bytes([next(words)])
        for connection in list(connections):
            connection.settimeout(0.01)
            try:
                connection.sendall(word)
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


def is_kept_from_workers_and_disks(nodes: list[subprocess.Popen[str]], folder: Path) -> bool:
    below = [child for node in nodes for child in descendants(psutil.Process(node.pid))]
    assert len(below) >= 4, "agents, and what they have started"
    own = [psutil.Process(node.pid) for node in nodes]
    assert [child for child in below if TOKEN in str(child.environ())] == []
    assert [process for process in [*own, *below] if TOKEN in str(process.cmdline())] == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    return True


def test_strangers_change_nothing_and_learn_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MANY + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MANY + 200), hard))
    undisturbed, disturbed = free_port(), free_port()
    expected = start(tmp_path / "undisturbed", undisturbed)
    (tmp_path / "undisturbed" / "continue").touch()
    folder = tmp_path / "disturbed"
    relay = Relay(disturbed)
    nodes = start(folder, disturbed, way=relay.port)
    try:
        begun = folder / "begun"
        wait_until(lambda: begun.exists() or nodes[0].poll() is not None, "it trains")
        head = psutil.Process(nodes[0].pid)
        assert is_kept_from_workers_and_disks(nodes, folder)
        with ThreadPoolExecutor() as pool:
            slow = pool.submit(write_slowly, disturbed)
            speak_nonsense(disturbed)
            slow.result()
        if shutil.which("openssl"):  # tests/unit/control/test_tls.py has most of it without
            speak_tls(disturbed, tmp_path)
        come_in_crowds(disturbed, head)
        take_all_files(disturbed, head)
        for _ in range(3):
            calls = relay.calls
            relay.hang_up()
            wait_until(lambda calls=calls: relay.calls > calls, "the agent calls again")
            time.sleep(1)  # so that they talk, more often than not
    finally:
        (folder / "continue").touch()
        got, wanted = weights_of(nodes, folder), weights_of(expected, tmp_path / "undisturbed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    relay.close()
    assert got == wanted
    assert len(relay.kept) > 2000
    for words in (TOKEN, VALUE, "script.py", "PASSWORD", '"message"'):
        assert words.encode() not in relay.kept, "what was recorded on the way can be read"


@pytest.mark.slow
def test_host_that_the_head_does_not_hear_for_half_a_minute_trains_on(tmp_path: Path) -> None:
    """Its connection is held, as by a cable that is cut; its worker's are not. 112 steps of 0.4 s outlast that."""
    folder, port = tmp_path / "held", free_port()
    slowly = TRAINS.replace("return torch.full", "time.sleep(0.05)\n        return torch.full")
    relay = Relay(port)
    nodes = start(folder, port, way=relay.port, script=slowly.replace('"2 epochs"', '"28 epochs"'))
    (folder / "continue").touch()
    try:
        wait_until((folder / "begun").exists, "it trains")
        relay.passes.clear()
        time.sleep(35)
        relay.passes.set()
    finally:
        weights_of(nodes, folder)
    relay.close()
