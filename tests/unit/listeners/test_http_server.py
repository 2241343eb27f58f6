"""The server of metrics and of the live page: strangers call it as they like, and a real request is answered."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from launching import wait_until

from manyhosts.listeners.http_server import MOST, HttpServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"yes" * 100_000)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[HttpServer]:
    made = HttpServer("127.0.0.1", 0, Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def call(server: HttpServer, say: bytes) -> socket.socket:
    connection = socket.create_connection(server.server_address[:2], timeout=20)  # type: ignore[arg-type]
    connection.sendall(say)
    return connection


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("say", [b"", b"GET /met", b"GET / HTTP/1.0\r\n\r\n"], ids=["nothing", "half", "reads not"])
def test_that_few_connections_are_open_whoever_calls(server: HttpServer, say: bytes) -> None:
    began, threads = files(), threading.active_count()
    calls = [call(server, say) for _ in range(2 * MOST)]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/", timeout=20) as answer:
        assert len(answer.read()) == 300_000
    wait_until(lambda: files() - began <= len(calls) + MOST, "connections are closed")
    wait_until(lambda: threading.active_count() - threads <= MOST, "threads end")
    for each in calls:
        each.close()
    wait_until(lambda: files() <= began, "all is closed")


@pytest.mark.parametrize(
    "say",
    [
        os.urandom(5000) + b"\n\n",
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        b"BREW /\r\n\r\n",
    ],
    ids=["garbage", "a long line", "a thousand headers", "a strange word"],
)
def test_that_what_is_no_request_is_refused_and_the_next_one_answered(
    server: HttpServer, say: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        socket.create_connection(server.server_address[:2], timeout=20) as connection,  # type: ignore[arg-type]
        contextlib.suppress(OSError),  # it may hang up, which is an answer, too
    ):
        connection.sendall(say)
        assert b"yes" not in connection.recv(100_000)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/", timeout=20) as answer:
        assert len(answer.read()) == 300_000
    assert "Traceback" not in capfd.readouterr().err
