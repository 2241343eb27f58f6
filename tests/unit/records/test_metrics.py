"""The metrics of a run: every step once, on disk within a second, whatever was killed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stories import BEGIN, ended, epoch_done, snapshot_saved, started, stepped, validated, was_tested

from manyhosts.events import (
    CompressionChosen,
    Event,
    LossLooked,
    Note,
    Recovered,
    Slowdown,
    SnapshotCopied,
    SnapshotSkipped,
    WorkersTimed,
    WorkerTimes,
)
from manyhosts.records import metrics
from manyhosts.records.metrics import MetricsFile, line_of, text_of

WENT_ON = Recovered(step=4, reason="rank 1 died", how="without it", steps_redone=1, seconds_lost=0.5, time=BEGIN)
EVERY_KIND: list[Event] = [
    started(),
    stepped(1),
    epoch_done(4),
    validated(4, loss=0.5, accuracy=0.9),
    snapshot_saved(4),
    SnapshotCopied(step=4, address="s3://bucket/run/step-00000004.0123456789ab", bytes=9, seconds=0.1, time=BEGIN),
    SnapshotSkipped(step=4, path=Path("snapshots/step-4"), reason="one bit is wrong", time=BEGIN),
    WENT_ON,
    Note(text="said once", step=4, time=BEGIN),
    LossLooked(outcome="not tried", text="a stream", step=4, time=BEGIN),
    Slowdown(step=5, text="host b is slow", what="worker", who="host b", factor=2.5, time=BEGIN, cause="data"),
    WorkersTimed(
        step=5,
        steps=3,
        workers=(
            WorkerTimes(
                rank=0,
                host="a",
                samples=8,
                total=0.5,
                compute=0.25,
                communication_exposed=0.125,
                data_wait=0.0625,
                snapshot_stall=0.0625,
            ),
        ),
        communication=0.125,
        time=BEGIN,
    ),
    CompressionChosen(step=5, compression="int8", why="slow", bandwidth=1e6, latency=1e-4, time=BEGIN),
    ended(4),
    was_tested(4, loss=0.4),
]


def write(path: Path, *events: Event) -> None:
    file = MetricsFile(path)
    for event in events:
        file.add(event)
    file.close()


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in metrics.read(path) if line["event"] == "step"]


def test_every_kind_of_event_has_its_line(tmp_path: Path) -> None:
    assert {type(event) for event in EVERY_KIND} == set(get_args(Event))
    write(tmp_path / "m", *EVERY_KIND)
    lines = metrics.read(tmp_path / "m")
    words = ["start", "step", "epoch", "validation", "snapshot", "copied", "skipped", "restart", "note"]
    words += ["look", "slow", "workers", "compression", "end", "test"]
    assert [line["event"] for line in lines] == words
    for line in lines:
        assert isinstance(line["step"], int)
        assert line["time"] >= BEGIN


def test_line_of_a_step_holds_what_is_promised() -> None:
    line = json.loads(text_of(stepped(5, loss=0.25, gradient_norm=1.5)))
    where = {"event": "step", "step": 5, "epoch": 1, "time": BEGIN + 5}
    numbers = {"loss": 0.25, "lr": 0.1, "samples": 8, "gradient_norm": 1.5, "bytes_sent": 1000}
    parts = {"compute": 0.5, "communication_exposed": 0.25, "data_wait": 0.125, "snapshot_stall": 0.0, "other": 0.125}
    assert line == where | numbers | {"seconds": 1.0, "exchange_seconds": 0.0} | parts


def test_values_of_the_user_are_kept_apart_from_our_names() -> None:
    line = json.loads(text_of(stepped(1, values={"seconds": 7.0, "perplexity": np.float32(2.5)})))
    assert (line["seconds"], line["values"]) == (1.0, {"seconds": 7.0, "perplexity": 2.5})


@given(
    loss=st.floats(),
    lr=st.floats(),
    norm=st.none() | st.floats(),
    seconds=st.floats(0, 1e6),
    step=st.integers(1, 10**12),
)
@example(loss=0.5, lr=math.inf, norm=None, seconds=1.0, step=1)
@example(loss=math.nan, lr=0.1, norm=1.0, seconds=1.0, step=1)
@example(loss=0.5, lr=0.1, norm=-math.inf, seconds=1.0, step=1)
@example(loss=math.inf, lr=0.1, norm=-math.inf, seconds=1.0, step=1)
def test_fast_way_to_write_a_step_says_what_the_general_way_says(
    loss: float, lr: float, norm: float | None, seconds: float, step: int
) -> None:
    event = stepped(step, loss=loss, lr=lr, gradient_norm=norm, seconds=seconds)
    assert json.loads(text_of(event)) == json.loads(json.dumps(line_of(event), allow_nan=False))


def test_numpy_numbers_are_written_as_numbers() -> None:
    line = json.loads(text_of(stepped(1, loss=np.float32(0.5), lr=np.float64(0.1), gradient_norm=np.float64(2))))
    assert (line["loss"], line["lr"], line["gradient_norm"]) == (0.5, 0.1, 2.0)


def test_numbers_that_are_none_are_valid_json_and_come_back(tmp_path: Path) -> None:
    write(
        tmp_path / "m",
        stepped(1, loss=math.nan),
        stepped(2, loss=math.inf, gradient_norm=-math.inf),
        validated(2, loss=math.nan),
        Note(text="NaN", step=2, time=BEGIN),
    )

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for text in (tmp_path / "m").read_text().splitlines():
        json.loads(text, parse_constant=refuse)
    first, second, validation, note = metrics.read(tmp_path / "m")
    assert math.isnan(first["loss"])
    assert (second["loss"], second["gradient_norm"]) == (math.inf, -math.inf)
    assert math.isnan(validation["values"]["loss"])
    assert note["text"] == "NaN"


def test_resume_takes_away_what_will_be_told_again_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "m"
    recovered = Recovered(step=6, reason="rank 1 died", how="without it", steps_redone=0, seconds_lost=0, time=BEGIN)
    write(
        path,
        started(),
        *(stepped(step) for step in (1, 2, 3, 4)),
        epoch_done(4),
        validated(4, loss=0.5),
        snapshot_saved(4),
        *(stepped(step) for step in (5, 6)),
        Note(text="said once", step=6, time=BEGIN),
        recovered,
        *(stepped(step) for step in (7, 8)),
        epoch_done(8),
        validated(8, loss=0.4),
        snapshot_saved(8),
        stepped(9),
    )
    file = MetricsFile(path)
    resumed = file.resume_at(4, time=BEGIN + 20)
    file.close()
    left = [(line["event"], line["step"]) for line in metrics.read(path)]
    kept = [("epoch", 4), ("validation", 4), ("snapshot", 4), ("note", 6), ("restart", 6)]
    assert left == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), *kept]
    assert resumed.steps_redone == 5
    assert resumed.seconds_lost == 16  # step 4 ended at BEGIN + 4
    assert "after step 9" in resumed.cut_off


def test_run_that_broke_off_before_its_first_snapshot_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, started(), stepped(1), stepped(2))
    file = MetricsFile(path)
    resumed = file.resume_at(0, time=BEGIN + 10)
    file.close()
    assert steps_in(path) == []
    assert (resumed.steps_redone, resumed.seconds_lost) == (2, 10)


def test_run_that_broke_off_twice_counts_no_second_twice(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, started(), stepped(1), stepped(2))
    write_second = MetricsFile(path)
    assert write_second.resume_at(1, time=BEGIN + 10).seconds_lost == 9
    write_second.add(started(1, time=BEGIN + 10))
    write_second.add(stepped(2, time=BEGIN + 11))
    write_second.close()
    third = MetricsFile(path)
    assert third.resume_at(1, time=BEGIN + 30).seconds_lost == 20  # since the second start, not since step 1
    third.close()


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], ""),
        ([started(), stepped(1), ended(1)], ""),
        ([started(), stepped(1), ended(1, status="interrupted")], ""),
        ([started(), stepped(1), ended(1), was_tested(1, loss=0.5)], ""),
        ([started(), stepped(1), ended(1, status="failed", reason="the loss is nan")], "the loss is nan"),
        ([started(), stepped(1)], "after step 1"),
        ([started()], "after step 0"),
        ([started(), stepped(1), ended(1), started(1)], "after step 1"),
    ],
    ids=["no run", "completed", "interrupted", "was_tested", "failed", "killed", "killed at once", "killed later"],
)
def test_run_that_broke_off_is_told_from_one_that_ended(tmp_path: Path, events: list[Event], words: str) -> None:
    path = tmp_path / "m"
    write(path, *events)
    file = MetricsFile(path)
    cut_off = file.resume_at(1 if len(events) > 1 else 0, time=BEGIN + 10).cut_off
    file.close()
    assert bool(cut_off) == bool(words)
    assert words in cut_off


@settings(max_examples=40)
@given(kills=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 120)), max_size=5))
def test_however_often_a_run_is_killed_every_step_stands_there_once(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("run") / "m"
    snapshot = 0
    for steps, back, torn in kills:
        file = MetricsFile(path)
        file.resume_at(snapshot, time=BEGIN)
        file.add(started(snapshot))
        for step in range(snapshot + 1, snapshot + steps + 1):
            file.add(stepped(step))
            if step % 4 == 0:
                file.add(epoch_done(step))
                file.add(validated(step, loss=0.5))
        file.close()
        with path.open("a") as end:
            end.write(text_of(stepped(snapshot + steps + 1))[:torn].rstrip("\n"))
        snapshot = max(snapshot, snapshot + steps - back)
    file = MetricsFile(path)
    file.resume_at(snapshot, time=BEGIN)
    for step in range(snapshot + 1, snapshot + 5):
        file.add(stepped(step))
    file.close()
    assert steps_in(path) == list(range(1, snapshot + 5))
    for kind in ("epoch", "validation"):
        reported = [line["step"] for line in metrics.read(path) if line["event"] == kind]
        assert len(reported) == len(set(reported))


RUN = """
import sys, time
from pathlib import Path
from stories import started, stepped
from manyhosts.records.metrics import MetricsFile

file = MetricsFile(Path(sys.argv[1]))
file.add(started())
step = 0
while True:
    step += 1
    file.add(stepped(step, time=time.time()))
    print(step, time.monotonic(), flush=True)
    time.sleep(0.002)
"""


def test_killed_process_leaves_every_step_that_is_older_than_a_second(tmp_path: Path) -> None:
    path = tmp_path / "m"
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.7 + random.random())
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        *complete, _ = process.stdout.read().split("\n")  # the last one is empty, or torn
        reported = [line.split() for line in complete]
    old = [int(step) for step, when in reported if float(when) < killed - 1.0]
    steps = steps_in(path)
    assert steps == list(range(1, len(steps) + 1))
    assert old, "the process told no step that was older than a second"
    assert steps[-1] >= old[-1]
    file = MetricsFile(path)
    file.resume_at(old[-1], time=time.time())
    file.add(stepped(old[-1] + 1))
    file.close()
    assert steps_in(path) == list(range(1, old[-1] + 2))


@pytest.mark.parametrize(
    ("events", "is_told"),
    [
        ([started(), stepped(1)], False),
        ([started(), stepped(1), ended(1)], True),
        ([started(), stepped(1), ended(1), snapshot_saved(1)], True),
        ([started(), stepped(1), ended(1), started(1)], False),
        ([started(), stepped(1), ended(1), replace(WENT_ON, step=1)], False),
    ],
)
def test_who_takes_a_file_over_knows_whether_the_end_is_told(
    tmp_path: Path, events: list[Event], is_told: bool
) -> None:
    write(tmp_path / "metrics.jsonl", *events)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reported = file.take_over()
    file.close()
    assert reported.end is is_told
    assert (reported(stepped(1)), reported(stepped(2))) == (True, False)


def test_flush_has_every_line_on_the_disk(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")
    for step in range(1, 50):
        file.add(stepped(step))
        if step % 7 == 0:
            file.flush()
            assert steps_in(tmp_path / "m") == list(range(1, step + 1))
    file.close()
