"""Requests that are wrong in every way, and what the answers and the memory of the server come to."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from served import Serving

PIECES = [b"{", b"}", b"[", b"]", b'"inputs"', b":", b",", b"1", b"1e999", b"null", b"NaN", b'"x"', b"true", b" ", b"-"]
KINDS = ["application/json", "application/vnd.safetensors", "text/plain", ""]
RIGHT = [[[[0.5] * 8] * 8]]
FILE = save({"inputs": np.zeros((2, 1, 8, 8), np.float32)})
SLOW = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def body_of(number: int, draw: random.Random) -> bytes:
    """Bytes, pieces of JSON, brackets, another shape, or a safetensors file that is cut off or lies."""
    bodies: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randrange(300)),
        lambda: b"".join(draw.choices(PIECES, k=draw.randrange(40))),
        lambda: b'{"inputs": ' + b"[" * draw.randrange(2000) + b"1" + b"]" * draw.randrange(2000) + b"}",
        lambda: b'{"inputs": [[[' + b"0.5," * draw.randrange(20) + b"1]]]}",
        lambda: FILE[: draw.randrange(len(FILE))],
        lambda: draw.randrange(2**64).to_bytes(8, "little") + FILE[8:],
    ]
    return bodies[number % len(bodies)]()


def connected(served: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.address.rpartition(":")[2])), timeout=60)


def raw(served: Serving, content: bytes) -> int:
    """The status of the answer to bytes that are no request, or only the beginning of one; 400 where it hangs up."""
    with connected(served) as line:
        line.sendall(content)
        try:
            found = line.recv(4096)
        except ConnectionResetError:
            return 400
    return int(found.split()[1]) if found else 400


def ask_wrongly(served: Serving, count: int, draw: random.Random) -> Counter[int]:
    """So many wrong requests, of which each 250th is far too long and each 500th comes too slowly."""
    statuses: Counter[int] = Counter()
    for number in range(count):
        if number % 250 == 249:
            status = served.ask("/predict", b"0" * 9_000_000)[0]
        elif number % 50 == 48:
            status = raw(served, draw.randbytes(2000) + b"\r\n\r\n")
        else:
            headers = {"Content-Type": draw.choice(KINDS)}
            status = served.ask("/predict", body_of(number, draw), headers=headers)[0]
        statuses[status] += 1
    threads = [threading.Thread(target=lambda: statuses.update([raw(served, SLOW)])) for _ in range(count // 500 + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def memory(served: Serving) -> int:
    """Bytes that the server and the process with the model hold for themselves alone."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (served.process.pid, *served.children())]
    return sum(int(text.partition("RssAnon:")[2].split()[0]) * 1024 for text in statuses)


def assert_wrong_requests_harm_nothing(served: Serving, first: int, count: int) -> None:
    """All get a 4xx, and from the first ones on the server grows by less than a twentieth."""
    draw, children = random.Random(0), served.children()
    with connected(served) as silent:
        silent.sendall(b"POST /predict HTTP/1.1\r\nHost: local")
        statuses = ask_wrongly(served, first, draw)
        before = memory(served)
        statuses += ask_wrongly(served, count, draw)
        grown = memory(served) - before
        assert silent.recv(4096) == b"", "a head that does not end is waited for"
    assert all(400 <= status < 500 for status in statuses), statuses
    assert {400, 408, 413, 415, 422} <= statuses.keys()
    assert statuses.total() >= first + count
    assert grown < 0.05 * before, (statuses, before, grown)
    assert served.children() == children
    assert len(served.predict(RIGHT)) == 1
