"""The listener that writes the summary, whoever is told first."""

from __future__ import annotations

from pathlib import Path

import pytest
from stories import BEGIN, ended, record, started, stepped, was_tested

from manyhosts.events import Event
from manyhosts.listeners.summary import WriteSummary
from manyhosts.records.metrics import MetricsFile
from manyhosts.records.summary import Summary


@pytest.mark.parametrize("metrics_first", [True, False])
def test_summary_holds_the_end_and_the_test_whether_the_metrics_were_told_before_or_not(
    tmp_path: Path, metrics_first: bool
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    shown: list[tuple[Summary, Event]] = []
    listener = WriteSummary(
        tmp_path / "summary.json", metrics, record(), lambda summary, event: shown.append((summary, event))
    )
    last = [ended(1, time=BEGIN + 3), was_tested(1, loss=0.25)]
    for event in [started(), stepped(1), *last]:
        for hear in (metrics.add, listener) if metrics_first else (listener, metrics.add):
            hear(event)
    metrics.close()
    assert [event for _, event in shown] == last
    assert [summary.test for summary, _ in shown] == [{}, {"loss": 0.25}]
    assert Summary.read(tmp_path / "summary.json") == shown[-1][0]
    assert (shown[-1][0].status, shown[-1][0].seconds) == ("completed", 3)
