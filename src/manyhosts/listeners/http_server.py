"""An HTTP server in a process that has other work: whoever calls, and however slowly, few connections are open."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

MOST = 64
"""Connections that are open at once."""


class HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread for each connection. One too many ends the oldest: who asks in earnest is answered at once."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # one more that is not accepted yet is called again by its system after a second

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen at `address`; port 0: one that is free.

        Raises:
            OSError: nothing can listen there.
            OverflowError: that is no port.
        """
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__((address, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        with self._lock:
            if len(self._open) >= MOST:
                with contextlib.suppress(OSError):  # it has hung up by itself
                    self._open.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection is over."""
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that hung up before it had its answer is no news; the terminal shows the run."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
