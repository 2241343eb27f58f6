"""The summary against sums done by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from stories import BEGIN, ended, epoch_done, record, snapshot_saved, started, stepped, validated, was_tested

from manyhosts.errors import ConfigError
from manyhosts.events import CompressionChosen, Event, Recovered
from manyhosts.records.metrics import line_of
from manyhosts.records.summary import Summary, percentile, summarise

FIELDS = (
    "status reason workers nodes strategy compression precision global_batch lr steps epochs steps_per_epoch "
    "samples_per_second epoch_seconds step_seconds bytes_sent_per_step network compression_reason restarts "
    "steps_redone samples_lost seconds_lost train_loss validation best test weights_sha256 seconds "
    "worker_seconds schema_version"
)

ALL: list[Event] = [
    started(),
    *(stepped(step, loss=float(step), lr=0.1 * step, samples=8) for step in (1, 2, 3)),
    stepped(4, loss=4.0, samples=4, seconds=3.0, bytes_sent=5000),
    epoch_done(4),
    validated(4, accuracy=0.8, loss=0.6),
    *(stepped(step, loss=float(step)) for step in (5, 6)),
    stepped(7, loss=10.0, samples=4, lr=0.05),
    validated(7, accuracy=0.7, loss=0.5, best=False),
    ended(7, status="stopped early", reason="accuracy is no better", time=BEGIN + 20),
]


def summary_of(*events: Event, **settings: object) -> Summary:
    return summarise([line_of(event) for event in events], record(**settings))


def test_fields_are_those_of_the_design_and_no_more() -> None:
    assert [entry.name for entry in dataclasses.fields(Summary)] == FIELDS.split()


def test_every_number_is_the_one_reckoned_by_hand() -> None:
    summary = summary_of(*ALL)
    assert summary == Summary(
        status="stopped early",
        reason="accuracy is no better",
        workers=2,
        nodes=1,
        strategy="ddp",
        compression="none",
        precision="fp32",
        global_batch=8,
        lr=pytest.approx(0.3),  # the highest
        steps=7,
        epochs=1,
        steps_per_epoch=4,
        samples_per_second=pytest.approx(48 / 9),  # 3·8 + 4 + 2·8 + 4 samples; six steps of 1 s, one of 3 s
        epoch_seconds=[6.0],
        step_seconds={
            "median": 1.0,
            "p95": pytest.approx(2.4),  # 95 % of the way from the first to the seventh: 1 + 0.7 · 2
            "compute": pytest.approx(9 * 0.5 / 7),
            "communication_exposed": pytest.approx(9 * 0.25 / 7),
            "data_wait": pytest.approx(9 * 0.125 / 7),
            "snapshot_stall": 0.0,
            "other": pytest.approx(9 * 0.125 / 7),
        },
        bytes_sent_per_step=pytest.approx((6 * 1000 + 5000) / 7),
        restarts=0,
        steps_redone=0,
        seconds_lost=0.0,
        train_loss=pytest.approx((5 * 8 + 6 * 8 + 10 * 4) / 20),  # of the epoch that was begun
        validation={"accuracy": 0.7, "loss": 0.5},
        best={"metric": "accuracy", "value": 0.8, "step": 4},
        test={},
        weights_sha256="ab" * 32,
        seconds=20.0,
    )


def test_parts_of_a_step_add_up_to_its_mean() -> None:
    step_seconds = summary_of(*ALL).step_seconds
    parts = [value for name, value in step_seconds.items() if name not in ("median", "p95")]
    assert sum(parts) == pytest.approx(9 / 7)


def test_summary_of_a_run_that_broke_off_is_that_of_a_whole_one_but_for_what_it_cost() -> None:
    again = BEGIN + 100
    broken: list[Event] = [
        *ALL[:7],  # to the epoch's end, after step 4
        Recovered(step=4, reason="killed", how="from a snapshot", steps_redone=2, seconds_lost=96, time=again),
        started(4, time=again),
        *(dataclasses.replace(event, time=event.time + 96) for event in ALL[7:]),
    ]
    whole, summary = summary_of(*ALL), summary_of(*broken)
    assert (summary.restarts, summary.steps_redone, summary.seconds_lost) == (1, 2, 96)
    assert summary.seconds == whole.seconds + 96
    same = {"restarts": 0, "steps_redone": 0, "seconds_lost": 0.0, "seconds": whole.seconds}
    assert dataclasses.replace(summary, **same) == whole


def test_time_between_an_orderly_end_and_going_on_is_not_counted() -> None:
    summary = summary_of(
        started(),
        stepped(1),
        ended(1, status="interrupted"),
        started(1, time=BEGIN + 1000),
        stepped(2, time=BEGIN + 1001),
        ended(2, time=BEGIN + 1002),
        was_tested(1500, loss=0.5),
    )
    assert summary.seconds == 1 + 2
    assert (summary.status, summary.restarts) == ("completed", 0)


def test_run_that_is_asked_for_again_when_it_is_over_has_trained_no_longer() -> None:
    once = [started(), stepped(1), ended(1)]
    again = [started(1, time=BEGIN + 1000), ended(1, time=BEGIN + 1007)]
    assert summary_of(*once, *again, *again).seconds == summary_of(*once).seconds


def test_what_was_written_beside_the_loop_and_told_late_turns_no_clock_back() -> None:
    late = snapshot_saved(1, time=BEGIN + 1)
    summary = summary_of(started(), stepped(1), stepped(5), late, ended(5, time=BEGIN + 6))
    assert summary.seconds == 6


def test_test_is_added_to_what_the_run_was() -> None:
    summary = summary_of(*ALL, was_tested(7, loss=0.4, accuracy=0.75))
    assert summary.test == {"loss": 0.4, "accuracy": 0.75}
    assert dataclasses.replace(summary, test={}) == summary_of(*ALL)


def test_test_without_training_has_a_summary_too() -> None:
    summary = summary_of(was_tested(0, loss=0.4))
    assert (summary.status, summary.steps, summary.test) == ("completed", 0, {"loss": 0.4})
    assert (summary.train_loss, summary.samples_per_second, summary.step_seconds) == (None, None, {})


@pytest.mark.parametrize(
    ("settings", "batch"),
    [({"batch_size": 16}, 16), ({"batch_size": None, "batch_size_per_worker": 2, "virtual_workers": 4}, 8)],
)
def test_global_batch_is_what_was_set_or_what_the_steps_had_of_all_workers(settings: dict, batch: int) -> None:
    assert summary_of(*ALL, **settings).global_batch == batch


def test_best_is_by_the_loss_where_nobody_says_otherwise() -> None:
    assert summary_of(*ALL, early_stopping=None).best == {"metric": "loss", "value": 0.6, "step": 4}


def test_compression_is_the_strategys() -> None:
    lines = [line_of(event) for event in ALL]
    compressed = dataclasses.replace(record(), settings={**record().settings, "strategy": {"compression": "int8"}})
    assert summarise(lines, compressed).compression == "int8"


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (50, 2.5), (95, 3.85), (100, 4), (1, 1.03)], ids=lambda number: str(number)
)
def test_percentile_is_linear_between_neighbours(percent: float, value: float) -> None:
    assert percentile([1, 2, 3, 4], percent) == pytest.approx(value)
    assert percentile([7], percent) == 7


def test_step_behind_the_end_is_of_a_worker_that_had_come_farther_than_who_told_it() -> None:
    events = [started(), stepped(1), ended(1, status="failed", reason="a sample"), stepped(2), snapshot_saved(2)]
    found = summarise(map(line_of, events), record())
    assert (found.status, found.reason, found.steps, found.weights_sha256) == ("failed", "a sample", 2, "")


def test_summary_is_read_back_also_with_a_loss_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    whole = summary_of(*ALL)
    whole.write(path)
    assert Summary.read(path) == whole
    broken = dataclasses.replace(whole, train_loss=math.inf, validation={"loss": math.nan})
    broken.write(path)
    assert "NaN" in path.read_text()
    read = Summary.read(path)
    assert read.train_loss == math.inf
    assert math.isnan(read.validation["loss"])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"schema_version": 2}, "schema version 2"), ({"steps": None}, "lacks steps")],
    ids=["newer", "field missing"],
)
def test_summary_that_cannot_be_understood_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    path = tmp_path / "summary.json"
    summary_of(*ALL).write(path)
    fields = {**json.loads(path.read_text()), **change}
    if fields["steps"] is None:
        del fields["steps"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=words):
        Summary.read(path)


def test_effective_bandwidth_is_what_was_sent_over_the_time_it_was_under_way() -> None:
    events = [started(), *(stepped(step, bytes_sent=3000, exchange_seconds=0.5) for step in (1, 2)), stepped(3)]
    assert summary_of(*events).network == {"effective_bandwidth": 6000.0}


def test_summary_names_what_auto_took_and_why() -> None:
    chosen = CompressionChosen(step=6, compression="int8", why="slow", bandwidth=2e6, latency=3e-4, time=BEGIN + 6)
    found = summary_of(started(), *(stepped(step) for step in range(1, 7)), chosen)
    assert (found.compression, found.compression_reason) == ("int8", "slow")
    assert found.network == {"probed_bandwidth": 2e6, "probed_latency": 3e-4}


def test_summary_that_was_written_before_there_was_a_network_in_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary_of(*ALL).write(path)
    fields = json.loads(path.read_text())
    del fields["network"], fields["compression_reason"]
    path.write_text(json.dumps(fields))
    assert Summary.read(path).network == {}


def test_time_of_workers_is_that_of_those_that_there_were() -> None:
    first = [started(workers=8), stepped(1), ended(1, status="interrupted", time=BEGIN + 3600)]
    later = BEGIN + 9000
    lost = Recovered(
        step=2,
        reason="",
        how="",
        steps_redone=0,
        seconds_lost=0.0,
        time=later + 1800,
        workers=1,
        lost="",
        samples_lost=0,
    )
    second = [started(1, time=later, workers=2), stepped(2, time=later + 1), lost, ended(2, time=later + 3600)]
    assert summary_of(*first, *second).worker_seconds == pytest.approx(8 * 3600 + 2 * 1800 + 1800)
    old = [dataclasses.replace(each, workers=0) if isinstance(each, type(started())) else each for each in first]
    assert summary_of(*old).worker_seconds is None
