"""Writes what happens to `metrics.jsonl`, and notices when the run before broke off."""

from __future__ import annotations

from manyhosts.events import Event, Recovered, RunStarted, SnapshotSaved, StepDone, TestDone, ValidationDone
from manyhosts.records.metrics import MetricsFile


class WriteMetrics:
    """Hands every event to the metrics file.

    A run that starts where another broke off removes what will be reported again, and reports the restart with what it
    cost: no one else knows how far the other had come.
    """

    KEEPS_RECORD = True
    """Whether no snapshot may be ahead of what it writes."""

    def __init__(self, metrics: MetricsFile) -> None:
        self.metrics = metrics
        self._resumed_at = -1
        """The step of the snapshot that the run has continued from last."""

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        if type(event) is StepDone:
            self.metrics.add(event)
        elif isinstance(event, ValidationDone | SnapshotSaved) and event.step == self._resumed_at:
            self.metrics.write_again(event)  # where the run continues from a snapshot whose validation was cut off
        elif isinstance(event, TestDone):
            self.metrics.write_again(event)  # a script that was killed after its test makes it again
        else:
            self._before(event)
            self.metrics.add(event)

    def _before(self, event: Event) -> None:
        """Take away what will be reported again, where `event` says so."""
        if isinstance(event, RunStarted):
            self._resume(event)
        elif isinstance(event, Recovered) and event.rewound:
            self.metrics.resume_at(event.step, time=event.time)

    def _resume(self, event: RunStarted) -> None:
        self._resumed_at = event.step
        before = self.metrics.resume_at(event.step, time=event.time)
        if before.cut_off:
            self.metrics.add(
                Recovered(
                    step=event.step,
                    reason=before.cut_off,
                    how=f"from the snapshot of step {event.step}" if event.step else "from the start",
                    steps_redone=before.steps_redone,
                    samples_lost=before.samples_lost,
                    seconds_lost=before.seconds_lost,
                    time=event.time,
                )
            )

    def flush(self) -> None:
        """Have every line on the disk."""
        self.metrics.flush()

    def close(self) -> None:
        """Write what is left."""
        self.metrics.close()
