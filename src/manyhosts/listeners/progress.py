"""Shows the person who started the run how far it is, a few times a second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from manyhosts.events import (
    EpochDone,
    Event,
    Note,
    Recovered,
    RunEnded,
    RunStarted,
    Slowdown,
    SnapshotSkipped,
    StepDone,
    ValidationDone,
)
from manyhosts.listeners.figures import amount, figure, figures
from manyhosts.listeners.paint import paint
from manyhosts.listeners.terminal import Fields
from manyhosts.listeners.voice import Voice
from manyhosts.records.background_writer import BackgroundWriter
from manyhosts.records.run_record import RunRecord
from manyhosts.units import Duration, seconds_in_words

_EVERY_S = 0.2
_RECENT_S = 5.0
"""The speed that is shown is that of the last few seconds."""


class ShowProgress:
    """Draws the live line, and says what deserves a line that stays: the start, each validation, what went wrong."""

    def __init__(
        self,
        voice: Voice,
        record: RunRecord,
        folder: Path,
        *,
        restarts: int = 0,
        started: RunStarted | None = None,
    ) -> None:
        """`restarts` counts those that came before this process; `started` is known where another one showed it."""
        self._voice, self._record, self._folder = voice, record, folder
        self._seconds = Duration.parse(record.settings["duration"]).seconds
        self._restarts = restarts
        self._start = started
        self._first: StepDone | None = None
        self._recent: deque[tuple[float, int, float]] = deque()
        """Of each report of new steps: when, their samples, and the seconds they took."""
        self._epoch: EpochDone | None = None
        self._loss_since = self._weight_since = 0.0
        """Of the steps since the last line that reported their loss."""
        self._background_writer: BackgroundWriter[Event] = BackgroundWriter(
            self._show_events, every_s=_EVERY_S, name="shows progress"
        )

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        self._background_writer.put(event)
        if isinstance(event, RunEnded):
            self._background_writer.flush()  # so that the last screen comes after everything else

    def flush(self) -> None:
        """Show what there is to show."""
        self._background_writer.flush()

    def close(self) -> None:
        """Show what is left and give the terminal back. Safe to call twice."""
        self._background_writer.close()
        self._voice.close()

    def _show_events(self, events: Sequence[Event]) -> None:
        new_steps: list[StepDone] = []
        for event in events:
            if self._epoch is not None and not isinstance(event, ValidationDone):
                self._say_epoch(None)
            if isinstance(event, StepDone):
                new_steps.append(event)
                if weight := _weight(event):
                    self._loss_since += event.loss * weight
                    self._weight_since += weight
            else:
                self._say(event)
        if new_steps:
            self._voice.progress(self._fields(new_steps))
        if events and isinstance(events[-1], RunEnded):
            self._voice.progress({"ended": True})

    def _say(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start, self._first = event, None
                self._recent.clear()
                self._voice.say(self._headline(event))
            case EpochDone():
                self._epoch = event  # said together with its validation, which comes next
            case ValidationDone():
                self._say_epoch(event)
            case SnapshotSkipped():
                self._voice.say(paint(f"snapshot {event.path.name} is left out: {event.reason}", "yellow"))
            case Recovered():
                self._restarts += 1
                if event.rewound:
                    self._loss_since = self._weight_since = 0.0
                cost = f"{amount(event.steps_redone, 'step')} redone, {seconds_in_words(event.seconds_lost)} lost"
                also = f"; lost with it: {event.lost}" if event.lost else ""
                self._voice.say(paint(f"continued {event.how} after {event.reason}: {cost}{also}", "yellow"))
            case Slowdown():
                self._voice.say(paint(event.text, "yellow") if event.factor > 1 else event.text)
            case Note():
                self._voice.say(event.text)

    def _headline(self, event: RunStarted) -> str:
        record = self._record
        settings = record.settings
        batch = f"batch {settings['batch_size']}" if settings.get("batch_size") else ""
        if settings.get("batch_size_per_worker"):
            batch = f"batch {settings['batch_size_per_worker']} per worker"
        workers = amount(record.workers, "worker") + (f" on {len(record.hosts)} hosts" if len(record.hosts) > 1 else "")
        words = [
            Path(record.script).name,
            f"{workers} ({record.strategy})",
            batch,
            str(Duration.parse(settings["duration"])),
        ]
        lines = [f"{paint(words[0], 'bold')}  " + " · ".join(word for word in words[1:] if word)]
        if event.step:
            source = f" ({Path(event.resumed_from).name})" if event.resumed_from else ""
            lines.append(f"continues after step {event.step}{source}")
        return "\n".join(lines)

    def _say_epoch(self, validation: ValidationDone | None) -> None:
        """One line for an epoch and what its validation found; either may be missing."""
        epoch, self._epoch = self._epoch, None
        news = validation or epoch
        if news is None:
            return
        if epoch is not None:
            epochs = self._epochs()
            done = str(epoch.epoch + 1).rjust(len(str(epochs or "")))
            parts = [f"epoch {done}/{epochs}" if epochs else f"epoch {done}", figure("loss", epoch.train_loss)]
        else:
            parts = [f"step {news.step}"]
            if self._weight_since:
                parts.append(figure("loss", self._loss_since / self._weight_since))
        self._loss_since = self._weight_since = 0.0
        if validation is not None:
            best = paint("  ★ best", "green") if validation.best else ""
            parts.append(f"validation: {figures(validation.values, ', ')}{best}")
        self._voice.say("   ".join(parts))

    def _fields(self, new_steps: Sequence[StepDone]) -> Fields:
        last = new_steps[-1]
        self._first = self._first or new_steps[0]
        samples, seconds = sum(step.samples for step in new_steps), sum(step.timing.total for step in new_steps)
        self._recent.append((last.time, samples, seconds))
        while self._recent[0][0] < last.time - _RECENT_S and len(self._recent) > 1:
            self._recent.popleft()
        recent_samples, recent_seconds = (sum(column) for column in list(zip(*self._recent, strict=True))[1:])
        left = self._seconds_left(last)
        fields: dict[str, float | int | None] = {
            "epoch": last.epoch + 1,
            "epochs": self._epochs(),
            "step": last.step,
            "total_steps": self._start.total_steps if self._start else None,
            "loss": _mean_loss(new_steps),
            "lr": last.lr,
            "samples_per_second": recent_samples / recent_seconds if recent_seconds > 0 else None,
            "seconds_left": left,
            "fraction": self._fraction(last, left),
            "restarts": self._restarts,
        }
        waited = sum(step.timing.communication_exposed for step in new_steps)
        if self._record.workers > 1 and seconds > 0:
            fields["waiting"] = waited / seconds
        return fields

    def _epochs(self) -> int | None:
        start = self._start
        if start is None or not start.total_steps or not start.steps_per_epoch:
            return None
        done = math.floor(start.epochs_done + 1e-6)  # the batch, and so the steps of an epoch, may have changed
        of_this_one = math.floor((start.epochs_done - done) * start.steps_per_epoch + 1e-6)  # its last step is smaller
        return done + math.ceil((of_this_one + start.total_steps - start.step) / start.steps_per_epoch)

    def _seconds_left(self, last: StepDone) -> float | None:
        """By whichever limit comes first; validations between the steps count as they did so far."""
        start, first = self._start, self._first
        if start is None or first is None:
            return None
        left = []
        if start.total_steps and last.step > first.step:
            left.append((start.total_steps - last.step) * (last.time - first.time) / (last.step - first.step))
        if self._seconds is not None:
            left.append(max(0.0, start.time - start.seconds_done + self._seconds - last.time))
        return min(left, default=None)

    def _fraction(self, last: StepDone, left: float | None) -> float | None:
        total = self._start.total_steps if self._start else None
        by_steps = last.step / total if total else None
        if self._seconds is None or self._start is None or left is None:
            return by_steps
        spent = last.time - self._start.time + self._start.seconds_done
        return max(spent / (spent + left) if spent + left > 0 else 0.0, by_steps or 0.0)


def _weight(step: StepDone) -> float:
    """What the batch of a step counts in a mean of losses; 0 where the step was left out."""
    if not math.isfinite(step.loss):
        return 0.0
    return step.samples if step.weight is None else step.weight


def _mean_loss(steps: Sequence[StepDone]) -> float:
    """By what the batches count; of steps that were left out only where there are no others."""
    known = [(each.loss, weight) for each in steps if (weight := _weight(each))]
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if known else steps[-1].loss
