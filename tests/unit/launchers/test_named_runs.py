"""A run is named by its directory, its handle, or as the last one: all three lead to the same."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_run
from stories import record

from manyhosts.cli.main import main
from manyhosts.errors import ConfigError
from manyhosts.launchers import detached, named_runs
from manyhosts.records import run_lock
from manyhosts.records.metrics import stream
from manyhosts.records.summary import summarise


def begun(folder: Path, at: float) -> Path:
    make_run(folder)
    replace(record(), started=at).write(folder / "run.json")
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    begun(tmp_path / "runs" / "first", 1000.0)
    begun(tmp_path / "runs" / "newest", 3000.0)
    begun(tmp_path / "runs" / "older", 2000.0)
    return tmp_path / "runs"


def test_last_is_the_run_that_was_begun_last(runs: Path) -> None:
    assert named_runs.directory_of("last") == runs / "newest"
    begun(runs / "first", 4000.0)  # resumed
    assert named_runs.directory_of("last") == runs / "first"
    assert [path.name for path in named_runs.runs_in(runs)] == ["first", "newest", "older"]


def test_handle_of_an_engine_leads_to_the_directory_that_was_given_to_it(runs: Path) -> None:
    named_runs.keep_handle(runs / "older", "slurm://4711")
    assert named_runs.directory_of("slurm://4711") == runs / "older"
    assert named_runs.named("runs/older").handle == "slurm://4711"
    assert named_runs.named("last") == named_runs.NamedRun(runs / "older", "slurm://4711")
    named_runs.keep_handle(runs / "older", "")  # begun again in a terminal
    assert named_runs.named("runs/older").handle == ""
    with pytest.raises(ConfigError, match="the run directory of slurm://4711 is not known here"):
        named_runs.directory_of("slurm://4711")


def test_where_there_is_no_run_none_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run in runs yet"):
        named_runs.named("last")


def test_snapshots_still_take_the_address_of_a_store(runs: Path) -> None:
    assert named_runs.directory_or_store("s3://bucket/path") == "s3://bucket/path"
    assert named_runs.directory_or_store("runs/first/best") == "runs/first/best"
    assert named_runs.directory_or_store("last") == str(runs / "newest")


def test_lines_of_a_log_that_was_full_are_there_too(runs: Path) -> None:
    log = runs / "newest" / "logs" / "here-0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("one\n")
    read = detached.growing(log)
    assert read() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    log.replace(f"{log}.1")
    assert read() == ""
    log.write_text("three\n")
    assert read() == "two\nthree\n"
    with log.open("a") as file:
        file.write("four\n")
    assert read() == "four\n"
    assert list(named_runs.InTerminal().logs(str(runs / "newest"), follow=False)) == ["one", "two", "three", "four"]


def test_run_that_a_terminal_has_taken_over_is_not_that_of_its_old_handle(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs / "older" / "detached"
    folder.mkdir()
    left = {
        "state": "cancelled",
        "reason": "",
        "code": 130,
        "target": "local",
        "hosts": [],
        "process": 1,
        "machine": socket.gethostname(),
    }
    (folder / "state.json").write_text(json.dumps(left))
    (folder / "job.json").write_text("{}")
    handle = f"local://{runs / 'older'}"
    assert main(["status", handle]) == 0
    assert capsys.readouterr().out.startswith("cancelled")
    lock = run_lock.take(runs / "older", run_lock.new_token())
    try:
        assert main(["status", handle]) == 0
        assert "begun again in a terminal" in capsys.readouterr().out
    finally:
        if lock is not None:
            lock.release()


def test_folder_of_another_user_is_no_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        if path.parent == runs / "first":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    real = Path.exists
    monkeypatch.setattr(Path, "exists", refused)
    assert [path.name for path in named_runs.runs_in(runs)] == ["newest", "older"]


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_folder_without_a_run_gets_a_sentence(verb: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(runs)]) == 2
    assert "this folder holds no run" in capsys.readouterr().err
    assert main([verb, "4711"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_every_verb_takes_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["watch"], ["report"], ["snapshots", "ls"], ["status"], ["cancel"]):
        assert main([*words, "last"]) == 0, words
    assert main(["logs", "last"]) == 2, "it was started without a launcher, which would have written one"
    assert (runs / "newest" / "report.html").exists()
    capsys.readouterr()


def test_list_says_of_each_run_its_state_cost_and_best_value(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(runs / "broken", end=None)
    (runs / "empty").mkdir()
    (runs / "script-only").mkdir()
    lock = run_lock.take(runs / "script-only", run_lock.new_token())
    assert lock is not None
    try:
        assert main(["runs", "--json"]) == 0
        found = {os.path.basename(run["directory"]): run for run in json.loads(capsys.readouterr().out)}
        assert main(["runs"]) == 0
    finally:
        if lock is not None:
            lock.release()
    assert {name: run["state"] for name, run in found.items()} == {
        "first": "completed", "newest": "completed", "older": "completed", "broken": "broke off",
        "script-only": "starting",
    }  # fmt: skip
    newest = found["newest"]
    assert newest["best"]["metric"] == "accuracy"
    assert newest["worker_seconds"] == newest["seconds"] * newest["workers"] > 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[:3] == ["run", "state", "workers"]
    assert "at step 96" in next(row for row in rows if row.startswith("runs/newest"))


def test_run_that_is_over_is_listed_without_reading_its_steps(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from manyhosts.report.run import read_run

    summary = read_run(runs / "newest").summary
    assert summary is not None
    main(["runs", "--json"])
    before = capsys.readouterr().out
    summary.write(runs / "newest" / "summary.json")
    (runs / "newest" / "metrics.jsonl").unlink()
    main(["runs", "--json"])
    reported = json.loads(capsys.readouterr().out)
    assert [run["best"] for run in reported] == [run["best"] for run in json.loads(before)]


def test_script_that_failed_before_it_trained_has_failed_by_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("raise ValueError('no such column')\n")
    assert main(["run", "--run-dir", "runs/one", "broken.py"]) == 1
    capsys.readouterr()
    for words in (["status", "runs/one"], ["runs", "--json"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "failed" in said, words
        assert "no such column" in said, words


def test_resume_says_of_a_run_that_it_never_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("raise ValueError('no such column')\n")
    assert main(["run", "broken.py"]) == 1
    capsys.readouterr()
    assert main(["run", "--resume", "last", "broken.py"]) == 2
    [run_dir] = Path("runs").iterdir()
    assert f"{run_dir.name} ended before its training began" in capsys.readouterr().err


def test_file_within_a_run_is_answered_with_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "first" / "logs").mkdir(exist_ok=True)
    (runs / "first" / "logs" / "rank-0.log").touch()
    assert main(["report", str(runs / "first" / "logs" / "rank-0.log")]) == 2
    assert f"name its run: {runs / 'first'}" in capsys.readouterr().err


def test_run_that_was_continued_and_killed_is_not_over(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = stream(runs / "older" / "metrics.jsonl")
    summarise(lines, record()).write(runs / "older" / "summary.json")
    assert main(["status", "runs/older"]) == 0
    assert "done" in capsys.readouterr().out
    later = (runs / "older" / "summary.json").stat().st_mtime + 1
    os.utime(runs / "older" / "run.json", (later, later))  # copied, perhaps
    main(["status", "runs/older"])
    assert "done" in capsys.readouterr().out
    with (runs / "older" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "start"}\n')  # begun again
    main(["status", "runs/older"])
    said = capsys.readouterr().out
    assert "done" not in said
    assert "it broke off" in said
