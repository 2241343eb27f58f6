"""How fast can a worker print, with a reader, with none that reads, and without a launcher?

    python benchmarks/output.py [--rounds 5] [--megabytes 40]

One process prints lines of 100 bytes as fast as it can and takes its own time. Three ways, which take turns: started by
Python with its output in a pipe that is read at once; by `manyhosts run`, with its output in a pipe that is read at
once; and by `manyhosts run` on a pseudo-terminal that nobody reads before the worker is done, as after Ctrl-S. The log
must have every line each time. The answer is written to output.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

REPORT = Path(__file__).with_suffix(".md")
SCRIPT = """
import sys, time
line, count = "." * 99, int(sys.argv[1])
began = time.perf_counter()
for _ in range(count):
    print(line, flush=True)
seconds = time.perf_counter() - began
with open("seconds.new", "w") as file:
    file.write(str(seconds))
import os
os.rename("seconds.new", "seconds")
"""
RUN = ["-P", "-m", "manyhosts.cli.main", "run", "--run-dir", "run"]
WAYS = ("without a launcher, read", "manyhosts run, read", "manyhosts run, terminal stopped")


def printed(way: str, lines: int) -> tuple[float, int]:
    """The worker's speed in MB/s, and how many of its lines were shown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flood.py").write_text(SCRIPT)
        words = [sys.executable, *(RUN if way != WAYS[0] else []), "flood.py", str(lines)]
        stopped = way == WAYS[2]
        reading, writing = pty.openpty() if stopped else os.pipe()
        process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
        os.close(writing)
        while stopped and not (folder / "seconds").exists():
            time.sleep(0.05)
        shown = 0
        with contextlib.suppress(OSError):  # so a terminal says that its last program has ended
            while chunk := os.read(reading, 1 << 16):
                shown += chunk.count(b"\n")
        os.close(reading)
        if process.wait() != 0:
            raise SystemExit(f"{way}: ended with {process.returncode}")
        if way != WAYS[0]:
            [log] = (folder / "run" / "logs").glob("*-0.log")
            if log.read_bytes().count(b"\n") != lines:
                raise SystemExit(f"{way}: the log has not every line")
        return lines * 100 / 1e6 / float((folder / "seconds").read_text()), shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=40)
    asked = parser.parse_args()
    lines = asked.megabytes * 10_000
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    for number in range(asked.rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            found[way].append(printed(way, lines))
            print(way, found[way][-1], flush=True)
    rows = []
    for way in WAYS:
        speeds, shown = zip(*found[way], strict=True)
        spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        rows.append(f"| {way} | {spread} | {min(lines, *shown) / lines:.0%} |")
    command = f"python benchmarks/output.py --rounds {asked.rounds} --megabytes {asked.megabytes}"
    text = f"""# How fast a worker can print

Written by `{command}`; its first lines say what is done.
Load at the end: {os.getloadavg()[0]:.1f}.

{describe(Path(sys.executable), ["manyhosts"])}

{asked.megabytes} MB in lines of 100 bytes, flushed one by one. Median (lowest and highest) of {asked.rounds} rounds.

| way | the worker prints, MB/s | lines shown, at least |
|---|---:|---:|
""" + "\n".join(rows)
    REPORT.write_text(text + "\n\nThe logs had every line each time.\n")


if __name__ == "__main__":
    main()
