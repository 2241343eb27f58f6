"""How many requests does `manyhosts serve` answer, and how late, next to plain uvicorn with the bare model?

Both serve one exported program on this machine's loopback, by turns, each in fresh processes of one computing thread:
`manyhosts serve` with batches of 1 and of 16, and a page of starlette that calls the program in the event loop, one
request after another. Clients of this process keep so many requests open without a break. Beside it, what the bare
forward pass gains from batch 1 to batch 16.

Run: python benchmarks/serving.py
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from machine import describe

ANSWER = Path(__file__).with_suffix(".md")
TRAIN = Path(__file__).with_name("serving_train.py")
PLAIN = """
import json, sys, torch, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
torch.set_num_threads(1)
program = torch.export.load(sys.argv[1]).module()

async def predict(request):
    inputs = torch.tensor(json.loads(await request.body())["inputs"])
    with torch.no_grad():
        return JSONResponse({"outputs": program(inputs)[0].tolist()})

async def ready(request):
    return JSONResponse({})

app = Starlette(routes=[Route("/predict", predict, methods=["POST"]), Route("/readyz", ready)])
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""


@contextmanager
def server(way: str, program: Path, port: int) -> Iterator[None]:
    words = [sys.executable, "-c", PLAIN, str(program / "model.pt2"), str(port)]
    if way != "plain uvicorn":
        words = [sys.executable, "-m", "manyhosts.cli.main", "serve", str(program), "--port", str(port)]
        words += ["--threads", "1", "--batch", way.rpartition(" ")[2]]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                asyncio.run(one(port, b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
                break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return await reader.readexactly(int(length.split(b":")[1]))


async def one(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await exchange(reader, writer, request)
    finally:
        writer.close()


async def load(port: int, clients: int, seconds: float) -> list[float]:
    """Seconds of each request."""
    body = json.dumps({"inputs": [[0.5] * 64]}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    found: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            begin = time.perf_counter()
            await exchange(reader, writer, request)
            found.append(time.perf_counter() - begin)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


def bare_gain(program: Path, seconds: float) -> tuple[float, float]:
    """Samples per second of the bare forward pass, with batches of 1 and of 16."""
    torch.set_num_threads(1)
    forward = torch.export.load(program / "model.pt2").module()
    rates = []
    for size in (1, 16):
        inputs, count, begin = torch.full((size, 64), 0.5), 0, time.perf_counter()
        with torch.no_grad():
            while time.perf_counter() - begin < seconds:
                forward(inputs)
                count += size
        rates.append(count / (time.perf_counter() - begin))
    return rates[0], rates[1]


WAYS = ("plain uvicorn", "manyhosts, batch 1", "manyhosts, batch 16")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--port", type=int, default=18765)
    asked = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = {(way, clients): [] for way in WAYS for clients in (1, 64)}
    late: dict[tuple[str, int], list[float]] = {key: [] for key in rates}
    gains, bare, kept = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manyhosts.cli.main"]
        run = str(Path(folder) / "run")
        quiet = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*command, "run", "--run-dir", run, str(TRAIN)], **quiet)  # type: ignore[call-overload]
        program = Path(folder) / "program"
        words = ["export", run, "--format", "torch-export", "--output", str(program)]
        subprocess.run([*command, *words], **quiet)  # type: ignore[call-overload]
        for number in range(asked.rounds):
            bare.append(bare_gain(program, asked.seconds / 2))
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                with server(way, program, asked.port):
                    for clients in (1, 64):
                        asyncio.run(load(asked.port, clients, 0.5))
                        seconds = sorted(asyncio.run(load(asked.port, clients, asked.seconds)))
                        rates[way, clients].append(len(seconds) / asked.seconds)
                        late[way, clients].append(1000 * seconds[int(0.99 * len(seconds))])
            gains.append(bare[-1][1] / bare[-1][0])
            kept.append(rates[WAYS[2], 64][-1] / rates[WAYS[1], 64][-1] / gains[-1])
            print(number, {key: round(values[-1], 1) for key, values in rates.items()}, gains[-1], kept[-1], flush=True)
    ANSWER.write_text(page(rates, late, bare, gains, kept, asked.rounds, asked.seconds))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def page(
    rates: dict[tuple[str, int], list[float]],
    late: dict[tuple[str, int], list[float]],
    bare: list[tuple[float, float]],
    gains: list[float],
    kept: list[float],
    rounds: int,
    seconds: float,
) -> str:
    rows = [
        f"| {way} | {clients} | {spread(rates[way, clients])} | {spread(late[way, clients])} |"
        for clients in (1, 64)
        for way in WAYS
    ]
    first, second = ([each[place] for each in bare] for place in (0, 1))
    machine = describe(Path(sys.executable), ["torch", "uvicorn"])
    lines = (__doc__ or "").strip().split("\n\n")
    return "\n".join(
        [
            f"# {lines[0]}",
            "",
            lines[1],
            "",
            "| served by | clients | requests per second | p99, ms |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            f"Bare forward pass: {spread(first)} samples per second in batches of 1, {spread(second)} in batches of "
            f"16: a gain of {spread(gains)}. Of that gain serving keeps {spread(kept)}: requests per second of 64 "
            "clients with batches of 16, over those with batches of 1.",
            "",
            f"Median and range of {rounds} rounds of {seconds:g} s. {machine}",
            "",
        ]
    )


if __name__ == "__main__":
    main()
