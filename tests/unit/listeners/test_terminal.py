"""The display on a terminal, on a pipe, and where the terminal knows few signs."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest
from screens import Screen

from manyhosts.listeners import terminal
from manyhosts.listeners.paint import bare, paint
from manyhosts.listeners.terminal import Display, live_line

FIELDS: dict[str, Any] = {
    "epoch": 3,
    "epochs": 20,
    "step": 1234,
    "total_steps": 9000,
    "loss": 0.1234,
    "samples_per_second": 30512.0,
    "seconds_left": 80.0,
    "fraction": 0.137,
    "restarts": 0,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and remembers each write."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self.writes: list[str] = []
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain value in the parent
        return self._encoding

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        text.encode(self._encoding)  # as a real stream does
        self.writes.append(text)
        return super().write(text)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def shown(stream: io.StringIO) -> list[str]:
    return Screen().feed(stream.getvalue()).text


def test_live_line_says_what_is_awaited_and_for_how_long() -> None:
    assert bare(live_line({"awaited": "waiting for b, c", "seconds": 75.2}, 80)) == "waiting for b, c  1:15"
    assert bare(live_line({"awaited": "waiting for b, c", "seconds": 75.2}, 9)) == "waiting f"


def test_live_line_holds_everything_in_eighty_columns() -> None:
    line = bare(live_line(FIELDS, 80))
    assert len(line) <= 80
    for words in ("epoch  3/20", "━", "step 1234/9000", "loss 0.1234", "30.5k samples/s", "1:20 left"):
        assert words in line
    with_restarts = bare(live_line({**FIELDS, "restarts": 2}, 79))
    assert len(with_restarts) <= 79
    for words in ("epoch  3/20", "step 1234 ", "loss 0.1234", "30.5k samples/s", "2 restarts", "1:20 left"):
        assert words in with_restarts


@pytest.mark.parametrize("width", range(5, 140, 3))
def test_live_line_never_gets_wider_than_the_terminal(width: int) -> None:
    line = bare(live_line({**FIELDS, "restarts": 12}, width))
    assert len(line) <= max(width, len("epoch  3/20"))
    assert line.startswith("epoch  3/20")


def test_live_line_leaves_out_what_is_not_known() -> None:
    assert bare(live_line({"step": 7, "epoch": 1}, 80)) == "epoch 1  step 7"


@pytest.mark.parametrize("fraction", [-1, 0, 0.5, 1, 2])
def test_bar_keeps_its_width(fraction: float) -> None:
    lines = [bare(live_line({"epoch": 1, "fraction": share}, 60)) for share in (0.3, fraction)]
    assert len(lines[0]) == len(lines[1])


def test_live_line_is_drawn_over_itself_in_one_write_without_being_erased_first() -> None:
    stream = Terminal()
    shows = Display(stream)
    for step in (1, 2, 10_000, 3):
        before = len(stream.writes)
        shows.progress({**FIELDS, "step": step})
        [write] = stream.writes[before:]
        assert write.startswith("\r\x1b[1mepoch")
        assert write.endswith("\x1b[K")
        assert len(shown(stream)) == 1
        assert f"step {step}/" in shown(stream)[0]


def test_lines_of_workers_and_our_own_stand_above_the_live_line() -> None:
    stream = Terminal()
    shows = Display(stream)
    shows.line("first", "[rank 1] ", False)
    shows.progress(FIELDS)
    shows.line("second", "[rank 1] ", False)
    shows.line("a warning", "[rank 0] ", True)
    shows.say(paint("ours", "green") + "\nand more")
    lines = shown(stream)
    assert lines[:5] == ["[rank 1] first", "[rank 1] second", "[rank 0] a warning", "ours", "and more"]
    assert lines[5].startswith("epoch  3/20")
    shows.close()
    assert shown(stream) == lines[:5]
    shows.close()


def test_run_that_ended_takes_the_live_line_away_and_a_new_one_brings_it_back() -> None:
    stream = Terminal()
    shows = Display(stream)
    shows.progress(FIELDS)
    shows.progress({"ended": True})
    assert shown(stream) == []
    shows.say("the last screen")
    assert shown(stream) == ["the last screen"]
    shows.progress(FIELDS)
    assert len(shown(stream)) == 2


def test_errors_go_to_their_own_stream_where_that_is_given() -> None:
    out, errors = io.StringIO(), io.StringIO()
    shows = Display(out, errors)
    shows.line("fine", "[0] ", False)
    shows.line("bad", "[1] ", True)
    assert (out.getvalue(), errors.getvalue()) == ("[0] fine\n", "[1] bad\n")


def test_pipe_gets_plain_lines_one_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(terminal.time, "monotonic", clock.monotonic)
    shows = Display(stream)
    for tenth in range(350):
        clock.now = 100 + tenth / 10
        shows.progress({**FIELDS, "step": tenth})
    lines = stream.getvalue().splitlines()
    assert [int(line.partition("step ")[2].partition("/")[0]) for line in lines] == [100, 200, 300]
    assert stream.getvalue() == bare(stream.getvalue())
    assert "\r" not in stream.getvalue()
    assert "━" not in stream.getvalue()


def test_line_that_was_said_counts_as_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(terminal.time, "monotonic", clock.monotonic)
    shows = Display(stream)
    shows.progress(FIELDS)
    clock.now += 9
    shows.say("epoch 3 is done")
    clock.now += 9
    shows.progress(FIELDS)
    assert stream.getvalue() == "epoch 3 is done\n"


@pytest.mark.parametrize(("name", "value", "live"), [("NO_COLOR", "1", True), ("TERM", "dumb", False)])
def test_terminal_that_wants_no_colours_gets_none(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, live: bool
) -> None:
    monkeypatch.setenv(name, value)
    stream = Terminal()
    shows = Display(stream)
    shows.progress(FIELDS)
    shows.say(paint("said", "red"))
    shows.line("printed", "[0] ")
    screen = Screen().feed(stream.getvalue())
    assert screen.colours == 0
    assert screen.text[:2] == ["said", "[0] printed"]
    assert (len(screen.text) == 3) == live


def test_what_a_worker_painted_itself_passes_as_it_is() -> None:
    stream = io.StringIO()
    Display(stream).line("\x1b[35mpurple\x1b[0m", "[0] ")
    assert stream.getvalue() == "[0] \x1b[35mpurple\x1b[0m\n"


def test_terminal_in_the_c_locale_gets_letters_for_signs() -> None:
    stream = Terminal("ascii")
    shows = Display(stream)
    shows.progress(FIELDS)
    shows.say("98 % ★ best")
    shows.line("Zürich", "")
    assert shown(stream)[:2] == ["98 % * best", "Z?rich"]
    assert "=" in shown(stream)[2]


def test_reader_that_went_away_hurts_nobody() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        os.close(reading)
        shows = Display(stream)
        shows.say("nobody hears this")
        shows.line("nor this", "")
        shows.close()
        with pytest.raises(BrokenPipeError):
            stream.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # so that closing the stream finds a reader


def test_many_threads_never_tear_a_line() -> None:
    stream = Terminal()
    shows = Display(stream)

    def talk(name: str) -> None:
        for number in range(200):
            shows.progress({**FIELDS, "step": number})
            shows.line(f"{name} {number}", "")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shows.close()
    for name in "abc":
        assert [line for line in shown(stream) if line.startswith(name)] == [f"{name} {n}" for n in range(200)]
    assert len(shown(stream)) == 600


def test_head_starts_without_rich_and_without_torch() -> None:
    code = (
        "import sys; from manyhosts.listeners.terminal import Display; shows = Display(sys.stdout);"
        "shows.line('x', ''); shows.progress({'epoch': 1}); shows.close();"
        "sys.exit(any(name in sys.modules for name in ('rich', 'torch', 'tensorboard')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@contextmanager
def real_terminal() -> Iterator[tuple[TextIO, Any]]:
    """The two ends of a pseudo-terminal: what a program writes to, and a function that reads what came out."""
    owner, program = pty.openpty()

    def read() -> str:
        stream.flush()
        found = os.read(owner, 1 << 16)
        while select.select([owner], [], [], 0.2)[0]:  # the kernel hands on what was written piece by piece
            found += os.read(owner, 1 << 16)
        return found.decode().replace("\r\n", "\n")

    with os.fdopen(program, "w", encoding="utf-8") as stream:
        yield stream, read
    os.close(owner)


def test_prints_of_the_script_appear_above_the_live_line_just_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with real_terminal() as (stream, read):
        monkeypatch.setattr(sys, "stdout", stream)
        shows = Display(stream)
        shows.guard()
        shows.progress(FIELDS)
        sys.stdout.write("whole\n")
        sys.stdout.write("first half, ")
        shows.progress({**FIELDS, "step": 1235})  # must wait for the other half
        sys.stdout.write("second half\n")
        screen = Screen().feed(read())
        assert screen.text[:2] == ["whole", "first half, second half"]
        assert "step 1235/" in screen.text[2]
        assert sys.stdout.encoding == "utf-8"  # everything else of the stream is there
        shows.close()
        assert sys.stdout is stream
        assert screen.feed(read()).text == ["whole", "first half, second half"]


def test_output_that_is_no_terminal_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    shows = Display(stream)
    shows.guard()
    assert sys.stdout is stream


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_of_ours_is_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(terminal, "_columns", lambda stream: width)
    stream = Terminal()
    shown = Display(stream)
    rule, bar = paint("─" * 40, "dim"), paint("█" * 28, "green")
    shown.say(f"epoch  1/12   loss 1.2210   validation: accuracy 88.89 %, loss 1.0900{paint('  ★ best', 'green')}")
    shown.say(f"{paint('completed', 'bold')} ─ all 12 epochs done {rule} 2 workers · ddp\n  computing  99 %  {bar}")
    lines = [bare(line) for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).startswith(
        "epoch 1/12 loss 1.2210 validation: accuracy 88.89 %, loss 1.0900 ★ best completed ─ all 12 epochs done ─"
    )
    assert len(lines) == {40: 5, 60: 4, 80: 3, 120: 3}[width]


def test_bars_are_left_out_together_where_one_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_columns", lambda stream: 30)
    stream = Terminal()
    Display(stream).say(f"computing  90 %  {paint('█' * 20, 'green')}\nwaiting    10 %  {paint('██▏', 'yellow')}")
    assert [bare(line) for line in stream.getvalue().splitlines()] == ["computing  90 %", "waiting    10 %"]


def test_lines_of_ours_stay_whole_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    Display(stream).say("word " * 40 + "end")
    assert stream.getvalue() == "word " * 40 + "end\n"


def test_live_line_leaves_room_for_what_the_terminal_shows_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in range(40, 121):
        monkeypatch.setattr(terminal, "_columns", lambda stream, width=width: width)
        stream = Terminal()
        Display(stream).progress(FIELDS)
        drawn = bare(stream.getvalue().removeprefix("\r").removesuffix("\x1b[K"))
        assert len(drawn) + len("^C") < width, "or the line that is erased would be the next one"
