"""Work beside the loop: in order, none lost, none twice, and its failures come out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhosts.records.background_writer import BackgroundWriter


def gathering() -> tuple[list[int], Callable[[list[int]], None]]:
    done: list[int] = []
    return done, done.extend


def test_everything_is_dealt_with_once_and_in_order_while_more_comes() -> None:
    done, work = gathering()
    background_writer: BackgroundWriter[int] = BackgroundWriter(work, every_s=0.0001, name="test")
    for item in range(20_000):
        background_writer.put(item)
    background_writer.close()
    assert done == list(range(20_000))


def test_thread_works_without_being_asked() -> None:
    worked = threading.Event()
    background_writer: BackgroundWriter[int] = BackgroundWriter(
        lambda items: worked.set() if items == [7] else None, every_s=0.01, name="test"
    )
    background_writer.put(7)
    assert worked.wait(timeout=120)
    background_writer.close()


def test_flush_deals_with_all_that_was_put_before() -> None:
    done, work = gathering()
    background_writer: BackgroundWriter[int] = BackgroundWriter(work, every_s=3600, name="test")
    background_writer.put(1)
    assert done == []
    background_writer.flush()
    assert done == [1]
    background_writer.close()


def test_close_works_off_the_rest_and_may_come_twice() -> None:
    done, work = gathering()
    background_writer: BackgroundWriter[int] = BackgroundWriter(work, every_s=3600, name="test")
    background_writer.put(1)
    background_writer.close()
    background_writer.close()
    assert done == [1]


def test_failure_in_the_thread_comes_out_of_the_next_put() -> None:
    tried, failure = threading.Event(), None

    def fail(items: list[int]) -> None:
        if items:
            tried.set()
            raise OSError("no room")

    background_writer: BackgroundWriter[int] = BackgroundWriter(fail, every_s=0.001, name="test")
    background_writer.put(1)
    assert tried.wait(timeout=120)
    deadline = time.monotonic() + 20
    while not isinstance(failure, OSError) and time.monotonic() < deadline:
        try:
            background_writer.put(2)
        except OSError as raised:
            failure = raised
    assert "no room" in str(failure)
    with pytest.raises(OSError, match="no room"):
        background_writer.close()


SCRIPT = """
import os, sys
from pathlib import Path
from manyhosts.records.background_writer import BackgroundWriter

out = Path(sys.argv[1])
background_writer = BackgroundWriter(lambda items: out.open("a").write("".join(items)), every_s=3600, name="test")
background_writer.put("once ")
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
raise RuntimeError("the script fails")
"""


def test_script_that_fails_leaves_its_last_words_once_although_it_had_forked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), out], env=dict(os.environ), capture_output=True
    )
    assert ended.returncode == 1
    assert out.read_text() == "once "
