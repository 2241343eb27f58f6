"""What the server and the process with the model say to each other: a JSON head and tensors, over a socket pair."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

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


def read_blocking(line: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The next message; None where the other side has ended."""
    sizes = line.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    text, body = _SIZES.unpack(sizes)
    head, tensors = line.read(text), line.read(body)
    if len(head) < text or len(tensors) < body:
        return None
    return json.loads(head), load(tensors) if tensors else {}
