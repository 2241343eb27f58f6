"""Who is answered without a token: whoever names an address of this machine alone, or the one that is listened at."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manyhosts.serve.app import Options, Server
from manyhosts.serve.workers import Served


def status_of(asked: str, host: str) -> int:
    """Of a server that listens at `host`, to one who has asked for the name `asked`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", f"{asked}:8000".encode())],
    }
    asyncio.run(Server(Options(served=Served(folder=Path()), host=host)).app()(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_address_that_is_listened_at_is_answered_and_no_other_name(host: str) -> None:
    assert [status_of(asked, host) for asked in (host, "localhost", "elsewhere.example", "127.0.0.3")] == [
        200,
        200,
        400,
        400,
    ]
