"""The first signal is a wish, what comes at once after it is the same one, and a later one is obeyed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from manyhosts.training.wishes import Wishes


def test_first_signal_is_a_wish_and_its_echo_the_same_one() -> None:
    wishes = Wishes()
    with wishes.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert wishes.asked == signal.SIGTERM
    wishes.hear(signal.SIGTERM)
    assert wishes.granted == "asked to stop by SIGTERM"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal; what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_second_signal_is_obeyed_at_once() -> None:
    wishes = Wishes()
    with wishes.listening():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.35)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with Wishes().listening():
        signal.raise_signal(signal.SIGUSR1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_wishes_of_several_workers_add_up_to_one() -> None:
    wishes = Wishes()
    wishes.hear(2 * signal.SIGTERM)
    assert wishes.granted == "asked to stop by SIGTERM"
