"""Serves the metrics of a run for Prometheus to fetch, on rank 0: how far it is, how fast, and who holds it up."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from manyhosts.config.metrics_port import WHERE, MetricsPort
from manyhosts.errors import ConfigError
from manyhosts.events import (
    Event,
    Recovered,
    RunEnded,
    RunStarted,
    Slowdown,
    StepDone,
    ValidationDone,
    WorkersTimed,
    WorkerTimes,
)
from manyhosts.listeners.http_server import HttpServer
from manyhosts.records.run_record import RunRecord

_RECENT_S = 5.0
"""The speed, and the parts of a step of a worker alone, are those of the last few seconds."""
_SLOWEST_S = 10.0
"""So long Prometheus may take for a part of what it asks, or of what it is answered."""
_PARTS = ("compute", "communication_exposed", "data_wait", "snapshot_stall")


class Figures:
    """Events of a run as families of metrics. Events come from the loop, and `collect` from a server's thread."""

    def __init__(self, record: RunRecord, *, restarts: int, families: Any, started: RunStarted | None = None) -> None:
        """`families`: the module `prometheus_client.core`. `started`: of a run that another worker has begun."""
        self._families, self._lock = families, threading.Lock()
        self._host, self._workers, self._restarts = socket.gethostname(), record.workers, restarts
        self._steps, self._samples = 0 if started is None else started.step, 0
        self._last: StepDone | None = None
        self._recent: deque[StepDone] = deque()
        self._validation: dict[str, float] = {}
        self._times: tuple[WorkerTimes, ...] = ()
        self._slow: dict[tuple[str, str], float] = {}
        self._is_training = started is not None

    def hear(self, event: Event) -> None:
        """Take note of `event`."""
        with self._lock:
            match event:
                case StepDone():
                    self._last, self._steps, self._samples = event, event.step, self._samples + event.samples
                    self._recent.append(event)
                    while self._recent[0].time < event.time - _RECENT_S:
                        self._recent.popleft()
                case RunStarted():
                    self._is_training, self._steps = True, event.step
                case RunEnded():
                    self._is_training = False
                case ValidationDone():
                    self._validation = dict(event.values)
                case WorkersTimed():
                    self._times, self._workers = event.workers, len(event.workers)
                case Slowdown():
                    self._slow = {key: factor for key, factor in self._slow.items() if key[0] != event.who}
                    if event.factor > 1:
                        self._slow[event.who, event.cause] = event.factor
                case Recovered():
                    self._restarts += 1
                    self._times, self._workers = ((), event.workers) if event.workers else (self._times, self._workers)

    def collect(self) -> Iterator[Any]:
        """Every family, as Prometheus' library asks for them."""
        with self._lock:
            yield from [*self._of_the_run(), *self._of_workers()]

    def _of_the_run(self) -> Iterator[Any]:
        gauge, counter = self._families.GaugeMetricFamily, self._families.CounterMetricFamily
        yield gauge("manyhosts_training", "1 while steps are taken, 0 before and after", value=float(self._is_training))
        yield gauge("manyhosts_workers", "Workers that train together", value=self._workers)
        yield counter(
            "manyhosts_steps", "Optimizer steps of the run, those before a resume included", value=self._steps
        )
        yield counter("manyhosts_samples", "Samples trained on since rank 0 began", value=self._samples)
        yield counter("manyhosts_restarts", "Times that training continued after a failure", value=self._restarts)
        if self._last is not None:
            yield gauge("manyhosts_loss", "Loss of the last step, the mean over its batch", value=self._last.loss)
            yield gauge("manyhosts_learning_rate", "Learning rate of the last step", value=self._last.lr)
            yield gauge("manyhosts_epoch", "Epoch of the last step, from 0", value=self._last.epoch)
            seconds = sum(step.timing.total for step in self._recent)
            rate = sum(step.samples for step in self._recent) / seconds if seconds else 0.0
            yield gauge("manyhosts_samples_per_second", "Over the steps of the last 5 seconds", value=rate)
        found = gauge("manyhosts_validation", "What the last validation found", labels=["metric"])
        for name, value in self._validation.items():
            found.add_metric([name], value)
        yield found

    def _of_workers(self) -> Iterator[Any]:
        gauge = self._families.GaugeMetricFamily
        times = self._times or self._of_a_worker_alone()
        parts = gauge("manyhosts_step_seconds", "Mean seconds of a step by its parts", labels=["rank", "host", "part"])
        for worker in times:
            for part in _PARTS:
                parts.add_metric([str(worker.rank), worker.host, part], getattr(worker, part))
        yield parts
        slow = gauge("manyhosts_slow", "How many times slower than the others it is", labels=["who", "cause"])
        for key, factor in self._slow.items():
            slow.add_metric(list(key), factor)
        yield slow

    def _of_a_worker_alone(self) -> tuple[WorkerTimes, ...]:
        """Of rank 0, where no other is there or none has reported its times yet."""
        steps = [step.timing for step in self._recent]
        if not steps:
            return ()
        means = {part: sum(getattr(step, part) for step in steps) / len(steps) for part in (*_PARTS, "total")}
        return (WorkerTimes(rank=0, host=self._host, samples=self._recent[-1].samples, **means),)


class ServeMetrics:
    """Lets Prometheus fetch the metrics of a run, until it is closed."""

    def __init__(
        self, place: MetricsPort, record: RunRecord, *, restarts: int = 0, started: RunStarted | None = None
    ) -> None:
        """Begin to serve.

        Raises:
            ConfigError: Prometheus' library is not installed here, or no one can listen at `place`.
        """
        try:
            library = importlib.import_module("prometheus_client")
        except ImportError as cause:
            raise ConfigError(
                f"metrics are served by prometheus_client, which is not installed on host {socket.gethostname()}",
                where=WHERE,
                fix=f"{sys.executable} -m pip install prometheus_client",
            ) from cause
        families = importlib.import_module("prometheus_client.core")
        self._figures = Figures(record, restarts=restarts, families=families, started=started)
        registry = library.CollectorRegistry()
        registry.register(self._figures)
        _close_those_at(place)
        try:
            self._server = HttpServer(place.address, place.port, _handler(library, registry))
        except OSError as cause:
            raise ConfigError(
                f"host {socket.gethostname()} cannot listen at {place.address}:{place.port} ({cause.strerror})",
                where=WHERE,
                fix="give a port that is free, and an address of that host",
            ) from cause
        self._thread = threading.Thread(target=self._server.serve_forever, name="serves metrics", daemon=True)
        self._thread.start()
        _serving[place] = self

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        self._figures.hear(event)

    def close(self) -> None:
        """Serve no more. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(library: Any, registry: Any) -> type[BaseHTTPRequestHandler]:
    """A class, for that is what the standard library asks for."""

    class Handler(library.MetricsHandler):  # type: ignore[misc]
        timeout = _SLOWEST_S

    return Handler.factory(registry)  # type: ignore[no-any-return]


_serving: dict[MetricsPort, ServeMetrics] = {}


def _close_those_at(place: MetricsPort) -> None:
    """Of several trainers of a script the last one that trains is served."""
    if (before := _serving.pop(place, None)) is not None:
        before.close()
