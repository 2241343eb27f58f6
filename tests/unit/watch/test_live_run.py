"""A run as whoever watches it sees it: what comes, what is taken back, and when it is over."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_runs import HOSTS, add, make_run, story
from stories import BEGIN, ended, started, stepped, validated

from manyhosts.errors import ConfigError
from manyhosts.events import Recovered
from manyhosts.listeners.metrics_file import WriteMetrics
from manyhosts.records import run_lock, run_owner
from manyhosts.records.metrics import MetricsFile
from manyhosts.watch import live_run
from manyhosts.watch.live_run import LiveRun
from manyhosts.watch.screen import Lines


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "_SETTLE_S", 0.05)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[run_lock.RunLock]:
    lock = run_lock.take(tmp_path, run_lock.new_token(), launches=True)
    assert lock is not None
    yield lock
    lock.release()


def looked(live: LiveRun, until: Callable[[], bool]) -> LiveRun:
    deadline = time.monotonic() + 30
    while live.refresh() or not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return live


def test_run_is_watched_from_before_its_first_line_to_its_end(tmp_path: Path, locked: run_lock.RunLock) -> None:
    live = LiveRun(tmp_path)
    live.refresh()
    assert live.run.status == "starting"
    directory = make_run(tmp_path, [started(total_steps=8)], end=None, hosts=["here"])
    live.refresh()
    assert live.run.status == "running"
    assert live.run.script == "train.py"
    add(directory, stepped(1), stepped(2))
    live.refresh()
    assert live.history.steps == 2
    add(directory, ended(2))
    live.refresh()
    assert live.run.status == "completed"
    assert not live.is_over  # the script may test, or begin another training
    locked.release()
    looked(live, lambda: live.is_over)
    assert live.exit_code == 0
    live.close()


@pytest.mark.parametrize(("end", "code"), [("stopped early", 0), ("failed", 1), ("interrupted", 130), (None, 1)])
def test_exit_code_tells_how_the_run_has_ended(end: str | None, code: int, tmp_path: Path) -> None:
    directory = make_run(tmp_path, end=end)
    os.utime(directory.metrics, (BEGIN, BEGIN))
    live = LiveRun(tmp_path)
    looked(live, lambda: live.is_over)
    assert live.exit_code == code
    live.close()


def test_owner_that_was_killed_ends_the_watching(tmp_path: Path, locked: run_lock.RunLock) -> None:
    make_run(tmp_path, end=None)
    live = LiveRun(tmp_path)
    live.refresh()
    assert live.run.status == "running"
    owner = dataclasses.asdict(locked.owner) | {"began": "never"}  # the process has that number no more
    (tmp_path / run_lock.NAME).write_text(json.dumps(owner))
    looked(live, lambda: live.is_over)
    assert live.run.status == "broke off"
    assert live.exit_code == 1
    live.close()


def test_owner_on_another_machine_lives_while_it_touches_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_run(tmp_path, end=None)
    os.utime(directory.metrics, (BEGIN, BEGIN))
    elsewhere = dataclasses.replace(run_owner.Owner.here("token", launches=True), machine="another", host="far")
    lock = tmp_path / run_lock.NAME
    lock.write_text(json.dumps(dataclasses.asdict(elsewhere)))
    monkeypatch.setattr(run_lock, "SILENT_S", 0.4)
    live = LiveRun(tmp_path)
    for beat in range(8):
        os.utime(lock, (BEGIN + beat, BEGIN + beat))  # by a clock that is years behind
        live.refresh()
        time.sleep(0.1)
    assert not live.is_over
    looked(live, lambda: live.is_over)
    live.close()


def test_lines_that_were_taken_back_count_no_more_and_nothing_is_printed_twice(
    tmp_path: Path, locked: run_lock.RunLock
) -> None:
    make_run(tmp_path, [], end=None, pictures=False)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    tell = WriteMetrics(file)
    live, lines, printed = LiveRun(tmp_path), Lines(), []
    for event in [started(), *map(stepped, range(1, 6)), validated(5, loss=0.5)]:
        tell(event)
    file.flush()
    live.refresh()
    printed += lines.new(live)
    assert live.history.steps == 5
    tell(started(2, time=BEGIN + 20, resumed_from="snapshots/step-00000002"))  # continues from step 2
    tell(stepped(3, time=BEGIN + 21, loss=7.0))
    file.flush()
    live.refresh()
    printed += lines.new(live)
    assert live.begun_again == 1
    assert live.history.last["step"] == 3
    assert live.history.last["loss"] == 7.0
    assert live.history.validations == []
    assert live.history.restarts == 1
    text = "\n".join(printed)
    assert text.count("training begins") == 1
    assert text.count("the run broke off after step 5") == 1
    assert text.count("continues after step 2 from step-00000002") == 1
    file.close()
    live.close()


def test_rewound_run_is_read_anew(tmp_path: Path, locked: run_lock.RunLock) -> None:
    make_run(tmp_path, [], end=None, pictures=False)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    tell = WriteMetrics(file)
    live = LiveRun(tmp_path)
    for event in [started(), *map(stepped, range(1, 9))]:
        tell(event)
    file.flush()
    live.refresh()
    tell(
        Recovered(
            step=4, reason="the loss is nan", how="from the snapshot", steps_redone=4, seconds_lost=4.0,
            time=BEGIN + 9, rewound=True,
        )
    )  # fmt: skip
    file.flush()
    live.refresh()
    assert live.history.last["step"] == 4
    assert live.history.steps == 4
    file.close()
    live.close()


def test_progress_is_printed_now_and_then(tmp_path: Path, locked: run_lock.RunLock) -> None:
    directory = make_run(tmp_path, [started(total_steps=8)], end=None, hosts=["here"])
    live, lines = LiveRun(tmp_path), Lines()
    lines.EVERY_S = 0.0  # type: ignore[misc]
    live.refresh()
    lines.new(live)
    add(directory, *map(stepped, range(1, 5)))
    live.refresh()
    [line] = lines.new(live)
    assert "50 % done, step 4 of 8, epoch 1 of 2, training loss 0.2500, speed 8 samples/s, 0:04 left" in line
    live.close()


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither a run nor a study"):
        LiveRun(tmp_path)


def test_watching_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path, list(story()), hosts=HOSTS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    live = LiveRun(tmp_path)
    looked(live, lambda: live.is_over)
    live.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
