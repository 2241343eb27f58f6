"""`--cluster`: what a table says counts as if it had been typed, and less than what is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhosts.cli.main import main

TABLE = """
[desk]
nodes = 2
workers-per-node = 2
env = { DATA = "/data", MASTER_PORT = 1 }
data = "/data"

[lab]
hosts = ["a", "b"]
"""


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What `run --dry-run` with some words prints, and its exit code."""
    (tmp_path / "manyhosts.toml").write_text(TABLE)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[str, int]:
        code = main(["run", "--dry-run", *words, "train.py"])
        out, err = capsys.readouterr()
        return out + err, code

    return run


def test_table_says_what_would_have_been_typed(dry_run) -> None:
    typed, _ = dry_run(
        "--run-dir", "r", "--nodes", "2", "--workers-per-node", "2", "--env", "DATA=/data", "--env", "MASTER_PORT=1"
    )
    assert dry_run("--run-dir", "r", "--cluster", "desk") == (typed, 0)
    assert "DATA=…hidden" in typed


def test_what_is_typed_counts_more(dry_run) -> None:
    text, _ = dry_run("--cluster", "desk", "--nodes", "1", "--env", "MASTER_PORT=2")
    assert "WORLD_SIZE=2" in text
    assert "MASTER_PORT=2" in text
    assert "DATA=…hidden" in text


def test_one_call_leaves_nothing_for_the_next(dry_run) -> None:
    dry_run("--cluster", "desk")
    text, _ = dry_run()
    assert "DATA=" not in text
    assert "WORLD_SIZE=1" in text


def test_hosts_of_a_table_are_reached_by_ssh(dry_run) -> None:
    text, code = dry_run("--cluster", "lab")
    assert (code, " -T a " in text, " -T b " in text) == (0, True, True), text


def test_hosts_that_are_typed_count_more_than_the_hostfile_of_a_table(dry_run, tmp_path: Path) -> None:
    (tmp_path / "h").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "manyhosts.toml").write_text('[lab]\nhostfile = "h"\nnodes = 2\n')
    text, code = dry_run("--cluster", "lab", "--hosts", "c")
    assert (code, " -T c " in text, " -T a " in text) == (0, True, False), text


def test_unknown_option_in_a_table_is_named_with_file_and_table(dry_run, tmp_path: Path) -> None:
    (tmp_path / "manyhosts.toml").write_text("[desk]\nworker = 2\n")
    text, code = dry_run("--cluster", "desk")
    assert code == 2
    assert "there is no option named 'worker'" in text
    assert f"{tmp_path / 'manyhosts.toml'}, table desk" in text
    assert "did you mean 'workers'?" in text


def test_value_that_the_option_cannot_have_is_named(dry_run, tmp_path: Path) -> None:
    (tmp_path / "manyhosts.toml").write_text('[desk]\nworkers = "two"\n')
    text, code = dry_run("--cluster", "desk")
    assert code == 2
    assert "workers is 'two'" in text
    assert str(tmp_path / "manyhosts.toml") in text


def test_last_run_is_looked_for_on_other_hosts_too_and_excludes_a_directory(dry_run, tmp_path: Path) -> None:
    text, code = dry_run("--resume", "last")
    assert (code, "there is no run of train.py to continue with" in text) == (2, True), text
    older = tmp_path / "runs" / "train-20260101-100000"
    older.mkdir(parents=True)
    (older / "run.json").write_text(json.dumps({"script": str(tmp_path / "train.py"), "started": 1767261600.0}))
    for words in (["--resume", "last"], ["--resume", "last", "--cluster", "lab"]):
        text, code = dry_run(*words)
        assert (code, "runs/train-20260101-100000" in text) == (0, True), text
    text, code = dry_run("--resume", "last", "--run-dir", "runs/train-20260101-100000")
    assert (code, "both --resume last and --run-dir are given" in text) == (2, True), text
    (tmp_path / "runs" / "train-20270101-110000").mkdir()
    assert dry_run("--resume", "last")[1] == 0
    text, code = dry_run("--resume", "last", "--cluster", "lab")
    assert (code, "--run-dir runs/train-20270101-110000" in text) == (2, True), text
