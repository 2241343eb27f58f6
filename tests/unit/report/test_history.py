"""What is made of the lines of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from made_runs import HOSTS, make_run, story, timed
from stories import BEGIN, ended, started, stepped, validated

from manyhosts.errors import ConfigError
from manyhosts.events import Event
from manyhosts.records.metrics import line_of, stream
from manyhosts.records.summary import PARTS
from manyhosts.report.history import History
from manyhosts.report.windows import Spent, Who, Windows, of_workers


def heard(events: Iterable[Event]) -> History:
    history = History()
    for event in events:
        history.hear(line_of(event))
    return history


def test_times_of_all_workers_add_up_over_windows_of_any_length() -> None:
    windows = Windows()
    for step in range(1, 5 * Windows.MOST + 4):
        windows.add(step, {Who(rank): Spent(2, dict.fromkeys(PARTS, 0.5 * (rank + 1))) for rank in range(3)})
    assert len(windows.blocks()) <= Windows.MOST
    assert [window.last for window in windows.blocks()] == sorted({window.last for window in windows.blocks()})
    assert windows.blocks()[-1].last == 5 * Windows.MOST + 3
    for rank, (who, spent) in enumerate(windows.total().items()):
        assert who.rank == rank
        assert spent.steps == 2 * (5 * Windows.MOST + 3)
        assert spent.step_s == pytest.approx(len(PARTS) * 0.25 * (rank + 1))


def test_workers_lines_take_the_place_of_the_leaders_times() -> None:
    alone = heard(event for event in story(hosts=["here"]))
    assert [str(who) for who in alone.times.total()] == ["rank 0"]
    every = heard(story())
    assert [who.host for who in every.times.total()] == list(HOSTS)
    slow = max(every.times.total().items(), key=lambda each: each[1].own_s)
    assert slow[0] == Who(2, "beyond")
    total = every.times.total()[Who(0, "here")]
    assert total.step_s == pytest.approx(1.0)  # what no part has is other
    assert heard([timed(6, 6)]).times.total()[Who(1, "there")].seconds["compute"] == pytest.approx(6 * 0.32)


def test_clock_stands_between_an_end_and_going_on() -> None:
    first = [started(), *map(stepped, range(1, 5)), ended(4, status="interrupted", time=BEGIN + 4)]
    later = BEGIN + 1000
    second = [started(4, time=later), stepped(5, time=later + 1), validated(5, time=later + 2, loss=0.5)]
    history = heard([*first, *second])
    assert history.seconds == pytest.approx(6.0)
    assert history.validations == [(pytest.approx(6.0), 5, {"loss": 0.5})]
    assert [period.status for period in history.periods] == ["interrupted", ""]
    assert not history.end


def test_progress_is_known_by_steps_or_by_time() -> None:
    history = heard([started(total_steps=8), *map(stepped, range(1, 5))])
    assert history.fraction(None) == pytest.approx(0.5)
    assert history.seconds_left(None) == pytest.approx(4.0)
    by_time = heard([started(total_steps=None), *map(stepped, range(1, 5))])
    assert by_time.fraction(None) is None
    assert by_time.fraction(16.0) == pytest.approx(0.25)
    assert by_time.seconds_left(16.0) == pytest.approx(12.0)
    assert History().fraction(None) is None
    assert History().seconds_left(None) is None


def test_a_line_of_an_unknown_kind_changes_nothing() -> None:
    history = heard(story())
    reported = history.reported
    history.hear({"event": "of the future", "step": 3, "time": BEGIN + 200})
    history.hear({"event": "hear"})
    history.hear({})
    assert history.reported == reported


def test_long_run_is_kept_in_few_points(tmp_path: Path) -> None:
    events = [started(total_steps=5000), *(stepped(step, seconds=0.001) for step in range(1, 5001))]
    history = History()
    for line in stream(make_run(tmp_path, events, end=None, pictures=False).metrics):
        history.hear(line)
    assert history.steps == 5000
    assert all(len(each.blocks()) <= 257 for each in (history.loss, history.rate, history.speed))
    assert len(history.rank_0.blocks()) <= Windows.MOST


def test_line_that_lacks_something_is_told_in_a_sentence() -> None:
    line = {name: value for name, value in line_of(stepped(1)).items() if name != "lr"}
    with pytest.raises(ConfigError, match="a line 'step' has no 'lr'"):
        History().hear(line)


def test_worker_that_has_the_rank_of_a_lost_one_has_a_row_of_its_own() -> None:
    windows = Windows()
    for step, numbers in ((10, (0, 1, 2)), (20, (0, 2))):  # number 1 was lost, and 2 has its rank
        workers = [
            {"rank": rank, "host": "vm", "worker": number, "total": 1.0, "compute": 1.0}
            for rank, number in enumerate(numbers)
        ]
        windows.add(step, of_workers({"steps": 10, "workers": workers}))
    rows = {str(who): spent.steps for who, spent in windows.total().items()}
    assert rows == {"rank 0 on vm": 20, "rank 1 on vm": 10, "rank 1 on vm (worker 2)": 10, "rank 2 on vm": 10}
