"""Workers' output: whole lines, each with its rank, at once, and all of it in the logs."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import socket
import subprocess
from pathlib import Path

import pytest
from launching import MANYHOSTS, environment, run, start, wait_until, write_script

pytestmark = pytest.mark.multiprocess


def test_long_lines_of_four_workers_never_mix(tmp_path: Path) -> None:
    source = """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(200):
            stream = sys.stdout if number % 2 else sys.stderr
            print(f"{rank} {number} " + rank * 5000, file=stream)
    """
    ended = run(tmp_path, source, "--workers", "4")
    lines = [line for text in (ended.out, ended.err) for line in text.splitlines()]
    expected = {f"[{rank}] {rank} {number} " + str(rank) * 5000 for rank in range(4) for number in range(200)}
    assert len(lines) == 800
    assert set(lines) == expected
    for rank in range(4):
        log = ended.log(rank).splitlines()
        assert sorted(log) == sorted(line.partition("] ")[2] for line in expected if line.startswith(f"[{rank}]"))
    odd = [line for line in ended.out.splitlines() if line.startswith("[2]")]
    assert [int(line.split()[2]) for line in odd] == list(range(1, 200, 2)), "in the order in which they were printed"


def test_streams_stay_apart(tmp_path: Path) -> None:
    ended = run(tmp_path, "import sys; print('good'); print('bad', file=sys.stderr)")
    assert (ended.out, ended.err) == ("good\n", "bad\n")


def test_one_worker_has_no_prefix_and_hosts_are_named_where_there_are_several(tmp_path: Path) -> None:
    assert run(tmp_path, "print('hello')").out == "hello\n"
    several = run(tmp_path, "print('hello')", "--nodes", "2", "--workers", "1")
    assert sorted(several.out.splitlines()) == ["[node0 0] hello", "[node1 1] hello"]


def test_line_without_an_end_is_shown_when_the_worker_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, "print('no end', end='')", "--workers", "2")
    assert sorted(ended.out.splitlines()) == ["[0] no end", "[1] no end"]


def test_progress_bar_is_shown_in_its_last_state_and_the_log_has_every_byte(tmp_path: Path) -> None:
    source = """
        import os, time
        from pathlib import Path
        os.write(1, b"10%\\r50%\\r100%\\ncaf\\xe9 \\xff\\n")
        [log] = Path("run/logs").glob("*-0.log")
        while not log.stat().st_size:
            time.sleep(0.01)
        print("done\\r")
    """
    ended = run(tmp_path, source, "--log-size", "22")
    words = "100%\ncaf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}\ndone\n"
    assert (ended.code, ended.out) == (0, words)
    [log] = (tmp_path / "run" / "logs").glob("*-0.log")
    assert Path(f"{log}.1").read_bytes() == b"10%\r50%\r100%\ncaf\xe9 \xff\n"
    assert log.read_bytes() == b"done\r\n"


def test_what_is_started_and_where_is_said_before_the_script_speaks(tmp_path: Path) -> None:
    process = start(tmp_path, "input()", "--workers", "2")  # which says nothing
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
    finally:
        process.terminate()
        process.communicate()
    named = re.escape(str(tmp_path / "script.py"))
    assert re.fullmatch(rf"manyhosts: starting {named} with 2 workers on \S+; logs and record in run\n", first)


def test_line_appears_at_once(tmp_path: Path) -> None:
    source = """
        import os, time
        print("waiting")
        while not os.path.exists("go-on"):
            time.sleep(0.01)
    """
    head = start(tmp_path, source)
    try:
        assert head.stdout is not None
        assert head.stdout.readline() == "waiting\n", "the worker still runs, and waits for us"
    finally:
        (tmp_path / "go-on").touch()
        head.communicate(timeout=120)
    assert head.returncode == 0


def test_terminal_that_has_stopped_to_read_stops_no_worker(tmp_path: Path) -> None:
    lines = 8_000
    source = f"""
        for number in range({lines}):
            print(number, "." * 4000)
        open("printed", "w").close()
        print("all printed")
    """
    script = write_script(tmp_path, source)
    owner, terminal = pty.openpty()  # nobody reads it: the kernel takes some thousand bytes
    words = [*MANYHOSTS, "run", "--run-dir", str(tmp_path / "run"), str(script)]
    head = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    try:
        wait_until((tmp_path / "printed").exists, "the worker has printed everything")
        assert head.poll() is None, "the end waits for a reader"
        shown = bytearray()
        with contextlib.suppress(OSError):  # so a terminal says that its last program has ended
            while chunk := os.read(owner, 1 << 16):
                shown += chunk
    finally:
        os.close(owner)
        head.kill()
        head.wait()
    log = next((tmp_path / "run" / "logs").glob("*-0.log")).read_text().splitlines()
    assert [int(line.split()[0]) for line in log[:-1]] == list(range(lines))
    words = shown.decode().replace("\r\n", "\n")
    seen = re.findall(r"(?m)(\d+) \.{4000}$", words)
    missed = re.findall(r"manyhosts: (\d+) lines", words)
    assert missed
    assert sum(map(int, missed)) + len(seen) == lines
    assert words.splitlines()[-1].endswith("all printed")


def test_full_log_does_not_stop_the_worker(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    name = socket.gethostname().split(".")[0]
    (tmp_path / "run" / "logs" / f"{name}-0.log").symlink_to("/dev/full")
    ended = run(tmp_path, "print('continues')")
    notice = f"manyhosts: the log of rank 0 on host {name} is incomplete: No space left on device\n"
    assert (ended.code, ended.out, ended.err) == (0, "continues\n", notice)
