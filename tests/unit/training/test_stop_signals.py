"""The first signal is a wish, what comes at once after it is the same one, and a later one is obeyed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhosts.cluster import reports
from manyhosts.training.loop.training import Progress, StopSignals, reached
from manyhosts.units import Duration


def test_first_signal_is_a_wish_and_its_echo_the_same_one() -> None:
    stop_signals = StopSignals()
    with stop_signals.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop_signals.asked == signal.SIGTERM
    stop_signals.hear(stop_signals.control_flags)
    assert stop_signals.granted == "asked to stop by SIGTERM"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal; what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_second_signal_is_obeyed_at_once() -> None:
    stop_signals = StopSignals()
    with stop_signals.listening():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.35)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with StopSignals().listening():
        signal.raise_signal(signal.SIGUSR1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_wishes_of_several_workers_add_up_to_one() -> None:
    stop_signals = StopSignals()
    stop_signals.hear([0, 2, 0, 0])
    assert (stop_signals.granted, stop_signals.number) == ("asked to stop by SIGTERM", 15)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_ctrl_c_heard_by_all_workers_is_ctrl_c(workers: int) -> None:
    asked = []
    for _ in range(workers):
        with (stop_signals := StopSignals()).listening():
            signal.raise_signal(signal.SIGINT)
        asked.append(stop_signals.control_flags)
    everybody = StopSignals()
    everybody.hear([sum(counts) for counts in zip(*asked, strict=True)])
    assert (everybody.granted, everybody.number) == ("asked to stop by SIGINT (Ctrl-C)", 2)


def test_several_signals_have_one_order_and_nobody_asked_is_no_wish() -> None:
    stop_signals = StopSignals()
    stop_signals.hear([0, 0, 0, 0])
    assert not stop_signals.granted
    stop_signals.hear([0, 1, 1, 1])
    assert stop_signals.number == signal.SIGTERM


def test_what_the_head_was_sent_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "agent"
    monkeypatch.setenv(reports.VARIABLE, str(address))
    assert reports.cause() == 0
    reports.leave_cause(address, signal.SIGINT)
    for sent, reason in ((signal.SIGTERM, "SIGINT (Ctrl-C)"), (signal.SIGUSR1, "SIGUSR1")):
        with (stop_signals := StopSignals(reports.cause)).listening():
            signal.raise_signal(sent)
        stop_signals.hear(stop_signals.control_flags)
        assert stop_signals.granted == f"asked to stop by {reason}"


@pytest.mark.parametrize(
    ("limit", "steps", "epochs", "reason"),
    [
        ("50 steps", 49, 4.9, ""),
        ("50 steps", 50, 5.0, "all 50 steps done"),
        ("50 steps", 150, 7.5, "150 steps done, 50 asked for"),
        ("2 epochs", 40, 2.0, "all 2 epochs done"),
        ("2 epochs", 150, 7.5, "7.5 epochs done, 2 asked for"),
        ("1 epoch", 20, 1.0, "the epoch is done"),
    ],
)
def test_run_that_has_trained_for_longer_than_asked_says_both(
    limit: str, steps: int, epochs: float, reason: str
) -> None:
    assert reached(Duration.parse(limit), Progress(steps, epochs)) == reason
