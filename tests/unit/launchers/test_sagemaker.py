"""What SageMaker is asked for, held to botocore's description of it, and what is made of its answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws import Aws, Refusal, hold_to_model, serve, variables
from plans import assert_sent, files_in

from manyhosts.cli.main import main
from manyhosts.control.job import HIDDEN, Job
from manyhosts.errors import ConfigError
from manyhosts.launchers.sagemaker import request as sagemaker_request
from manyhosts.launchers.sagemaker import sagemaker
from manyhosts.launchers.sagemaker.client import Client
from manyhosts.launchers.sagemaker.sagemaker import SageMaker

LEAST = {
    "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/trainer",
    "bucket": "s3://ours/runs",
    "instance": "ml.g5.xlarge",
}
EVERYTHING = {
    **LEAST,
    "region": "eu-west-1",
    "profile": "work",
    "time": "8h",
    "spot": "yes",
    "wait": "20h",
    "volume": "200",
    "data": "digits=s3://ours/digits,more=s3://ours/more",
    "subnets": "subnet-1,subnet-2",
    "security-groups": "sg-1",
    "kms-key": "arn:aws:kms:eu-west-1:123456789012:key/ours",
    "network-isolation": "yes",
    "tags": "team=vision,cost=42",
    "python": "/opt/python",
}


def job(folder: Path = Path("/work"), **more: Any) -> Job:
    options = {**LEAST, **more.pop("options", {})}
    words = {"nodes": 2, "run_dir": folder / "runs" / "first", **more}
    return Job(program="train.py", folder=folder, options=options, **words)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """An AWS whose jobs wait for ever, and a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sagemaker, "_LATE_S", 0)
    (tmp_path / "train.py").write_text("print('trained')\n")
    with serve(tmp_path) as made:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables(made).items():
            monkeypatch.setenv(name, value)
        yield made


def send(*words: str, **changed: str) -> int:
    options = [word for key, value in {**LEAST, **changed}.items() for word in ("-o", f"{key}={value}")]
    return main(["run", "--on", "sagemaker", "--nodes", "2", *options, "--run-dir", "runs/first", *words, "train.py"])


@pytest.mark.parametrize("options", [LEAST, EVERYTHING], ids=["least", "everything"])
def test_request_fits_the_model_of_the_service(options: dict[str, str]) -> None:
    wished = job(options=options, overrides={"lr": "0.1"}, encrypt=True)
    made = sagemaker_request.request(wished)
    sagemaker_request.validate(made)
    hold_to_model("sagemaker", "CreateTrainingJob", made)


def test_model_would_notice_a_slip() -> None:
    made = sagemaker_request.request(job())
    with pytest.raises(Refusal, match="InstanceType"):
        hold_to_model("sagemaker", "CreateTrainingJob", {**made, "ResourceConfig": {"InstanceType": "ml.none"}})
    with pytest.raises(ConfigError, match="RoleARN"):
        sagemaker_request.validate({**made, "RoleARN": "x"})


def test_every_option_reaches_the_request() -> None:
    assert EVERYTHING.keys() == sagemaker_request.OPTIONS.keys()
    text = json.dumps(sagemaker_request.request(job(options=EVERYTHING, encrypt=True)))
    words = [LEAST["image"], LEAST["role"], "s3://ours/runs/first/run", "ml.g5.xlarge", "/opt/python", '"subnet-2"']
    words += ['"MaxRuntimeInSeconds": 28800', '"MaxWaitTimeInSeconds": 72000', '"VolumeSizeInGB": 200', '"sg-1"']
    words += ['"EnableManagedSpotTraining": true', "s3://ours/digits", '"Key": "cost", "Value": "42"']
    words += ['"KmsKeyId": "arn:aws:kms', '"VolumeKmsKeyId": "arn:aws:kms', '"EnableNetworkIsolation": true']
    words += [
        '"EnableInterContainerTrafficEncryption": true',
        '"InstanceCount": 2',
        '"LocalPath": "/opt/ml/checkpoints"',
    ]
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"options": {"role": "trainer"}}, "role is 'trainer'"),
        ({"options": {"bucket": "ours"}}, "bucket is 'ours'"),
        ({"options": {"instance": "g5.xlarge"}}, "instance is 'g5.xlarge'"),
        ({"options": {"spot": "maybe"}}, "spot is 'maybe'"),
        ({"options": {"volume": "big"}}, "volume is 'big'"),
        ({"options": {"data": "s3://ours/digits"}}, "cannot read 's3://ours/digits'"),
        ({"options": {"subnets": "subnet-1"}}, "given alone"),
        ({"options": {"time": "5 epochs"}}, "time is '5 epochs'"),
        ({"sync": False}, "share no disk"),
        ({"least_nodes": 1}, "as many instances from beginning to end, and --nodes is 1:2"),
    ],
)
def test_request_that_makes_no_sense_is_refused_before_it_is_sent(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SageMaker().plan(job(**more))


@pytest.mark.parametrize("key", LEAST)
def test_what_is_missing_is_named_with_an_example(key: str) -> None:
    options = {name: value for name, value in LEAST.items() if name != key}
    with pytest.raises(ConfigError, match=f"no {key} is named") as raised:
        SageMaker().plan(Job(program="t.py", folder=Path("/w"), run_dir=Path("/w/r"), options=options))
    assert f"-o {key}=" in raised.value.fix


def test_dry_run_prints_what_is_sent_and_asks_nobody(here: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    assert send("--dry-run", "--env", "KEY=s3cret") == 0
    text = capsys.readouterr().out.replace("--dry-run", "--detach")  # which is what the two differ in
    shown = {place: content for place, content in files_in(text).items() if place != "CreateTrainingJob"}
    request = json.loads(files_in(text)["CreateTrainingJob"])
    hold_to_model("sagemaker", "CreateTrainingJob", request)
    assert "note: the record will be in s3://ours/runs/first/run" in text
    assert ("s3cret" in text, here.asked) == (False, [])
    assert send("--detach", "--env", "KEY=s3cret") == 0
    [(name, made)] = here.jobs.items()
    assert request == json.loads(json.dumps(made.request).replace(name, "first-chosen-when-sent"))
    sent = {place.replace(name, "first-chosen-when-sent"): content for place, content in here.objects.items()}
    assert list(shown) == list(sent)
    [job_file] = [place for place in shown if place.endswith("/job.json")]
    later = assert_sent(json.loads(shown.pop(job_file)), json.loads(sent[job_file]), [HIDDEN, f"KEY={HIDDEN}"])
    assert later == ["s3cret", "KEY=s3cret"]
    assert list(shown.values()) == ["(the working directory, packed)", HIDDEN]


def test_dry_run_without_boto3_says_what_it_did_not_do(
    here: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.validate", None)
    assert send("--dry-run") == 0
    assert "not compared with AWS's own description" in capsys.readouterr().out


def test_job_is_sent_asked_after_and_stopped_by_its_handle(here: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    assert send("--detach") == 0
    handle = capsys.readouterr().out.strip()
    name = handle.removeprefix("sagemaker://eu-central-1/")
    assert name in here.jobs
    files = {key.rpartition("/")[2] for key in here.objects}
    assert files == {"folder.tar.gz", "job.json", "token"}
    [token] = [value.decode() for key, value in here.objects.items() if key.endswith("/token")]
    assert len(bytes.fromhex(token)) == 16
    assert token not in json.dumps(here.jobs[name].request), "everybody who sees the job sees its request"
    main(["status", handle])
    assert capsys.readouterr().out.startswith("waiting · Starting · 2 x ml.g5.xlarge · CloudWatch ")
    assert main(["logs", handle]) == 3
    assert "there is no log of this job: waiting" in capsys.readouterr().err
    for said in ("cancelled · ", "it has ended before: cancelled · "):
        assert main(["cancel", handle]) == 0
        assert capsys.readouterr().out.startswith(said)
    main(["status", "--json", handle])
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


def test_same_run_is_sent_twice_under_two_names_and_one_place(here: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    assert send("--detach") == send("--detach") == 0
    assert len(set(capsys.readouterr().out.split())) == 2
    assert {job.request["CheckpointConfig"]["S3Uri"] for job in here.jobs.values()} == {"s3://ours/runs/first/run"}


def test_states_of_sagemaker_in_our_words(here: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    send("--detach")
    name = capsys.readouterr().out.strip().removeprefix("sagemaker://")
    [made] = here.jobs.values()
    client = Client()
    jobs = SageMaker(lambda *_: client)
    for status, second, reason, state, code in [
        ("InProgress", "Downloading", "", "waiting", None),
        ("InProgress", "Training", "", "running", None),
        ("InProgress", "Interrupted", "", "waiting", None),
        ("Completed", "Completed", "", "done", 0),
        ("Failed", "Failed", "AlgorithmError: a slip, exit code: 4", "failed", 4),
        ("Stopped", "MaxRuntimeExceeded", "", "failed", None),
        ("Stopped", "Stopped", "", "cancelled", None),
    ]:
        made.status, made.second, made.reason = status, second, reason
        found = jobs.status(name)
        assert (found.state, found.code) == (state, code), second
        assert reason in found.reason


def test_log_is_read_page_by_page_and_stream_by_stream(
    here: Aws, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send("--detach")
    handle = capsys.readouterr().out.strip()
    [(name, made)] = here.jobs.items()
    for number, lines in enumerate((23, 4)):
        made.streams.append(tmp_path / f"{name}__algo-1-{number}")
        made.streams[-1].write_text("".join(f"{number} {line}\n" for line in range(lines)))
    made.streams.append(tmp_path / f"{name}__algo-10-0")
    made.streams[-1].write_text("the tenth instance\n")
    made.status = made.second = "Completed"
    for follow in ([], ["--follow"]):
        assert main(["logs", *follow, handle]) == 0
        wanted = [*(f"0 {line}" for line in range(23)), *(f"1 {line}" for line in range(4))]
        assert capsys.readouterr().out.splitlines() == wanted


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        (["AWS_DEFAULT_REGION"], "no AWS region is chosen"),
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "there are no AWS credentials to be had"),
    ],
)
def test_what_is_not_configured_is_a_sentence(
    missing: list[str], what: str, here: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in missing:
        monkeypatch.delenv(name)
    assert send() == 3
    assert what in capsys.readouterr().err


def test_quota_bucket_profile_and_network_are_sentences(
    here: Aws, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.quota = 1
    assert send() == 3
    said = capsys.readouterr().err
    assert "AWS refused CreateTrainingJob: The account-level service limit 'ml.g5.xlarge" in said
    assert "Service Quotas" in said
    assert send(bucket="s3://theirs/runs") == 3
    assert "AWS refused PutObject: The specified bucket does not exist" in capsys.readouterr().err
    assert send(profile="nobody") == 3
    assert "The config profile (nobody) could not be found" in capsys.readouterr().err
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert send() == 3
    assert "AWS was not reached" in capsys.readouterr().err


def test_job_that_nobody_knows_is_unknown(here: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "sagemaker://eu-central-1/gone"]) == 0
    assert capsys.readouterr().out.startswith("unknown · SageMaker has no such job in eu-central-1")
    assert main(["cancel", "sagemaker://eu-central-1/gone"]) == 0
