"""How long until `manyhosts serve` answers again when a process with its model is killed under load?

Eight clients ask without a break; SIGKILL ends a process with the model, of an export that one process serves, and of
a run whose model is cut over two. Counted are the seconds until the next right answer, what clients were told until
then, and answers that differ from the model's: none may.

Run: python benchmarks/serving_killed.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from machine import describe
from serving import TRAIN, one

ANSWER = Path(__file__).with_suffix(".md")
BODY = json.dumps({"inputs": [[0.5] * 64]}).encode()
REQUEST = (
    f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    "Connection: close\r\n\r\n"
).encode() + BODY
CLIENTS = 8
LONGEST_S = 120


async def ask(port: int) -> tuple[int, list[float]]:
    """The status, and the outputs of a right answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(REQUEST)
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        return status, json.loads(content)["outputs"][0] if status == 200 else []
    finally:
        writer.close()


async def killed(port: int, victim: int, wanted: list[float]) -> tuple[float, Counter[str]]:
    """Seconds from the kill to the first right answer that was asked for after the loss was seen, and what was told."""
    told: Counter[str] = Counter()
    begin, back = time.perf_counter(), 0.0
    lost = False

    async def client() -> None:
        nonlocal back, lost
        while not back and time.perf_counter() - begin < LONGEST_S:
            asked_after = lost
            status, outputs = await ask(port)
            near = status == 200 and all(abs(a - b) < 1e-5 for a, b in zip(outputs, wanted, strict=True))
            told["right" if near else "wrong" if status == 200 else str(status)] += 1
            lost = lost or status == 503
            if near and asked_after:
                back = back or time.perf_counter() - begin
            if status == 503:
                await asyncio.sleep(0.02)

    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    assert back, f"no answer for {LONGEST_S} s: {told}"
    return back, told


def round_of(words: list[str], port: int, number: int) -> tuple[float, Counter[str]]:
    """Start a server, kill one of its processes, end it."""
    command = [sys.executable, "-m", "manyhosts.cli.main", "serve", *words, "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                asyncio.run(one(port, b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
                break
            time.sleep(0.2)
        _, wanted = asyncio.run(ask(port))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return asyncio.run(killed(port, int(children[number % len(children)]), wanted))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=18766)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manyhosts.cli.main"]
        quiet = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        run, program = str(Path(folder) / "run"), str(Path(folder) / "program")
        subprocess.run([*command, "run", "--run-dir", run, str(TRAIN)], **quiet)  # type: ignore[call-overload]
        words = ["export", run, "--format", "torch-export", "--output", program]
        subprocess.run([*command, *words], **quiet)  # type: ignore[call-overload]
        ways = {"an export, one process": [program], "a run, cut over two processes": [run, "--workers", "2"]}
        found = {way: [round_of(ways[way], asked.port, n) for n in range(asked.rounds)] for way in ways}
    rows = []
    for way, rounds in found.items():
        seconds = [each for each, _ in rounds]
        told = sum((each for _, each in rounds), Counter())
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        rows.append(f"| {way} | {len(rounds)} | {spread} | {told['right']} | {told['503']} | {told['wrong']} |")
        print(rows[-1], told, flush=True)
        assert set(told) <= {"right", "503"}, told
    lines = (__doc__ or "").strip().split("\n\n")
    head = [
        "| served | kills | seconds to the next right answer | right | 503 | wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    machine = describe(Path(sys.executable), ["torch", "uvicorn"])
    model = "The model has 302 MB of weights; a start imports PyTorch and reads them. Median and range."
    ANSWER.write_text("\n".join([f"# {lines[0]}", "", lines[1], "", *head, *rows, "", f"{model} {machine}", ""]))


if __name__ == "__main__":
    main()
