"""Where a run stands, and whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from stories import record

from manyhosts.errors import ConfigError
from manyhosts.records.run_directory import RunDirectory


def test_paths_are_those_of_the_design() -> None:
    run = RunDirectory(Path("r"))
    paths = [run.run_json, run.metrics, run.summary, run.snapshots, run.best, run.tensorboard, run.logs]
    names = ["run.json", "metrics.jsonl", "summary.json", "snapshots", "best", "tensorboard", "logs"]
    assert paths == [Path("r", name) for name in names]
    assert run.log("host", 3) == Path("r/logs/host-3.log")


def test_variable_names_the_directory(tmp_path: Path) -> None:
    chosen = RunDirectory.choose(Path("train.py"), {"MANYHOSTS_RUN_DIR": str(tmp_path / "mine")})
    assert chosen.path == tmp_path / "mine"


def test_directory_is_named_after_script_and_time_and_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [RunDirectory.choose(Path("some/train.py"), {}).path for _ in range(4)]
    assert len(set(chosen)) == 4
    for path in chosen:
        assert path.parent == Path("runs")
        assert path.name.startswith("train-20")


def test_new_directory_that_cannot_be_made_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file is in its place")
    with pytest.raises(ConfigError, match="cannot make the run directory: ") as refused:
        RunDirectory.choose(Path("train.py"), {})
    assert "MANYHOSTS_RUN_DIR=DIR" in refused.value.fix


def test_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "b").open_for(Path("train.py"))
    assert run.logs.is_dir()


def test_directory_of_the_same_script_is_gone_on_with(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    record().write(run.run_json)
    assert run.open_for(Path("elsewhere/train.py")) is run


def test_directory_of_another_script_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    record().write(run.run_json)
    with pytest.raises(ConfigError) as caught:
        run.open_for(Path("other.py"))
    assert "train.py" in caught.value.what
    assert "other.py" in caught.value.what
    assert caught.value.where == str(tmp_path)
    assert "--run-dir" in caught.value.fix


def test_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot make the run directory"):
        RunDirectory(tmp_path / "file" / "run").open_for(Path("train.py"))


def test_what_is_set_aside_is_not_set_aside_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.set_aside() == "", "there is nothing"
    directory.best.mkdir()
    for kept_file in (directory.summary, directory.metrics, directory.run_json):
        kept_file.write_text("{}")
    kept = Path(directory.set_aside())
    assert sorted(path.name for path in kept.iterdir()) == ["best", "metrics.jsonl", "run.json", "summary.json"]
    assert directory.metrics.exists(), "it says how the training before broke off"
    assert directory.set_aside() == "", "a start that breaks off is made again"
