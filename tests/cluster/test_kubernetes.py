"""Pods that are hosts of a lab: real addresses and processes, started from what the API was sent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers import Container, call, manyhosts, users_folder, weights
from engines import share
from kubernetes_cluster import Cluster, cluster
from launching import MANYHOSTS, environment, wait_until

from manyhosts.lab import Lab, lab

LONG_S = 240
SLOWLY = ("--env", "PAUSE=0.03")
"""So that a run continues while something happens to it, however fast this machine is."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    with lab(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def disk(pair: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume that all pods see as /data."""
    folder = tmp_path_factory.mktemp("disk")
    share(pair, folder, "/data")
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder."""
    return users_folder(tmp_path_factory.mktemp("desk"))


@pytest.fixture
def pods(pair: Lab, disk: Path, tmp_path: Path) -> Iterator[Cluster]:
    known: set[str] = set()

    def machine_of(index: int) -> Container:
        """Where the pod of an index runs; by now, the Service has given all of them names."""
        for kind, _, name in made.objects:
            if kind == "Service" and name not in known:
                call(pair, {f"{name}-{number}.{name}": host for number, host in enumerate(pair)})
                known.add(name)
        return Container(pair[index])

    with cluster(tmp_path, machine_of) as made:
        yield made


def words(name: str, script: str, *more: str) -> list[str]:
    options = ["-o", "image=me/train:1", "-o", f"python={sys.executable}", "-o", "volumes=disk:/data"]
    return ["run", "--on", "kubernetes", "--nodes", "2", *options, "--run-dir", f"/data/{name}", *more, script]


def ask(pods: Cluster, desk: Path, *asked: str) -> Any:
    return manyhosts(desk, *asked, KUBECONFIG=str(pods.folder / "kubeconfig"))


def status(pods: Cluster, desk: Path, handle: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(pods, desk, "status", "--json", handle).stdout)
    return found


def running(pair: Lab) -> list[str]:
    return [each for host in pair for each in host.processes().values() if "manyhosts.launchers" in each]


def lines_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.timeout(LONG_S)
def test_two_pods_train_to_the_weights_of_this_machine(
    pods: Cluster, desk: Path, disk: Path, short_training: str
) -> None:
    done = ask(pods, desk, *words("first", "digits.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "manyhosts: sent as kubernetes://default/first" in done.stdout
    assert weights(disk / "first") == short_training
    assert sorted(path.name for path in (disk / "first" / "logs").glob("*.log")) == ["first-0-0.log", "first-1-1.log"]


@pytest.mark.slow  # a node that is asked to end: test_first_node of tests/multiprocess
@pytest.mark.timeout(LONG_S)
def test_run_whose_pod_is_evicted_goes_on_to_the_same_weights(
    pods: Cluster, desk: Path, disk: Path, short_training: str
) -> None:
    handle = ask(pods, desk, *words("evicted", "digits.py", "--detach", *SLOWLY)).stdout.strip()
    wait_until(lambda: lines_of(disk / "evicted") > 20, "it trains")
    pods.evict(1)
    said = ask(pods, desk, "logs", "--follow", handle).stdout
    assert status(pods, desk, handle)["state"] == "done", said
    assert "asked to end; started again, the run continues" in said
    assert len(pods.of_index(0)) == len(pods.of_index(1)) == 2
    assert pods.objects["Job", "default", "evicted"]["status"].get("failed", 0) == 0, "an eviction is nobody's fault"
    assert weights(disk / "evicted") == short_training


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_run_whose_pod_dies_without_a_word_goes_on_with_the_one_that_is_started_for_it(
    pods: Cluster, desk: Path, disk: Path
) -> None:
    handle = ask(pods, desk, *words("killed", "digits.py", "--detach", *SLOWLY)).stdout.strip()
    wait_until(lambda: lines_of(disk / "killed") > 20, "it trains")
    kill_pod(pods, 1)
    said = ask(pods, desk, "logs", "--follow", handle).stdout
    assert status(pods, desk, handle)["state"] == "done", said
    assert (len(pods.of_index(0)), len(pods.of_index(1))) == (1, 2), "the first pod has continued"
    assert pods.objects["Job", "default", "killed"]["status"]["failed"] == 1
    assert json.loads((disk / "killed" / "summary.json").read_text())["workers"] == 2


@pytest.mark.timeout(LONG_S)
def test_elastic_run_whose_pod_dies_goes_on_alone_until_another_has_come(pods: Cluster, desk: Path, disk: Path) -> None:
    text = (desk / "digits.py").read_text().replace("EPOCHS, BATCH = 3,", "EPOCHS, BATCH = 1000,")
    (desk / "long.py").write_text(text)
    options = ("--nodes", "1:2", "--detach", "--env", "PAUSE=0.1")
    handle = ask(pods, desk, *words("elastic", "long.py", *options)).stdout.strip()
    record = disk / "elastic" / "metrics.jsonl"
    wait_until(lambda: lines_of(disk / "elastic") > 10, "it trains")
    kill_pod(pods, 1)
    wait_until(lambda: "continues with 2 workers, 1 of them new" in record.read_text(), "it is whole again")
    steps = lines_of(disk / "elastic")
    wait_until(lambda: lines_of(disk / "elastic") > steps + 3, "it trains on")
    assert ask(pods, desk, "cancel", handle).returncode == 0
    assert (len(pods.of_index(0)), "with 1 worker" in record.read_text()) == (1, True), "nobody has waited"
    wait_until(lambda: not pods.pods, "the pods are gone")


def kill_pod(pods: Cluster, index: int) -> None:
    """As when its machine is gone."""
    [pod] = pods.of_index(index)
    assert pod.machine is not None
    pod.machine.signal(pod.process, signal.SIGKILL)


@pytest.mark.timeout(LONG_S)
def test_script_that_fails_in_a_pod_ends_the_job_with_its_error(pods: Cluster, desk: Path) -> None:
    done = ask(pods, desk, *words("wrong", "wrong.py"))
    assert done.returncode == 1
    assert "ValueError: a slip" in done.stdout
    assert "host wrong-1" in done.stdout
    found = status(pods, desk, "kubernetes://default/wrong")
    assert (found["state"], found["code"]) == ("failed", 1)
    assert len(pods.pods) <= 3, "what is wrong with a script is not tried again"


@pytest.mark.timeout(LONG_S)
def test_cancelled_job_leaves_nothing_in_the_cluster_nor_on_its_machines(
    pods: Cluster, pair: Lab, desk: Path, disk: Path
) -> None:
    handle = ask(pods, desk, *words("lost", "digits.py", "--detach", *SLOWLY)).stdout.strip()
    wait_until(lambda: lines_of(disk / "lost") > 5, "it trains")
    assert status(pods, desk, handle)["state"] == "running"
    assert running(pair)
    follower = subprocess.Popen(
        [*MANYHOSTS, "logs", "--follow", handle],
        env={**environment(), "KUBECONFIG": str(pods.folder / "kubeconfig")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2):
        assert ask(pods, desk, "cancel", handle).returncode == 0
    wait_until(lambda: not pods.pods, "the pods are gone")
    assert pods.objects == {}
    wait_until(lambda: not running(pair), "nothing runs in the pods")
    assert follower.wait(timeout=120) == 0


def examined(pods: Cluster, desk: Path, *more: str) -> Any:
    options = ["-o", "image=me/train:1", "-o", f"python={sys.executable}", "-o", "volumes=disk:/data"]
    done = ask(pods, desk, "doctor", "--on", "kubernetes", "--nodes", "2", *options, "--json", *more)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # a doctor inside a job: test_slurm, test_mpi
@pytest.mark.timeout(LONG_S)
def test_doctor_examines_the_pods_from_inside_and_leaves_nothing(
    pods: Cluster, pair: Lab, desk: Path, disk: Path
) -> None:
    before = sorted(path.name for path in disk.iterdir())
    found = examined(pods, desk, "--run-dir", "/data/soon", "--data", "digits.py", "wrong.py")
    assert [host["hostname"] for host in found["hosts"]] == pair.names
    assert [host["run_dir"] for host in found["hosts"]] == [{"path": "/data/soon", "trouble": "", "shared": True}] * 2
    assert [(host["script"]["files"], len(host["data"])) for host in found["hosts"]] == [(1, 1)] * 2
    assert [(pair["trouble"], pair["bandwidth"] > 0) for pair in found["pairs"]] == [("", True)] * 2
    assert [finding["what"] for finding in found["findings"] if finding["level"] == "error"] == []
    assert (found["target"], found["exit_code"], found["meeting"]["right"]) == ("kubernetes", 0, True)
    wait_until(lambda: not running(pair) and not pods.pods, "the pods are gone")
    assert pods.objects == {}
    assert sorted(path.name for path in disk.iterdir()) == before


@pytest.mark.timeout(LONG_S)
def test_doctor_says_why_its_pods_report_nothing(pods: Cluster, desk: Path) -> None:
    found = examined(pods, desk, "-o", "python=/bin/false")
    [error] = found["findings"]
    assert (found["exit_code"], error["check"]) == (3, "reach")
    assert "the doctor's job ended without a report" in error["what"]
    assert pods.objects == {}
