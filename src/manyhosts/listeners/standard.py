"""The listeners that every run has on rank 0."""

from __future__ import annotations

from manyhosts.cluster.place import Place
from manyhosts.config import metrics_port
from manyhosts.events import Event, Listener, RunEnded, RunStarted
from manyhosts.listeners.last_screen import last_screen, row_of_test
from manyhosts.listeners.metrics_file import WriteMetrics
from manyhosts.listeners.progress import ShowProgress
from manyhosts.listeners.summary import WriteSummary
from manyhosts.listeners.tensorboard import WriteTensorBoard
from manyhosts.listeners.voice import Voice, voice
from manyhosts.records.metrics import MetricsFile
from manyhosts.records.run_directory import RunDirectory
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import Summary


def standard(
    run: RunDirectory,
    record: RunRecord,
    to: Voice | None = None,
    *,
    metrics: MetricsFile | None = None,
    started: RunStarted | None = None,
) -> list[Listener]:
    """Metrics file, TensorBoard, progress and summary, for a `Broadcast`.

    `to` is where they speak: where it is left out, the head of `manyhosts run`, or this process's output. The progress
    comes before the summary, so that its last line is above the last screen. One that takes over from another rank 0
    gives its `metrics`, and with what the run `started`.

    Raises:
        ConfigError: metrics are to be served, and cannot be.
    """
    to = to or voice()
    metrics = metrics or MetricsFile(run.metrics)

    def show(summary: Summary, event: Event) -> None:
        to.say(last_screen(summary, run.path) if isinstance(event, RunEnded) else row_of_test(summary.test))

    # Those that another worker has seen, or that came before a resume, are on record.
    restarts, place = max(Place.from_environment().restart, metrics.restarts()), metrics_port.asked()
    served: list[Listener] = []
    if place is not None:
        from manyhosts.listeners.prometheus import ServeMetrics  # and with it a server, where it is asked for

        served.append(ServeMetrics(place, record, restarts=restarts, started=started))
    return [
        *served,
        WriteMetrics(metrics),
        WriteTensorBoard(run.tensorboard),
        ShowProgress(to, record, run.path, restarts=restarts, started=started),
        WriteSummary(run.summary, metrics, record, show),
    ]
