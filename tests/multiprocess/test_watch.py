"""`manyhosts watch` of a real run of two workers: it sees what comes until the end, and leaves the run as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import kill_all, summary
from runs import events, step_lines
from watching import HELD_AT, HeldRun, Watching, held_run, watching

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """What every file of `folder` holds, and when it was written."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def trained_to(run: HeldRun) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {
        "weights": summary(run.run_dir)["weights_sha256"],
        "losses": [line["loss"] for line in step_lines(run.run_dir)],
        "validations": [line["values"] for line in events(run.run_dir, "validation")],
        "files": sorted(path.name for path in run.run_dir.rglob("*") if not path.name.startswith("events.out.")),
    }


@contextlib.contextmanager
def watching_held(run: HeldRun) -> Iterator[Watching]:
    """Of a run that stands still: lines of it are there."""
    run.wait_until_held()
    with watching(run.run_dir) as watcher:
        watcher.wait_for(HELD_AT)
        yield watcher


def test_two_who_watch_see_a_run_to_its_end_and_it_trains_as_if_nobody_did(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with held_run(tmp_path / "alone", held=False) as alone:
        assert alone.end() == 0, alone.output
    with held_run(tmp_path) as run:
        run.wait_until_held()
        with watching(run.run_dir) as lines, watching(run.run_dir, terminal=True) as drawn:
            lines.wait_for(HELD_AT)
            drawn.wait_for(HELD_AT)
            assert (lines.process.poll(), drawn.process.poll()) == (None, None)
            run.go_on()
            assert run.end() == 0, run.output
            assert (lines.end(), drawn.end()) == (0, 0), lines.said + drawn.said
    assert lines.said.splitlines()[-1] == "completed: all 4 epochs done"
    assert drawn.said.rindex("completed") > drawn.said.rindex("running")
    assert "held_script.py" in drawn.said
    assert "rank 1" in drawn.said
    reported = [line for line in lines.said.splitlines() if "validation" in line]
    assert len(reported) == 4
    assert trained_to(run) == trained_to(alone)


@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "terminal"])
def test_run_that_is_killed_broke_off_for_who_watches(terminal: bool, tmp_path: Path) -> None:
    with held_run(tmp_path) as run:
        run.wait_until_held()
        with watching(run.run_dir, terminal=terminal) as watcher:
            watcher.wait_for(HELD_AT)
            kill_all(run.process)
            assert watcher.end() == 1, watcher.said
    step = max(line["step"] for line in step_lines(run.run_dir))
    assert f"the last step is {step}, and the same command continues" in " ".join(watcher.said.split())


def test_run_that_fails_is_told_with_its_reason_and_code(tmp_path: Path) -> None:
    with held_run(tmp_path) as run, watching_held(run) as watcher:
        run.go_on("fail")
        assert run.end() == 2, run.output
        assert watcher.end() == 1, watcher.said
    last = watcher.said.splitlines()[-1]
    assert last.startswith("failed: ")
    assert "this <b>sample</b> cannot be read" in last
    before = files(run.run_dir)
    with watching(run.run_dir) as again:  # of a run that is over: the same, and nothing is touched
        assert again.end() == 1
    assert again.said.splitlines()[-1] == last
    assert files(run.run_dir) == before


def test_ctrl_c_ends_the_watching_and_leaves_the_run_alone(tmp_path: Path) -> None:
    with held_run(tmp_path) as run:
        with watching_held(run) as watcher:
            assert watcher.close() == 130
            assert "watching has ended; the run continues" in watcher.said
        run.go_on()
        assert run.end() == 0, run.output
    assert summary(run.run_dir)["status"] == "completed"


def test_command_that_writes_into_the_run_directory_is_caught_as_a_watch_would_be(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    reports = Watching(tmp_path, verb="report")  # whose page lies there
    assert reports.end() == 99, reports.said
    assert "WRITES" in reports.said
