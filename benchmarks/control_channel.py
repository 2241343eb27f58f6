"""Does a run on four hosts end with the same bits, whatever becomes of the terminal that started it?

    python benchmarks/control_channel.py            # as root, on Linux: it makes hosts of this machine; 15 minutes
    python benchmarks/control_channel.py --pause 60 --cut 60 --fuzz 600 --sockets 2000
    python benchmarks/control_channel.py --pause 2 --cut 4 --fuzz 0 --sockets 200 --no-report

All of this happens to one run, which trains with dropout and BatchNorm on hosts with disks of their own. Its terminal
is stopped by Ctrl-S; the cable of the machine that it was started from is cut; its command is killed, and typed again
some seconds later; another host opens `--sockets` connections to the command's port at once, and sends it nonsense of
every kind for `--fuzz` seconds, inside TLS and outside. Then its weights are compared with those of one process that is
left in peace, and its record is looked through: each step once. The answer is written to control_channel.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from machine import describe

from manyhosts.lab import Lab, lab
from manyhosts.records.run_directory import HEAD

HERE = Path(__file__).parent
REPORT = Path(__file__).with_suffix(".md")
STOP, GO = b"\x13", b"\x11"
"""Ctrl-S and Ctrl-Q."""
STEP_S = 0.25
"""That one takes at least."""
SPARE_S = 45.0
"""What the training lasts beside what happens to it on purpose, at least."""
AWAY_S = 5.0
"""Between the death of the command and the next one."""
TRAINING = """
import os, time
import torch
from torch import nn
import manyhosts as mh

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().__getitem__(index)

images = torch.rand(320, 64, generator=torch.Generator().manual_seed(7))
labels = images.reshape(320, 4, 16).sum(2).argmax(1)
trainer = mh.Trainer(
    model=lambda: nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    ),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    data=mh.Data(train=Slow(images, labels), batch_size=32),
    snapshots=mh.Snapshots(every="100 steps"),
    virtual_workers=4,
)
trainer.fit(os.environ["DURATION"])
"""


class Terminal:
    """A terminal that is read all the time, whose reader is stopped as a user stops it."""

    def __init__(self) -> None:
        self._screen, self.end = pty.openpty()
        self.text = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while words := os.read(self._screen, 1 << 16):
                self.text += words

    def type(self, words: bytes) -> None:
        os.write(self._screen, words)


class Run:
    """One run from the desk of a lab, on its first four hosts."""

    def __init__(self, hosts: Lab, folder: Path, steps: int) -> None:
        self.hosts, self.folder, self.steps, self.terminal = hosts, folder, steps, Terminal()
        (folder / "train.py").write_text(TRAINING)
        self.metrics = hosts[0].path(folder / "run" / "metrics.jsonl")
        self.words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--hosts", ",".join(hosts.names[:4])]
        self.words += ["--run-dir", "run", "--env", "OMP_NUM_THREADS=1", "--env", f"DURATION={steps} steps"]
        self.words += ["--env", f"SLOW={STEP_S / 8}", "train.py"]  # a worker has eight samples of a step
        self.command = self.type_command()

    def type_command(self) -> subprocess.Popen[str]:
        end = self.terminal.end
        return self.hosts.desk.start(self.words, folder=str(self.folder), stdout=end, stderr=end, process_group=0)

    def step(self) -> int:
        """The last step that the first host has on its disk."""
        lines = self.metrics.read_bytes().split(b"\n")[:-1] if self.metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if b'"event": "step"' in line), default=0)

    def wait_for_step(self, step: int, within_s: float) -> None:
        until = time.monotonic() + within_s
        while self.step() < step:
            assert self.command.poll() is None, f"the command has ended:\n{self.terminal.text.decode()}"
            assert time.monotonic() < until, f"no step {step} within {within_s:.0f} s:\n{self.terminal.text.decode()}"
            time.sleep(0.1)

    def goes_on(self) -> None:
        self.wait_for_step(self.step() + 3, 60)


def nonsense(chance: random.Random) -> bytes:
    hello = b'{"message": "hello", "node": 0, "proof": '
    kinds: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.choice([1, 10, 1000, 100_000])) + b"\n",
        lambda: b"[" * chance.randrange(1, 60_000) + b"\n",
        lambda: b'{"message":' * chance.randrange(1, 3000) + b"\n",
        lambda: hello + b'"\\ud800"}\n',
        lambda: hello + b"9" * chance.randrange(1, 8000) + b"}\n",
        lambda: json.dumps({"message": "call", "protocol": 1, "nonce": chance.randbytes(16).hex()}).encode() + b"\n",
        lambda: json.dumps({"message": chance.choice(["leave", "start", "alive", "ended"]), "n": 1}).encode() + b"\n",
        lambda: b"\x16\x03\x01" + chance.randbytes(400),
        lambda: b"{}\n[]\n0\n\n",
    ]
    return chance.choice(kinds)()


def pester(address: str, port: int, seconds: float, sockets: int) -> int:
    """Be the stranger: so many connections at once, then nonsense for so long. Returns how often it has called."""
    chance, calls = random.Random(port), 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def call() -> socket.socket:
        return socket.create_connection((address, port), timeout=5)

    with contextlib.ExitStack() as stack:
        for _ in range(sockets):
            with contextlib.suppress(OSError):
                stack.enter_context(call())
                calls += 1
        time.sleep(1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
        with contextlib.suppress(OSError), call() as plain:
            calls += 1
            connection = context.wrap_socket(plain) if chance.random() < 0.5 else plain
            for _ in range(chance.randrange(1, 4)):
                connection.sendall(nonsense(chance))
                if chance.random() < 0.2:
                    connection.settimeout(0.2)
                    connection.recv(1 << 12)
    return calls


@contextlib.contextmanager
def pestered(run: Run, seconds: float, sockets: int) -> Iterator[list[int]]:
    """Within, the fifth host pesters the command's port; at the end it is waited for. Gives how often it has called."""
    left = json.loads((run.folder / "run" / HEAD).read_text())
    words = [sys.executable, str(Path(__file__).resolve()), "--stranger", f"{left['address']}:{left['port']}"]
    words += ["--fuzz", str(seconds), "--sockets", str(sockets)]
    stranger = run.hosts[4].start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    calls: list[int] = []
    try:
        yield calls
        out, err = stranger.communicate(timeout=seconds + 300)
        assert stranger.returncode == 0, err
        calls.append(int(out))
    finally:
        run.hosts[4].end(stranger)
        stranger.communicate()


def disturb(run: Run, asked: argparse.Namespace) -> list[tuple[str, str]]:
    """All that happens to the run. Returns what was seen, by what was done."""
    seen: list[tuple[str, str]] = []

    def note(what: str, first: int) -> None:
        seen.append((what, f"steps {first} to {run.step()}"))

    run.wait_for_step(10, 120)
    began = run.step()
    with pestered(run, asked.fuzz, asked.sockets) as calls:
        first = run.step()
        run.terminal.type(STOP)
        time.sleep(asked.pause)
        run.terminal.type(GO)
        note(f"terminal stopped for {asked.pause:g} s", first)
        run.goes_on()
        first = run.step()
        run.hosts.desk.cut()
        time.sleep(asked.cut)
        run.hosts.desk.mend()
        note(f"cable of the command's machine cut for {asked.cut:g} s", first)
        time.sleep(min(10.0, asked.cut))
        run.goes_on()
        first = run.step()
        run.hosts.desk.end(run.command, signal.SIGKILL)
        run.command.wait()
        time.sleep(AWAY_S)
        run.command = run.type_command()
        note(f"command killed, and typed again after {AWAY_S:g} s", first)
        run.goes_on()
        assert run.step() < run.steps, "it has ended before all had happened"
    what = (
        f"a stranger: {asked.sockets} connections at once, then nonsense for {asked.fuzz:g} s, {calls[0]} calls in all"
    )
    note(what, began)
    return seen


def examined(run: Run, reference: Path) -> dict[str, object]:
    """What the run has left behind, next to the one that nothing happened to."""
    ended, wanted = (json.loads((path / "summary.json").read_text()) for path in (run.folder / "run", reference))
    lines = [json.loads(line) for line in (run.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["event"] == "step"]
    return {
        "equal": ended["weights_sha256"] == wanted["weights_sha256"],
        "weights": ended["weights_sha256"][:16],
        "once": steps == list(range(1, run.steps + 1)),
        "status": ended["status"],
        "restarts": ended["restarts"],
        "steps_redone": ended["steps_redone"],
        "events": dict(Counter(line["event"] for line in lines if line["event"] in ("restart", "begin", "resume"))),
    }


def undisturbed(folder: Path, steps: int) -> Path:
    words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--run-dir", "alone"]
    words += ["--env", "OMP_NUM_THREADS=1", "--env", f"DURATION={steps} steps", "train.py"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder / "alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pause", type=float, default=60, help="seconds that the terminal is stopped")
    parser.add_argument("--cut", type=float, default=60, help="seconds that the cable is cut")
    parser.add_argument("--fuzz", type=float, default=600, help="seconds of nonsense")
    parser.add_argument("--sockets", type=int, default=2000)
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--stranger", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stranger:
        address, _, port = asked.stranger.rpartition(":")
        print(pester(address, int(port), asked.fuzz, asked.sockets))
        return
    lasts_s = max(asked.fuzz, asked.pause + asked.cut) + SPARE_S + asked.sockets / 100
    steps = round(lasts_s / STEP_S)
    with tempfile.TemporaryDirectory() as name, lab(5, shown=(str(HERE),)) as hosts:
        folder = Path(name)
        run = Run(hosts, folder, steps)
        try:
            seen = disturb(run, asked)
            code = run.command.wait(timeout=lasts_s * 4)
        finally:
            run.hosts.desk.end(run.command)
        text = run.terminal.text.decode(errors="replace")
        assert code == 0, text
        found = examined(run, undisturbed(folder, steps))
    print(json.dumps(found))
    for what, when in seen:
        print(f"{what}: {when}")
    reported = [line.strip() for line in text.splitlines() if line.startswith("manyhosts: ")]
    print("\n".join(reported))
    assert found["equal"], found
    assert found["once"], found
    assert "this one takes it over" in text, text
    if not asked.no_report:
        report(asked, steps, seen, found)


def report(asked: argparse.Namespace, steps: int, seen: list[tuple[str, str]], found: dict[str, object]) -> None:
    """Write the answer beside this file."""
    happened = "\n".join(f"| {what} | {when} |" for what, when in seen)
    REPORT.write_text(f"""# What becomes of a run whose terminal is stopped, cut off and killed

Written by `python benchmarks/control_channel.py --pause {asked.pause:g} --cut {asked.cut:g} --fuzz {asked.fuzz:g} \
--sockets {asked.sockets}`, whose first lines say what is done. n = 1.

{describe(Path(sys.executable), ["manyhosts", "torch"])}

One run on four hosts with disks of their own, {steps} steps of four virtual workers:

| what happened | while it trained |
|---|---|
{happened}

Its weights ({found["weights"]}…) {"are" if found["equal"] else "are not"} those of one process to which nothing
happened. Each step is {"" if found["once"] else "not "}in its record once. Restarts: {found["restarts"]}; steps made
again: {found["steps_redone"]}; exit code 0, status {found["status"]}.
""")


if __name__ == "__main__":
    main()
