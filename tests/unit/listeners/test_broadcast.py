"""One listener in front of many: what fails is named, and misses only what it failed at."""

from __future__ import annotations

import time

import pytest
from stories import started, stepped

from manyhosts.events import Event, RunStarted
from manyhosts.listeners import broadcast
from manyhosts.listeners.broadcast import Broadcast


class Failing:
    def __init__(self, on: int) -> None:
        self.on, self.heard = on, 0

    def __call__(self, event: Event) -> None:
        self.heard += 1
        if event.step == self.on:
            raise RuntimeError("the disk is gone")


class Finishing:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, []

    def __call__(self, event: Event) -> None:
        self.calls.append("reported")

    def flush(self) -> None:
        self.calls.append("flush")
        if self.fails:
            raise OSError("full")

    def close(self) -> None:
        self.calls.append("close")


def test_all_are_told_everything_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    tell = Broadcast([first.append, second.append])
    events = [started(), stepped(1), stepped(2)]
    for event in events:
        tell(event)
    assert first == second == events


def test_listener_that_fails_is_named_and_misses_only_what_it_failed_at(caplog: pytest.LogCaptureFixture) -> None:
    before: list[Event] = []
    after: list[Event] = []
    failing = Failing(on=2)
    tell = Broadcast([before.append, failing, after.append])
    for step in (1, 2, 3, 2, 4):
        tell(stepped(step))
    assert len(before) == len(after) == failing.heard == 5
    [record] = caplog.records
    assert "Failing failed at StepDone of step 2 (test_broadcast.py, line" in record.getMessage()
    assert "RuntimeError: the disk is gone" in record.getMessage()
    tell.close()
    tell.close()
    assert [record.getMessage() for record in caplog.records][1:] == [
        "the listener Failing failed 2 times: what it keeps is incomplete"
    ]


def test_two_that_fail_at_once_are_both_named(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    tell = Broadcast([Failing(on=1), Failing(on=1), heard.append])
    tell(stepped(1))
    tell(stepped(2))
    assert len(heard) == 2
    assert len(caplog.records) == 2


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_run_comes_through(end: type[BaseException]) -> None:
    def stop(_: Event) -> None:
        raise end

    with pytest.raises(end):
        Broadcast([stop])(stepped(1))


def test_flush_and_close_reach_those_who_have_them_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    failing, fine = Finishing(fails=True), Finishing()
    heard: list[Event] = []
    tell = Broadcast([heard.append, failing, fine])
    tell.flush()
    tell(stepped(1))
    tell.close()
    assert failing.calls == fine.calls == ["flush", "reported", "close"]  # a disk that was full has room again
    assert "Finishing could not flush: OSError: full" in caplog.text


def test_listener_that_training_waits_for_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_SLOW_AFTER_S", 0.1)

    def dawdle(event: Event) -> None:
        time.sleep(0.05)

    tell = Broadcast([[].append, dawdle])
    for step in range(1, 7):
        tell(stepped(step))
    [line] = caplog.messages
    assert line.startswith("training waits for the listener ")
    assert "dawdle" in line


def test_listener_that_is_called_and_not_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def later(event: Event) -> None:
        raise AssertionError("nobody awaits it")

    Broadcast([later])(started())
    assert "gives a coroutine when it is called, and not one line of it is run" in caplog.text


class OfStarts(Finishing):
    HEARS = (RunStarted,)


def test_listener_that_says_what_it_hears_is_called_for_that_alone_and_closed_like_all() -> None:
    choosy, all_ears = OfStarts(), Finishing()
    news = Broadcast([choosy, all_ears])
    for event in (started(), stepped(1), stepped(2)):
        news(event)
    assert choosy.calls == ["reported"]
    assert all_ears.calls == ["reported"] * 3
    assert news.flush()
    news.close()
    assert choosy.calls == ["reported", "flush", "close"]
