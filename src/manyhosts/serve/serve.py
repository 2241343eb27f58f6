"""Serves a model until it is asked to end: the model first, then the port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from manyhosts.errors import ConfigError
from manyhosts.serve.app import Options, Server, is_loopback

# So long a connection stays open between two requests
_KEEP_ALIVE_S = 5


def serve(options: Options, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `report` is given the address, once the model answers.

    Raises:
        ConfigError: the model cannot be opened, the port is taken, or there is no token and others reach it.
    """
    if not options.token and not options.behind_sagemaker and not is_loopback(options.host):
        raise ConfigError(
            f"others reach {options.host}, and there is no token that they must know",
            where="--host",
            fix="set MANYHOSTS_SERVE_TOKEN, or leave --host out to serve this machine alone",
        )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, report))


async def _serve(options: Options, report: Callable[[str], None]) -> None:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except OSError as cause:
        listening.close()
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {cause.strerror}",
            where="--host, --port",
            fix="choose another with --port P; 0 takes a free one",
        ) from cause
    server = Server(options)
    try:
        await server.open()
        config = uvicorn.Config(
            server.app(),
            log_level=logging.WARNING,
            access_log=False,
            limit_concurrency=options.limits.queue * 2,
            timeout_graceful_shutdown=max(1, round(options.grace_s)),
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        listening.listen(2048)
        report(f"http://{host}:{listening.getsockname()[1]}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn takes it, and raises it again at its end
        running = uvicorn.Server(config)
        closing = asyncio.create_task(_close_silent(running, max(options.limits.body_s, _KEEP_ALIVE_S + 1)))
        await running.serve(sockets=[listening])
        closing.cancel()
    finally:
        await server.workers.stop()
        listening.close()


async def _close_silent(server: uvicorn.Server, seconds: float) -> None:
    """Close connections on which no request has begun between two looks: uvicorn waits for a head without end."""
    before: dict[object, object] = {}
    while True:
        await asyncio.sleep(seconds)
        idle = {
            each: each.cycle
            for each in server.server_state.connections
            if each.cycle is None or each.cycle.response_complete
        }
        for each in idle.keys() & before.keys():
            if idle[each] is before[each]:
                each.transport.close()
        before = idle
