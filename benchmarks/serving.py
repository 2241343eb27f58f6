"""How many requests does `manyhosts serve` answer, and how late, next to plain uvicorn with the bare model?

Both serve one exported program on this machine's loopback, by turns, each in fresh processes of one computing thread:
`manyhosts serve` with batches of 1 and of 16, and a page of starlette that calls the program in the event loop, one
request after another. Clients of this process keep so many requests open without a break. The process with the model
has one core, and clients and server have the other.

What batches of 16 give over batches of 1: to the bare forward pass on that core, and to 64 clients of
`manyhosts serve`. Once in samples per second; once per second that the process with the model had its core, which
what else runs on the machine changes less.

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
from collections.abc import Iterable, Iterator
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


CORES = sorted(os.sched_getaffinity(0))
MODEL, REST = CORES[:1], CORES[1:2] or CORES


def use_cores(cores: Iterable[int], pid: int = 0) -> None:
    """Have all threads of a process run on these."""
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def server(way: str, program: Path, port: int) -> Iterator[int]:
    """Within, it runs. Gives the id of the process that has the model."""
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
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        model = int(children[0]) if children else process.pid
        use_cores(MODEL, model)
        yield model
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


def computed(pid: int) -> float:
    """Seconds that the process has had a core."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def bare(program: Path, seconds: float) -> dict[int, tuple[float, float]]:
    """Of the bare forward pass with batches of 1 and of 16: samples per second, and per second that it had a core."""
    torch.set_num_threads(1)
    use_cores(MODEL)
    forward = torch.export.load(program / "model.pt2").module()
    rates = {}
    for size in (1, 16):
        inputs, count = torch.full((size, 64), 0.5), 0
        begin, before = time.perf_counter(), time.process_time()
        with torch.no_grad():
            while time.perf_counter() - begin < seconds:
                forward(inputs)
                count += size
        rates[size] = count / (time.perf_counter() - begin), count / (time.process_time() - before)
    use_cores(REST)
    return rates


WAYS = ("plain uvicorn", "manyhosts, batch 1", "manyhosts, batch 16")
CLIENTS = (1, 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--port", type=int, default=18765)
    asked = parser.parse_args()
    served: dict[tuple[str, int], list[tuple[float, float, float]]] = {(w, c): [] for w in WAYS for c in CLIENTS}
    alone = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "manyhosts.cli.main"]
        run = str(Path(folder) / "run")
        quiet = {"cwd": folder, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*command, "run", "--run-dir", run, str(TRAIN)], **quiet)  # type: ignore[call-overload]
        program = Path(folder) / "program"
        words = ["export", run, "--format", "torch-export", "--output", str(program)]
        subprocess.run([*command, *words], **quiet)  # type: ignore[call-overload]
        for number in range(asked.rounds):
            alone.append(bare(program, asked.seconds / 2))
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                with server(way, program, asked.port) as model:
                    for clients in CLIENTS:
                        asyncio.run(load(asked.port, clients, 0.5))
                        before = computed(model)
                        seconds = sorted(asyncio.run(load(asked.port, clients, asked.seconds)))
                        served[way, clients].append(
                            (
                                len(seconds) / asked.seconds,
                                1000 * seconds[int(0.99 * len(seconds))],
                                len(seconds) / (computed(model) - before),
                            )
                        )
            print(number, {key: values[-1] for key, values in served.items()}, alone[-1], flush=True)
    use_cores(CORES)
    ANSWER.write_text(page(served, alone, asked.rounds, asked.seconds))


def spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.median(found):.3g} ({min(found):.3g} to {max(found):.3g})"


def page(
    served: dict[tuple[str, int], list[tuple[float, float, float]]],
    alone: list[dict[int, tuple[float, float]]],
    rounds: int,
    seconds: float,
) -> str:
    rows = [
        f"| {way} | {clients} | {spread(each[0] for each in served[way, clients])} "
        f"| {spread(each[1] for each in served[way, clients])} "
        f"| {spread(a[0] / b[0] for a, b in zip(served[way, clients], served[WAYS[0], clients], strict=True))} |"
        for clients in CLIENTS
        for way in WAYS
    ]
    most = CLIENTS[-1]
    gains = []
    for title, bare_place, place in (("time", 0, 0), ("time with a core", 1, 2)):
        own = [each[16][bare_place] / each[1][bare_place] for each in alone]
        ours = [b[place] / a[place] for a, b in zip(served[WAYS[1], most], served[WAYS[2], most], strict=True)]
        kept = spread(one / other for one, other in zip(ours, own, strict=True))
        gains.append(f"| {title} | {spread(own)} | {spread(ours)} | {kept} |")
    machine = describe(Path(sys.executable), ["torch", "uvicorn"])
    lines = (__doc__ or "").strip().split("\n\n")
    return "\n".join(
        [
            f"# {lines[0]}",
            "",
            lines[1],
            "",
            "| served by | clients | requests per second | p99, ms | requests, of plain uvicorn |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            lines[2],
            "",
            "| per second of | gain of the bare forward pass | gain of serving | share that is kept |",
            "|---|---:|---:|---:|",
            *gains,
            "",
            f"Median and range of {rounds} rounds of {seconds:g} s; shares are of one round. {machine}",
            "",
        ]
    )


if __name__ == "__main__":
    main()
