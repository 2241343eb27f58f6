"""What every engine promises, asked of all of them in one table; what is an engine's own is in its own file."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from manyhosts.cli.main import main
from manyhosts.control.job import Job
from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError
from manyhosts.launchers.launcher import LAUNCHERS

SECRET = "hunter2-of-nobody"


@dataclass(frozen=True)
class Asked:
    """What an engine needs to know before it can plan, and the words that its host names come to."""

    options: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    planned: tuple[str, ...] = ()
    chooses_hosts: bool = False
    encrypts: bool = False
    missing: str = ""
    """A module, or a program, without which it starts nothing."""
    says: str = ""


IN_SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-4]"}
IN_AWS = {
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/trainer",
    "bucket": "s3://ours/runs",
    "instance": "ml.g5.xlarge",
}
NODES_OF_RAY = ("a node of the Ray cluster (1 of 2)", "a node of the Ray cluster (2 of 2)")
ENGINES = {
    "join": Asked(options={"bind": "127.0.0.1"}, planned=(socket.gethostname().split(".")[0], "host 1 (to join)")),
    "kubernetes": Asked(
        options={"image": "me/train:1"}, chooses_hosts=True, missing="kubernetes", says="pip install kubernetes"
    ),
    "local": Asked(planned=("node0", "node1"), encrypts=True),
    "mpi": Asked(hosts=("a", "b"), planned=("a", "b"), missing="mpirun", says="there is no mpirun on this machine"),
    "ray": Asked(planned=NODES_OF_RAY, chooses_hosts=True, missing="ray", says="pip install ray"),
    "sagemaker": Asked(options=IN_AWS, chooses_hosts=True, encrypts=True, missing="boto3", says="pip install boto3"),
    "slurm": Asked(chooses_hosts=True, missing="sbatch", says="sbatch"),
    "slurm, in an allocation": Asked(
        present=IN_SLURM, chooses_hosts=True, planned=("n1", "n2"), missing="srun", says="there is no srun"
    ),
    "ssh": Asked(
        hosts=("a", "b"), planned=("a", "b"), encrypts=True, missing="ssh", says="there is no ssh on this machine"
    ),
}


def engine(name: str) -> Any:
    return LAUNCHERS.load(name.partition(",")[0])(ENGINES[name].present)


def job(name: str, folder: Path, **more: Any) -> Job:
    asked = ENGINES[name]
    options = {**asked.options, **more.pop("options", {})}
    own = {"run_dir": folder / "runs" / "first", "nodes": 2, "hosts": asked.hosts, "options": options, **more}
    return Job(program="train.py", folder=folder, **own)


def planned(name: str, folder: Path, **more: Any) -> Plan:
    found: Plan = engine(name).plan(job(name, folder, **more))
    return found


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for variable in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    return str(request.param)


def test_every_engine_is_in_the_table() -> None:
    assert {name.partition(",")[0] for name in ENGINES} == set(LAUNCHERS.names())


def test_plan_touches_nothing_and_is_the_same_again(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    one, other = planned(name, tmp_path), planned(name, tmp_path)
    assert (one, str(one)) == (other, str(other))
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_plan_has_an_agent_for_each_node_in_the_order_of_the_hosts(name: str, tmp_path: Path) -> None:
    plan = planned(name, tmp_path)
    assert plan.hosts == ENGINES[name].planned
    numbers = [re.findall(r"'--nodes?', '(\d+)'", str(words)) for words in plan.agents]
    asked = 1 if name == "join" else len(plan.hosts)  # the others get theirs when they come
    assert numbers == [[str(node)] for node in range(asked)] + [[] for _ in plan.hosts[asked:]]


def test_values_of_env_are_in_no_word_that_is_shown(name: str, tmp_path: Path) -> None:
    words = ("run", "--env", f"KEY={SECRET}", f"--env=KEY={SECRET}", "--env", "NAME", "train.py")
    more = {"environment": {"KEY": SECRET, "NAME": SECRET}, "hidden": ("KEY", "NAME"), "words": words}
    plan = planned(name, tmp_path, **more)
    assert SECRET not in str(plan)
    assert SECRET not in shlex.join(map(str, plan.command))
    assert plan.job.environment["KEY"] == SECRET, "but it is sent"


def test_unknown_option_is_refused_with_what_it_knows(name: str, tmp_path: Path) -> None:
    known = list(engine(name).OPTIONS)
    slip = f"{known[0][:-1]}x" if known else "any"
    with pytest.raises(ConfigError, match=f"no option '{slip}'") as caught:
        planned(name, tmp_path, options={slip: "1"})
    assert not known or known[0] in caught.value.fix, "with the one that was meant"


def test_every_option_is_explained_and_an_empty_one_is_refused(name: str, tmp_path: Path) -> None:
    for key, meaning in engine(name).OPTIONS.items():
        assert meaning, key
        with pytest.raises(ConfigError, match=key):
            planned(name, tmp_path, options={key: ""})


def test_hosts_are_named_where_the_user_chooses_them_and_nowhere_else(name: str, tmp_path: Path) -> None:
    if ENGINES[name].chooses_hosts:
        with pytest.raises(ConfigError, match=f"{name.partition(',')[0]} chooses the hosts"):
            planned(name, tmp_path, hosts=("a", "b"))
    elif ENGINES[name].hosts:
        assert planned(name, tmp_path, hosts=("c", "a")).hosts == ("c", "a")
        with pytest.raises(ConfigError, match="a"):
            planned(name, tmp_path, hosts=("a", "a"))


def test_encryption_that_nobody_sees_to_is_refused(name: str, tmp_path: Path) -> None:
    if ENGINES[name].encrypts:
        planned(name, tmp_path, encrypt=True)
    else:
        with pytest.raises(ConfigError, match="--encrypt required"):
            planned(name, tmp_path, encrypt=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, at a machine that has no program of any engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize("missing", [name for name, asked in ENGINES.items() if asked.missing])
def test_what_is_not_installed_is_a_sentence_with_the_way_out(
    missing: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ENGINES[missing]
    monkeypatch.setitem(sys.modules, asked.missing, None)
    for variable in IN_SLURM:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in asked.present.items():
        monkeypatch.setenv(variable, value)
    options = [word for key, value in asked.options.items() for word in ("-o", f"{key}={value}")]
    hosts = ["--hosts", ",".join(asked.hosts)] if asked.hosts else ["--nodes", "2"]
    assert main(["run", "--on", missing.partition(",")[0], *hosts, *options, "train.py"]) == 3
    said = capsys.readouterr().err
    assert asked.says in said
    assert "fix:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "handle",
    [
        *("kubernetes://first", "kubernetes://Team/first", "kubernetes://a/b c"),
        *("sagemaker://first", "sagemaker://eu-central-1/a b", "sagemaker://Europe/first"),
        *("slurm://x", "slurm://1;reboot", "slurm://"),
    ],
)
@pytest.mark.parametrize("verb", ["status", "cancel", "logs"])
def test_word_that_names_no_job_is_a_wrong_request(
    verb: str, handle: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never reaches an engine: there is none."""
    assert main([verb, handle]) == 2
    said = capsys.readouterr().err
    assert handle.partition("://")[0] in said
    assert "fix:" in said
