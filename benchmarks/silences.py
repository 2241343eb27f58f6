"""How often does a run on an overloaded machine take a host for silent that is not?

    python benchmarks/silences.py --minutes 10 --processes 30     # so many that compute, for each core

Four hosts that are rehearsed on this machine, whose workers wait, while `--processes` times as many processes as there
are cores compute without end: how often is a host named? Before that, without the load, agents are stopped in turn:
after how long is the host named, and after how long is it back? The answer is written to silences.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import psutil
from machine import describe

REPORT = Path(__file__).with_suffix(".md")
SCRIPT = """
import os, time
open(f"running-{os.environ['RANK']}", "w").close()
while not os.path.exists("go-on"):
    time.sleep(0.05)
"""
NODES = 4
STOPPED_S = 5.0


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "wait.py").write_text(SCRIPT)
    words = [sys.executable, "-P", "-m", "manyhosts.cli.main", "run", "--run-dir", str(folder / "run")]
    words += ["--nodes", str(NODES), "--workers-per-node", "1", "wait.py"]
    head = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    while len(list(folder.glob("running-*"))) < NODES:
        time.sleep(0.1)
        assert head.poll() is None, "the run has ended"
    return head


def end(head: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    (folder / "go-on").touch()
    _, words = head.communicate(timeout=600)
    return head.returncode, words


def overloaded(processes: int, minutes: float) -> str:
    """A run beside so many processes that compute. Returns what was seen, as a row of a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        burn = [sys.executable, "-S", "-c", "while True: pass"]
        burning = [subprocess.Popen(burn) for _ in range(processes)]
        try:
            head = start(folder)
            time.sleep(60 * minutes)
            load = os.getloadavg()[0]
            code, words = end(head, folder)
        finally:
            for each in burning:
                each.kill()
    named = [line for line in words.splitlines() if "has not been heard from" in line]
    print(words)
    return (
        f"| {processes} that compute on {os.cpu_count()} cores, load {load:.0f} | {minutes:g} | {len(named)} | {code} |"
    )


def quiet() -> tuple[list[float], list[float]]:
    """Each agent is stopped for some seconds. Returns after how long its host was named, and was back."""
    named, back = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        head = start(folder)
        time.sleep(5)
        below = psutil.Process(head.pid).children(recursive=True)
        assert head.stderr is not None, "it was asked for as a pipe"
        for number in range(NODES):
            [agent] = [each for each in below if f"node {number}:" in " ".join(each.cmdline())]
            began = time.monotonic()
            agent.send_signal(signal.SIGSTOP)
            named.append(_line(head.stderr, "has not been heard from", began))
            time.sleep(max(0.0, STOPPED_S - (time.monotonic() - began)))
            began = time.monotonic()
            agent.send_signal(signal.SIGCONT)
            back.append(_line(head.stderr, "is back after", began))
        code, rest = end(head, folder)
    if code or rest:
        raise SystemExit(f"the run ended with {code}: {rest}")
    return named, back


def _line(stream: IO[str], words: str, began: float) -> float:
    line = stream.readline()
    if words not in line:
        raise SystemExit(f"not {words!r}, but {line!r}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=30, help="that compute, for each core")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    named, back = quiet()
    row = overloaded(asked.processes * (os.cpu_count() or 1), asked.minutes)
    REPORT.write_text(f"""# Silent hosts, and hosts that are taken for silent

Written by `python benchmarks/silences.py --minutes {asked.minutes:g} --processes {asked.processes}`, whose first lines
say what is done.

{describe(Path(sys.executable), ["manyhosts"])}

The agent of each of {NODES} hosts was stopped for {STOPPED_S:g} s, at a load of {load:.1f}. Its host was named after
{statistics.median(named):.2f} s (at most {max(named):.2f} s), and told to be back {statistics.median(back):.2f} s
(at most {max(back):.2f} s) after it continued. The run ended well.

| beside a run on {NODES} hosts | minutes | hosts taken for silent | exit code of the run |
|---|---:|---:|---:|
{row}
""")


if __name__ == "__main__":
    main()
