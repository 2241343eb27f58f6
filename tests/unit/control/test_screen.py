"""Readers that stop, are slow, or go away: whoever writes never waits, and the end waits within limits."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from manyhosts.control import screen as module
from manyhosts.control.screen import Screen, say_last


class Pipe:
    """A small pipe: its end to write to, and what has been read of it."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self.stream: TextIO = os.fdopen(writing, "w")
        self.read = b""

    def drain(self, pause_s: float = 0.0, at_once: int = 1 << 16) -> threading.Thread:
        """Read until the end on a thread, with a pause before each look."""

        def take() -> None:
            while True:
                time.sleep(pause_s)
                chunk = os.read(self.reading, at_once)
                self.read += chunk
                if not chunk:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        return thread


@contextmanager
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    if not made.stream.closed:
        made.stream.close()
    os.close(made.reading)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.5)
    monkeypatch.setattr(module, "SLOW_S", 1.0)


def test_reader_that_stops_for_a_while_holds_nobody_up_and_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_S", 60.0)
    lines = [f"line {number}" for number in range(1500)]
    with pipe() as out:
        screen = Screen(out.stream, out.stream)
        began = time.monotonic()
        for number, line in enumerate(lines):
            (screen.out if number % 2 else screen.err).write(line + "\n")
        assert time.monotonic() - began < 60, "nobody reads, and the writer continued"
        reader = out.drain(pause_s=0.3)
        assert screen.close(stuck_s=5)
        out.stream.close()
        reader.join()
    assert out.read.decode().splitlines() == lines, "in the order in which both streams were written to"


def test_of_too_much_the_oldest_lines_go_and_their_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING_BYTES", 200_000)
    with pipe() as out, pipe() as err:
        screen = Screen(out.stream, err.stream, logs="runs/first/logs")
        for number in range(10_000):
            screen.out.write(f"line {number}\n")
            if number == 5_000:
                screen.err.write("manyhosts: rank 1 is slow\n")
        readers = [out.drain(), err.drain()]
        assert screen.close()
        for end in (out, err):
            end.stream.close()
        for reader in readers:
            reader.join()
    shown = [int(line.split()[1]) for line in out.read.decode().splitlines()]
    *notices, warning = sorted(err.read.decode().splitlines())
    assert warning == "manyhosts: rank 1 is slow", "what the launcher has to say is not lost among a script's lines"
    missed = [int(notice.split()[1]) for notice in notices]
    assert shown[-1] == 9999
    assert shown == sorted(set(shown))
    assert sum(missed) + len(shown) == 10_000
    assert notices[0].endswith(
        "lines were not shown here, because what was printed before was not read in time;"
        " the logs of all workers are in runs/first/logs"
    )


def test_reader_that_never_comes_back_cannot_hold_the_end() -> None:
    with pipe() as out:
        screen = Screen(out.stream, out.stream)
        screen.out.write("x" * 100_000)
        began = time.monotonic()
        assert not screen.close()
        assert time.monotonic() - began > 0.4
        screen.out.write("nobody hears this")
        assert screen.close(), "there is nothing left to wait for"
        say_last(out.stream, "nor this\n")
        reader = out.drain()
        out.stream.close()
        reader.join(120)


def test_slow_reader_gets_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_BYTES", 20_000)
    with pipe() as out:
        screen = Screen(out.stream, out.stream)
        for number in range(40_000):
            screen.out.write(f"line {number}\n")
        reader = out.drain(pause_s=0.05, at_once=4096)
        assert screen.close()
        out.stream.close()
        reader.join()
    lines = out.read.decode().splitlines()
    assert lines[0] == "line 0"
    assert lines[-1] == "line 39999"
    [notice] = [line for line in lines if "not shown" in line]
    assert int(notice.split()[1]) + len(lines) - 1 == 40_000


def test_reader_that_went_away_is_waited_for_no_more() -> None:
    with pipe() as out, pipe() as err:
        os.close(out.reading)
        screen = Screen(out.stream, err.stream)
        for _ in range(1000):
            screen.out.write("nobody hears\n" * 100)
        screen.err.write("but this is heard\n")
        assert screen.close()
        out.reading = os.open(os.devnull, os.O_RDONLY)
        assert os.read(err.reading, 100) == b"but this is heard\n"


def test_of_a_live_line_only_the_newest_state_waits() -> None:
    with pipe() as out:
        screen = Screen(out.stream, out.stream)
        screen.out.write("x" * 8000 + "\n")
        for step in range(1000):
            screen.out.write(f"\rstep {step}\x1b[K")
        screen.out.write("\r\x1b[Ka line\n\rstep 1000")
        reader = out.drain()
        assert screen.close()
        out.stream.close()
        reader.join()
    shown = out.read.decode().partition("\n")[2]
    assert shown.endswith("\rstep 999\x1b[K\r\x1b[Ka line\n\rstep 1000")
    assert shown.count("step") <= 3, "one of those before may have gone together with the long line"


def test_stream_without_a_descriptor_is_written_to_all_the_same() -> None:
    stream = io.StringIO()
    with Screen(stream, stream) as screen:
        assert not screen.out.isatty()
        screen.out.write("hello\n")
        with pytest.raises(OSError, match="fileno"):
            screen.out.fileno()
    assert stream.getvalue() == "hello\n"


def test_letters_that_the_stream_has_no_bytes_for_do_no_harm() -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(writing, "w", encoding="ascii", errors="surrogateescape") as stream,
        Screen(stream, stream) as screen,
    ):
        screen.out.write("Z\N{LATIN SMALL LETTER U WITH DIAERESIS}rich \udcff\n")
    with os.fdopen(reading, "rb") as found:
        assert found.read() == b"Z?rich ?\n"
