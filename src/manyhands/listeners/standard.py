"""The listeners that every run has on its leader."""

from __future__ import annotations

from manyhands.cluster.place import Place
from manyhands.events import Event, Listener, RunEnded, RunStarted
from manyhands.listeners.last_screen import last_screen, row_of_test
from manyhands.listeners.metrics_file import WriteMetrics
from manyhands.listeners.progress import ShowProgress
from manyhands.listeners.summary import WriteSummary
from manyhands.listeners.tensorboard import WriteTensorBoard
from manyhands.listeners.voice import Voice, voice
from manyhands.records.metrics import MetricsFile
from manyhands.records.run_directory import RunDirectory
from manyhands.records.run_record import RunRecord
from manyhands.records.summary import Summary


def standard(
    run: RunDirectory,
    record: RunRecord,
    to: Voice | None = None,
    *,
    metrics: MetricsFile | None = None,
    started: RunStarted | None = None,
) -> list[Listener]:
    """Metrics file, TensorBoard, progress and summary, for a `Broadcast`.

    `to` is where they speak: where it is left out, the head of `manyhands run`, or this process's output. The progress
    comes before the summary, so that its last line stands above the last screen. Whoever takes over from another leader
    gives its `metrics`, and with what the run `started`.
    """
    to = to or voice()
    metrics = metrics or MetricsFile(run.metrics)

    def show(summary: Summary, event: Event) -> None:
        to.say(last_screen(summary, run.path) if isinstance(event, RunEnded) else row_of_test(summary.test))

    return [
        WriteMetrics(metrics),
        WriteTensorBoard(run.tensorboard),
        ShowProgress(to, record, run.path, restarts=Place.from_environment().restart, started=started),
        WriteSummary(run.summary, metrics, record, show),
    ]
