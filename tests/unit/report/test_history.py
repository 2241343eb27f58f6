"""What is made of the lines of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from made_runs import HOSTS, make_run, story, timed
from stories import BEGIN, ended, started, stepped, validated

from manyhosts.errors import ConfigError
from manyhosts.events import Event, Slowdown
from manyhosts.records.metrics import line_of, stream
from manyhosts.records.numbers import from_words
from manyhosts.records.summary import PARTS
from manyhosts.report.history import History
from manyhosts.report.windows import Spent, Who, Windows, of_workers


def heard(events: Iterable[Event]) -> History:
    history = History()
    for event in events:
        history.hear(from_words(line_of(event)))
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


def test_speed_is_samples_over_seconds_also_where_one_step_is_slow() -> None:
    steps = [
        stepped(number, seconds=1.0 if number % 10 == 0 else 0.01, samples=100, time=BEGIN + number)
        for number in range(1, 5001)
    ]
    history = heard([started(), *steps])
    assert all(value == pytest.approx(1000 / 1.09, rel=0.3) for _, _, value in history.speed.points())


def test_loss_that_is_no_number_hides_none_of_the_others() -> None:
    steps = [stepped(number, loss=float("nan") if number % 20 == 0 else 2.0) for number in range(1, 5121)]
    points = heard([started(), *steps]).loss.points()
    assert len(points) <= 256
    assert {value for _, _, value in points} == {2.0}


def test_share_of_a_run_that_is_limited_in_time_counts_neither_lost_work_nor_time_down() -> None:
    first = [started(), stepped(1, time=BEGIN + 3540)]
    later = BEGIN + 8 * 3600
    again = started(1, time=later, seconds_done=1800.0, total_steps=None)
    history = heard([*first, again, stepped(2, time=later + 300)])
    assert history.fraction(7200) == pytest.approx(2100 / 7200)
    assert history.seconds_left(7200) == pytest.approx(5100)


def test_epochs_are_counted_by_the_steps_that_they_have_now() -> None:
    begun = started(40, steps_per_epoch=10, total_steps=70, epochs_done=2.0)
    assert heard([begun]).epochs == 5


def test_who_was_slow_before_a_restart_is_slow_until_then() -> None:
    slow = Slowdown(step=1, text="slow", what="host", who="host b", factor=3.0, cause="compute", time=BEGIN + 1)
    history = heard([started(), slow, started(1, time=BEGIN + 10)])
    assert history.slow["host b"] == [(BEGIN + 1, 3.0), (BEGIN + 10, 1.0)]
