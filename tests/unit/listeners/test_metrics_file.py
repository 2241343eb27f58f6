"""The listener that writes the metrics notices what went before."""

from __future__ import annotations

from pathlib import Path

from stories import BEGIN, ended, snapshot_saved, started, stepped

from manyhosts.events import Event
from manyhosts.listeners.metrics_file import WriteMetrics
from manyhosts.records import metrics
from manyhosts.records.metrics import MetricsFile


def listen(path: Path, *events: Event) -> None:
    listener = WriteMetrics(MetricsFile(path))
    for event in events:
        listener(event)
    listener.close()


def reported(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in metrics.read(path)]


def test_first_run_tells_no_restart(tmp_path: Path) -> None:
    listen(tmp_path / "m", started(), stepped(1), ended(1))
    assert reported(tmp_path / "m") == [("start", 0), ("step", 1), ("end", 1)]


def test_run_that_goes_on_where_another_broke_off_tells_what_that_cost(tmp_path: Path) -> None:
    path = tmp_path / "m"
    listen(path, started(), stepped(1), stepped(2), snapshot_saved(2), stepped(3), stepped(4))
    listen(path, started(2, time=BEGIN + 50), stepped(3, time=BEGIN + 51))
    before = [("start", 0), ("step", 1), ("step", 2), ("snapshot", 2)]
    assert reported(path) == [*before, ("restart", 2), ("start", 2), ("step", 3)]
    [restart] = [line for line in metrics.read(path) if line["event"] == "restart"]
    assert (restart["steps_redone"], restart["seconds_lost"]) == (2, 48)
    assert restart["reason"] == "the run broke off after step 4"
    assert restart["how"] == "from the snapshot of step 2"


def test_run_that_goes_on_after_an_orderly_end_tells_no_restart(tmp_path: Path) -> None:
    path = tmp_path / "m"
    listen(path, started(), stepped(1), ended(1, status="interrupted"))
    listen(path, started(1, time=BEGIN + 50), stepped(2), ended(2))
    assert [word for word, _ in reported(path)] == ["start", "step", "end", "start", "step", "end"]


def test_two_runs_of_one_process_are_one_story(tmp_path: Path) -> None:
    path = tmp_path / "m"
    listen(path, started(), stepped(1), ended(1), started(1), stepped(2), ended(2))
    assert [word for word, _ in reported(path)] == ["start", "step", "end", "start", "step", "end"]
