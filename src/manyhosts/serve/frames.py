"""What the server and the process with the model say to each other: a JSON head and tensors, over a socket pair."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load, save

_SIZES = struct.Struct("!QQ")
# The number of the process's end of the pair
SOCKET = "MANYHOSTS_SERVE_SOCKET"
# What is to be served, as JSON: see `model_process`
REQUEST = "MANYHOSTS_SERVE"


def frame(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """The bytes of one message."""
    text = json.dumps(dict(head)).encode()
    body = save({name: np.ascontiguousarray(each) for name, each in arrays.items()}) if arrays else b""
    return _SIZES.pack(len(text), len(body)) + text + body


async def read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The next message.

    Raises:
        IncompleteReadError: the other side has ended.
    """
    text, body = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    head = json.loads(await reader.readexactly(text))
    return head, load(await reader.readexactly(body)) if body else {}


def read_blocking(line: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next message; None where the other side has ended."""
    sizes = _exactly(line, _SIZES.size)
    if sizes is None:
        return None
    text, body = _SIZES.unpack(sizes)
    head, tensors = _exactly(line, text), _exactly(line, body) if body else b""
    if head is None or tensors is None:
        return None
    return json.loads(head), load(tensors) if tensors else {}


def _exactly(line: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, place = memoryview(data), 0
    while place < size:
        count = line.recv_into(view[place:])
        if not count:
            return None
        place += count
    return bytes(data)
