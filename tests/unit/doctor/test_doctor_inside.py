"""A doctor that is a job itself: what it says through the job's log, and who has not reported to it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from manyhosts.cluster.findings import Finding
from manyhosts.control.first_node import NodeInfo
from manyhosts.control.job import Job
from manyhosts.doctor import as_job
from manyhosts.doctor.examination import Examination, Request
from manyhosts.launchers.kubernetes.kubernetes import Kubernetes
from manyhosts.launchers.sagemaker.sagemaker import SageMaker

REQUEST = Request(target="kubernetes", run_dir="/project/runs/a", script="/project/train.py", data=("/data", "sub"))
JOB = Job(program="doctor", folder=Path("/project"), run_dir=Path("/tmp/doctor"), options={"image": "a:1"})


def test_long_report_comes_through_a_log_in_short_lines_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.dumps({"text": "ä" * 20_000})
    as_job._say("does", "looking")
    sys.stdout.write("a library says something\n")
    as_job._say("found", report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 8200
    assert list(as_job.read(lines)) == [("does", "looking"), ("else", "a library says something"), ("found", report)]


def test_report_that_breaks_off_is_none() -> None:
    assert list(as_job.read(['manyhosts-doctor found {"schema": 1', "Killed"])) == [("else", "Killed")]


def test_examination_is_the_same_after_its_way_through_json() -> None:
    finding = Finding(level="error", check="clock", what="it is off", where="host a", fix="set it", kind="host")
    found = Examination(request=REQUEST, hosts=[{"name": "a"}], findings=[finding], seconds=2.5)
    assert Examination.of_json(REQUEST, json.loads(json.dumps(found.to_json()))) == found


def test_node_that_has_not_reported_is_named_with_where_it_should_have_called() -> None:
    here = NodeInfo(number=0, hosts=("a-0", "a-1"), head="a-0.a:29400", address="10.0.0.1", token="t")
    lost = as_job._missing(here, [as_job.Reached("a-0", {}, None)])
    assert [one.what for one in lost] == ["host a-1 did not report to a-0 within 90 s"]
    assert "a-0.a:29400" in lost[0].fix
    assert lost[0].kind == "reach"


def test_paths_below_the_working_directory_are_looked_for_in_that_of_the_nodes() -> None:
    there = as_job._there(Kubernetes(), JOB, REQUEST)
    assert (there.run_dir, there.script, there.data) == ("runs/a", "train.py", ("/data", "sub"))
    assert not there.shares_disk
    on_a_volume = replace(JOB, options={**JOB.options, "volumes": "ours:/disk"})
    assert as_job._there(Kubernetes(), on_a_volume, replace(REQUEST, run_dir="/disk/runs")).shares_disk
    assert (
        as_job._there(SageMaker(), replace(JOB, options={}), replace(REQUEST, target="sagemaker")).run_dir
        == "/opt/ml/checkpoints"
    )
