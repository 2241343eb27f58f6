"""The loop calls back in time and in order, and a channel loses no message."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from manyhosts.control.loop import Channel, Loop, Message


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def test_work_beside_the_loop_comes_back_to_it_or_ends_it_with_its_error(loop: Loop) -> None:
    heard: list[int] = []
    loop.run_in_thread(lambda: 7, heard.append)
    loop.run(until=lambda: bool(heard))
    assert heard == [7]
    loop.run_in_thread(lambda: 1 // 0, heard.append)
    late: list[bool] = []
    loop.after(20, lambda: late.append(True))
    with pytest.raises(ZeroDivisionError):
        loop.run(until=lambda: bool(late))
    assert heard == [7]


def test_timers_are_called_in_the_order_of_their_times_and_not_when_cancelled(loop: Loop) -> None:
    heard: list[str] = []
    loop.after(0.02, lambda: heard.append("later"))
    loop.after(0.01, lambda: heard.append("sooner"))
    loop.after(0.0, lambda: heard.append("never"))()
    loop.run(until=lambda: len(heard) == 2)
    assert heard == ["sooner", "later"]


def test_signals_are_heard_in_the_loop_and_given_back(loop: Loop) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    heard: list[signal.Signals] = []
    loop.on_signals([signal.SIGUSR1], heard.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    loop.run(until=lambda: bool(heard))
    loop.close()
    assert (heard, signal.getsignal(signal.SIGUSR1)) == ([signal.SIGUSR1], before)


def test_signals_cannot_be_asked_for_outside_the_main_thread(loop: Loop) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            loop.on_signals([signal.SIGUSR1], lambda _: None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_messages_arrive_whole_and_in_order_however_large(loop: Loop, ends: tuple[socket.socket, ...]) -> None:
    heard: list[Message] = []
    sender = Channel(loop, ends[0], heard.append, lambda: None)
    Channel(loop, ends[1], heard.append, lambda: None)
    for number in range(50):
        sender.send("numbered", number=number, ballast="x" * 100_000)
    assert sender.backlog_bytes > 0, "more than the system takes at once"
    loop.run(until=lambda: len(heard) == 50)
    assert [message["number"] for message in heard] == list(range(50))
    assert sender.backlog_bytes == 0


def test_both_sides_may_talk_at_once(loop: Loop, ends: tuple[socket.socket, ...]) -> None:
    heard: dict[str, int] = {"left": 0, "right": 0}
    left = Channel(loop, ends[0], lambda _: heard.update(left=heard["left"] + 1), lambda: None)
    right = Channel(loop, ends[1], lambda _: heard.update(right=heard["right"] + 1), lambda: None)
    for _ in range(20):
        left.send("to the right", ballast="x" * 100_000)
        right.send("to the left", ballast="x" * 100_000)
    loop.run(until=lambda: heard == {"left": 20, "right": 20})


@pytest.mark.parametrize("nonsense", [b"no json\n", b"[1]\n", b"\xff\xfe\n"])
def test_channel_ends_when_the_other_side_speaks_nonsense(
    loop: Loop, ends: tuple[socket.socket, ...], nonsense: bytes
) -> None:
    ended: list[bool] = []
    Channel(loop, ends[0], lambda _: None, lambda: ended.append(True))
    ends[1].sendall(nonsense)
    loop.run(until=lambda: bool(ended))


def test_channel_ends_when_a_stranger_sends_a_line_without_end(loop: Loop, ends: tuple[socket.socket, ...]) -> None:
    ended: list[bool] = []
    channel = Channel(loop, ends[0], lambda _: None, lambda: ended.append(True))
    channel.longest_line = 1000
    ends[1].sendall(b"x" * 2000)
    loop.run(until=lambda: bool(ended))


def test_end_of_the_other_side_is_told_once_and_sending_is_safe_after_it(
    loop: Loop, ends: tuple[socket.socket, ...]
) -> None:
    ended: list[bool] = []
    channel = Channel(loop, ends[0], lambda _: None, lambda: ended.append(True))
    ends[1].close()
    loop.run(until=lambda: bool(ended))
    channel.send("into the void")
    channel.close()
    assert ended == [True]


def test_last_messages_before_the_end_are_heard(loop: Loop, ends: tuple[socket.socket, ...]) -> None:
    heard: list[object] = []
    Channel(loop, ends[0], lambda message: heard.append(message["n"]), lambda: heard.append("end"))
    ends[1].sendall(b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(3)))
    ends[1].close()
    loop.run(until=lambda: "end" in heard)
    assert heard == [0, 1, 2, "end"]


def test_terminal_that_closes_is_not_heard_of_where_nohup_has_it_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        loop, heard = Loop(), []
        loop.on_signals([signal.SIGHUP, signal.SIGTERM], heard.append)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        loop.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
