"""What is asked of a launcher, and the plan that it makes of it without touching anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhosts.control import job_file
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers.launcher import LAUNCHERS
from manyhosts.launchers.local import Local


def job(**changes: object) -> Job:
    values = {"program": "train.py", "folder": Path("/work"), "run_dir": Path("/work/runs/train-1"), **changes}
    return Job(**values)


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("workers_per_node", 0, "--workers"),
        ("nodes", 0, "--nodes"),
        ("restarts", -1, "--restarts"),
        ("workers_per_node", 99_999_999_999, "--workers"),
        ("nodes", 99_999_999_999, "--nodes"),
    ],
)
def test_number_that_makes_no_sense_is_refused_by_the_name_of_its_option(field: str, value: int, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(**{field: value})
    assert caught.value.where == option
    assert str(value) in caught.value.what


def test_plan_gives_every_rank_its_place() -> None:
    plan = Local().plan(job(nodes=2, workers_per_node=3))
    places = [
        (w["RANK"], w["LOCAL_RANK"], w["GROUP_RANK"], w["WORLD_SIZE"], w["LOCAL_WORLD_SIZE"]) for w in plan.workers
    ]
    assert places == [(str(rank), str(rank % 3), str(rank // 3), "6", "3") for rank in range(6)]
    assert plan.hosts == ("node0", "node1")


def test_same_job_gives_the_same_plan_and_touches_nothing(tmp_path: Path) -> None:
    asked = job(folder=tmp_path, run_dir=tmp_path / "runs" / "x")
    assert Local().plan(asked) == Local().plan(asked)
    assert list(tmp_path.iterdir()) == []


def test_printed_plan_shows_command_folder_and_what_differs_between_workers() -> None:
    text = str(Local().plan(job(arguments=("a b", "--c"), workers_per_node=2, environment={"SEED": "3"})))
    assert "$ python train.py 'a b' --c" in text
    assert "in /work" in text
    assert "SEED=3" in text
    assert "RANK=1" in text
    assert "MASTER_PORT=(chosen at the start)" in text


def test_plan_holds_no_secret() -> None:
    assert "token" not in str(Local().plan(job())).lower()


def test_every_target_of_the_table_can_be_loaded() -> None:
    assert [LAUNCHERS.load(name) for name in LAUNCHERS.names()]


def test_unknown_target_lists_those_that_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        LAUNCHERS.load("locall")
    assert caught.value.fix == "did you mean 'local'? known: " + ", ".join(LAUNCHERS.names())


def test_value_that_is_shown_nowhere_is_in_no_line_to_type(tmp_path: Path) -> None:
    words = ("run", "--env", "TOKEN=s3cret", "--env=KEY=s3cret", "train.py", "--env", "NAME=mine")
    job = Job(program="train.py", folder=tmp_path, run_dir=tmp_path, arguments=("--env", "NAME=mine"), words=words)
    typed = ("run", "--env", "TOKEN", "--env=KEY", "train.py", "--env", "NAME=mine")
    assert job_file.without_hidden(job).words == typed
