"""How many GPUs a host has for its workers, without asking torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from manyhosts.control import job_file
from manyhosts.control.agent import host_state
from manyhosts.control.job import Job
from manyhosts.errors import ConfigError
from manyhosts.launchers.kubernetes.kubernetes import Kubernetes
from manyhosts.launchers.ray import Ray
from manyhosts.launchers.slurm.slurm import Slurm

JOB = Job(program="train.py", folder=Path("/p"), run_dir=Path("/p/runs/a"), nodes=2, workers_are_chosen=False)


def smi(folder: Path, text: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_gpus_that_the_environment_names_count_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for named, count in {"": 0, "-1": 0, "0": 1, "0,2,3": 3, "GPU-a,GPU-b": 2}.items():
        assert host_state.count({"CUDA_VISIBLE_DEVICES": named}, tmp_path) == count


def test_driver_is_asked_before_nvidia_smi_and_that_before_the_devices_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert host_state.count({"PATH": "/nowhere"}, tmp_path) == 2
    environment = smi(tmp_path, "echo 'GPU 0: NVIDIA A100 (UUID: a)'; echo '  MIG 1g.5gb Device 0: (UUID: b)'")
    assert host_state.count(environment, tmp_path) == 1
    for number in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    assert host_state.count(environment, tmp_path) == 3


@pytest.mark.parametrize("text", ["echo No devices were found", "exit 9", "echo 'GPU 0: lost'; exit 15"])
def test_driver_that_is_in_trouble_counts_as_none(tmp_path: Path, text: str) -> None:
    assert host_state.count(smi(tmp_path, text), tmp_path) == 0


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        (Slurm({}), {"gpus": "a100:4"}),
        (Ray(), {"gpus": "4"}),
        (Kubernetes(), {"gpus": "4", "image": "a"}),
    ],
)
def test_worker_is_started_for_each_gpu_that_an_engine_is_asked_for(launcher, options: dict[str, str]) -> None:
    planned = launcher.plan(replace(JOB, options=options)).job
    assert (planned.workers_per_node, planned.workers) == (4, 8)


def test_one_worker_that_was_asked_for_on_many_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="one worker that uses one of them"):
        Slurm({}).plan(replace(JOB, workers_are_chosen=True, options={"gpus": "4"}))


def test_ranks_go_on_behind_a_host_with_more_workers_also_where_a_host_is_away() -> None:
    job = JOB.with_workers(0, 3).with_workers(1, 2)
    assert (job.workers, job.first_rank(1), job.on([1]).workers, job.on([1]).workers_on(0)) == (5, 3, 2, 2)
    assert job_file.of_text(job_file.text_of(job), where="here") == job
