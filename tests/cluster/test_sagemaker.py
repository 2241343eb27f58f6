"""Instances that are hosts of a lab, with /opt/ml as SageMaker lays it out: real addresses, real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws import Aws, serve, variables
from containers import Container, call, manyhosts, users_folder
from launching import wait_until

from manyhosts.lab import Lab, lab

LONG_S = 240
OPTIONS = {
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/trainer",
    "bucket": "s3://ours/runs",
    "instance": "ml.g5.xlarge",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    with lab(2) as hosts:
        call(hosts, {f"algo-{number}": host for number, host in enumerate(hosts, start=1)})
        yield hosts


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder."""
    return users_folder(tmp_path_factory.mktemp("desk"))


@pytest.fixture
def aws(pair: Lab, tmp_path: Path) -> Iterator[Aws]:
    with serve(tmp_path, lambda: [Container(host) for host in pair]) as made:
        yield made


def run(aws: Aws, desk: Path, name: str, script: str, *more: str) -> Any:
    options = [
        word for key, value in {**OPTIONS, "python": sys.executable}.items() for word in ("-o", f"{key}={value}")
    ]
    words = ["run", "--on", "sagemaker", "--nodes", "2", *options, "--run-dir", f"runs/{name}", *more, script]
    return manyhosts(desk, *words, **variables(aws))


def weights_there(aws: Aws, name: str) -> str:
    summary = json.loads(aws.objects[f"s3://ours/runs/{name}/run/summary.json"])
    assert summary["workers"] == 2
    return str(summary["weights_sha256"])


@pytest.mark.timeout(LONG_S)
def test_two_instances_train_to_the_weights_of_this_machine(aws: Aws, desk: Path, short_training: str) -> None:
    done = run(aws, desk, "first", "digits.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "manyhosts: sent as sagemaker://eu-central-1/first-" in done.stdout
    assert "test" in done.stdout, "what the first instance printed came through CloudWatch"
    assert weights_there(aws, "first") == short_training


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_run_on_spare_instances_goes_on_when_they_are_taken_away(aws: Aws, desk: Path, short_training: str) -> None:
    handle = run(aws, desk, "spare", "digits.py", "-o", "spot=yes", "--detach", "--env", "PAUSE=0.03").stdout.strip()
    name = handle.rpartition("/")[2]
    metrics = aws.machines[0].host.path("/opt/ml/checkpoints/metrics.jsonl")
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, "it trains")
    aws.take_away(name)
    wait_until(lambda: aws.jobs[name].status == "Completed", "it is over")
    said = manyhosts(desk, "logs", handle, **variables(aws)).stdout
    assert "started again, the run continues from its last snapshot" in said
    assert weights_there(aws, "spare") == short_training


@pytest.mark.slow  # a job that fails: test_kubernetes; its words: tests/unit/launchers/test_sagemaker.py
@pytest.mark.timeout(LONG_S)
def test_job_that_fails_says_so_in_the_words_of_the_first_failure(aws: Aws, desk: Path) -> None:
    done = run(aws, desk, "wrong", "wrong.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: a slip" in done.stdout
    [handle] = [word for word in done.stdout.split() if word.startswith("sagemaker://")]
    found = json.loads(manyhosts(desk, "status", "--json", handle, **variables(aws)).stdout)
    assert (found["state"], found["code"]) == ("failed", 1)
    assert "rank 1" in found["reason"]
    assert "host algo-2" in found["reason"]


@pytest.mark.slow  # a doctor inside a job: test_slurm, test_mpi
@pytest.mark.timeout(LONG_S)
def test_doctor_examines_the_instances_from_inside(aws: Aws, pair: Lab, desk: Path) -> None:
    options = [f"-o{key}={value}" for key, value in {**OPTIONS, "python": sys.executable}.items()]
    words = ["doctor", "--on", "sagemaker", "--nodes", "2", *options, "--json", "wrong.py"]
    done = manyhosts(desk, *words, **variables(aws))
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert [(host["name"], host["hostname"]) for host in found["hosts"]] == [("algo-1", "lab1"), ("algo-2", "lab2")]
    assert [host["run_dir"]["path"] for host in found["hosts"]] == ["/opt/ml/checkpoints"] * 2
    assert [finding["what"] for finding in found["findings"] if finding["level"] == "error"] == []
    assert (found["exit_code"], found["meeting"]["right"]) == (0, True)
    [job] = aws.jobs.values()
    wait_until(lambda: job.status == "Completed", "the job is over")
    for host in pair:
        wait_until(
            lambda host=host: not {"launchers", "control"} & set(str(host.processes()).split(".")),
            f"nothing is left on {host.name}",
        )
