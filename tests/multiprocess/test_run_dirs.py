"""Each run has a directory of its own; workers that were given different ones are told so, and do not wait."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import MANYHOSTS, environment, write_script
from ranks import run_ranks
from sharded import Case, make_trainer

from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess


def given_own(rank: int, folder: Path, *, leader_alone: bool) -> str:
    try:
        if leader_alone:
            make_trainer(Case(strategy="ddp"), folder if rank == 0 else None)  # type: ignore[arg-type]  # as scripts do
        else:
            make_trainer(Case(strategy="ddp"), folder / f"at-{rank}")
    except ConfigError as error:
        return error.what
    return ""


def both_ways(rank: int, folder: Path) -> list[str]:
    return [given_own(rank, folder, leader_alone=each) for each in (False, True)]


def test_workers_with_other_run_directories_are_told_both_names(tmp_path: Path) -> None:
    for named, alone in run_ranks(2, both_ways, tmp_path):
        assert named == (
            f"the workers are given different run directories: rank 0 '{tmp_path}/at-0', rank 1 '{tmp_path}/at-1'"
        )
        assert alone == f"the workers are given different run directories: rank 0 '{tmp_path}', rank 1 none"
    assert not (tmp_path / "at-0").exists()


def test_runs_that_start_in_the_same_second_have_a_directory_each(tmp_path: Path) -> None:
    words = [*MANYHOSTS, "run", str(write_script(tmp_path, "print('ran')"))]
    started = [subprocess.Popen(words, cwd=tmp_path, env=environment()) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert len(list((tmp_path / "runs").glob("script-*"))) == 3


def test_run_that_never_began_leaves_no_directory(tmp_path: Path) -> None:
    words = [*MANYHOSTS, "run", "--hosts", "nowhere.invalid", str(write_script(tmp_path, "print('ran')"))]
    assert subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, timeout=120).returncode != 0
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("what", ["print", "'script.py'"])
def test_call_from_python_that_never_began_leaves_no_directory(what: str, tmp_path: Path) -> None:
    write_script(tmp_path, "print('ran')")
    call = f"import manyhosts as mh; mh.launch.run({what}, [], hosts=['nowhere.invalid'])"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "nowhere.invalid" in done.stderr) == (3, True), done.stderr
    assert not list((tmp_path / "runs").glob("*"))
