"""The script before it starts: is it there, whose run directory is this, what should be loaded for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers import scripts
from manyhosts.records.run_directory import RunDirectory


def test_script_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError) as caught:
        scripts.check(str(tmp_path / "trian.py"), "script")
    assert "trian.py" in caught.value.what
    assert (caught.value.where, caught.value.fix) == (
        str(tmp_path),
        "did you mean 'train.py'? in that folder: train.py",
    )


def test_script_that_is_here_and_not_in_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ConfigError) as caught:
        scripts.check("src/train.py", "script")
    assert caught.value.fix == "there is no folder 'src', and here is train.py: manyhosts run train.py"


def test_name_with_spaces_that_was_typed_without_quotes_is_named_with_them(tmp_path: Path) -> None:
    (tmp_path / "my train.py").touch()
    with pytest.raises(ConfigError) as caught:
        scripts.check(str(tmp_path / "my"), "script")
    assert caught.value.fix == f"put a name with spaces between quotes: '{tmp_path}/my train.py'"


def test_folder_is_no_script_unless_python_can_run_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        scripts.check(str(tmp_path), "script")
    (tmp_path / "__main__.py").touch()
    scripts.check(str(tmp_path), "script")


def test_executable_must_be_on_the_path() -> None:
    scripts.check("sh", "executable")
    with pytest.raises(ConfigError, match="no executable 'no-such-thing'"):
        scripts.check("no-such-thing", "executable")


def test_module_and_executable_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        scripts.kind_of(module=True, no_python=True)


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("import os, json", ()),
        ("import torch", (*scripts.TORCH, scripts.COMPILER)),
        ("def f():\n    from torch import nn", (*scripts.TORCH, scripts.COMPILER)),
        ("import my_models", (*scripts.TORCH, scripts.COMPILER)),
        ("from . import sibling", (*scripts.TORCH, scripts.COMPILER)),
        ("import manyhosts as mh", (*scripts.TORCH, "own")),
        ("import manyhosts\ntrain(strategy=chosen)", (*scripts.TORCH, *scripts.IN_PARTS, "own")),
        ("import manyhosts\ntrain(compile=True)", (*scripts.TORCH, *scripts.IN_PARTS, "own")),
        ("this is no python", ()),
    ],
)
def test_torch_is_loaded_unless_the_standard_library_is_all_that_is_imported(
    tmp_path: Path, source: str, loaded: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert scripts.preload(str(script), "script", own=["own"]) == loaded


def test_what_keeps_a_model_in_parts_is_loaded_once_where_the_command_line_asks_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import manyhosts")
    assert scripts.preload(str(script), "script", settings=["strategy"]) == (*scripts.TORCH, *scripts.IN_PARTS)
    assert scripts.preload(str(script), "script", settings=["lr"]) == scripts.TORCH


def test_nothing_is_loaded_for_an_executable() -> None:
    assert scripts.preload("sh", "executable", own=["own"]) == ()


def job_in(folder: Path, script: str = "train.py") -> Job:
    return Job(program=script, folder=folder, run_dir=folder / "run")


def record(folder: Path, script: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(json.dumps({"script": script}))


@pytest.mark.parametrize("recorded", ["train.py", "{}/train.py", "/moved/from/here/train.py"])
def test_run_directory_of_the_same_script_is_taken(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "train.py").touch()
    record(tmp_path, recorded.format(tmp_path))
    scripts.check_run_dir(job_in(tmp_path))


def test_run_directory_of_a_script_that_is_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "train.py", tmp_path / "other" / "train.py"):
        path.touch()
    record(tmp_path, str(tmp_path / "other" / "train.py"))
    with pytest.raises(ConfigError, match="this is the run directory of"):
        scripts.check_run_dir(job_in(tmp_path))


def test_run_directory_that_does_not_exist_is_a_new_run(tmp_path: Path) -> None:
    scripts.check_run_dir(job_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_run_directory_whose_name_is_too_long_is_refused_with_a_launcher_and_without(tmp_path: Path) -> None:
    job = replace(job_in(tmp_path), run_dir=tmp_path / (300 * "a"))
    with pytest.raises(ConfigError, match="the run directory cannot be read: File name too long"):
        scripts.check_run_dir(job)
    with pytest.raises(ConfigError, match="cannot make the run directory: File name too long"):
        RunDirectory(job.run_dir).open_for(tmp_path / "train.py")


def test_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file"):
        scripts.check_run_dir(job_in(tmp_path))


@pytest.mark.parametrize("name", scripts._READ)
def test_pipe_or_circle_of_links_in_place_of_a_record_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)):
        make(path)
        with pytest.raises(ConfigError, match=f"{name} in the run directory is no file"):
            scripts.check_run_dir(job_in(tmp_path))
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("target", ["run", "nowhere"])
def test_run_directory_that_is_a_link_to_nowhere_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "run").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=f"the run directory is a link to .*{target}, which leads nowhere"):
        scripts.check_run_dir(job_in(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        scripts.check_run_dir(job_in(tmp_path))
    assert caught.value.where == str(tmp_path / "run" / "run.json")


def test_what_is_loaded_before_workers_are_forked_asks_for_no_gpu_and_leaves_no_python_thread() -> None:
    code = f"""
import importlib, threading, torch
def trap(*_, **__):
    raise AssertionError("CUDA was asked for, which a forked process cannot use then")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "init"):
    setattr(torch.cuda, name, trap)
for module in {(*scripts.TORCH, *scripts.IN_PARTS)}:
    importlib.import_module(module)
assert threading.active_count() == 1, threading.enumerate()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_metrics_are_loaded_once_for_all_where_a_script_has_some(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for source, asked in (("import manyhosts\nfrom torchmetrics import Metric", True), ("import manyhosts", False)):
        script.write_text(source)
        assert ("torchmetrics" in scripts.preload(str(script), "script", own=("manyhosts.training.trainer",))) == asked


def begin(folder: Path, name: str, script: str, started: str | None) -> Path:
    """A run directory below `runs`; with the record of a run of `script`, unless it never began."""
    path = folder / "runs" / name
    path.mkdir(parents=True)
    if started is not None:
        when = time.mktime(time.strptime(started, "%Y%m%d-%H%M%S"))
        (path / "run.json").write_text(json.dumps({"script": script, "started": when}))
    return path


def test_last_run_is_that_of_the_same_script_or_module_which_began_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for program, kind in (("train.py", "script"), ("pkg.train", "module")):
        with pytest.raises(ConfigError, match=f"there is no run of {program} to continue with") as refused:
            scripts.last_run_dir(program, kind)
        assert (refused.value.where, "--run-dir" in refused.value.fix) == (str(tmp_path / "runs"), True)
    (tmp_path / "train.py").touch()
    first = begin(tmp_path, "of-my-own", str(tmp_path / "train.py"), "20260101-100005")
    begin(tmp_path, "train-20260101-100000", str(tmp_path / "train.py"), "20260101-100001")
    module = begin(tmp_path, "pkg-20260101-100002", str(tmp_path / "pkg" / "train.py"), "20260101-100002")
    begin(tmp_path, "pkg-20260101-100003", str(tmp_path / "pkg" / "evaluate.py"), "20260101-100003")
    begin(tmp_path, "pkg-20260101-100004", str(tmp_path / "pkg" / "evaluate.py"), None)
    package = begin(tmp_path, "other", str(tmp_path / "pkg" / "big" / "__main__.py"), "20260101-100004")
    (tmp_path / "runs" / "train-20260101-110000").mkdir()
    (tmp_path / "runs" / "train-20260101-110000" / "run.json").write_text("damaged")
    assert scripts.last_run_dir("train.py", "script") == first
    assert scripts.last_run_dir("train.py", "script", elsewhere=True) == first
    assert scripts.last_run_dir("pkg.train", "module") == module, "and not that of another module of the package"
    assert scripts.last_run_dir("pkg.big", "module") == package
    assert scripts.last_run_dir("/usr/bin/pkg", "executable").name == "pkg-20260101-100003"


def test_run_of_other_hosts_that_was_started_last_is_not_passed_over_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    known = begin(tmp_path, "train-20260101-100000", str(tmp_path / "train.py"), "20260101-100000")
    begin(tmp_path, "train-20260101-090000", "", None)
    assert scripts.last_run_dir("train.py", "script", elsewhere=True) == known
    begin(tmp_path, "train-20260101-110000", "", None)
    assert scripts.last_run_dir("train.py", "script") == known, "here it would have left a record, had it begun"
    with pytest.raises(ConfigError, match="started last has no record here") as refused:
        scripts.last_run_dir("train.py", "script", elsewhere=True)
    assert refused.value.fix.endswith("--run-dir runs/train-20260101-110000")
