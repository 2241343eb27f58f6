"""A real Ray cluster on several hosts, started by `ray start`, places the agents."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alone import SOURCE, undisturbed
from commands import summary
from engines import (
    FOLDER,
    MANYHOSTS,
    environment,
    examined,
    furthest_from_one_process,
    hashes,
    lacks,
    run,
    run_alone,
    share,
)
from launching import wait_until, write_script
from runs import restarts, step_lines

from manyhosts.lab import Host, Lab, lab

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray"),
    pytest.mark.skipif(
        " " in sys.executable,
        reason="Ray starts its workers by `bash -c` with the path of Python unquoted, so none starts from a path with "
        "a space: exec_worker in ray/_private/runtime_env/context.py",
    ),
]
RAY = [sys.executable, "-P", "-m", "ray.scripts.scripts"]
SMALL = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",  # workers are made when there is work,
    "RAY_num_workers_soft_limit": "0",  # none are kept in stock,
    "RAY_worker_niceness": "0",  # and they need not stand back behind whatever else this machine does
}
LONG_S = 300
"""Ray starts six programs on each host, all on the cores of this machine."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    with lab(4) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def folder(hosts: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all hosts share. One Ray cluster serves all tests: it takes longer to begin than they do."""
    shared = tmp_path_factory.mktemp("shared")
    share(hosts, shared)
    begin(hosts[0], ["--head", "--port=6379", "--include-dashboard=false"])
    with ThreadPoolExecutor() as each:
        list(each.map(lambda host: begin(host, ["--address=lab1:6379"]), hosts.hosts[1:]))
    return shared


def begin(host: Host, role: list[str]) -> None:
    words = [*RAY, "start", *role, f"--node-ip-address={host.address}", *SMALL]
    host.run(words, env=environment(**SETTINGS), timeout_s=LONG_S)


@pytest.fixture(autouse=True)
def rays_workers_have_gone(hosts: Lab) -> Iterator[None]:
    """Wait for Ray to end the processes that it keeps for a while longer than their job."""
    yield
    wait_until(lambda: not workers_of_ray(hosts), "Ray has ended the workers of the job", timeout_s=LONG_S)


def workers_of_ray(hosts: Lab) -> list[str]:
    words = [each for host in hosts for each in host.processes().values()]
    return [each for each in words if each.startswith(("ray::IDLE", "ray::be_agent"))]


@pytest.mark.timeout(3 * LONG_S)
def test_four_hosts_of_a_ray_cluster_train_to_the_weights_of_one_process(
    hosts: Lab, folder: Path, tmp_path: Path
) -> None:
    words = ["--on", "ray", "--nodes", str(len(hosts)), "--run-dir", f"{FOLDER}/run", "recipe_script.py"]
    done = run(hosts[1], words, timeout_s=LONG_S)
    assert done.returncode == 0, done.stderr
    found = hashes(done.stdout)
    assert sorted(host for host, _ in found.values()) == hosts.names
    assert len({digest for _, digest in found.values()}) == 1
    assert furthest_from_one_process(folder / "run" / "weights-0.npz", tmp_path) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(3 * LONG_S)
def test_run_whose_command_is_killed_is_not_taken_over_but_goes_on_from_its_snapshot(hosts: Lab, folder: Path) -> None:
    """Ray ends what a command had it start when the command is gone; nothing that was saved is lost."""
    write_script(folder, SOURCE, "long.py")
    words = ["--on", "ray", "--nodes", "3", "--run-dir", f"{FOLDER}/killed", "--env", "SLOW=0.02"]
    words = [*MANYHOSTS, "run", *words, "--env", "DURATION=60 steps", "long.py"]
    run_dir = folder / "killed"
    command = hosts[0].start(words, folder=FOLDER, env=environment(), stderr=subprocess.PIPE)
    wait_until(
        lambda: command.poll() is not None or any(run_dir.glob("snapshots/step-*")), "it trains", timeout_s=LONG_S
    )
    hosts[0].end(command, signal.SIGKILL)
    command.communicate()
    done = hosts[0].run(words, folder=FOLDER, env=environment(), timeout_s=LONG_S, check=False)
    assert (done.returncode, "takes it over" in done.stderr) == (0, False), done.stderr
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, 61))
    assert summary(run_dir)["weights_sha256"] == undisturbed(folder, 60)["weights_sha256"]
    assert len(restarts(run_dir)) == 1


@pytest.mark.slow  # such scripts: test_slurm, test_mpi
@pytest.mark.timeout(3 * LONG_S)
def test_unmodified_torchrun_script_runs_by_ray_on_four_hosts_without_a_terminal(hosts: Lab) -> None:
    count = len(hosts)
    words = ["--on", "ray", "--nodes", str(count), "-o", "address=lab1:6379", "--run-dir", f"{FOLDER}/plain"]
    handle = run(hosts[0], ["--detach", *words, "torchrun_script.py"], timeout_s=LONG_S).stdout.strip()
    assert handle == f"ray://{FOLDER}/plain"
    asked = [*MANYHOSTS, "logs", "--follow", handle]
    reported = hosts[0].run(asked, env=environment(), timeout_s=LONG_S).stdout
    everybody = rf"sum {sum(range(count))} of {count} on (lab\d) sees \[\]"
    assert sorted(re.findall(everybody, reported)) == hosts.names, reported
    status = hosts[0].run([*MANYHOSTS, "status", handle], env=environment()).stdout
    assert status.startswith("done · "), status


@pytest.mark.slow  # a doctor inside a job: test_slurm, test_mpi
@pytest.mark.timeout(3 * LONG_S)
def test_doctor_examines_the_hosts_that_ray_gives_it(hosts: Lab, folder: Path) -> None:
    found = examined(hosts[2], ["--on", "ray", "--nodes", "2", "torchrun_script.py"])
    assert len({host["hostname"] for host in found["hosts"]} & set(hosts.names)) == 2
    assert [finding["what"] for finding in found["findings"] if finding["level"] == "error"] == []
    assert [host["run_dir"]["shared"] for host in found["hosts"]] == [True, True]
    assert [pair["trouble"] for pair in found["pairs"]] == ["", ""]
    assert (found["exit_code"], found["meeting"]["right"]) == (0, True)
    assert not (folder / "runs").exists()


@pytest.mark.timeout(3 * LONG_S)
@pytest.mark.slow  # one that lacks the script: test_slurm, test_mpi
@pytest.mark.parametrize("gone", ["script", "folder"])
def test_host_of_ray_that_does_not_share_the_folder_is_named_with_what_it_lacks(hosts: Lab, gone: str) -> None:
    done = run_alone(hosts, ["--on", "ray", "--nodes", "4"], gone)
    assert done.returncode == 3, done.stderr
    assert lacks(gone) in done.stderr
    assert "host lab4, /root/alone" in done.stderr
    assert "here\n" not in done.stdout, "nothing has run"
