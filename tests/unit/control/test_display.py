"""Plain lines, and silence where nobody reads."""

from __future__ import annotations

import contextlib
import io
import os

from manyhosts.control.display import PlainDisplay


def test_lines_go_where_the_worker_wrote_them_and_progress_goes_nowhere() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, err)
    display.line("good", "[0] ", is_error=False)
    display.line("bad", "[1] ", is_error=True)
    display.progress({"step": 3})
    display.say("\x1b[1mboth\x1b[0m\nlines")
    display.close()
    assert (out.getvalue(), err.getvalue()) == ("[0] good\nboth\nlines\n", "[1] bad\n")


def test_pipe_that_nobody_reads_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    display = PlainDisplay(stream, stream)
    for _ in range(3):
        display.line("nobody hears", "", is_error=False)
    with contextlib.suppress(BrokenPipeError):
        stream.close()
