"""What a host does with torch: computes for a while, joins the rendezvous of all hosts and adds up numbers with them.

Sent to the host's own Python as a program of its own. It takes questions as JSON objects, one on each line of its
standard input, and answers each with one on its standard output.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SIDE = 384
_GPU_SIDE = 4096
_ELEMENTS = 1 << 18
_ROUNDS = 3
_PART = 1 << 16
"""Elements of each part of a sum whose bytes are counted."""
_NESTED = 4
"""Processes that it takes to cut a tensor along one dimension twice."""
_ACKNOWLEDGED = 120
"""The offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""


def speed(seconds: float) -> dict[str, Any]:
    """Floating-point operations in a second: of all cores this process may use together, and of each GPU.

    Every core multiplies matrices of its own, and only the time counts in which it was let: so a neighbour's work does
    not make a host slow. The share of that time is reported, too.
    """
    import torch

    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rates, shares = [0.0] * cores, [0.0] * cores
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        one, two = torch.ones(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
        torch.mm(one, one, out=two)
        begin, begin_own, rounds = time.perf_counter(), time.thread_time(), 0
        while rounds == 0 or time.perf_counter() < end:
            torch.mm(one, one, out=two)
            rounds += 1
        own = max(time.thread_time() - begin_own, 1e-9)
        rates[number] = 2 * _SIDE**3 * rounds / own
        shares[number] = min(1.0, own / (time.perf_counter() - begin))

    working = [threading.Thread(target=work, args=(number,)) for number in range(cores)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": sum(rates),
        "share": sum(shares) / cores,
        "gpus": [_gpu_speed(number, seconds) for number in range(gpus)],
    }


def _gpu_speed(number: int, seconds: float) -> float:
    import torch

    one = torch.ones(_GPU_SIDE, _GPU_SIDE, device=f"cuda:{number}", dtype=torch.float16)
    torch.mm(one, one)
    torch.cuda.synchronize(number)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(8):
            torch.mm(one, one)
        torch.cuda.synchronize(number)
        count += 8
    return 2 * _GPU_SIDE**3 * count / (time.perf_counter() - begin)


class Rendezvous:
    """The rendezvous, as workers have it: a store on the first host, and a group of one process on each."""

    def __init__(self) -> None:
        self._master: Any = None

    def open(self, address: str) -> dict[str, Any]:
        """On the first host: keep the store, on that address alone. Returns its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch names it public all the same

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=256)
        port = listening.getsockname()[1]
        self._master = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return {"port": port}

    def join(self, rank: int, size: int, address: str, port: int, limit_s: float) -> dict[str, Any]:
        """Join the others and add up numbers with them, at most `limit_s` seconds for each.

        Returns the seconds that the rendezvous took, those of one sum of 1 MiB, whether sums came out right, and what
        this version of PyTorch does otherwise than it says (see `silent_faults`).
        """
        import torch
        import torch.distributed as dist

        limit = datetime.timedelta(seconds=limit_s)
        begin = time.perf_counter()
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        numbers = torch.full((_ELEMENTS,), float(rank + 1))
        dist.all_reduce(numbers)
        met = time.perf_counter()
        right = bool((numbers == size * (size + 1) / 2).all())
        sums = []
        for _ in range(_ROUNDS):
            begin_sum = time.perf_counter()
            dist.all_reduce(torch.ones(_ELEMENTS))
            sums.append(time.perf_counter() - begin_sum)
        found = {"met_s": met - begin, "sum_s": sorted(sums)[_ROUNDS // 2], "right": right}
        return found | {"faults": silent_faults(rank, size)}


def silent_faults(rank: int, size: int) -> list[str]:
    """What the collectives of this PyTorch get wrong over Gloo without an error: words of `network.FAULTS`.

    All processes of the group call this. manyhosts itself uses none of these; scripts may.
    """
    import torch
    import torch.distributed as dist

    found = []
    try:
        mean = torch.full((3,), float(rank + 1))
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if not torch.allclose(mean, torch.full((3,), (size + 1) / 2)):
            found.append("average")
    except (RuntimeError, ValueError):
        pass  # it says that it cannot: no fault that anyone would miss
    own, parts = torch.empty(_PART), [torch.full((_PART,), float(rank + 1)) for _ in range(size)]
    before = _bytes_sent()
    dist.reduce_scatter(own, parts)
    dist.barrier()  # until what was sent has come
    sent = _bytes_sent() - before
    if not bool((own == size * (size + 1) / 2).all()):
        found.append("reduce_scatter")
    elif before and sent > 1.5 * 2 * 4 * _PART * size:  # more than an all-reduce of all of it would send
        found.append("reduce_scatter bytes")
    if size >= _NESTED and size % 2 == 0:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, size // 2))
        for rows in range(1, 2 * size + 2):  # few of which can be cut evenly
            full = torch.arange(rows * 2.0).reshape(rows, 2)
            if not torch.equal(distribute_tensor(full, mesh, [Shard(0), Shard(0)]).full_tensor(), full):
                found.append("nested shards")
                break
    return found


def _bytes_sent() -> int:
    """By the connections of this process so far, as far as the others have acknowledged them; 0 where not counted."""
    sent = 0
    try:
        for entry in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(entry))) as found:
                        if found.family in (socket.AF_INET, socket.AF_INET6):
                            reported = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                            sent += int.from_bytes(reported[_ACKNOWLEDGED : _ACKNOWLEDGED + 8], sys.byteorder)
            except OSError:
                continue
    except OSError:
        return 0
    return sent


def main() -> None:
    """Load torch, say so, then answer until standard input ends. Ends at once: Gloo hangs when it is taken down."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    rendezvous = Rendezvous()
    try:
        import torch

        begun: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    except Exception as error:
        begun = {"trouble": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(begun) + "\n")
    out.flush()
    deeds: dict[str, Callable[..., dict[str, Any]]] = {"speed": speed, "open": rendezvous.open, "join": rendezvous.join}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = deeds[asked.pop("do")](**asked)
        except Exception as error:
            answer = {"trouble": f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
