"""The HTTP side: who may ask, what is read and for how long, what is answered, and what is counted."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from safetensors import SafetensorError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from manyhosts.errors import ManyhostsError
from manyhosts.records.chosen_run import snapshot_of
from manyhosts.records.manifest import read as read_manifest
from manyhosts.records.run_directory import RunDirectory
from manyhosts.serve.batching import Batching
from manyhosts.serve.feedback import Drift, KeptSamples
from manyhosts.serve.openapi import openapi, page
from manyhosts.serve.tensors import (
    BINARY,
    Arrays,
    Refused,
    from_binary,
    from_json,
    parsed,
    samples_of,
    to_binary,
    to_json,
)
from manyhosts.serve.workers import Lost, Served, Workers, log

_JSON = "application/json"
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_FOLLOW_S = 1.0
# Where the bars of the histograms end
_SECONDS, _SIZES = (
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
    (1, 2, 4, 8, 16, 32, 64, 128, 256),
)
# So many times the largest body is read and dropped: a client that is cut off while it sends hears no reason
_READ_OVER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request and all together may take."""

    body_bytes: int = 8 << 20
    samples: int = 256  # Of one request
    body_s: float = 10.0  # For the body to arrive
    queue: int = 256  # Requests that wait
    batch: int = 32  # Samples that the model computes at once
    batch_wait_s: float = 0.002  # How long a request waits for others to fill its batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `manyhosts serve` was asked for."""

    served: Served
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""  # What a client must send as `Authorization: Bearer …`; none on this machine's own address alone
    follow: bool = False
    # SageMaker asks, which has checked who asks it: `/ping` and `/invocations` alone, without a token
    behind_sagemaker: bool = False
    limits: Limits = Limits()
    keep: Path | None = None
    keep_share: float = 0.01
    keep_bytes: int = 100_000_000
    grace_s: float = 30.0  # For requests under way when the server is asked to end


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    return host in _LOOPBACK or host.startswith("127.")


class _Numbers:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("manyhosts_requests", "Requests, by status", ["status"], registry=self.registry)
        self.seconds = Histogram("manyhosts_seconds", "Of a prediction", buckets=_SECONDS, registry=self.registry)
        self.batch = Histogram("manyhosts_batch_samples", "Of a batch", buckets=_SIZES, registry=self.registry)
        self.waiting = Gauge("manyhosts_waiting", "Requests that wait", registry=self.registry)
        self.restarts = Counter("manyhosts_model_restarts", "Of the processes with the model", registry=self.registry)
        self.step = Gauge("manyhosts_model_step", "Step of the snapshot that answers", registry=self.registry)
        self.drift = Gauge(
            "manyhosts_drift",
            "Mean of what was served, in deviations from that of the training set",
            ["kind", "tensor"],
            registry=self.registry,
        )


class _Token:
    """Lets no one in who does not know the token, whatever the path."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                refusal = _error(401, "send the token of this server: Authorization: Bearer TOKEN")
                refusal.headers["WWW-Authenticate"] = "Bearer"
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Server:
    """One served model."""

    def __init__(self, options: Options) -> None:
        self.options, self.numbers = options, _Numbers()
        self.workers = Workers(options.served, on_restart=self.numbers.restarts.inc)
        limits = options.limits
        self.batching = Batching(
            self.workers, most=limits.batch, wait_s=limits.batch_wait_s, queue=limits.queue, on_batch=self._served
        )
        self._drift = Drift({})
        self._opens = False
        self._keep = (
            KeptSamples(options.keep, share=options.keep_share, most_bytes=options.keep_bytes) if options.keep else None
        )

    def app(self, *, opens: bool = False) -> Starlette:
        """The application, with a check of who may ask it. `opens`: it opens the model itself when it starts."""
        self._opens = opens
        if self.options.behind_sagemaker:
            routes = [Route("/ping", self._readyz), Route("/invocations", self._predict, methods=["POST"])]
            return Starlette(routes=routes, lifespan=self._lifespan)
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            Route("/docs", self._docs),
        ]
        if self.options.token:
            guard = Middleware(_Token, token=self.options.token)
        else:  # no page from elsewhere may ask under a name of its own
            guard = Middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, self.options.host], www_redirect=False)
        return Starlette(
            routes=routes,
            middleware=[guard],
            exception_handlers={404: _nothing_there, 405: _nothing_there},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._opens:
            await self.open()
        follower = asyncio.create_task(self._follow()) if self.options.follow else None
        self.batching.start()
        try:
            yield
        finally:
            if follower is not None:
                follower.cancel()
            await self.batching.stop()
            await self.workers.stop()
            if self._keep is not None:
                self._keep.flush()

    async def open(self) -> None:
        """Open the model, before anybody is let in.

        Raises:
            ConfigError: it cannot be opened.
        """
        await self.workers.start()
        self._drift = Drift(self.workers.described.data)

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        try:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in (_JSON, BINARY):
                raise Refused(415, f"the content type must be {_JSON} or {BINARY}")
            body = await self._body(request)
            outputs = await self.batching.answer(await self._inputs(kind, body))
            wants_binary = BINARY in request.headers.get("accept", "") or kind == BINARY
            response = (
                Response(to_binary(outputs), media_type=BINARY)
                if wants_binary
                else Response(to_json(outputs), media_type=_JSON)
            )
        except Refused as error:
            response = _error(error.status, error.sentence)
        except Lost as error:
            response = _error(503, f"{error}: try again")
        except ClientDisconnect:
            response = _error(400, "the client has gone")
        if response.status_code == 503:
            response.headers["Retry-After"] = "1"
        self.numbers.requests.labels(response.status_code).inc()
        self.numbers.seconds.observe(time.perf_counter() - begin)
        return response

    async def _body(self, request: Request) -> bytes:
        most = self.options.limits.body_bytes
        reported = request.headers.get("content-length", "0")
        if not reported.isdigit():
            raise Refused(411, "the length of the body is not a number")
        if int(reported) > _READ_OVER * most:
            raise Refused(413, f"the body has {reported} bytes, and {most} are allowed")
        body, count = bytearray(), 0
        try:
            async with asyncio.timeout(self.options.limits.body_s):
                async for chunk in request.stream():
                    count += len(chunk)
                    if count <= most:
                        body += chunk
                    elif count > _READ_OVER * most:
                        break
            if count > most:
                raise Refused(413, f"the body has more than {most} bytes")
        except TimeoutError as cause:
            raise Refused(408, f"the body did not come within {self.options.limits.body_s:g} s") from cause
        return bytes(body)

    async def _inputs(self, kind: str, body: bytes) -> Arrays:
        if kind == BINARY:
            arrays = from_binary(body, self.workers.described)
            self._check_count(samples_of(arrays))
            return arrays
        samples = parsed(body)
        self._check_count(len(samples))
        workers = self.workers
        return await workers.preprocess(samples) if workers.preprocesses else from_json(samples, workers.described)

    def _check_count(self, count: int) -> None:
        if count > self.options.limits.samples:
            raise Refused(413, f"{count} samples were sent, and {self.options.limits.samples} are allowed at once")

    def _served(self, inputs: Arrays, outputs: Arrays) -> None:
        self.numbers.batch.observe(samples_of(inputs))
        self._drift.add(inputs, outputs)
        if self._keep is not None:
            try:
                self._keep.add(inputs, outputs)
            except (OSError, SafetensorError) as error:  # the library's own, of a disk that is full
                log.warning("samples are not kept any more: %s", error)
                self._keep = None

    async def _healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _readyz(self, _: Request) -> Response:
        if not self.workers.ready.is_set():
            return _error(503, "the model is being opened")
        return JSONResponse({"status": "ready", "step": self.workers.step})

    async def _metrics(self, _: Request) -> Response:
        self.numbers.waiting.set(len(self.batching))
        self.numbers.step.set(self.workers.step or 0)
        for (kind, name), value in self._drift.values().items():
            self.numbers.drift.labels(kind, name).set(value)
        return Response(generate_latest(self.numbers.registry), media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(self._description())

    async def _docs(self, _: Request) -> Response:
        return HTMLResponse(page(self.workers.described, self._description()))

    def _description(self) -> dict[str, object]:
        return openapi(
            self.workers.described,
            most_samples=self.options.limits.samples,
            has_token=bool(self.options.token),
            preprocesses=self.workers.preprocesses,
        )

    async def _follow(self) -> None:
        """Take over each snapshot that appears under the name that is served."""
        directory = RunDirectory(self.options.served.folder)
        refused: tuple[int, float] | None = None
        while True:
            await asyncio.sleep(_FOLLOW_S)
            with suppress(ManyhostsError, OSError, Lost):
                path = snapshot_of(directory, self.options.served.snapshot)
                manifest = read_manifest(path)
                found = (manifest.facts.step, manifest.time)
                if found[0] == self.workers.step or found == refused:
                    continue
                why = await self.workers.take(path)
                if why:
                    refused = found
                    log.warning("step %d is not taken over: %s", found[0], why)
                else:
                    log.warning("now answering with step %d", found[0])


async def _nothing_there(request: Request, error: Any) -> Response:
    asked = f"{request.method} {request.url.path[:100]}"
    sentence = f"{asked} is not answered here: ask POST /predict, and /docs says what it takes"
    return _error(error.status_code, sentence, error.headers)


def _error(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)
